"""SwiGLU (swiglu.py) whose result is int8 with a scale for each row."""

from __future__ import annotations

import ctypes
import math
from typing import Any

import torch
from torch import Tensor

from sfast_ext.kernels.backend import cuda_tier, nvrtc
from sfast_ext.kernels.backend.registry import Declined, kernel, require
from sfast_ext.kernels.backend.triton_runtime import HALF, cdiv, launch_kernel
from sfast_ext.kernels.eight_bits import quantise_rows
from sfast_ext.kernels.pointwise import modulated_norm, swiglu


def reference(gate: Tensor, value: Tensor, group: int = 0, joined: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(q (..., N) int8, scale (...) float32) of `swiglu.reference`, as `quantise_rows.reference` has them.

    Args:
        joined: (..., M), whose columns stand in front of those of SwiGLU.

    Computes in float32 (float64 if they are): SwiGLU is not rounded in between.
    """
    compute = torch.promote_types(gate.dtype, torch.float32)
    return quantise_rows.reference(behind(joined, swiglu.reference(gate.to(compute), value.to(compute))), group)


def behind(joined: Tensor | None, x: Tensor) -> Tensor:
    """x behind the columns of another tensor, if there is one."""
    return x if joined is None else torch.cat([joined.to(x.dtype), x], -1)


def constants(
    columns: int, pack: int, dtype: torch.dtype, group: int, *, gated: bool, tanh: bool, joined: bool = False
) -> dict[str, int] | None:
    """Compile-time parameters of csrc/activation8.cu; None for rows that it does not take."""
    found = modulated_norm.threads_and_chunks(columns, pack)
    if found is None or (group and (pack != quantise_rows.PACK or columns % group)):
        return None
    threads, chunks = found
    return {
        "TYPE": cuda_tier.TYPES[dtype],
        "GATED": int(gated),
        "TANH": int(tanh),
        "JOINED": int(joined),
        "GROUP": group,
        **cuda_tier.of_rows(columns, threads, chunks, pack),
    }


def _prepared(*args: Any, **constants: int) -> tuple[list[Any], int, int]:
    *tensors, strides, sizes = args
    numbers = [*map(ctypes.c_longlong, strides), *map(ctypes.c_int, sizes)]
    return [*tensors, *numbers], constants["THREADS"] * constants["ROWS"], 0


SOURCE = nvrtc.Source("activation8", _prepared, ("x", "gate", "joined", "out", "scales", "strides", "sizes"))


def activated(
    x: Tensor, gate: Tensor | None, group: int, *, tanh: bool = False, joined: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(q, scale) of silu(gate) * x, or of GELU of x, by one kernel; behind the columns of `joined`, if it is given.

    Raises:
        Declined: the operands are not taken.
    """
    require(cuda_tier.accepts(SOURCE, x, gate, joined))
    if x.dtype not in HALF or not x.dim() or not x.shape[-1] or (gate is not None and gate.shape != x.shape):
        raise Declined("no half precision, or tensors of two shapes or without columns")
    if joined is not None and (joined.shape[:-1] != x.shape[:-1] or not joined.shape[-1]):
        raise Declined("columns of other rows, or none, to join")
    rows, split = x.numel() // x.shape[-1], 0 if joined is None else joined.shape[-1]
    columns = split + x.shape[-1]
    tensors = [None if t is None else swiglu.rows_of(t) for t in (x, gate, joined)]
    strides = tuple(0 if t is None else t.stride(0) for t in tensors)
    pack = cuda_tier.pack(math.gcd(x.shape[-1], split, *(strides if rows > 1 else ())), *tensors)
    options = {"gated": gate is not None, "tanh": tanh, "joined": joined is not None}
    given = constants(columns, pack, x.dtype, group, **options)
    if given is None or rows >= 2**31:
        raise Declined("rows that are too long, too many or not divided as the rotation needs")
    size = *x.shape[:-1], columns
    q = torch.empty(size, dtype=torch.int8, device=x.device)
    scales = torch.empty(size[:-1], dtype=torch.float32, device=x.device)
    if rows:
        grid = (cdiv(rows, given["ROWS"]),)
        launch_kernel(SOURCE, grid, *tensors, q, scales, strides, (rows, columns, split), **given)
    return q, scales


@kernel(reference, portable=True, cuda_sources=(SOURCE,))
def launch(gate: Tensor, value: Tensor, group: int = 0, joined: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """`reference` in one launch. gate and value, of one shape and dtype, may be the two halves of a packed product;
    float16 or bfloat16; up to 40,960 columns. With a rotation rows begin at multiples of 16 bytes, and `joined` has a
    multiple of 8 columns."""
    return activated(value, gate, group, joined=joined)
