"""Residual add and layer norm; the sum is a result too, for the next residual."""

from __future__ import annotations

import torch
from torch import Tensor

from sfast_ext.kernels.backend.registry import kernel
from sfast_ext.kernels.pointwise import layer_norm


def reference(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    out_dtype: torch.dtype | None = None,
    shift: Tensor | None = None,
    post_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(sum, y): sum = x + shift + residual (..., C), rounded to x's dtype; y its layer norm, with weight and bias (C,).

    shift (C,) is the bias of the linear layer that computes x: cuBLAS is faster without it. post_bias (C,) is added to
    the returned sum, after the norm has read it.

    y is computed from the rounded sum in float32 (float64 if x is), and rounded once to out_dtype (default: x's).
    """
    compute = torch.promote_types(x.dtype, torch.float32)
    out_sum = x.to(compute) if shift is None else x.to(compute) + shift.to(compute)
    out_sum = (out_sum + residual.to(compute)).to(x.dtype)
    y = layer_norm.reference(out_sum, weight, bias, eps, out_dtype)
    return out_sum if post_bias is None else (out_sum.to(compute) + post_bias.to(compute)).to(x.dtype), y


@kernel(reference, portable=True, triton_functions=(layer_norm.layer_norm_kernel,), cuda_sources=(layer_norm.SOURCE,))
def launch(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    out_dtype: torch.dtype | None = None,
    shift: Tensor | None = None,
    post_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`reference` in one launch, with two reads and two writes. x and residual have one shape; dtypes, layouts and
    sizes as of `layer_norm.launch`."""
    operands = layer_norm.Operands(x, residual, shift, post_bias, weight, bias)
    out_sum, out = layer_norm.normalised(operands, eps, out_dtype)
    assert out_sum is not None
    return out_sum, out
