"""Group norm kernels that hold all they read of x in registers: a whole group at once, or a part of some groups.

At the sizes of a UNet a norm waits for latencies, not for bytes. So every load of a program is under way before
the first value is used, nothing is read twice by one program, and mean and variance are two passes over registers.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from sfast_ext.kernels.backend.triton_runtime import (
    MAX_GRID_YZ,
    VERSION,
    begin_early,
    cdiv,
    constexpr,
    jit,
    next_power_of_2,
    tl,
)

# Elements of the largest tile that holds a whole group, padding included. Twice that gains 1.4 us at 2560 channels and
# 16x16, loses as much at 640 and 32x32, and costs two compilations of half a second on the first call.
_SLAB = 16384
_FEWEST = 64  # pixels of the smallest such tile; the next are 4 and 16 times it: sizes are compilations
_PER_THREAD = 16  # elements a thread has of a whole group, until there are as many warps as may be
_MOST_WARPS = 16
_PART = 8192  # elements of a tile that holds a part
_PART_WARPS = 4
_PART_BLOCK = 64  # channels of it, where a group is not wider
_PART_WIDEST = 128


class Tile(NamedTuple):
    """Blocks of an image's channels, groups of a block, parts of its pixels, and the constants of the kernel."""

    blocks: int
    groups: int
    parts: int
    constants: dict[str, int]


def whole(pixels: int, groups: int, group_width: int) -> Tile | None:
    """One program a group, one launch: None where a group does not fit."""
    # Few programs, 64 at batch 2, but each does little: even one of the largest takes less than a second launch.
    # Groups of 4 channels and more start at 8 bytes of fp16; others would need kernels of their own.
    if group_width % 4 or group_width < 8:
        return None
    rows = _FEWEST
    while rows < pixels:
        rows *= 4
    block = next_power_of_2(group_width)
    if rows * block > _SLAB:
        return None
    block = max(block, min(64, _SLAB // rows))  # 20 channels take the kernel of 40 where registers allow it
    warps = max(1, min(_MOST_WARPS, rows * block // (32 * _PER_THREAD)))
    return Tile(groups, 1, 1, {"UNIT": 4, "BLOCK": block, "PIXELS": rows, "num_warps": warps})


def parts(pixels: int, groups: int, group_width: int) -> Tile | None:
    """Pixels split so that a part fits, two launches: None where a group is too wide or the parts too many."""
    if group_width > _PART_WIDEST:
        return None
    block = max(_PART_BLOCK, next_power_of_2(group_width))
    rows = _PART // block
    if cdiv(pixels, rows) > MAX_GRID_YZ:
        return None
    step = 4 // math.gcd(group_width, 4)  # whole groups in 8 bytes of fp16
    most = block // group_width
    if most >= step:
        most -= most % step
    each = cdiv(groups, cdiv(groups, most))
    if most >= step:
        each = min(most, cdiv(each, step) * step)
    constants = {
        "UNIT": math.gcd(each * group_width, 4),
        "BLOCK": block,
        "GROUPS": max(8, next_power_of_2(each)),
        "PIXELS": rows,
        "num_warps": _PART_WARPS,
    }
    return Tile(cdiv(groups, each), each, cdiv(pixels, rows), constants)


@jit()
def silu_of(y):
    # y / (1 + exp(-y)), in half the instructions of a division and of exp, which look after subnormal numbers: the
    # programs of a norm are so few that what they compute counts. Where exp2 overflows, rsqrt gives the 0 it should.
    root = tl.math.rsqrt(1.0 + tl.math.exp2(y * -1.4426950408889634))
    return y * root * root


# To add up a tile at once, and to hand it on from a branch, Triton 2.1 lays it out anew through as much shared memory
# as it takes in float32. Turing has no room for that.
if () < VERSION < (2, 2):

    @jit()
    def sum_of(tile):
        return tl.sum(tl.sum(tile, 1), 0)

    @jit()
    def silu_if(y, wanted):
        return tl.where(wanted != 0, silu_of(y), y)

else:

    @jit()
    def sum_of(tile):
        return tl.sum(tile)

    @jit()
    def silu_if(y, wanted):
        if wanted != 0:
            y = silu_of(y)
        return y


@jit()
def store_picture(out, y, row, channel, mask, image, pixels, channels, across, PATCHES: constexpr):
    """A tile of a picture; with PATCHES each pixel nine times, for all that see it (im2col of 3x3, padding 1)."""
    if PATCHES:
        start = out + image * pixels * channels * 9
        down = pixels // across
        up, along = row // across, row % across
        for tap in range(9):
            dy, dx = tap // 3 - 1, tap % 3 - 1
            # the pixel that sees this one as its neighbour `tap`
            above, before = up - dy, along - dx
            there = (above >= 0) & (above < down) & (before >= 0) & (before < across)
            place = (((above * across + before) * 9 + tap) * channels)[:, None] + channel[None, :]
            tl.store(start + place, y.to(out.dtype.element_ty), mask=mask & there[:, None])
            # where this one's own neighbour `tap` lies outside
            below, after = up + dy, along + dx
            outside = (below < 0) | (below >= down) | (after < 0) | (after >= across)
            place = ((row * 9 + tap) * channels)[:, None] + channel[None, :]
            tl.store(start + place, 0.0, mask=mask & outside[:, None])
    else:
        place = row[:, None] * channels + channel[None, :]
        tl.store(out + image * pixels * channels + place, y.to(out.dtype.element_ty), mask=mask)


# All: x is (N, pixels, channels); a block holds units * UNIT channels, which are whole groups. UNIT is known to the
# compiler, so that it knows which accesses are aligned; the rest is not, so that one compilation serves many norms, and
# compiling is what a first call waits for. What is there or not (shift, weight, bias, SiLU) is told at run time, by
# masks that cost nothing. Offsets inside a tile fit in 32 bits.


@jit(
    do_not_specialize=[
        "pixels",
        "units",
        "shift_stride",
        "has_shift",
        "has_weight",
        "has_bias",
        "silu",
        "across",
    ]
)
def _whole(
    x,
    shift,
    weight,
    bias,
    out,
    pixels,
    channels,
    units,
    shift_stride,
    has_shift,
    has_weight,
    has_bias,
    silu,
    across,
    eps,
    PATCHES: constexpr,
    UNIT: constexpr,
    BLOCK: constexpr,
    PIXELS: constexpr,
    EARLY: constexpr,
):
    begin_early(EARLY)
    image = tl.program_id(1).to(tl.int64)
    width = units * UNIT
    column = tl.arange(0, BLOCK)
    channel = tl.program_id(0) * width + column
    inside = column < width
    row = tl.arange(0, PIXELS)
    mask = (row < pixels)[:, None] & inside[None, :]
    place = row[:, None] * channels + channel[None, :]
    start = image * pixels * channels
    value = tl.load(x + start + place, mask=mask, other=0.0)
    addend = tl.load(shift + image * shift_stride + channel, mask=inside & (has_shift != 0), other=0.0).to(tl.float32)
    scale = tl.load(weight + channel, mask=inside & (has_weight != 0), other=1.0).to(tl.float32)
    term = tl.load(bias + channel, mask=inside & (has_bias != 0), other=0.0).to(tl.float32)

    value = value.to(tl.float32)
    count = (pixels * width).to(tl.float32)
    mean = sum_of(value) / count + tl.sum(addend) / width.to(tl.float32)
    centred = tl.where(mask, value - (mean - addend)[None, :], 0.0)
    rstd = 1.0 / tl.sqrt(sum_of(centred * centred) / count + eps)
    y = centred * (scale * rstd)[None, :] + term[None, :]
    y = silu_if(y, silu)
    store_picture(out, y, row, channel, mask, image, pixels, channels, across, PATCHES)


@jit()
def write_statistics(mean, m2, count, column, inside, partial, image, groups, group_width, width, GROUPS):
    """From the mean and M2 of each channel of a part those of its groups, in their place of `partial`."""
    # channels to groups, through the matrix of who belongs where
    lane = tl.arange(0, GROUPS)
    member = ((column // group_width)[:, None] == lane[None, :]) & inside[:, None]
    group_mean = tl.sum(tl.where(member, mean[:, None], 0.0), 0) / group_width.to(tl.float32)
    offset = tl.where(member, mean[:, None] - group_mean[None, :], 0.0)
    group_m2 = tl.sum(tl.where(member, m2[:, None], 0.0) + count * offset * offset, 0)

    group = tl.program_id(0) * (width // group_width) + lane
    valid = (lane < width // group_width) & (group < groups)
    at = (image * tl.num_programs(1) + tl.program_id(1)) * groups + group
    size = tl.num_programs(2).to(tl.int64) * tl.num_programs(1) * groups
    tl.store(partial + at, group_mean, mask=valid)
    tl.store(partial + size + at, group_m2, mask=valid)


@jit(do_not_specialize=["pixels", "groups", "group_width", "units", "shift_stride", "has_shift"])
def _part_statistics(
    x,
    shift,
    partial,
    pixels,
    channels,
    groups,
    group_width,
    units,
    shift_stride,
    has_shift,
    UNIT: constexpr,
    BLOCK: constexpr,
    GROUPS: constexpr,
    PIXELS: constexpr,
    EARLY: constexpr,
):
    begin_early(EARLY)
    image = tl.program_id(2).to(tl.int64)
    width = units * UNIT
    column = tl.arange(0, BLOCK)
    channel = tl.program_id(0) * width + column
    inside = (column < width) & (channel < channels)
    first = tl.program_id(1) * PIXELS
    here = tl.minimum(pixels - first, PIXELS)
    row = tl.arange(0, PIXELS)
    mask = (row < here)[:, None] & inside[None, :]
    start = (image * pixels + first) * channels
    value = tl.load(x + start + (row[:, None] * channels + channel[None, :]), mask=mask, other=0.0).to(tl.float32)
    addend = tl.load(shift + image * shift_stride + channel, mask=inside & (has_shift != 0), other=0.0)

    count = here.to(tl.float32)
    mean = tl.sum(value, 0) / count
    centred = tl.where(mask, value - mean[None, :], 0.0)
    m2 = tl.sum(centred * centred, 0)
    mean += addend.to(tl.float32)

    write_statistics(mean, m2, count, column, inside, partial, image, groups, group_width, width, GROUPS)
