"""Group norm in CUDA C++ for any card: one launch for small images (csrc/group_norm_whole.cu), two for large ones
(csrc/group_norm_statistics.cu, csrc/group_norm_normalise.cu).

The kernels that read x first also compute it, if it is a sum or a concatenation. The statistics may be those of
another kernel (`normalised_by`). No atomics: results are bitwise reproducible.
"""

from __future__ import annotations

import ctypes
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sfast_ext.kernels.backend import cuda_tier, nvrtc
from sfast_ext.kernels.backend.triton_runtime import (
    MAX_GRID_YZ,
    cdiv,
    device_of,
    launch_kernel,
    multiprocessors,
    next_power_of_2,
)
from sfast_ext.kernels.group_norm.two_pass import Norm, Parts

_WHOLE_THREADS = 1024  # of a block at most, one launch
_WHOLE_ELEMENTS = 32  # of a thread at most, one launch; half of it of other types and large blocks
_WHOLE_PIXELS = 512  # at most, one launch that computes its input: more are too many short rows for a block
_EACH = 4  # accesses of a thread at a time, two launches
_THREADS = 256  # of a block, unless one pixel has more accesses
_RESIDENT = 2  # such blocks of a multiprocessor: all run at once
_CHANNELS = 80  # of a block, unless a group is wider
_MAX_GROUPS = 128  # of a block
MAX_PARTS = 128  # which each normalising block reads
_MAX_ELEMENTS = 2**32  # of an image: offsets in it are 32-bit
_MAX_PIXELS = 2**30  # of an image: a block counts on beyond its last


class Inputs(NamedTuple):
    """What a norm is taken of: (a + addend + residual) * scale, with b concatenated.

    a, residual (N, ..., A), b (N, ..., B), addend (N, A), or (A,) with `fused`. With `fused` the sum is rounded to a's
    dtype and a result too; without, there are a and addend alone.
    """

    a: Tensor
    addend: Tensor | None = None
    residual: Tensor | None = None
    b: Tensor | None = None
    scale: float = 1.0
    fused: bool = False

    @property
    def first(self) -> int:
        return self.a.shape[-1]

    @property
    def channels(self) -> int:
        return self.first + (0 if self.b is None else self.b.shape[-1])

    @property
    def pixels(self) -> int:
        return self.a.numel() // (self.a.shape[0] * self.first)

    @property
    def addend_stride(self) -> int:
        return self.addend.stride(0) if self.addend is not None and self.addend.dim() == 2 else 0

    def pack(self, width: int, *vectors: Tensor | None) -> int:
        """Channels of one access, of which a group has as many at least."""
        sizes = math.gcd(math.gcd(self.channels, self.first), self.addend_stride)
        found = cuda_tier.pack(sizes, self.a, self.b, self.addend, self.residual, *vectors)
        while found > width:
            found //= 2
        return found


class Tile(NamedTuple):
    """Threads of a block, which takes `lanes` pixels at a time, and accesses of a thread; of `groups` groups."""

    lanes: int
    threads: int
    each: int
    groups: int


def whole(pixels: int, width: int, pack: int, dtype: torch.dtype) -> Tile | None:
    """The tile of a group in one launch; None if it does not fit."""
    pack = math.gcd(width, pack)
    packs = width // pack
    if packs > _WHOLE_THREADS:
        return None
    each = next_power_of_2(cdiv(pixels, _WHOLE_THREADS // packs))
    lanes = cdiv(pixels, each)
    threads = cdiv(lanes * packs, 32) * 32
    most = _WHOLE_ELEMENTS if dtype == torch.float16 or threads <= _WHOLE_THREADS // 2 else _WHOLE_ELEMENTS // 2
    return Tile(lanes, threads, each, 1) if each * pack <= most else None


def block(groups: int, width: int, pack: int) -> Tile | None:
    """The tile of two launches; None for channels that it does not take."""
    step = pack // math.gcd(width, pack)  # whole accesses
    each = max(step, min(_CHANNELS // width, _MAX_GROUPS) // step * step)
    each = min(each, groups)
    packs = each * width // pack
    if packs > cuda_tier.MAX_THREADS:
        return None
    lanes = max(1, _THREADS // packs)
    return Tile(lanes, cdiv(lanes * packs, 32) * 32, _EACH, each)


def accepts_size(pixels: int, channels: int) -> bool:
    """Whether offsets in an image, and its pixels, are counted in 32 bits without an overflow."""
    return pixels * channels < _MAX_ELEMENTS and pixels < _MAX_PIXELS


def accepts_patches(pixels: int, width: int, dtype: torch.dtype) -> bool:
    """Whether the im2col matrix of such an image can be written, from aligned operands."""
    return whole(pixels, width, 16 // dtype.itemsize, dtype) is not None


def normalised(
    inputs: Inputs, groups: int, norm: Norm, patches: bool = False, out: Tensor | None = None
) -> tuple[Tensor | None, Tensor] | None:
    """The sum (N, ..., C), None without `fused`, and its group norm, as `group_norm.reference`; None for a shape that
    the kernels do not take.

    Args:
        inputs: contiguous and accepted by `cuda_tier`, but for the rows of a two-dimensional addend, which may be
            apart.
        norm: contiguous and accepted by `cuda_tier`.
        patches: the norm is returned as its im2col matrix, (N, H, W, 9 C); only if `whole` is not None.
        out: memory for the norm, like the sum in norm.dtype, which may be that of `inputs.a`; used by the second of two
            launches.
    """
    a, images, channels, pixels = inputs.a, inputs.a.shape[0], inputs.channels, inputs.pixels
    width = channels // groups
    pack = inputs.pack(width, norm.weight, norm.bias, out)
    one = None if inputs.fused and pixels > _WHOLE_PIXELS else whole(pixels, width, pack, a.dtype)
    if (one is None and patches) or max(images, groups) > MAX_GRID_YZ or not accepts_size(pixels, channels):
        return None
    total = torch.empty((*a.shape[:-1], channels), dtype=a.dtype, device=a.device) if inputs.fused else None
    operands = (a, inputs.b, inputs.addend, inputs.residual)
    constants = {"TYPE": cuda_tier.TYPES[a.dtype], "FUSED": int(inputs.fused)}
    scale = float(inputs.scale)
    if one is not None:
        out = torch.empty((*a.shape[:-1], (9 if patches else 1) * channels), dtype=norm.dtype, device=a.device)
        sizes: tuple[int, ...] = (pixels, channels, groups, one.lanes, inputs.first, inputs.addend_stride)
        flags = (a.shape[-2] if patches else 0, int(norm.silu))
        constants |= {"OUT": cuda_tier.TYPES[norm.dtype], "PACK": math.gcd(width, pack), "EACH": one.each}
        constants |= {"THREADS": 512 if one.threads <= 512 else _WHOLE_THREADS}
        tensors = (*operands, norm.weight, norm.bias, total, out)
        launch_kernel(WHOLE, (groups, images), *tensors, *sizes, *flags, scale, float(norm.eps), **constants)
        return total, out
    tile = block(groups, width, pack)
    if tile is None:
        return None
    resident = resident_of(tile)
    per_part = pixels_of_block(pixels, images, groups, tile, resident, a, MAX_PARTS)
    parts = cdiv(pixels, per_part)
    partial = torch.empty((2, images, parts, groups), dtype=torch.float32, device=a.device)
    sizes = (pixels, per_part, channels, groups, tile.groups, tile.lanes, inputs.first, inputs.addend_stride)
    grid = (parts, cdiv(groups, tile.groups), images)
    constants |= {"PACK": pack, "EACH": tile.each, "EXTREMES": 0, **resident}
    launch_kernel(STATISTICS, grid, *operands, total, partial, None, *sizes, scale, **constants)
    x, shift = (a, inputs.addend) if total is None else (total, None)
    return total, _normalise(x, shift, norm, partial, per_part, pack, tile, out)


def pixels_of_part(parts: Parts, images: int, channels: int, groups: int, dtype: torch.dtype) -> int | None:
    """Pixels of each part of an image of which another kernel has the statistics, for `normalised_by`; None if the
    parts differ in size or are too many, the kernels do not take the image, or one launch computes its norm."""
    if parts.height % parts.box_height or parts.width % parts.box_width or parts.boxes > MAX_PARTS:
        return None
    pixels = parts.height * parts.width
    if max(images, groups) > MAX_GRID_YZ or not accepts_size(pixels, channels):
        return None
    in_one = whole(pixels, channels // groups, 16 // dtype.itemsize, dtype) is not None
    return None if in_one else parts.box_height * parts.box_width


def is_one_launch(pixels: int, width: int, dtype: torch.dtype, fused: bool) -> bool:
    """Whether one launch computes the norm of such an image, from aligned operands, which may be fused sums."""
    return not (fused and pixels > _WHOLE_PIXELS) and accepts_patches(pixels, width, dtype)


def normalised_by(partial: Tensor, per_part: int, x: Tensor, norm: Norm) -> Tensor:
    """The group norm of x by statistics from another kernel.

    Args:
        partial: (2, N, parts, groups): means and sums of squared deviations of parts of an image, `per_part` pixels
            each.
        x: (N, ..., C); it and `norm` are contiguous and accepted by `cuda_tier`.
    """
    groups = partial.shape[-1]
    width = x.shape[-1] // groups
    pack = Inputs(x).pack(width, norm.weight, norm.bias)
    tile = block(groups, width, pack)
    assert tile is not None, "groups of more accesses than a block has threads"
    return _normalise(x, None, norm, partial, per_part, pack, tile)


def _normalise(
    x: Tensor, shift: Tensor | None, norm: Norm, partial: Tensor, per_part: int, pack: int, tile: Tile,
    out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The second launch: x (N, ..., C) plus shift (N, C), normalised, written to `out`, if it is given.

    partial is (2, N, parts, groups): means and sums of squared deviations of parts of per_part pixels of the sum.
    """
    _, images, parts, groups = partial.shape
    channels = x.shape[-1]
    pixels = x.numel() // (images * channels)
    resident = resident_of(tile)
    per_block = pixels_of_block(pixels, images, groups, tile, resident, x, pixels)
    in_place = out is x
    out = torch.empty(x.shape, dtype=norm.dtype, device=x.device) if out is None else out
    stride = 0 if shift is None else shift.stride(0)
    sizes = (pixels, per_block, channels, groups, tile.groups, tile.lanes, stride, per_part, parts, int(norm.silu))
    constants = {"TYPE": cuda_tier.TYPES[x.dtype], "OUT": cuda_tier.TYPES[norm.dtype], "PACK": pack, "EACH": tile.each}
    constants |= {"IN_PLACE": int(in_place), **resident}
    grid = (cdiv(pixels, per_block), cdiv(groups, tile.groups), images)
    launch_kernel(NORMALISE, grid, x, shift, *norm[:2], partial, out, *sizes, float(norm.eps), **constants)
    return out


def resident_of(tile: Tile) -> dict[str, int]:
    """Threads of the largest block, and such blocks of a multiprocessor."""
    if tile.threads > _THREADS:
        return {"THREADS": cuda_tier.MAX_THREADS, "RESIDENT": 1}
    return {"THREADS": _THREADS, "RESIDENT": _RESIDENT}


def pixels_of_block(
    pixels: int, images: int, groups: int, tile: Tile, resident: dict[str, int], x: Tensor, most: int
) -> int:
    """Pixels of a block, so that all blocks run at once, but at most so many of an image."""
    at_once = resident["RESIDENT"] * multiprocessors(device_of(x)) // (cdiv(groups, tile.groups) * images)
    wanted = cdiv(pixels, max(1, min(most, at_once)))
    return cdiv(wanted, tile.lanes) * tile.lanes


def _numbers(values: tuple[Any, ...]) -> list[Any]:
    return [ctypes.c_float(x) if isinstance(x, float) else ctypes.c_int(x) for x in values]


def _prepared_whole(*args: Any, **constants: int) -> tuple[list[Any], int, int]:
    tensors, numbers = args[:8], args[8:]
    channels, groups, lanes = numbers[1:4]
    threads = lanes * (channels // groups // constants["PACK"])
    return [*tensors, *_numbers(numbers)], cdiv(threads, 32) * 32, 0


def prepared(*args: Any, **constants: int) -> tuple[list[Any], int, int]:
    """For kernels whose numbers begin with those of pixels and of a tile."""
    count = next(i for i, x in enumerate(args) if isinstance(x, int))
    tensors, numbers = args[:count], args[count:]
    channels, groups, block_groups, lanes = numbers[2:6]
    threads = lanes * (block_groups * (channels // groups) // constants["PACK"])
    return [*tensors, *_numbers(numbers)], cdiv(threads, 32) * 32, 0


_OPERANDS = ("a", "b", "addend", "residual")
TILE = ("channels", "groups", "block_groups", "lanes")
WHOLE = nvrtc.Source(
    "group_norm_whole",
    _prepared_whole,
    (
        *_OPERANDS, "weight", "bias", "sum", "out", "pixels", "channels", "groups", "lanes", "first", "addend_stride",
        "across", "with_silu", "scale", "eps",
    ),
)  # fmt: skip
STATISTICS = nvrtc.Source(
    "group_norm_statistics",
    prepared,
    (*_OPERANDS, "sum", "partial", "extremes", "pixels", "per_part", *TILE, "first", "addend_stride", "scale"),
)
NORMALISE = nvrtc.Source(
    "group_norm_normalise",
    prepared,
    (
        "x", "shift", "weight", "bias", "partial", "out", "pixels", "per_block", *TILE, "shift_stride", "per_part",
        "parts", "with_silu", "eps",
    ),
)  # fmt: skip
SOURCES = (WHOLE, STATISTICS, NORMALISE)
