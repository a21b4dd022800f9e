"""Sinusoidal timestep embedding (Vaswani et al. 2017): several tiny operations as one kernel."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from sfast_ext.kernels.backend import cuda_tier, nvrtc, triton_runtime
from sfast_ext.kernels.backend.registry import Declined, kernel, require
from sfast_ext.kernels.backend.triton_runtime import (
    MAX_GRID_YZ,
    cdiv,
    constexpr,
    jit,
    launch_kernel,
    pdl_wait,
    tl,
)

_BLOCK = 128
TIMES = (torch.float16, torch.bfloat16, torch.float32, torch.int32, torch.int64)
"""Types of timesteps, by their number in csrc/timestep_embedding.cu."""


def reference(t: Tensor, frequency: Tensor, sine_first: bool, out_dtype: torch.dtype | None = None) -> Tensor:
    """t (N, 1), frequency (1, F) or (F,) in float32 -> (N, 2F): sine of t * frequency, then cosine, or cosine first.

    As in torch, the angle is rounded to frequency's dtype; the result is in out_dtype (default: frequency's).
    """
    angle = t.to(frequency.dtype) * frequency.reshape(1, -1)
    parts = [angle.sin(), angle.cos()]
    return torch.cat(parts if sine_first else parts[::-1], -1).to(out_dtype or frequency.dtype)


@jit(do_not_specialize=["half", "stride"])
def timestep_embedding_kernel(t, frequency, out, half, stride, SINE_FIRST: constexpr, BLOCK: constexpr, PDL: constexpr):
    pdl_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < half
    angle = tl.load(t + row * stride).to(tl.float32) * tl.load(frequency + column, mask=mask, other=0.0)
    sine, cosine = tl.sin(angle), tl.cos(angle)
    out += row * 2 * half
    left, right = (sine, cosine) if SINE_FIRST else (cosine, sine)
    tl.store(out + column, left.to(out.dtype.element_ty), mask=mask)
    tl.store(out + half + column, right.to(out.dtype.element_ty), mask=mask)


def constants(time: torch.dtype, dtype: torch.dtype) -> dict[str, int]:
    """Compile-time parameters of csrc/timestep_embedding.cu."""
    return {"TIME": TIMES.index(time), "OUT": cuda_tier.TYPES[dtype], "THREADS": _BLOCK}


def _prepared(*args: Any, **constants: int) -> tuple[list[Any], int, int]:
    *tensors, half, stride, sine_first = args
    numbers = ctypes.c_int(half), ctypes.c_longlong(stride), ctypes.c_int(sine_first)
    return [*tensors, *numbers], constants["THREADS"], 0


_SOURCE = nvrtc.Source("timestep_embedding", _prepared, ("t", "frequency", "out", "half", "stride", "sine_first"))


@kernel(reference, portable=True, triton_functions=(timestep_embedding_kernel,), cuda_sources=(_SOURCE,))
def launch(t: Tensor, frequency: Tensor, sine_first: bool, out_dtype: torch.dtype | None = None) -> Tensor:
    """`reference` in one launch: t of one of `TIMES`, with any stride; frequency in float32 is made contiguous; the
    result in float16, bfloat16 or float32. F up to 8,388,480."""
    half, dtype = frequency.numel(), out_dtype or frequency.dtype
    out = torch.empty((t.shape[0], 2 * half), dtype=dtype, device=frequency.device)
    triton, reason = cuda_tier.tier((_SOURCE,), frequency)
    require(reason, triton_runtime.accepts(frequency, out) if triton else None)
    if frequency.dtype != torch.float32 or t.dtype not in TIMES or dtype not in cuda_tier.TYPES:
        raise Declined("another dtype")
    if t.device != frequency.device or type(t) is not Tensor or cdiv(half, _BLOCK) > MAX_GRID_YZ:
        raise Declined("tensors of several devices, of a subclass of Tensor, or too many frequencies")
    if out.numel():
        grid = (t.shape[0], cdiv(half, _BLOCK))
        operands = (frequency.contiguous(), out, half, t.stride(0))
        if not triton:
            launch_kernel(_SOURCE, grid, t, *operands, int(sine_first), **constants(t.dtype, dtype))
            return out
        launch_kernel(timestep_embedding_kernel, grid, t, *operands, SINE_FIRST=sine_first, BLOCK=_BLOCK, num_warps=4)
    return out
