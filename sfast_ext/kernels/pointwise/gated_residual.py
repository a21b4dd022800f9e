"""A residual addition of what a gate of the sample, and an RMS norm, are applied to."""

from __future__ import annotations

import torch
from torch import Tensor

from sfast_ext.kernels.backend.registry import kernel
from sfast_ext.kernels.pointwise import modulated_norm


def reference(
    x: Tensor,
    y: Tensor,
    gate: Tensor | None,
    inner_weight: Tensor | None = None,
    inner_eps: float | None = None,
    tanh: bool = False,
) -> Tensor:
    """x + gate * norm(y), or x + tanh(gate) * norm(y), of x, y (..., C): norm is y's RMS norm over C, times
    inner_weight (C,), or y itself if inner_eps is None. gate is broadcast to x.

    Computes in float32 (float64 if x is) and rounds once.
    """
    compute = torch.promote_types(x.dtype, torch.float32)
    y = y.to(compute)
    if inner_eps is not None:
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + inner_eps)
        if inner_weight is not None:
            y = y * inner_weight.to(compute)
    if gate is not None:
        y = y * (gate.to(compute).tanh() if tanh else gate.to(compute))
    return (x.to(compute) + y).to(x.dtype)


@kernel(reference, portable=True, cuda_sources=(modulated_norm.SOURCE,))
def launch(
    x: Tensor,
    y: Tensor,
    gate: Tensor | None,
    inner_weight: Tensor | None = None,
    inner_eps: float | None = None,
    tanh: bool = False,
) -> Tensor:
    """`reference` in one launch, with two reads and one write. x and y have one shape; dtypes, layouts and sizes as of
    `modulated_norm.launch`."""
    operands = modulated_norm.Operands(x, y, inner_weight, gate=gate)
    parts = modulated_norm.Parts(add=True, inner=inner_eps is not None, tanh=tanh)
    out_sum, _, _ = modulated_norm.modulated(operands, parts, inner_eps or 0.0)
    assert out_sum is not None
    return out_sum
