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


def reference(gate: Tensor, value: Tensor, group: int = 0) -> tuple[Tensor, Tensor]:
    """(q (..., N) int8, scale (...) float32) of `swiglu.reference`, as `quantise_rows.reference` has them.

    Computes in float32 (float64 if they are): SwiGLU is not rounded in between.
    """
    compute = torch.promote_types(gate.dtype, torch.float32)
    return quantise_rows.reference(swiglu.reference(gate.to(compute), value.to(compute)), group)


def constants(
    columns: int, pack: int, dtype: torch.dtype, group: int, *, gated: bool, tanh: bool
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
        "GROUP": group,
        **cuda_tier.of_rows(columns, threads, chunks, pack),
    }


def _prepared(*args: Any, **constants: int) -> tuple[list[Any], int, int]:
    *tensors, x_stride, gate_stride, rows, columns = args
    numbers = [*map(ctypes.c_longlong, (x_stride, gate_stride)), *map(ctypes.c_int, (rows, columns))]
    return [*tensors, *numbers], constants["THREADS"] * constants["ROWS"], 0


SOURCE = nvrtc.Source(
    "activation8", _prepared, ("x", "gate", "out", "scales", "x_stride", "gate_stride", "rows", "columns")
)


def activated(x: Tensor, gate: Tensor | None, group: int, *, tanh: bool = False) -> tuple[Tensor, Tensor]:
    """(q, scale) of silu(gate) * x, or of GELU of x, by one kernel.

    Raises:
        Declined: the operands are not taken.
    """
    require(cuda_tier.accepts(SOURCE, x, gate))
    if x.dtype not in HALF or not x.dim() or not x.shape[-1] or (gate is not None and gate.shape != x.shape):
        raise Declined("no half precision, or tensors of two shapes or without columns")
    rows, columns = x.numel() // x.shape[-1], x.shape[-1]
    values, gates = swiglu.rows_of(x), None if gate is None else swiglu.rows_of(gate)
    strides = values.stride(0), 0 if gates is None else gates.stride(0)
    pack = cuda_tier.pack(math.gcd(columns, *(strides if rows > 1 else ())), values, gates)
    given = constants(columns, pack, x.dtype, group, gated=gate is not None, tanh=tanh)
    if given is None or rows >= 2**31:
        raise Declined("rows that are too long, too many or not divided as the rotation needs")
    q = torch.empty(x.shape, dtype=torch.int8, device=x.device)
    scales = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    if rows:
        grid = (cdiv(rows, given["ROWS"]),)
        launch_kernel(SOURCE, grid, values, gates, q, scales, *strides, rows, columns, **given)
    return q, scales


@kernel(reference, portable=True, cuda_sources=(SOURCE,))
def launch(gate: Tensor, value: Tensor, group: int = 0) -> tuple[Tensor, Tensor]:
    """`reference` in one launch. gate and value, of one shape and dtype, may be the two halves of a packed product;
    float16 or bfloat16; up to 40,960 columns. With a rotation rows begin at multiples of 16 bytes."""
    return activated(value, gate, group)
