"""A gated residual addition, and the modulated norm of the sum; the sum is a result too, for the next residual."""

from __future__ import annotations

from torch import Tensor

from sfast_ext.kernels.backend.registry import kernel
from sfast_ext.kernels.pointwise import gated_residual, modulated_norm


def reference(
    x: Tensor,
    y: Tensor,
    gate: Tensor | None,
    inner_weight: Tensor | None,
    inner_eps: float | None,
    tanh: bool,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    rms: bool = True,
    plus_one: bool = False,
) -> tuple[Tensor, Tensor]:
    """(sum, norm): `gated_residual.reference` of the first six, and `modulated_norm.reference` of the sum as it is
    rounded."""
    total = gated_residual.reference(x, y, gate, inner_weight, inner_eps, tanh)
    return total, modulated_norm.reference(total, weight, bias, eps, scale, shift, rms, plus_one)


@kernel(reference, portable=True, cuda_sources=(modulated_norm.SOURCE,))
def launch(
    x: Tensor,
    y: Tensor,
    gate: Tensor | None,
    inner_weight: Tensor | None,
    inner_eps: float | None,
    tanh: bool,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    rms: bool = True,
    plus_one: bool = False,
) -> tuple[Tensor, Tensor]:
    """`reference` in one launch, with two reads and two writes. x and y have one shape; dtypes, layouts and sizes as of
    `modulated_norm.launch`."""
    operands = modulated_norm.Operands(x, y, inner_weight, weight, bias, gate, scale, shift)
    plus_one = plus_one and scale is not None
    parts = modulated_norm.Parts(True, inner_eps is not None, tanh and gate is not None, 1 if rms else 2, plus_one)
    total, out, _ = modulated_norm.modulated(operands, parts, inner_eps or 0.0, eps)
    assert total is not None and out is not None
    return total, out
