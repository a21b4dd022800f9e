"""Layer norm over the last dimension (Ba, Kiros and Hinton 2016), of a sum as well (add_layer_norm.py)."""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from sfast_ext.kernels.backend import cuda_tier, nvrtc
from sfast_ext.kernels.backend.registry import Declined, kernel, require
from sfast_ext.kernels.backend.triton_runtime import (
    DTYPES,
    MAX_BLOCK,
    cdiv,
    constexpr,
    jit,
    launch_kernel,
    next_power_of_2,
    pdl_wait,
    tl,
)


def reference(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, out_dtype: torch.dtype | None = None
) -> Tensor:
    """Layer norm of x (..., C) over C, times weight (C,), plus bias (C,), in out_dtype (default: x's).

    Computes in float32 (float64 if x is) and rounds once.
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
    x, residual, shift, post_bias, weight, bias, out_sum, out, rows, columns, eps, ADD: constexpr, HAS_SHIFT: constexpr,
    HAS_POST_BIAS: constexpr, HAS_WEIGHT: constexpr, HAS_BIAS: constexpr, ROWS: constexpr, BLOCK: constexpr,
    PDL: constexpr,
):  # fmt: skip
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
    if ADD:
        second = tl.load(residual + at, mask=mask, other=0.0)
        value = first.to(tl.float32) + second.to(tl.float32)
        if HAS_SHIFT:
            value += pre.to(tl.float32)[None, :]
        rounded = value.to(out_sum.dtype.element_ty)
        value = rounded.to(tl.float32)
        if HAS_POST_BIAS:
            rounded = (value + post.to(tl.float32)[None, :]).to(out_sum.dtype.element_ty)
        tl.store(out_sum + at, rounded, mask=mask)
    else:
        value = first.to(tl.float32)
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


_ROW_THREADS = 16  # the fewest of a row
# Accesses of a thread, until a row has _MAX_ROW_THREADS, and elements of an access, at most: what leaves registers for
# 1,024 threads of a multiprocessor. By 5 the columns of Stable Diffusion divide.
_ROW_CHUNKS, _ROW_CHUNKS_FLOAT32 = 5, 3
_ROW_PACK = 4
_MAX_ROW_THREADS = 512
_MAX_CHUNKS = 16


def constants(columns: int, pack: int, dtype: torch.dtype, out: torch.dtype, add: bool) -> dict[str, int] | None:
    """Compile-time parameters of csrc/layer_norm.cu; None for rows that it does not take."""
    pack = min(pack, _ROW_PACK)
    threads = _ROW_THREADS
    most = _ROW_CHUNKS_FLOAT32 if dtype == torch.float32 else _ROW_CHUNKS
    while threads < _MAX_ROW_THREADS and columns > threads * pack * most:
        threads *= 2
    chunks = cdiv(columns, threads * pack)
    if not 0 < chunks <= _MAX_CHUNKS:
        return None
    return {
        "TYPE": cuda_tier.TYPES[dtype],
        "OUT": cuda_tier.TYPES[out],
        "ADD": int(add),
        **cuda_tier.of_rows(columns, threads, chunks, pack),
    }


def _prepared(*args: Any, **constants: int) -> tuple[list[Any], int, int]:
    *tensors, rows, columns, eps = args
    numbers = ctypes.c_int(rows), ctypes.c_int(columns), ctypes.c_float(eps)
    return [*tensors, *numbers], constants["THREADS"] * constants["ROWS"], 0


_OPERANDS = ("x", "residual", "shift", "post_bias", "weight", "bias", "out_sum", "out", "rows", "columns", "eps")
SOURCE = nvrtc.Source("layer_norm", _prepared, _OPERANDS)


class Operands(NamedTuple):
    """What a norm is taken of, x or x + shift + residual, and its parameters; see `add_layer_norm.reference`."""

    x: Tensor
    residual: Tensor | None = None
    shift: Tensor | None = None
    post_bias: Tensor | None = None
    weight: Tensor | None = None
    bias: Tensor | None = None


def normalised(operands: Operands, eps: float, out_dtype: torch.dtype | None) -> tuple[Tensor | None, Tensor]:
    """(sum, y) by one kernel; the sum is None without a residual.

    Raises:
        Declined: the operands are not taken.
    """
    columns, dtype, add = operands.x.shape[-1], out_dtype or operands.x.dtype, operands.residual is not None
    triton, reason = cuda_tier.tier((SOURCE,), *operands)
    require(reason)
    if (operands.residual is not None and operands.residual.shape != operands.x.shape) or dtype not in DTYPES:
        raise Declined("a residual of another shape, or another dtype of the result")
    dense = [None if t is None else t.contiguous() for t in operands]
    pack = cuda_tier.pack(max(columns, 1), *dense)
    given = None if triton else constants(columns, pack, operands.x.dtype, dtype, add)
    if not 0 < columns <= MAX_BLOCK if triton else given is None:
        raise Declined("rows that are too long, or empty")
    x = dense[0]
    assert x is not None
    out_sum = torch.empty(x.shape, dtype=x.dtype, device=x.device) if add else None
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    count = x.numel() // columns
    if count and given is not None:
        launch_kernel(SOURCE, (cdiv(count, given["ROWS"]),), x, *dense[1:], out_sum, out, count, columns, eps, **given)
    elif count:
        rows, block, warps = tile(columns)
        launch_kernel(
            layer_norm_kernel,
            (cdiv(count, rows),),
            *(x if tensor is None else tensor for tensor in (x, *dense[1:], out_sum)),
            out,
            count,
            columns,
            eps,
            ADD=add,
            HAS_SHIFT=operands.shift is not None,
            HAS_POST_BIAS=operands.post_bias is not None,
            HAS_WEIGHT=operands.weight is not None,
            HAS_BIAS=operands.bias is not None,
            ROWS=rows,
            BLOCK=block,
            num_warps=warps,
        )
    return out_sum, out


@kernel(reference, portable=True, triton_functions=(layer_norm_kernel,), cuda_sources=(SOURCE,))
def launch(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, out_dtype: torch.dtype | None = None
) -> Tensor:
    """`reference` in one launch: rows stay in registers between the two passes over them.

    x (..., C) is made contiguous; float16, bfloat16 or float32, in CUDA C++ one dtype for all operands. Up to 16,384
    columns in Triton; in CUDA C++ up to 8,192 to 32,768, by dtype and alignment.
    """
    return normalised(Operands(x, weight=weight, bias=bias), eps, out_dtype)[1]
