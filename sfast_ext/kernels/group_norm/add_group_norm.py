"""A convolution's bias, residual and scale, and the group norm of the sum; the sum is kept, for the next residual."""

from __future__ import annotations

import torch
from torch import Tensor

from sfast_ext.kernels.group_norm import fused_inputs, group_norm
from sfast_ext.kernels.pointwise import bias_add

USES = (bias_add, group_norm)


def reference(
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    scale: float,
    groups: int,
    weight: Tensor | None,
    term: Tensor | None,
    eps: float,
    silu: bool = False,
    out_dtype: torch.dtype | None = None,
    patches: bool = False,
) -> tuple[Tensor, Tensor]:
    """(sum, y): sum = (x + bias + residual) * scale in x's dtype, y its group norm, times weight, plus term, then SiLU.

    x, residual (N, C, H, W), the vectors (C,). y comes from the rounded sum, and is rounded once to out_dtype
    (default: x's).
    """
    total = bias_add.reference(x, bias, residual, scale)
    return total, group_norm.reference(total, groups, weight, term, eps, None, silu, out_dtype, patches)


def launch(
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    scale: float,
    groups: int,
    weight: Tensor | None,
    term: Tensor | None,
    eps: float,
    silu: bool = False,
    out_dtype: torch.dtype | None = None,
    patches: bool = False,
) -> tuple[Tensor, Tensor]:
    """`reference` as one Triton kernel, or as two; where an image is too large for their tiles, one after the other."""
    dtype = out_dtype or x.dtype
    done = fused_inputs.run(x, None, bias, residual, scale, groups, weight, term, eps, silu, dtype, patches)
    if done is not None:
        return done
    total = bias_add.launch(x, bias, residual, scale)
    return total, group_norm.launch(total, groups, weight, term, eps, None, silu, out_dtype, patches)
