"""3x3 convolutions of NHWC images: csrc/conv2d.cu, for Hopper.

An implicit GEMM whose tiles divide Stable Diffusion's channels, multiples of 160; cuDNN computes 384 instead of 320, by
tiles of 192.
"""

from __future__ import annotations

import ctypes
import functools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from sfast_ext.kernels.backend import cuda_tier, nvrtc, smem_ring
from sfast_ext.kernels.backend.registry import SLOWER, Declined, kernel, require
from sfast_ext.kernels.backend.triton_runtime import cdiv, device_of, is_dry_run, launch_kernel, multiprocessors

_MANY_COLUMNS = 1280  # output channels from which pairs of blocks share the weight by multicast
_FITTING = 160  # divides the output channels; cuDNN is left a VAE's, which are powers of 2
MAX_PIXELS_AS_PRODUCT = 128  # pixels up to which an im2col GEMM is faster, if a norm writes the patches
_IN_PARTS = 384, 1024  # pixels between which cuDNN's split K is as fast
# model of cuDNN: TFLOP/s by tile (pixels, channels) that fill an NVIDIA H200, fitted to 33 sizes; constant microseconds
_CUDNN = {(128, 192): 797, (128, 128): 624, (64, 128): 468, (256, 64): 532}
_CUDNN_START = 3.6
_IN_DOUBT = 1.1  # ratio of the two models up to which the kernel was the faster one


class Tile(NamedTuple):
    """A tile, 128 pixels by `width` output channels, and the model of its time on an NVIDIA H200 in microseconds, by
    which the fastest is chosen."""

    width: int  # output channels (N)
    step: float  # of 64 of K, in a wave
    load: float  # of 64 of K, times the share of multiprocessors a wave keeps busy
    start: float  # and end, of a wave
    pingpong: bool = False  # one warpgroup in its epilogue while the other is in its mainloop
    split: int = 1  # blocks that split K
    pair: int = 1  # blocks that share the weight by multicast


_UNSPLIT = [
    Tile(160, 0.340, 0.112, 0.8, pingpong=True),
    Tile(128, 0.243, 0.135, 4.0, pingpong=True),
    Tile(224, 0.410, 0.190, 13.0),
]
TILES = [
    *(tile._replace(pair=2) for tile in _UNSPLIT),
    *_UNSPLIT,
    Tile(160, 0.324, 0.109, 8.2, split=2),
    Tile(80, 0.173, 0.172, 3.7, split=2),
    Tile(80, 0.171, 0.083, 6.9, split=4),
]
_WITH_GROUPS = 160  # width of the tiles that also compute group statistics
_WITH_STATISTICS = [tile for tile in TILES if tile.width == _WITH_GROUPS and tile.split == 1]
_USUAL_GROUPS = 32  # of a group norm
_MAX_PIXELS = 2**31 - 2**16  # counted in 32 bits, those of the last tile included
_GROUPS = (10, 20, 40)  # channels of such a group, of 320, 640 and 1280


class Boxes(ctypes.Structure):
    """How an image is divided into boxes of a tile's pixels: the struct of csrc/conv2d.cu."""

    _fields_ = [(name, ctypes.c_int) for name in ("across", "down", "wide", "high", "width", "height", "images")]


def reference(x: Tensor, weight: Tensor) -> Tensor:
    """x (N, C, H, W), weight (K, C, 3, 3) -> (N, K, H, W); padding 1.

    Computes in float32 (float64 if x is) and rounds once.
    """
    compute = torch.promote_types(x.dtype, torch.float32)
    return F.conv2d(x.to(compute), weight.to(compute), padding=1).to(x.dtype)


def fallback(x: Tensor, weight: Tensor) -> Tensor:
    """`reference` by PyTorch, on CUDA by cuDNN."""
    return F.conv2d(x, weight, padding=1)


def profitable(x: Tensor, weight: Tensor) -> bool:
    """Whether the kernel is faster than cuDNN, for operands that it `accepts`."""
    pixels, columns = x.shape[0] * x.shape[2] * x.shape[3], weight.shape[0]
    if columns % _FITTING or pixels <= MAX_PIXELS_AS_PRODUCT or _IN_PARTS[0] < pixels <= _IN_PARTS[1]:
        return False
    return _microseconds(x, columns, best(x, columns)) < _IN_DOUBT * _cudnn(x, columns)


def accepts(x: Tensor, weight: Tensor) -> str | None:
    """Why the kernel does not take the operands on this GPU; None if it does, see `launch`."""
    unfit = cuda_tier.accepts(_SOURCE, x, weight)
    if unfit is not None:
        return unfit
    if x.dim() != 4 or weight.dim() != 4 or weight.shape[1:] != (x.shape[1], 3, 3):
        return "other shapes"
    if not 0 < x.numel() < _MAX_PIXELS * x.shape[1]:
        return "no pixels, or too many"
    if weight.shape[1] % smem_ring.DEPTH or weight.shape[0] % 8:
        return "channels that are no multiples of 64 and 8"
    layout = torch.channels_last
    if not is_dry_run() and not all(t.is_contiguous(memory_format=layout) for t in (x, weight)):
        return "an image or a weight that is not channels last"
    return "operands that are not aligned to 16 bytes" if x.data_ptr() % 16 or weight.data_ptr() % 16 else None


def best(x: Tensor, columns: int) -> Tile:
    """The fastest tile for x (N, C, H, W) and so many output channels, by the model."""
    return min(TILES, key=lambda tile: _microseconds(x, columns, tile))


def _microseconds(x: Tensor, columns: int, tile: Tile) -> float:
    if tile.pair > 1 and columns < _MANY_COLUMNS:
        return math.inf
    blocks = cdiv(_tiles_down(x), tile.pair) * cdiv(columns, tile.width)
    clusters = _clusters(x, tile.split * tile.pair)
    waves = math.ceil(blocks / clusters)
    if tile.split > 1 and waves > 1:
        return math.inf
    steps = 9 * x.shape[1] / smem_ring.DEPTH / tile.split
    return waves * (steps * tile.step + tile.start) + blocks / clusters * steps * tile.load


def _cudnn(x: Tensor, columns: int) -> float:
    """The model's microseconds of cuDNN with its fastest tile."""
    pixels, count = x.shape[0] * x.shape[2] * x.shape[3], multiprocessors(device_of(x))

    def microseconds(down: int, across: int, rate: int) -> float:
        waves = cdiv(cdiv(pixels, down) * cdiv(columns, across), count)
        return waves * count * 2 * down * across * 9 * x.shape[1] / (rate * 1e6)

    return min(microseconds(*tile, rate) for tile, rate in _CUDNN.items()) + _CUDNN_START


def _tiles_down(x: Tensor) -> int:
    return math.prod(_boxes(x)[1])


def _clusters(x: Tensor, size: int) -> int:
    """Clusters of so many blocks that run at once: not all GPCs have a multiple of four multiprocessors."""
    count = multiprocessors(device_of(x))
    return count // size if size <= 2 else count * 15 // (16 * size)


def _boxes(x: Tensor) -> tuple[tuple[int, int], tuple[int, int, int]]:
    """(log2 of a box's columns, log2 of its rows), (boxes across, down, over the images): the division with the fewest
    boxes, and of these with the widest."""
    return _cut(x.shape[0], *x.shape[2:])


@functools.lru_cache(maxsize=None)
def _cut(images: int, height: int, width: int) -> tuple[tuple[int, int], tuple[int, int, int]]:
    bits = smem_ring.ROWS.bit_length() - 1

    def count(across: int, down: int) -> tuple[int, int, int]:
        return cdiv(width, 1 << across), cdiv(height, 1 << down), cdiv(images, 1 << (bits - across - down))

    shapes = [(across, down) for across in range(bits, -1, -1) for down in range(bits - across, -1, -1)]
    chosen = min(shapes, key=lambda shape: math.prod(count(*shape)))
    return chosen, count(*chosen)


def accepts_statistics(x: Tensor, weight: Tensor, groups: int) -> str | None:
    """Why the kernel does not compute the statistics of the result's groups in its epilogue; None if it can, and is
    `profitable`."""
    unfit = accepts(x, weight)
    if unfit is not None:
        return unfit
    columns = weight.shape[0]
    width = columns // groups
    # lanes hold pairs of columns, and the reduction over lanes halves
    if columns % groups or columns % _WITH_GROUPS or width % 2 or _WITH_GROUPS not in [width << n for n in range(5)]:
        return "groups that do not divide a tile"
    (across, down), _ = _boxes(x)
    if not profitable(x, weight) or across + down != 7 or best(x, columns) not in _WITH_STATISTICS:
        return SLOWER  # boxes are of one image each
    return None


def with_statistics(
    x: Tensor, weight: Tensor, groups: int, shift: Tensor | None, residual: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Convolution with group statistics, of operands that it accepts (`accepts_statistics`).

    Returns:
        x convolved plus shift (N, K) or (K,) plus residual like the result, rounded once; partial (2, N, boxes,
        groups), means and sums of squared deviations of each of the `boxes_of_image`.
    """
    images, columns = x.shape[0], weight.shape[0]
    wide, high, *_ = boxes_of_image(x)
    partial = torch.empty((2, images, wide * high, groups), dtype=torch.float32, device=x.device)
    tile = best(x, columns)
    all_at_once = _tiles_down(x) * columns // tile.width <= multiprocessors(device_of(x))
    if all_at_once or x.dtype != torch.float16:  # ping-pong spills registers for bfloat16
        tile = tile._replace(pingpong=False)
    if _tiles_down(x) % tile.pair:  # the shift of an image that does not exist must not be read
        tile = tile._replace(pair=1)
    out = _launch(x, weight, tile, columns // groups, shift, residual, partial)
    return out, partial


def boxes_of_image(x: Tensor) -> tuple[int, int, int, int]:
    """Boxes across and down, and their columns and rows, of an image of which statistics are computed."""
    (across, down), (wide, high, _) = _boxes(x)
    return wide, high, 1 << across, 1 << down


def _launch(
    x: Tensor,
    weight: Tensor,
    tile: Tile,
    group: int = 0,
    shift: Tensor | None = None,
    residual: Tensor | None = None,
    partial: Tensor | None = None,
) -> Tensor:
    out = torch.empty(
        (x.shape[0], weight.shape[0], *x.shape[2:]),
        dtype=x.dtype,
        device=x.device,
        memory_format=torch.channels_last,
    )
    tiles = cdiv(_tiles_down(x), tile.pair) * cdiv(weight.shape[0], tile.width)
    clusters = _clusters(x, tile.pair * tile.split)
    assert tile.split == 1 or tiles <= clusters, "blocks that split K have one tile"
    grid = min(tiles, clusters) * tile.pair * tile.split
    launch_kernel(_SOURCE, (grid,), out, x, weight, shift, residual, partial, **constants(tile, x.dtype, group))
    return out


def constants(tile: Tile, dtype: torch.dtype, group: int = 0) -> dict[str, int]:
    """The kernel's compile-time parameters."""
    return {
        "WIDTH": tile.width,
        "PINGPONG": int(tile.pingpong),
        "STAGES": smem_ring.stages(tile.width, tile.split == 1),
        "PAIR": tile.pair,
        "SPLIT": tile.split,
        "GROUP": group,
        "BF16": int(dtype == torch.bfloat16),
    }


def variants(given: dict[str, int]) -> list[dict[str, int]]:
    """Constants that other image sizes may need if one needs the given ones: those of `best` and of
    `with_statistics`, most likely first."""
    dtype = torch.bfloat16 if given["BF16"] else torch.float16
    pingpong = (True, False) if dtype == torch.float16 else (False,)
    found = []
    for group in dict.fromkeys((given["GROUP"], 0, *_GROUPS)):
        tiles = TILES
        if group:
            pairs = group * _USUAL_GROUPS >= _MANY_COLUMNS
            tiles = [t._replace(pingpong=each) for each in pingpong for t in _WITH_STATISTICS if pairs or t.pair == 1]
        found += [constants(tile, dtype, group) for tile in tiles]
    return found


def shared_bytes(constants: dict[str, int]) -> int:
    """Dynamic shared memory of a block in bytes."""
    return smem_ring.shared_bytes(constants["WIDTH"], constants["STAGES"], constants["SPLIT"] == 1)


def _prepared(
    out: Tensor,
    x: Tensor,
    weight: Tensor,
    shift: Tensor | None,
    residual: Tensor | None,
    partial: Tensor | None,
    **constants: int,
) -> tuple[list[Any], int, int]:
    images, channels, height, width = x.shape
    columns = weight.shape[0]
    width_of_tile, pair = constants["WIDTH"], constants["PAIR"]
    (across, down), (wide, high, deep) = _boxes(x)
    box = [smem_ring.DEPTH, 1 << across, 1 << down, 1 << (7 - across - down)]
    size = x.element_size()
    x_map = nvrtc.tensor_map(
        x,
        [channels, width, height, images],
        [size * n for n in (channels, width * channels, height * width * channels)],
        box,
    )
    depth = 9 * channels
    weight_map = nvrtc.tensor_map(weight, [depth, columns], [size * depth], [smem_ring.DEPTH, width_of_tile // pair])
    numbers = channels // smem_ring.DEPTH, columns, cdiv(wide * high * deep, pair), cdiv(columns, width_of_tile)
    boxes = Boxes(across, down, wide, high, width, height, images)
    args = [out, x_map, weight_map, *map(ctypes.c_int, numbers), boxes]
    if constants["GROUP"]:
        stride = 0 if shift is None or shift.dim() == 1 else shift.stride(0)
        args += [shift, ctypes.c_int(stride), residual, partial]
    return args, smem_ring.THREADS, shared_bytes(constants)


_NAMES = ("out", "x", "weight", "shift", "residual", "partial")
_SOURCE = nvrtc.Source("conv2d", _prepared, _NAMES, variants, ("weight",), hopper=True)


@kernel(reference, fallback=fallback, cuda_sources=(_SOURCE,))
def launch(x: Tensor, weight: Tensor) -> Tensor:
    """`reference` in one launch on Hopper, if that is `profitable`; else by `fallback`.

    x (N, C, H, W) and weight (K, C, 3, 3) in one dtype, float16 or bfloat16; channels last, aligned to 16 bytes; C a
    multiple of 64, K of 160.
    """
    require(accepts(x, weight))
    if not profitable(x, weight):
        raise Declined(SLOWER)
    return _launch(x, weight, best(x, weight.shape[0]))
