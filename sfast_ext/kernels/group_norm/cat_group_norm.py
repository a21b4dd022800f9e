"""A skip connection beside what came up, and the group norm of both; what they make together is kept."""

from __future__ import annotations

import torch
from torch import Tensor

from sfast_ext.kernels.group_norm import fused_inputs, group_norm
from sfast_ext.kernels.pointwise import bias_add

USES = (bias_add, group_norm)


def reference(
    a: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    b: Tensor,
    groups: int,
    weight: Tensor | None,
    term: Tensor | None,
    eps: float,
    silu: bool = False,
    out_dtype: torch.dtype | None = None,
    patches: bool = False,
) -> tuple[Tensor, Tensor]:
    """(joined, y): joined = a + bias + residual and b along the channels, y its group norm, then SiLU.

    a, residual (N, A, H, W), bias (A,), b (N, B, H, W); the norm is multiplied by weight (A + B,), and term (A + B,)
    added. y comes from the rounded sum, and is rounded once to out_dtype (default: a's).
    """
    first = bias_add.reference(a, bias, residual)
    joined = torch.cat([first, b.to(first.dtype)], 1).contiguous(memory_format=torch.channels_last)
    return joined, group_norm.reference(joined, groups, weight, term, eps, None, silu, out_dtype, patches)


def launch(
    a: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    b: Tensor,
    groups: int,
    weight: Tensor | None,
    term: Tensor | None,
    eps: float,
    silu: bool = False,
    out_dtype: torch.dtype | None = None,
    patches: bool = False,
) -> tuple[Tensor, Tensor]:
    """`reference` as one Triton kernel, or as two; where an image is too large for their tiles, one after the other."""
    dtype = out_dtype or a.dtype
    done = fused_inputs.run(a, b, bias, residual, 1.0, groups, weight, term, eps, silu, dtype, patches)
    if done is not None:
        return done
    first = a if bias is None and residual is None else bias_add.launch(a, bias, residual)
    joined = torch.cat([first, b.to(first.dtype)], 1)
    return joined, group_norm.launch(joined, groups, weight, term, eps, None, silu, out_dtype, patches)
