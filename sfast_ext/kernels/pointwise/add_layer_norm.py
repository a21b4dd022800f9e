"""Residual add and layer norm; the sum is a result too, for the next residual."""

from __future__ import annotations

import torch
from torch import Tensor

from sfast_ext.kernels.backend import cuda_tier
from sfast_ext.kernels.backend.registry import Kernel, register
from sfast_ext.kernels.backend.triton_runtime import (
    DTYPES,
    MAX_BLOCK,
    cdiv,
    constexpr,
    jit,
    launch_kernel,
    pdl_wait,
    supported,
    tl,
)
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

    y is computed from the rounded sum in float32 (float64 where x is), and rounded once to out_dtype (default: x's).
    """
    compute = torch.promote_types(x.dtype, torch.float32)
    out_sum = x.to(compute) if shift is None else x.to(compute) + shift.to(compute)
    out_sum = (out_sum + residual.to(compute)).to(x.dtype)
    y = layer_norm.reference(out_sum, weight, bias, eps, out_dtype)
    return out_sum if post_bias is None else (out_sum.to(compute) + post_bias.to(compute)).to(x.dtype), y


@jit(do_not_specialize=["rows"])
def add_layer_norm_kernel(
    x,
    residual,
    shift,
    post_bias,
    weight,
    bias,
    out_sum,
    out,
    rows,
    columns,
    eps,
    HAS_SHIFT: constexpr,
    HAS_POST_BIAS: constexpr,
    HAS_WEIGHT: constexpr,
    HAS_BIAS: constexpr,
    ROWS: constexpr,
    BLOCK: constexpr,
    PDL: constexpr,
):
    pdl_wait(PDL)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = column < columns
    mask = (row < rows)[:, None] & inside[None, :]
    at = row[:, None] * columns + column[None, :]
    # all loads are issued before the first use
    if HAS_SHIFT:
        pre = tl.load(shift + column, mask=inside, other=0.0)
    if HAS_POST_BIAS:
        post = tl.load(post_bias + column, mask=inside, other=0.0)
    if HAS_WEIGHT:
        gamma = tl.load(weight + column, mask=inside, other=0.0)
    if HAS_BIAS:
        beta = tl.load(bias + column, mask=inside, other=0.0)
    first = tl.load(x + at, mask=mask, other=0.0)
    second = tl.load(residual + at, mask=mask, other=0.0)
    value = first.to(tl.float32) + second.to(tl.float32)
    if HAS_SHIFT:
        value += pre.to(tl.float32)[None, :]
    rounded = value.to(out_sum.dtype.element_ty)
    value = rounded.to(tl.float32)
    if HAS_POST_BIAS:
        rounded = (value + post.to(tl.float32)[None, :]).to(out_sum.dtype.element_ty)
    tl.store(out_sum + at, rounded, mask=mask)
    mean = tl.sum(value, 1) / columns
    centred = tl.where(mask, value - mean[:, None], 0.0)
    variance = tl.sum(centred * centred, 1) / columns
    y = centred * (1.0 / tl.sqrt(variance + eps))[:, None]
    if HAS_WEIGHT:
        y *= gamma.to(tl.float32)[None, :]
    if HAS_BIAS:
        y += beta.to(tl.float32)[None, :]
    tl.store(out + at, y.to(out.dtype.element_ty), mask=mask)


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
    """`reference` as one kernel: two reads, two writes."""
    columns = x.shape[-1]
    dtype = out_dtype or x.dtype
    operands = (x, residual, shift, post_bias, weight, bias)
    if cuda_tier.usable(layer_norm.SOURCE, *operands) and x.shape == residual.shape and dtype in DTYPES:
        dense = (x.contiguous(), residual.contiguous(), *operands[2:])
        out_sum, out = (torch.empty(x.shape, dtype=kind, device=x.device) for kind in (x.dtype, dtype))
        if layer_norm.launch_rows(dense, out_sum, out, eps):
            return out_sum, out
    if (
        not supported(x, residual, weight, bias, shift, post_bias)
        or x.shape != residual.shape
        or not 0 < columns <= MAX_BLOCK
        or dtype not in DTYPES
    ):
        return reference(x, residual, weight, bias, eps, out_dtype, shift, post_bias)
    x = x.contiguous()
    out_sum = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    count = x.numel() // columns
    if count:
        rows, block, warps = layer_norm.tile(columns)
        launch_kernel(
            add_layer_norm_kernel,
            (cdiv(count, rows),),
            x,
            residual.contiguous(),
            x if shift is None else shift.contiguous(),
            x if post_bias is None else post_bias.contiguous(),
            x if weight is None else weight.contiguous(),
            x if bias is None else bias.contiguous(),
            out_sum,
            out,
            count,
            columns,
            eps,
            HAS_SHIFT=shift is not None,
            HAS_POST_BIAS=post_bias is not None,
            HAS_WEIGHT=weight is not None,
            HAS_BIAS=bias is not None,
            ROWS=rows,
            BLOCK=block,
            num_warps=warps,
        )
    return out_sum, out


KERNEL = register(
    Kernel(
        "add_layer_norm",
        reference,
        launch,
        portable=True,
        triton_functions=(add_layer_norm_kernel,),
        cuda_sources=(layer_norm.SOURCE,),
    )
)
