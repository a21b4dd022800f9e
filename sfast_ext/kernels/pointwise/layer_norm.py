"""Layer norm over the last dimension (Ba, Kiros and Hinton 2016)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from sfast_ext.kernels.backend.registry import Kernel, register
from sfast_ext.kernels.backend.triton_runtime import (
    DTYPES,
    MAX_BLOCK,
    cdiv,
    constexpr,
    jit,
    launch_kernel,
    next_power_of_2,
    pdl_wait,
    supported,
    tl,
)


def reference(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, out_dtype: torch.dtype | None = None
) -> Tensor:
    """Layer norm of x (..., C) over C, times weight (C,), plus bias (C,), in out_dtype (default: x's).

    Computes in float32 (float64 where x is) and rounds once.
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
def layer_norm_kernel(
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
    PDL: constexpr,
):
    pdl_wait(PDL)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = column < columns
    mask = (row < rows)[:, None] & inside[None, :]
    at = row[:, None] * columns + column[None, :]
    # all loads are issued before the first use
    if HAS_WEIGHT:
        gamma = tl.load(weight + column, mask=inside, other=0.0)
    if HAS_BIAS:
        beta = tl.load(bias + column, mask=inside, other=0.0)
    value = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    mean = tl.sum(value, 1) / columns
    centred = tl.where(mask, value - mean[:, None], 0.0)
    variance = tl.sum(centred * centred, 1) / columns
    y = centred * (1.0 / tl.sqrt(variance + eps))[:, None]
    if HAS_WEIGHT:
        y *= gamma.to(tl.float32)[None, :]
    if HAS_BIAS:
        y += beta.to(tl.float32)[None, :]
    tl.store(out + at, y.to(out.dtype.element_ty), mask=mask)


_ROWS = 2  # of a program, so that their loads overlap
_ELEMENTS = 4096  # of a program at most, unless a row is longer
_PER_WARP = 1024


def tile(columns: int) -> tuple[int, int, int]:
    """(rows of a program, columns of its block, warps) for rows of so many columns."""
    block = max(16, next_power_of_2(columns))
    rows = max(1, min(_ROWS, _ELEMENTS // block))
    return rows, block, min(16, max(1, rows * block // _PER_WARP))


def launch(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, out_dtype: torch.dtype | None = None
) -> Tensor:
    """`reference` as one Triton kernel; rows stay in registers between the two passes over them."""
    columns = x.shape[-1]
    dtype = out_dtype or x.dtype
    if not supported(x, weight, bias) or not 0 < columns <= MAX_BLOCK or dtype not in DTYPES:
        return reference(x, weight, bias, eps, out_dtype)
    x = x.contiguous()
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    count = x.numel() // columns
    if count:
        rows, block, warps = tile(columns)
        launch_kernel(
            layer_norm_kernel,
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


KERNEL = register(Kernel("layer_norm", reference, launch, triton_functions=(layer_norm_kernel,)))
