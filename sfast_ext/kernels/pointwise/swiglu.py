"""SwiGLU (Shazeer 2020): values times the SiLU of gates."""

from __future__ import annotations

import ctypes
import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from sfast_ext.kernels.backend import cuda_tier, nvrtc
from sfast_ext.kernels.backend.registry import Declined, kernel, require
from sfast_ext.kernels.backend.triton_runtime import cdiv, launch_kernel


def reference(gate: Tensor, value: Tensor) -> Tensor:
    """silu(gate) * value of two tensors (..., N). Computes in float32 (float64 if they are) and rounds once."""
    compute = torch.promote_types(gate.dtype, torch.float32)
    return (F.silu(gate.to(compute)) * value.to(compute)).to(gate.dtype)


_THREADS = 256
_PACKS = 2  # accesses of a thread, so that loads overlap


def constants(pack: int, dtype: torch.dtype) -> dict[str, int]:
    """Compile-time parameters of csrc/swiglu.cu."""
    return {"TYPE": cuda_tier.TYPES[dtype], "PACK": pack, "PACKS": _PACKS}


def _prepared(*args: Any, **constants: int) -> tuple[list[Any], int, int]:
    *tensors, gate_stride, value_stride, rows, columns = args
    numbers = [*map(ctypes.c_longlong, (gate_stride, value_stride)), *map(ctypes.c_int, (rows, columns))]
    return [*tensors, *numbers], _THREADS, 0


SOURCE = nvrtc.Source(
    "swiglu", _prepared, ("gate", "value", "out", "gate_stride", "value_stride", "rows", "columns")
)


def rows_of(x: Tensor) -> Tensor:
    """x as (rows, N): a view if its rows are equally far apart, as in a part of a packed product."""
    flat = x.reshape(-1, x.shape[-1])
    return flat if flat.stride(-1) == 1 else flat.contiguous()


@kernel(reference, portable=True, cuda_sources=(SOURCE,))
def launch(gate: Tensor, value: Tensor) -> Tensor:
    """`reference` in one launch. gate and value, of one shape and dtype, may be the two halves of a packed product;
    float16, bfloat16 or float32; fewer than 2**31 elements."""
    require(cuda_tier.accepts(SOURCE, gate, value))
    if not gate.dim() or not gate.shape[-1] or gate.shape != value.shape or gate.numel() >= 2**31:
        raise Declined("tensors of two shapes, without columns or too large")
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    gates, values = rows_of(gate), rows_of(value)
    rows, columns = gates.shape
    strides = gates.stride(0), values.stride(0)
    pack = cuda_tier.pack(math.gcd(columns, *(strides if rows > 1 else ())), gates, values, out)
    given = constants(pack, gate.dtype)
    if rows:
        grid = (cdiv(rows * columns, _THREADS * pack * _PACKS),)
        launch_kernel(SOURCE, grid, gates, values, out, *strides, rows, columns, **given)
    return out
