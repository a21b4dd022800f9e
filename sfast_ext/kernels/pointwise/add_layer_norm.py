"""A residual add and the layer norm after it; the sum is kept, for the next residual."""

from __future__ import annotations

import torch
from torch import Tensor

from sfast_ext.kernels.backend.triton_runtime import (
    DTYPES,
    MAX_BLOCK,
    begin_early,
    cdiv,
    constexpr,
    jit,
    runs,
    start,
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
    after: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(sum, y): sum = x + shift + residual (..., C), rounded to x's dtype as the add alone rounds; y its layer norm.

    shift (C,) is the bias of the layer that x comes from: without it cuBLAS has quicker products. after (C,) is added
    to the sum that is handed out, once the norm has it.

    y comes from the rounded sum, in float32 (float64 where x is), and is rounded once to out_dtype (default:
    x's).
    """
    compute = torch.promote_types(x.dtype, torch.float32)
    total = x.to(compute) if shift is None else x.to(compute) + shift.to(compute)
    total = (total + residual.to(compute)).to(x.dtype)
    y = layer_norm.reference(total, weight, bias, eps, out_dtype)
    return total if after is None else (total.to(compute) + after.to(compute)).to(x.dtype), y


@jit(do_not_specialize=["rows"])
def _kernel(
    x,
    residual,
    shift,
    after,
    weight,
    bias,
    total,
    out,
    rows,
    columns,
    eps,
    HAS_SHIFT: constexpr,
    HAS_AFTER: constexpr,
    HAS_WEIGHT: constexpr,
    HAS_BIAS: constexpr,
    ROWS: constexpr,
    BLOCK: constexpr,
    EARLY: constexpr,
):
    begin_early(EARLY)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = column < columns
    mask = (row < rows)[:, None] & inside[None, :]
    at = row[:, None] * columns + column[None, :]
    # all that is read is under way before the first of it is waited for
    if HAS_SHIFT:
        added = tl.load(shift + column, mask=inside, other=0.0)
    if HAS_AFTER:
        later = tl.load(after + column, mask=inside, other=0.0)
    if HAS_WEIGHT:
        factor = tl.load(weight + column, mask=inside, other=0.0)
    if HAS_BIAS:
        offset = tl.load(bias + column, mask=inside, other=0.0)
    first = tl.load(x + at, mask=mask, other=0.0)
    second = tl.load(residual + at, mask=mask, other=0.0)
    value = first.to(tl.float32) + second.to(tl.float32)
    if HAS_SHIFT:
        value += added.to(tl.float32)[None, :]
    rounded = value.to(total.dtype.element_ty)
    value = rounded.to(tl.float32)
    if HAS_AFTER:
        rounded = (value + later.to(tl.float32)[None, :]).to(total.dtype.element_ty)
    tl.store(total + at, rounded, mask=mask)
    mean = tl.sum(value, 1) / columns
    centred = tl.where(mask, value - mean[:, None], 0.0)
    variance = tl.sum(centred * centred, 1) / columns
    y = centred * (1.0 / tl.sqrt(variance + eps))[:, None]
    if HAS_WEIGHT:
        y *= factor.to(tl.float32)[None, :]
    if HAS_BIAS:
        y += offset.to(tl.float32)[None, :]
    tl.store(out + at, y.to(out.dtype.element_ty), mask=mask)


def launch(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    out_dtype: torch.dtype | None = None,
    shift: Tensor | None = None,
    after: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`reference` as one Triton kernel: two reads, two writes."""
    columns = x.shape[-1]
    dtype = out_dtype or x.dtype
    if (
        not runs(x, residual, weight, bias, shift, after)
        or x.shape != residual.shape
        or not 0 < columns <= MAX_BLOCK
        or dtype not in DTYPES
    ):
        return reference(x, residual, weight, bias, eps, out_dtype, shift, after)
    x = x.contiguous()
    total = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    count = x.numel() // columns
    if count:
        rows, block, warps = layer_norm.tile(columns)
        start(
            _kernel,
            (cdiv(count, rows),),
            x,
            residual.contiguous(),
            x if shift is None else shift.contiguous(),
            x if after is None else after.contiguous(),
            x if weight is None else weight.contiguous(),
            x if bias is None else bias.contiguous(),
            total,
            out,
            count,
            columns,
            eps,
            HAS_SHIFT=shift is not None,
            HAS_AFTER=after is not None,
            HAS_WEIGHT=weight is not None,
            HAS_BIAS=bias is not None,
            ROWS=rows,
            BLOCK=block,
            num_warps=warps,
        )
    return total, out
