"""3x3 convolutions of 8-bit integers by wgmma on Hopper, with a residual in the epilogue: csrc/wgmma_conv8.cu"""

from __future__ import annotations

import ctypes
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sfast_ext.kernels.backend import nvrtc
from sfast_ext.kernels.backend.triton_runtime import (
    INTERPRETED,
    cdiv,
    device_of,
    hopper,
    launch_kernel,
    multiprocessors,
)
from sfast_ext.kernels.conv import conv2d as half_conv2d
from sfast_ext.kernels.conv.conv2d import Boxes
from sfast_ext.kernels.eight_bits import mma_conv8

DEPTH = 128  # K of a stage, and its bytes
MAX_DEPTH = 2**22 // 127
"""Terms of a sum of which the sum of the weight's codes is an integer that the kernel takes out of a float32."""
FITTING = 80
"""Divides the output channels: the width of the narrowest tile."""
_HALF = 64  # channels of half a stage
_ROWS = 128  # M of a tile
_THREADS = 3 * 128
_SHARED = 227 << 10  # bytes of shared memory that a block may have
_OWN = 1024 + 256  # bytes of it: alignment of the stages to 1 KB, and mbarriers
_STAGING = 8 * 16 * 80  # bytes: eight warps write 16 rows of 32 columns at a time
_VECTORS = 2 * 42  # bytes of a column: for two warpgroups the scale, nine sums of codes, the bias
_MAX_STAGES = 8


class Tile(NamedTuple):
    """A tile of 128 pixels, and the model of its time on an NVIDIA H200 in microseconds.

    Args:
        width: N, output channels.
        pingpong: whether one warpgroup is in its epilogue while the other is in its mainloop.
        split: blocks that split K.
        pair: blocks that share the weight by multicast.
        begin: of a launch.
        start: of a wave, and its end.
        step: of 128 of K.
    """

    width: int
    pingpong: bool
    split: int
    pair: int
    begin: float
    start: float
    step: float


TILES = [
    Tile(160, False, 1, 2, -0.68, 6.61, 0.374),
    Tile(160, True, 1, 2, 2.80, 3.69, 0.380),
    Tile(160, False, 1, 1, -1.62, 7.73, 0.379),
    Tile(160, True, 1, 1, 2.35, 4.42, 0.384),
    Tile(80, False, 1, 1, -4.45, 7.41, 0.249),
    Tile(160, False, 2, 1, 5.55, 5.55, 0.335),
    Tile(80, False, 2, 1, 0.0, 3.6, 0.334),
]
"""Fitted to benchmarks/results/hopper-conv8-h200.json, where the first of `tiles` takes up to 1.08 times the least."""


def supported(device: torch.device) -> bool:
    """Whether the kernel can be used on a device."""
    return not INTERPRETED and hopper(device) and _SOURCE.supported(device)


def accepts(
    x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None, residual: Tensor | None,
    stride: int, dtype: torch.dtype,
) -> str | None:  # fmt: skip
    """Why `conv2d` does not take the operands on this GPU; None if it does. They are those of `mma_conv8`, with stride
    1, an image of two rows and columns at least, and output channels that are a multiple of 80."""
    if not supported(device_of(x)):
        return "kernels for Hopper are not for this device, or not compiled here"
    unfit = mma_conv8.accepts(x, x_scale, weight, weight_scale, bias, residual, stride, dtype)
    if unfit is not None:
        return unfit
    columns, depth = weight.shape
    if stride != 1 or min(x.shape[2:]) < 2 or columns % FITTING or depth > MAX_DEPTH:
        return "another stride, a single row or column, or channels that do not fit"
    if any(each.data_ptr() % 16 for each in (weight_scale, bias) if each is not None):
        return "scales or a bias that are not aligned to 16 bytes"
    return None


def tiles(x: Tensor, columns: int) -> list[Tile]:
    """The tiles for x (N, C, H, W) and so many output channels; what is the fastest by the model stands first."""
    return sorted((tile for tile in TILES if fits(x, columns, tile)), key=lambda tile: microseconds(x, columns, tile))


def fits(x: Tensor, columns: int, tile: Tile) -> bool:
    """Whether a tile takes such a convolution: blocks that split K have one tile."""
    return tile.split == 1 or _blocks(x, columns, tile) <= _at_once(x, tile)


def microseconds(x: Tensor, columns: int, tile: Tile) -> float:
    """The time by the model."""
    count = waves(x, columns, tile, multiprocessors(device_of(x)))
    return tile.begin + count * (tile.start + tile.step * steps(x, tile))


def waves(x: Tensor, columns: int, tile: Tile, multiprocessors: int) -> int:
    """Of a grid that fills so many multiprocessors."""
    return cdiv(_blocks(x, columns, tile), _clusters(tile, multiprocessors))


def steps(x: Tensor, tile: Tile) -> float:
    """Of a tile; one whose half lies behind the channels takes about as long."""
    return 9 * cdiv(x.shape[1], DEPTH) / tile.split


def _blocks(x: Tensor, columns: int, tile: Tile) -> int:
    """Tiles, or pairs of them."""
    return cdiv(_tiles_down(x), tile.pair) * cdiv(columns, tile.width)


def _tiles_down(x: Tensor) -> int:
    return math.prod(half_conv2d._boxes(x)[1])


def _at_once(x: Tensor, tile: Tile) -> int:
    return _clusters(tile, multiprocessors(device_of(x)))


def _clusters(tile: Tile, count: int) -> int:
    """Clusters of a wave: not all GPCs have a multiple of four multiprocessors."""
    size = tile.split * tile.pair
    return max(1, count // size if size <= 2 else count * 15 // (16 * size))


def conv2d(
    x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None, residual: Tensor | None,
    dtype: torch.dtype, *, tile: Tile | None = None,
) -> Tensor:  # fmt: skip
    """x (N, C, H, W), weight (K, 9 C) -> (N, K, H, W), channels last, of operands that it accepts (`accepts`).

    Args:
        residual: is added, and not overwritten.
        tile: one of `tiles`, by default the first.

    Raises:
        Unavailable: the kernel cannot be compiled or loaded.
    """
    columns = weight.shape[0]
    chosen = tile or tiles(x, columns)[0]
    size = mma_conv8.size_of(x, columns, 1)
    out = torch.empty(size, dtype=dtype, device=x.device, memory_format=torch.channels_last)
    grid = min(_blocks(x, columns, chosen), _at_once(x, chosen)) * chosen.pair * chosen.split
    operands = out, x, x_scale, weight, weight_scale, bias, residual
    launch_kernel(_SOURCE, (grid,), *operands, **constants(chosen, dtype, x.shape[1]))
    return out


def constants(tile: Tile, dtype: torch.dtype, channels: int) -> dict[str, int]:
    """The kernel's compile-time parameters."""
    return {
        "WIDTH": tile.width,
        "PINGPONG": int(tile.pingpong),
        "STAGES": _stages(tile.width, tile.split),
        "PAIR": tile.pair,
        "SPLIT": tile.split,
        "TAIL": int(channels % DEPTH != 0),
        "BF16": int(dtype == torch.bfloat16),
    }


def variants(given: dict[str, int]) -> list[dict[str, int]]:
    """Constants that other image sizes may need if one needs the given ones."""
    dtype = torch.bfloat16 if given["BF16"] else torch.float16
    return [constants(tile, dtype, channels) for channels in (DEPTH, _HALF) for tile in TILES]


def shared_bytes(constants: dict[str, int]) -> int:
    """Dynamic shared memory of a block in bytes."""
    width = constants["WIDTH"]
    return 1024 + constants["STAGES"] * _stage(width) + _epilogue_bytes(width, constants["SPLIT"])


def _stage(width: int) -> int:
    return DEPTH * (_ROWS + width)


def _epilogue_bytes(width: int, split: int) -> int:
    return _STAGING + _VECTORS * width if split == 1 else 0


def _stages(width: int, split: int) -> int:
    """Stages that fit a block."""
    return min(_MAX_STAGES, (_SHARED - _OWN - _epilogue_bytes(width, split)) // _stage(width))


def _prepared(
    out: Tensor, x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None,
    residual: Tensor | None, **constants: int,
) -> tuple[list[Any], int, int]:  # fmt: skip
    images, channels, height, width = x.shape
    columns, of_tile, pair = weight.shape[0], constants["WIDTH"], constants["PAIR"]
    (across, down), (wide, high, deep) = half_conv2d._boxes(x)
    box = [DEPTH, 1 << across, 1 << down, 1 << (7 - across - down)]
    strides = [channels, width * channels, height * width * channels]
    maps = [
        nvrtc.tensor_map(x, [channels, width, height, images], strides, box),
        nvrtc.tensor_map(weight, [9 * channels, columns], [9 * channels], [DEPTH, of_tile // pair]),
    ]
    numbers = channels, columns, cdiv(wide * high * deep, pair), cdiv(columns, of_tile)
    boxes = Boxes(across, down, wide, high, width, height, images)
    vectors = x_scale, weight_scale, bias, residual
    return [out, *maps, *vectors, *map(ctypes.c_int, numbers), boxes], _THREADS, shared_bytes(constants)


_NAMES = ("out", "x", "x_scale", "weight", "weight_scale", "bias", "residual")
# a plan writes the weight too, so nothing is read before the wait
_SOURCE = nvrtc.Source("wgmma_conv8", _prepared, _NAMES, variants, hopper=True)
SOURCES = (_SOURCE,)
