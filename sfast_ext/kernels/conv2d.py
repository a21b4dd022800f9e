"""3x3 convolutions of NHWC pictures: csrc/conv2d.cu, for Hopper.

An implicit GEMM whose tiles fit Stable Diffusion's channels, which are multiples of 160 where cuDNN's are of 64: 320
are two tiles, not three halves.
"""

from __future__ import annotations

import ctypes
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from sfast_ext.kernels import _cuda
from sfast_ext.kernels._triton import (
    INTERPRETED,
    are_collected,
    cdiv,
    device_of,
    multiplies,
    multiprocessors,
    runs,
    start,
)

_DEPTH = 64  # channels that are multiplied at a time
_MANY_COLUMNS = 1280  # from which blocks share what they load of the weight
_NARROWEST = 80  # channels of the result
_AS_PRODUCT = 128  # pixels; up to here one product of patches is quicker where a norm writes them, see passes/im2col.py
_CUDNN = 384, 1024  # between so many pixels cuDNN's sums in parts are as quick
_SHARED = 232448 - 1024 - 256  # bytes of a block, less what slots lose to begin at 1 KB, and barriers
_MOST_STAGES = 8
_STAGING = 8 * 16 * 80  # bytes through which eight warps write 16 rows of 32 columns at a time


class Tile(NamedTuple):
    """What a block computes, 128 pixels and so many channels of the result, and the microseconds it takes on an NVIDIA
    H200, by which the quickest is chosen."""

    width: int  # channels of the result
    step: float  # of 64 terms of the sum, in a round of blocks
    load: float  # of 64 terms, times the share of multiprocessors that a round keeps busy
    start: float  # and end, of a round
    turns: bool = False  # whether one group of warps finishes a tile while the other multiplies
    split: int = 1  # blocks that share a sum


TILES = [
    Tile(160, 0.340, 0.112, 0.8, turns=True),
    Tile(128, 0.243, 0.135, 4.0, turns=True),
    Tile(224, 0.410, 0.190, 13.0),
    Tile(160, 0.324, 0.109, 8.2, split=2),
    Tile(80, 0.173, 0.172, 3.7, split=2),
    Tile(80, 0.171, 0.083, 6.9, split=4),
]


class Boxes(ctypes.Structure):
    """How an image is cut into boxes of a tile's pixels, for the kernel; see csrc/conv2d.cu."""

    _fields_ = [(name, ctypes.c_int) for name in ("across", "down", "wide", "high", "width", "height", "images")]


def reference(x: Tensor, weight: Tensor) -> Tensor:
    """x (N, C, H, W), weight (K, C, 3, 3) -> (N, K, H, W), with a row of zeros around x.

    Computes in float32 (float64 where x is), rounds once.
    """
    compute = torch.promote_types(x.dtype, torch.float32)
    return F.conv2d(x.to(compute), weight.to(compute), padding=1).to(x.dtype)


def library(x: Tensor, weight: Tensor) -> Tensor:
    """`reference` as PyTorch does it, for CUDA by cuDNN."""
    return F.conv2d(x, weight, padding=1)


def launch(x: Tensor, weight: Tensor) -> Tensor:
    """`reference` by the kernel where it is there and the quicker way, else by `library`."""
    if takes(x, weight):
        try:
            return _launch(x, weight, best(x, weight.shape[0]))
        except _cuda.Unavailable:
            pass  # the log has it; it is not asked again
    return library(x, weight)


def takes(x: Tensor, weight: Tensor) -> bool:
    """Whether the kernel can read the operands, on this GPU, and is the faster way."""
    if not reads(x, weight):
        return False
    pixels = x.shape[0] * x.shape[2] * x.shape[3]
    return _AS_PRODUCT < pixels <= _CUDNN[0] or pixels > _CUDNN[1]


def reads(x: Tensor, weight: Tensor) -> bool:
    """Whether the kernel can read the operands, on this GPU."""
    if INTERPRETED or x.dim() != 4 or weight.dim() != 4 or not runs(x, weight) or not multiplies(x):
        return False
    columns, channels = weight.shape[:2]
    if weight.dtype != x.dtype or weight.shape[1:] != (x.shape[1], 3, 3) or not x.numel():
        return False
    if channels % _DEPTH or columns % 8 or columns < _NARROWEST:
        return False
    layout = torch.channels_last
    if not are_collected() and not all(t.is_contiguous(memory_format=layout) for t in (x, weight)):
        return False
    if x.data_ptr() % 16 or weight.data_ptr() % 16:
        return False
    return _KERNEL.available(device_of(x))


def best(x: Tensor, columns: int) -> Tile:
    """What takes the shortest time for x (N, C, H, W) and so many channels of the result."""
    return min(TILES, key=lambda tile: _microseconds(x, columns, tile))


def _microseconds(x: Tensor, columns: int, tile: Tile) -> float:
    blocks = _tiles_down(x) * cdiv(columns, tile.width)
    clusters = _clusters(x, tile.split)
    rounds = math.ceil(blocks / clusters)
    if tile.split > 1 and rounds > 1:
        return math.inf
    steps = 9 * x.shape[1] / _DEPTH / tile.split
    return rounds * (steps * tile.step + tile.start) + blocks / clusters * steps * tile.load


def _tiles_down(x: Tensor) -> int:
    return math.prod(_boxes(x)[1])


def _clusters(x: Tensor, size: int) -> int:
    """Clusters of so many blocks that run at once: groups of multiprocessors are not all multiples of four."""
    count = multiprocessors(device_of(x))
    return count // size if size <= 2 else count * 15 // (16 * size)


def _boxes(x: Tensor) -> tuple[tuple[int, int], tuple[int, int, int]]:
    """The logarithms of a box's columns and rows, and how many boxes there are across, down and over the images: the
    fewest, and the widest of these."""
    images, _, height, width = x.shape
    bits = 7  # 128 pixels

    def count(across: int, down: int) -> tuple[int, int, int]:
        return cdiv(width, 1 << across), cdiv(height, 1 << down), cdiv(images, 1 << (bits - across - down))

    shapes = [(across, down) for across in range(bits, -1, -1) for down in range(bits - across, -1, -1)]
    chosen = min(shapes, key=lambda shape: math.prod(count(*shape)))
    return chosen, count(*chosen)


def _launch(x: Tensor, weight: Tensor, tile: Tile) -> Tensor:
    out = torch.empty(
        (x.shape[0], weight.shape[0], *x.shape[2:]),
        dtype=x.dtype,
        device=x.device,
        memory_format=torch.channels_last,
    )
    given = constants(tile, weight.shape[0], x.dtype)
    pair = given["PAIR"]
    tiles = cdiv(_tiles_down(x), pair) * cdiv(weight.shape[0], tile.width)
    clusters = _clusters(x, pair * tile.split)
    assert tile.split == 1 or tiles <= clusters, "blocks that share a sum have one tile"
    grid = min(tiles, clusters) * pair * tile.split
    start(_KERNEL, (grid,), out, x, weight, **given)
    return out


def constants(tile: Tile, columns: int, dtype: torch.dtype) -> dict[str, int]:
    """What the kernel is compiled for."""
    return {
        "WIDTH": tile.width,
        "TURNS": int(tile.turns),
        "STAGES": min(_MOST_STAGES, (_SHARED - _STAGING * (tile.split == 1)) // _slot(tile.width)),
        "PAIR": 2 if columns >= _MANY_COLUMNS and tile.split == 1 else 1,
        "SPLIT": tile.split,
        "BF16": int(dtype == torch.bfloat16),
    }


def _slot(width: int) -> int:
    return 2 * _DEPTH * (128 + width)


def shared_bytes(constants: dict[str, int]) -> int:
    """What a block asks for: 1 KB to begin at, slots, and what it writes through."""
    return 1024 + constants["STAGES"] * _slot(constants["WIDTH"]) + _STAGING * (constants["SPLIT"] == 1)


def _prepared(out: Tensor, x: Tensor, weight: Tensor, **constants: int) -> tuple[list[Any], int, int]:
    images, channels, height, width = x.shape
    columns = weight.shape[0]
    width_of_tile, pair = constants["WIDTH"], constants["PAIR"]
    (across, down), (wide, high, deep) = _boxes(x)
    box = [_DEPTH, 1 << across, 1 << down, 1 << (7 - across - down)]
    size = x.element_size()
    picture = _cuda.tensor_map(
        x,
        [channels, width, height, images],
        [size * n for n in (channels, width * channels, height * width * channels)],
        box,
    )
    matrix = _cuda.tensor_map(weight, [9 * channels, columns], [size * 9 * channels], [_DEPTH, width_of_tile // pair])
    numbers = channels // _DEPTH, columns, cdiv(wide * high * deep, pair), cdiv(columns, width_of_tile)
    boxes = Boxes(across, down, wide, high, width, height, images)
    args = [out, picture, matrix, *map(ctypes.c_int, numbers), boxes]
    return args, 3 * 128, shared_bytes(constants)


_KERNEL = _cuda.Source("conv2d", _prepared, ("out", "x", "weight"))
