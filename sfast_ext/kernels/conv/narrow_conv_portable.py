"""`narrow_conv` in CUDA C++ for any card: csrc/narrow_conv_in.cu and csrc/narrow_conv_out.cu.

Few input channels: one kernel, without tensor cores. Few output channels: a GEMM by cuBLAS, of pixels by 9 taps x
channels, which reads the input once, and a kernel that adds up the taps.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from sfast_ext.kernels.backend import cuda_tier, nvrtc
from sfast_ext.kernels.backend.triton_runtime import cdiv, channels_inner, launch_kernel

MAX_PIXELS = 2**31 - 2**16  # counted in 32 bits, the last block's included
_THREADS = 128  # few input channels: of a block
_PIXELS = 4  # of a thread
_LANES, _COLUMNS = 8, 64  # threads of a pixel, and output channels of a block, as csrc/narrow_conv_in.cu has them
_STORE = 4  # elements of a store at most
_DEPTH = 36  # taps x channels staged together at most: half of the shared memory that every card gives a block
_OUT_THREADS = 64  # few output channels: so few that a small image has blocks for all multiprocessors
_SCALE = 0.125
"""In float16 a tap's result may overflow although the sum of taps does not."""


def from_few(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x (N, C, H, W) with any strides -> (N, H, W, K); accepted, weight channels last, bias contiguous."""
    images, channels, height, width = x.shape
    columns, pixels = weight.shape[0], images * height * width
    out = torch.empty((images, height, width, columns), dtype=x.dtype, device=x.device)
    given = in_constants(channels, cuda_tier.pack(columns, out), x.dtype)
    grid = (cdiv(pixels, given["THREADS"] // _LANES * given["PIXELS"]), cdiv(columns, _COLUMNS))
    launch_kernel(IN, grid, x, weight, bias, out, pixels, height, width, columns, *x.stride(), **given)
    return out


def to_few(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x (N, C, H, W) -> (N, H, W, K); accepted, weight channels last, bias contiguous."""
    images, channels, height, width = x.shape
    columns = weight.shape[0]
    pixels = channels_inner(x).view(-1, channels)
    taps = weight.permute(0, 2, 3, 1).reshape(-1, channels)  # a view if the weight is channels last
    scale = _SCALE if x.dtype == torch.float16 else 1.0
    # a row for each tap: rows as long as the image are aligned, those of 9 taps x channels would not be
    # with beta 0 the first operand is not read
    products = torch.addmm(x.new_empty(()), taps, pixels.t(), beta=0, alpha=scale)
    out = torch.empty((images, height, width, columns), dtype=x.dtype, device=x.device)
    given = out_constants(columns, x.dtype)
    grid = (cdiv(len(pixels), given["THREADS"]),)
    launch_kernel(OUT, grid, products, bias, out, len(pixels), height, width, 1 / scale, **given)
    return out


def in_constants(channels: int, pack: int, dtype: torch.dtype) -> dict[str, int]:
    """Compile-time parameters of csrc/narrow_conv_in.cu."""
    taps = next(taps for taps in (9, 3, 1) if taps * channels <= _DEPTH)
    return {
        "TYPE": cuda_tier.TYPES[dtype],
        "CHANNELS": channels,
        "THREADS": _THREADS,
        "PIXELS": _PIXELS,
        "TAPS": taps,
        "PACK": min(pack, _STORE),
    }


def out_constants(columns: int, dtype: torch.dtype) -> dict[str, int]:
    """Compile-time parameters of csrc/narrow_conv_out.cu."""
    return {"TYPE": cuda_tier.TYPES[dtype], "CHANNELS": columns, "THREADS": _OUT_THREADS}


def _prepared_in(*args: Any, **constants: int) -> tuple[list[Any], int, int]:
    tensors, sizes, strides = args[:4], args[4:8], args[8:]
    return [*tensors, *map(ctypes.c_int, sizes), *map(ctypes.c_longlong, strides)], constants["THREADS"], 0


def _prepared_out(*args: Any, **constants: int) -> tuple[list[Any], int, int]:
    tensors, sizes, scale = args[:3], args[3:6], args[6]
    return [*tensors, *map(ctypes.c_int, sizes), ctypes.c_float(scale)], constants["THREADS"], 0


IN = nvrtc.Source(
    "narrow_conv_in",
    _prepared_in,
    (
        "x", "weight", "bias", "out", "pixels", "height", "width", "columns", "x_image", "x_channel", "x_row",
        "x_column",
    ),
)  # fmt: skip
OUT = nvrtc.Source("narrow_conv_out", _prepared_out, ("products", "bias", "out", "pixels", "height", "width", "scale"))
SOURCES = (IN, OUT)
