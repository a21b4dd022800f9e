"""Layer norm over the last dimension."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from sfast_ext.kernels.backend.triton_runtime import (
    DTYPES,
    MAX_BLOCK,
    begin_early,
    cdiv,
    constexpr,
    jit,
    next_power_of_2,
    runs,
    start,
    tl,
)


def reference(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, out_dtype: torch.dtype | None = None
) -> Tensor:
    """x (..., C) normalised over C, times weight (C,), plus bias (C,); out_dtype (default: x's).

    Computes in float32 (float64 where x is), rounds once.
    """
    compute = torch.promote_types(x.dtype, torch.float32)
    y = F.layer_norm(
        x.to(compute),
        x.shape[-1:],
        None if weight is None else weight.to(compute),
        None if bias is None else bias.to(compute),
        eps,
    )
    return y.to(out_dtype or x.dtype)


@jit(do_not_specialize=["rows"])
def _kernel(
    x,
    weight,
    bias,
    out,
    rows,
    columns,
    eps,
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
    if HAS_WEIGHT:
        factor = tl.load(weight + column, mask=inside, other=0.0)
    if HAS_BIAS:
        offset = tl.load(bias + column, mask=inside, other=0.0)
    value = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    mean = tl.sum(value, 1) / columns
    centred = tl.where(mask, value - mean[:, None], 0.0)
    variance = tl.sum(centred * centred, 1) / columns
    y = centred * (1.0 / tl.sqrt(variance + eps))[:, None]
    if HAS_WEIGHT:
        y *= factor.to(tl.float32)[None, :]
    if HAS_BIAS:
        y += offset.to(tl.float32)[None, :]
    tl.store(out + at, y.to(out.dtype.element_ty), mask=mask)


_ROWS = 2  # of a program: their loads are under way together
_ELEMENTS = 4096  # of a program at most, where a row is no longer
_PER_WARP = 1024


def tile(columns: int) -> tuple[int, int, int]:
    """Rows a program, columns of its block, warps."""
    block = max(16, next_power_of_2(columns))
    rows = max(1, min(_ROWS, _ELEMENTS // block))
    return rows, block, min(16, max(1, rows * block // _PER_WARP))


def launch(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, out_dtype: torch.dtype | None = None
) -> Tensor:
    """`reference` as one Triton kernel; a row lies in registers between the two passes over it."""
    columns = x.shape[-1]
    dtype = out_dtype or x.dtype
    if not runs(x, weight, bias) or not 0 < columns <= MAX_BLOCK or dtype not in DTYPES:
        return reference(x, weight, bias, eps, out_dtype)
    x = x.contiguous()
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    count = x.numel() // columns
    if count:
        rows, block, warps = tile(columns)
        start(
            _kernel,
            (cdiv(count, rows),),
            x,
            x if weight is None else weight.contiguous(),
            x if bias is None else bias.contiguous(),
            out,
            count,
            columns,
            eps,
            HAS_WEIGHT=weight is not None,
            HAS_BIAS=bias is not None,
            ROWS=rows,
            BLOCK=block,
            num_warps=warps,
        )
    return out
