"""A gated residual addition, and the modulated norm of the sum, whose result is int8; the sum is a result too."""

from __future__ import annotations

from torch import Tensor

from sfast_ext.kernels.backend.registry import kernel
from sfast_ext.kernels.eight_bits import modulated_norm8
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
    group: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """(sum, q, scale): `gated_residual.reference` of the first six, and `modulated_norm8.reference` of the sum as it is
    rounded."""
    total = gated_residual.reference(x, y, gate, inner_weight, inner_eps, tanh)
    return total, *modulated_norm8.reference(total, weight, bias, eps, scale, shift, rms, plus_one, group)


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
    group: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """`reference` in one launch. x and y have one shape; all else as of `modulated_norm8.launch`."""
    operands = modulated_norm.Operands(x, y, inner_weight, weight, bias, gate, scale, shift)
    plus_one, tanh, norm = plus_one and scale is not None, tanh and gate is not None, 1 if rms else 2
    parts = modulated_norm.Parts(True, inner_eps is not None, tanh, norm, plus_one, codes=True, group=group)
    total, q, scales = modulated_norm.modulated(operands, parts, inner_eps or 0.0, eps)
    assert total is not None and q is not None and scales is not None
    return total, q, scales
