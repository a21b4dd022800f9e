"""Nearest-neighbour upsampling of channels-last images, or of the sum of two."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from sfast_ext.kernels.backend import cuda_tier, nvrtc
from sfast_ext.kernels.backend.registry import Declined, kernel, require
from sfast_ext.kernels.backend.triton_runtime import (
    MAX_GRID_YZ,
    cdiv,
    channels_inner,
    channels_outer,
    constexpr,
    jit,
    launch_kernel,
    pdl_wait,
    tl,
)


def reference(x: Tensor, size: tuple[int, int], steps: tuple[float, float], residual: Tensor | None = None) -> Tensor:
    """x (N, C, H, W) plus residual -> (N, C, *size), channels last: target pixel i is source pixel floor(i * step).

    steps are source pixels per target pixel, in float32 as in torch: 1 / scale_factor if that is given, else the
    quotient of the sizes.
    """
    x = x if residual is None else x + residual
    at = [places(*some).to(x.device) for some in zip(x.shape[2:], size, steps)]
    return x[:, :, at[0]][..., at[1]].contiguous(memory_format=torch.channels_last)


def places(length: int, target: int, step: float) -> Tensor:
    """(target,): index of the source pixel, of `length`, for each of `target` pixels."""
    place = torch.arange(target, dtype=torch.float32) * torch.tensor(step, dtype=torch.float32)
    return place.floor().long().clamp(max=length - 1)


_ROWS, _BLOCK = 16, 64  # a tile; the channels of Stable Diffusion's UNets are multiples of 64


@jit(do_not_specialize=["rows", "height", "width", "out_height", "out_width"])
def upsample_kernel(
    x, residual, out, rows, channels, height, width, out_height, out_width, step_y, step_x, RESIDUAL: constexpr,
    ROWS: constexpr, BLOCK: constexpr, PDL: constexpr,
):  # fmt: skip
    pdl_wait(PDL)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = (row < rows)[:, None] & (channel < channels)[None, :]
    line = row // out_width
    y = (line % out_height).to(tl.float32) * step_y
    x_ = (row % out_width).to(tl.float32) * step_x
    source_y = tl.minimum(y.to(tl.int32), height - 1)
    source_x = tl.minimum(x_.to(tl.int32), width - 1)
    source = ((line // out_height) * height + source_y) * width + source_x
    place = source[:, None] * channels + channel[None, :]
    value = tl.load(x + place, mask=mask, other=0.0)
    if RESIDUAL:
        value = value.to(tl.float32) + tl.load(residual + place, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row[:, None] * channels + channel[None, :], value.to(out.dtype.element_ty), mask=mask)


_THREADS = 256
_PACKS = 2  # accesses of a thread, so that loads overlap
_MAX_OF_A_LINE = MAX_GRID_YZ * _THREADS * _PACKS  # elements


def constants(pack: int, dtype: torch.dtype) -> dict[str, int]:
    """Compile-time parameters of csrc/upsample.cu."""
    return {"TYPE": cuda_tier.TYPES[dtype], "THREADS": _THREADS, "PACK": pack, "PACKS": _PACKS}


def _prepared(*args: Any, **constants: int) -> tuple[list[Any], int, int]:
    tensors, sizes, steps = args[:3], args[3:8], args[8:]
    return [*tensors, *map(ctypes.c_int, sizes), *map(ctypes.c_float, steps)], constants["THREADS"], 0


_OPERANDS = ("x", "residual", "out", "channels", "height", "width", "out_height", "out_width", "step_y", "step_x")
_SOURCE = nvrtc.Source("upsample", _prepared, _OPERANDS)


@kernel(reference, portable=True, triton_functions=(upsample_kernel,), cuda_sources=(_SOURCE,))
def launch(x: Tensor, size: tuple[int, int], steps: tuple[float, float], residual: Tensor | None = None) -> Tensor:
    """`reference` in one launch.

    x and residual (N, C, H, W), of one shape and dtype, are made channels last; float16, bfloat16 or float32. C up to
    4,194,240 in Triton; rows of the result up to 33,553,920 elements in CUDA C++.
    """
    batch, channels, height, width = x.shape
    triton, reason = cuda_tier.tier((_SOURCE,), x, residual)
    require(reason)
    if residual is not None and (residual.shape != x.shape or residual.dtype != x.dtype):
        raise Declined("a residual of another shape or dtype")
    row = channels if triton else size[1] * channels
    if not 0 < row <= (MAX_GRID_YZ * _BLOCK if triton else _MAX_OF_A_LINE) or min(height, width, *size) < 1:
        raise Declined("no elements, or too many in a row")
    inner, other = channels_inner(x), None if residual is None else channels_inner(residual)
    out = torch.empty((batch, *size, channels), dtype=x.dtype, device=x.device)
    count = out.numel() // channels
    sizes = (channels, height, width, *size, *map(float, steps))
    if count and not triton:
        given = constants(cuda_tier.pack(channels, inner, other), x.dtype)
        grid = (batch * size[0], cdiv(size[1] * channels, given["THREADS"] * given["PACK"] * given["PACKS"]))
        launch_kernel(_SOURCE, grid, inner, other, out, *sizes, **given)
    elif count:
        launch_kernel(
            upsample_kernel,
            (cdiv(count, _ROWS), cdiv(channels, _BLOCK)),
            inner,
            inner if other is None else other,
            out,
            count,
            *sizes,
            RESIDUAL=residual is not None,
            ROWS=_ROWS,
            BLOCK=_BLOCK,
            num_warps=4,
        )
    return channels_outer(out)
