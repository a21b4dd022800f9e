"""Layer norm over the last dimension (Ba, Kiros and Hinton 2016)."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from sfast_ext.kernels.backend import cuda_tier, nvrtc
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
    """`reference` as one kernel; rows stay in registers between the two passes over them."""
    columns = x.shape[-1]
    dtype = out_dtype or x.dtype
    if cuda_tier.usable(SOURCE, x, weight, bias) and dtype in DTYPES:
        rows_of = x.contiguous()
        operands = (rows_of, None, None, None, weight, bias)
        out = torch.empty(x.shape, dtype=dtype, device=x.device)
        if launch_rows(operands, None, out, eps):
            return out
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


_ROW_THREADS = 16  # the fewest of a row
_BLOCK_THREADS = 128
# Accesses of a thread, until a row has _MOST_ROW_THREADS, and elements of an access, at most: what leaves registers for
# 1,024 threads of a multiprocessor. By 5 the columns of Stable Diffusion divide.
_ROW_CHUNKS, _ROW_CHUNKS_FLOAT32 = 5, 3
_ROW_PACK = 4
_MOST_ROW_THREADS = 512
_MOST_CHUNKS = 16


def constants(columns: int, pack: int, dtype: torch.dtype, out: torch.dtype, add: bool) -> dict[str, int] | None:
    """Compile-time parameters of csrc/layer_norm.cu; None for rows that it does not take."""
    pack = min(pack, _ROW_PACK)
    threads = _ROW_THREADS
    most = _ROW_CHUNKS_FLOAT32 if dtype == torch.float32 else _ROW_CHUNKS
    while threads < _MOST_ROW_THREADS and columns > threads * pack * most:
        threads *= 2
    chunks = cdiv(columns, threads * pack)
    if not 0 < chunks <= _MOST_CHUNKS:
        return None
    return {
        "TYPE": cuda_tier.TYPES[dtype],
        "OUT": cuda_tier.TYPES[out],
        "ADD": int(add),
        "THREADS": threads,
        "ROWS": max(1, _BLOCK_THREADS // threads),
        "CHUNKS": chunks,
        "PACK": pack,
        "EXACT": int(columns == threads * chunks * pack),
    }


def launch_rows(operands: tuple[Tensor | None, ...], out_sum: Tensor | None, out: Tensor, eps: float) -> bool:
    """Launch csrc/layer_norm.cu; False for rows that it does not take.

    Args:
        operands: x, residual, shift, post_bias, weight, bias. x and residual are contiguous.
    """
    x = operands[0]
    assert x is not None
    columns = x.shape[-1]
    vectors = [None if v is None else v.contiguous() for v in operands[2:]]
    if not columns:
        return False
    pack = cuda_tier.pack(columns, *operands[:2], *vectors)
    given = constants(columns, pack, x.dtype, out.dtype, out_sum is not None)
    count = x.numel() // columns
    if given is None:
        return False
    if count:
        launch_kernel(
            SOURCE,
            (cdiv(count, given["ROWS"]),),
            *operands[:2],
            *vectors,
            out_sum,
            out,
            count,
            columns,
            eps,
            **given,
        )
    return True


def _prepared(*args: Any, **constants: int) -> tuple[list[Any], int, int]:
    *tensors, rows, columns, eps = args
    numbers = ctypes.c_int(rows), ctypes.c_int(columns), ctypes.c_float(eps)
    return [*tensors, *numbers], constants["THREADS"] * constants["ROWS"], 0


_OPERANDS = ("x", "residual", "shift", "post_bias", "weight", "bias", "out_sum", "out", "rows", "columns", "eps")
SOURCE = nvrtc.Source("layer_norm", _prepared, _OPERANDS)


KERNEL = register(
    Kernel(
        "layer_norm",
        reference,
        launch,
        portable=True,
        triton_functions=(layer_norm_kernel,),
        cuda_sources=(SOURCE,),
    )
)
