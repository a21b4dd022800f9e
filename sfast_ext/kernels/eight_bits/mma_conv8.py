"""3x3 convolutions of 8-bit integers by mma.sync, with a residual in the epilogue, on every card from compute
capability 7.5 on: csrc/mma_conv8.cu."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from sfast_ext.kernels.backend import cuda_tier, nvrtc, triton_runtime
from sfast_ext.kernels.backend.triton_runtime import (
    INTERPRETED,
    MAX_GRID_YZ,
    cdiv,
    device_of,
    is_dry_run,
    launch_kernel,
    multiprocessors,
)
from sfast_ext.kernels.eight_bits import MIN_CAPABILITY, mma8_tiles, mma_gemm8
from sfast_ext.kernels.eight_bits.mma8_tiles import DEPTH
from sfast_ext.kernels.eight_bits.quantise_weights import SCALES
from sfast_ext.kernels.linear import mma_gemm
from sfast_ext.kernels.linear.mma_gemm import PLAIN, RESIDUAL
from sfast_ext.kernels.linear.mma_tiles import Tile

MAX_DEPTH = (2**31 - 1) // (127 * (128 + 127))
"""Terms of a sum of which int32 holds the difference from the sum of zeros: 66311."""
_MAX_ELEMENTS = 2**31  # elements of an operand or result


def tiles(rows: int, columns: int, channels: int, device: torch.device) -> list[Tile]:
    """The tiles for so many pixels of a result, and output and input channels; what is expected to be the fastest
    stands first."""
    card = triton_runtime.capability(device)
    return mma8_tiles.worth_measuring((rows, columns, channels), card, multiprocessors(device), pairs=False)


def size_of(x: Tensor, columns: int, stride: int) -> tuple[int, int, int, int]:
    """The shape of the result of x (N, C, H, W)."""
    return x.shape[0], columns, cdiv(x.shape[2], stride), cdiv(x.shape[3], stride)


def accepts(
    x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None, residual: Tensor | None,
    stride: int, dtype: torch.dtype,
) -> str | None:  # fmt: skip
    """Why `conv2d` does not take x (N, C, H, W), x_scale (2, N), weight (K, 9 C), weight_scale (10, K), bias (K) and
    residual, of the result's shape; None if it does: x, channels last, and weight in int8, scales in float32, the rest
    in `dtype`, which is float16 or bfloat16; C a multiple of 64, K of 8; stride 1 or 2."""
    has_kernels = not INTERPRETED and SOURCE.supported(device_of(x))
    unfit = mma_gemm8.unfit_operands(has_kernels, x, x_scale, weight, weight_scale, bias, residual, dtype)
    return unfit or _accepts_sizes(x, x_scale, weight, weight_scale, bias, residual, stride)


def _accepts_sizes(
    x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None, residual: Tensor | None,
    stride: int,
) -> str | None:  # fmt: skip
    if x.dim() != 4 or weight.dim() != 2 or weight.shape[1] != 9 * x.shape[1] or stride not in (1, 2):
        return "other shapes, or another stride"
    columns, depth = weight.shape
    if not x.numel() or not columns or columns % 8 or x.shape[1] % DEPTH or depth > MAX_DEPTH:
        return f"output channels that are no multiple of 8, or channels that are no multiple of {DEPTH}, or too many"
    result = size_of(x, columns, stride)
    if x_scale.shape != (2, x.shape[0]) or weight_scale.shape != (SCALES, columns):
        return "scales of other shapes"
    if (bias is not None and bias.shape != (columns,)) or (residual is not None and residual.shape != result):
        return "a bias or a residual of another shape"
    dense = [each for each in (x_scale, weight, weight_scale, bias) if each is not None]
    images = [each for each in (x, residual) if each is not None]
    if not is_dry_run():
        if not all(each.is_contiguous() for each in dense):
            return "a weight, scales or a bias that is not contiguous"
        if not all(each.is_contiguous(memory_format=torch.channels_last) for each in images):
            return "an image or a residual that is not channels last"
    if any(each is not None and each.data_ptr() % 16 for each in (x, weight, residual)):
        return "operands or a residual that are not aligned to 16 bytes"
    rows = result[0] * result[2] * result[3]
    too_large = max(x.numel(), rows * columns, weight.numel()) >= _MAX_ELEMENTS or cdiv(rows, 64) > MAX_GRID_YZ
    return "too many elements" if too_large else None


def conv2d(
    x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None, residual: Tensor | None,
    stride: int, dtype: torch.dtype, *, tile: Tile | None = None,
) -> Tensor:  # fmt: skip
    """x (N, C, H, W), weight (K, 9 C) -> (N, K, H / stride, W / stride), channels last, of operands that it accepts
    (`accepts`).

    Args:
        residual: is added, and not overwritten.
        tile: one of `tiles`, by default the first.

    Raises:
        Unavailable: the kernel cannot be compiled or loaded.
    """
    columns = weight.shape[0]
    images, _, height, width = size = size_of(x, columns, stride)
    out = torch.empty(size, dtype=dtype, device=x.device, memory_format=torch.channels_last)
    rows = images * height * width
    chosen = tile or tiles(rows, columns, x.shape[1], device_of(x))[0]
    grid = cdiv(columns, chosen.width), cdiv(rows, chosen.rows)
    operands = out, x, x_scale, weight, weight_scale, bias, residual
    numbers = rows, columns, weight.shape[1], x.shape[1], height, width, *x.shape[2:], stride
    launch_kernel(SOURCE, grid, *operands, *numbers, **constants(chosen, dtype, residual is not None))
    return out


def constants(chosen: Tile, dtype: torch.dtype, residual: bool = False) -> dict[str, int]:
    """The kernel's compile-time parameters."""
    kind = RESIDUAL if residual else PLAIN
    return {"TYPE": cuda_tier.TYPES[dtype], **mma_gemm.of_tile(chosen), "EPILOGUE": kind}


def shared_bytes(tile: Tile) -> int:
    """Dynamic shared memory of a block: as of `mma8_tiles`, the zeros of its rows, and the sums of its columns."""
    return mma8_tiles.shared_bytes(tile, pairs=False) + 4 * tile.rows + 4 * tile.width


def _prepared(*args: Any, **constants: int) -> tuple[list[Any], int, int]:
    tile = mma_gemm.tile_of(constants)
    return [*args[:7], *map(ctypes.c_int, args[7:])], tile.threads, shared_bytes(tile)


_NAMES = ("out", "x", "x_scale", "weight", "weight_scale", "bias", "residual")
_NUMBERS = ("rows", "columns", "depth", "channels", "height", "width", "image_height", "image_width", "stride")
SOURCE = nvrtc.Source("mma_conv8", _prepared, (*_NAMES, *_NUMBERS), since=MIN_CAPABILITY)
