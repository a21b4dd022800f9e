"""RMS norm (Zhang and Sennrich 2019) or layer norm of rows, scaled and shifted by vectors of their sample (Peebles and
Xie 2023), of a gated sum as well (gated_norm.py, gated_residual.py)."""

from __future__ import annotations

import ctypes
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sfast_ext.kernels.backend import cuda_tier, nvrtc
from sfast_ext.kernels.backend.registry import Declined, kernel, require
from sfast_ext.kernels.backend.triton_runtime import cdiv, launch_kernel
from sfast_ext.kernels.eight_bits import quantise_rows


def reference(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    rms: bool = True,
    plus_one: bool = False,
) -> Tensor:
    """Norm of x (..., C) over C, times weight (C,), plus bias (C,), times scale, plus shift, which are broadcast to x.

    Args:
        rms: whether it is an RMS norm; else a layer norm.
        plus_one: whether 1 is added to the scale.

    Computes in float32 (float64 if x is) and rounds once.
    """
    y = x.to(torch.promote_types(x.dtype, torch.float32))
    if not rms:
        y = y - y.mean(-1, keepdim=True)
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        y = y * weight.to(y.dtype)
    if bias is not None:
        y = y + bias.to(y.dtype)
    if scale is not None:
        y = y * (1 + scale.to(y.dtype) if plus_one else scale.to(y.dtype))
    if shift is not None:
        y = y + shift.to(y.dtype)
    return y.to(x.dtype)


_WARP, _MAX_THREADS = 32, 1024
_CHUNKS = (2, 1, 3, 4, 5)
"""Accesses of a thread, the best first: the first that divides a row, by which no thread is idle."""
_FEW = 2
"""Accesses of a thread otherwise, until a row has `_MAX_THREADS`."""
_MAX_CHUNKS = 5


class Parts(NamedTuple):
    """What a kernel does next to the norm: csrc/modulated_norm.cu."""

    add: bool = False
    inner: bool = False
    tanh: bool = False
    norm: int = 0
    """0 none, 1 RMS, 2 layer norm."""
    plus_one: bool = False
    codes: bool = False
    """Whether the norm's result is int8, with a scale for each row."""
    group: int = 0
    """How many neighbours are rotated before (kernels/eight_bits/quantise_rows.py)."""


def threads_and_chunks(columns: int, pack: int) -> tuple[int, int] | None:
    """The threads of a row, whole warps, and the accesses of each; None for rows that are too long."""
    accesses = cdiv(columns, pack)
    even = (n for n in _CHUNKS if accesses % (_WARP * n) == 0 and accesses // n <= _MAX_THREADS // 2)
    chunks = next(even, 0) if columns % pack == 0 else 0
    threads = accesses // chunks if chunks else min(_MAX_THREADS, _WARP * cdiv(cdiv(accesses, _FEW), _WARP))
    chunks = chunks or cdiv(accesses, threads or 1)
    return (threads, chunks) if 0 < chunks <= _MAX_CHUNKS else None


def constants(columns: int, pack: int, dtype: torch.dtype, parts: Parts) -> dict[str, int] | None:
    """Compile-time parameters of csrc/modulated_norm.cu; None for rows that it does not take."""
    found = threads_and_chunks(columns, pack)
    if found is None:
        return None
    threads, chunks = found
    return {
        "TYPE": cuda_tier.TYPES[dtype],
        "ADD": int(parts.add),
        "INNER": int(parts.inner),
        "TANH": int(parts.tanh),
        "NORM": parts.norm,
        "PLUS_ONE": int(parts.plus_one),
        "CODES": int(parts.codes),
        "GROUP": parts.group,
        **cuda_tier.of_rows(columns, threads, chunks, pack),
    }


def _prepared(*args: Any, **constants: int) -> tuple[list[Any], int, int]:
    *tensors, strides, sizes, epsilons = args
    numbers = [*map(ctypes.c_longlong, strides), *map(ctypes.c_int, sizes), *map(ctypes.c_float, epsilons)]
    return [*tensors, *numbers], constants["THREADS"] * constants["ROWS"], 0


_OPERANDS = ("x", "y", "inner_weight", "weight", "bias", "gate", "scale", "shift", "out_sum", "out", "scales")
SOURCE = nvrtc.Source("modulated_norm", _prepared, (*_OPERANDS, "strides", "sizes", "epsilons"))


class Operands(NamedTuple):
    """What is normed, x or x + gate * inner norm of y, and what by; see `reference` and `gated_norm.reference`."""

    x: Tensor
    y: Tensor | None = None
    inner_weight: Tensor | None = None
    weight: Tensor | None = None
    bias: Tensor | None = None
    gate: Tensor | None = None
    scale: Tensor | None = None
    shift: Tensor | None = None


class _Vectors(NamedTuple):
    """Vectors of samples, of which each is read by so many rows."""

    tensor: Tensor | None = None
    stride: int = 0
    rows: int = 1


def _vectors(t: Tensor | None, x: Tensor) -> _Vectors:
    """A tensor that is broadcast to x, by the rows that share a vector of it.

    Raises:
        Declined: rows that share one are no neighbours.
    """
    if t is None:
        return _Vectors()
    if t.dim() > x.dim() or not t.dim() or t.shape[-1] != x.shape[-1]:
        raise Declined("a scale, shift or gate of another shape")
    lead = (*[1] * (x.dim() - t.dim()), *t.shape[:-1])
    if any(a not in (1, b) for a, b in zip(lead, x.shape[:-1], strict=True)):
        raise Declined("a scale, shift or gate of another shape")
    # from the first dimension in which they are shared on, they must be shared in all
    different = next((i for i, (a, b) in enumerate(zip(lead, x.shape[:-1], strict=True)) if a != b), len(lead))
    if any(size != 1 for size in lead[different:]):
        raise Declined("a scale, shift or gate of which distant rows share a vector")
    flat = t.reshape(-1, t.shape[-1])
    if flat.stride(-1) != 1:
        flat = flat.contiguous()
    rows = math.prod(x.shape[different:-1])
    return _Vectors(flat, flat.stride(0) if len(flat) > 1 else 0, max(1, rows))


def modulated(
    operands: Operands, parts: Parts, inner_eps: float = 0.0, eps: float = 0.0
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """(sum, y, scale) by one kernel: the sum is None without an addition, y without a norm, the scale if y is no int8.

    Raises:
        Declined: the operands are not taken.
    """
    x, y, inner_weight, weight, bias, *modulation = operands
    require(cuda_tier.accepts(SOURCE, *operands))
    if not x.dim() or not x.shape[-1] or (y is not None and y.shape != x.shape):
        raise Declined("an addition of another shape, or empty rows")
    columns = x.shape[-1]
    if any(t is not None and t.shape != (columns,) for t in (inner_weight, weight, bias)):
        raise Declined("a weight or a bias of another shape")
    gate, scale, shift = (_vectors(t, x) for t in modulation)
    x, y = x.contiguous(), None if y is None else y.contiguous()
    inner_weight, weight, bias = (None if t is None else t.contiguous() for t in (inner_weight, weight, bias))
    out_sum = torch.empty(x.shape, dtype=x.dtype, device=x.device) if parts.add else None
    kind = torch.int8 if parts.codes else x.dtype
    out = torch.empty(x.shape, dtype=kind, device=x.device) if parts.norm else None
    scales = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device) if parts.codes else None
    vectors = gate, scale, shift
    width = math.gcd(columns, *(each.stride for each in vectors))
    tensors = (x, y, inner_weight, weight, bias, *(each.tensor for each in vectors), out_sum)
    given = constants(columns, pack := cuda_tier.pack(width, *tensors), x.dtype, parts)
    if parts.group and (pack != quantise_rows.PACK or columns % parts.group):
        raise Declined("a rotation of rows that are not divided so")
    rows = x.numel() // columns
    if given is None or rows >= 2**31:
        raise Declined("rows that are too long, or too many")
    if rows:
        strides, sizes = [each.stride for each in vectors], [*(each.rows for each in vectors), rows, columns]
        grid = (cdiv(rows, given["ROWS"]),)
        launch_kernel(SOURCE, grid, *tensors, out, scales, strides, sizes, [inner_eps, eps], **given)  # type: ignore[arg-type]
    return out_sum, out, scales


@kernel(reference, portable=True, cuda_sources=(SOURCE,))
def launch(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    rms: bool = True,
    plus_one: bool = False,
) -> Tensor:
    """`reference` in one launch, with one read and one write: rows stay in registers.

    x (..., C) is made contiguous; float16, bfloat16 or float32, the same for all operands; up to 40,960 columns, fewer
    if rows begin at odd places. Rows that share a vector of scale or shift are neighbours.
    """
    parts = Parts(norm=1 if rms else 2, plus_one=plus_one and scale is not None)
    _, out, _ = modulated(Operands(x, weight=weight, bias=bias, scale=scale, shift=shift), parts, eps=eps)
    assert out is not None
    return out
