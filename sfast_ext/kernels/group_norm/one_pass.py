"""Group norm kernels that keep their input in registers: a whole group, or a part of some groups.

At a UNet's sizes a norm is bound by latency, not bandwidth. So a program issues all loads before the first use, reads
nothing twice, and computes mean and variance in two passes over registers.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from sfast_ext.kernels.backend.triton_runtime import (
    MAX_GRID_YZ,
    VERSION,
    cdiv,
    constexpr,
    jit,
    next_power_of_2,
    pdl_wait,
    tl,
)

# Elements, with padding, of the largest tile for a whole group. Twice as many gain 1.4 us at 2560 channels and 16x16,
# lose as much at 640 and 32x32, and cost two compilations of half a second on the first call.
_SLAB = 16384
_MIN_PIXELS = 64  # pixels of the smallest such tile; the next have 4 and 16 times as many: every size is a compilation
_PER_THREAD = 16  # elements of a thread, up to _MAX_WARPS
_MAX_WARPS = 16
_PART = 8192  # elements of a tile for a part
_PART_WARPS = 4
_PART_BLOCK = 64  # channels of it, unless a group is wider
_PART_MAX_WIDTH = 128


class Tile(NamedTuple):
    """Blocks of an image's channels, groups per block, parts of its pixels, and the kernel's constants."""

    blocks: int
    groups: int
    parts: int
    constants: dict[str, int]


def whole(pixels: int, groups: int, group_width: int) -> Tile | None:
    """The tile of one launch with one program per group; None if a group does not fit."""
    # Few programs, 64 at batch 2, but small ones: even the largest takes less time than a second launch. Groups of a
    # multiple of 4 channels are aligned to 8 bytes of fp16; others would need separate kernels.
    if group_width % 4 or group_width < 8:
        return None
    rows = _MIN_PIXELS
    while rows < pixels:
        rows *= 4
    block = next_power_of_2(group_width)
    if rows * block > _SLAB:
        return None
    block = max(block, min(64, _SLAB // rows))  # share the compilation for 40 channels with 20 if registers allow it
    warps = max(1, min(_MAX_WARPS, rows * block // (32 * _PER_THREAD)))
    return Tile(groups, 1, 1, {"UNIT": 4, "BLOCK": block, "PIXELS": rows, "num_warps": warps})


def parts(pixels: int, groups: int, group_width: int) -> Tile | None:
    """The tile of two launches, pixels split so that a part fits; None if a group is too wide or parts are too
    many."""
    if group_width > _PART_MAX_WIDTH:
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
    # y / (1 + exp(-y)) in half the instructions of division and exp, which handle subnormal numbers: a norm has so few
    # programs that arithmetic matters. If exp2 overflows, rsqrt correctly gives 0.
    root = tl.math.rsqrt(1.0 + tl.math.exp2(y * -1.4426950408889634))
    return y * root * root


# To reduce a tile at once, or to return it from a branch, Triton 2.1 converts its layout through shared memory, with 4
# bytes per element. Turing has not enough of it.
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
def store_tile(out, y, row, channel, mask, image, pixels, channels, across, PATCHES: constexpr):
    """Store a tile of an image; with PATCHES each pixel nine times, once for each neighbour (im2col, 3x3, padding
    1)."""
    if PATCHES:
        start = out + image * pixels * channels * 9
        down = pixels // across
        up, along = row // across, row % across
        for tap in range(9):
            dy, dx = tap // 3 - 1, tap % 3 - 1
            # the pixel whose neighbour `tap` is this one
            above, before = up - dy, along - dx
            there = (above >= 0) & (above < down) & (before >= 0) & (before < across)
            place = (((above * across + before) * 9 + tap) * channels)[:, None] + channel[None, :]
            tl.store(start + place, y.to(out.dtype.element_ty), mask=mask & there[:, None])
            # zeros if this pixel's neighbour `tap` is outside
            below, beyond = up + dy, along + dx
            outside = (below < 0) | (below >= down) | (beyond < 0) | (beyond >= across)
            place = ((row * 9 + tap) * channels)[:, None] + channel[None, :]
            tl.store(start + place, 0.0, mask=mask & outside[:, None])
    else:
        place = row[:, None] * channels + channel[None, :]
        tl.store(out + image * pixels * channels + place, y.to(out.dtype.element_ty), mask=mask)


# In all kernels x is (N, pixels, channels) and a block is units * UNIT channels, whole groups. UNIT is a constexpr, so
# that the compiler knows the alignment; the rest is not, so that one compilation serves many norms (a first call waits
# for compilation). Optional operands (shift, weight, bias, SiLU) are run-time masks, which cost nothing. Offsets inside
# a tile are 32-bit.


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
def group_norm_one_pass_kernel(
    x, shift, weight, bias, out, pixels, channels, units, shift_stride, has_shift, has_weight, has_bias, silu, across,
    eps, PATCHES: constexpr, UNIT: constexpr, BLOCK: constexpr, PIXELS: constexpr, PDL: constexpr,
):  # fmt: skip
    pdl_wait(PDL)
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
    gamma = tl.load(weight + channel, mask=inside & (has_weight != 0), other=1.0).to(tl.float32)
    beta = tl.load(bias + channel, mask=inside & (has_bias != 0), other=0.0).to(tl.float32)

    value = value.to(tl.float32)
    count = (pixels * width).to(tl.float32)
    mean = sum_of(value) / count + tl.sum(addend) / width.to(tl.float32)
    centred = tl.where(mask, value - (mean - addend)[None, :], 0.0)
    rstd = 1.0 / tl.sqrt(sum_of(centred * centred) / count + eps)
    y = centred * (gamma * rstd)[None, :] + beta[None, :]
    y = silu_if(y, silu)
    store_tile(out, y, row, channel, mask, image, pixels, channels, across, PATCHES)


@jit()
def write_statistics(mean, m2, count, column, inside, partial, image, groups, group_width, width, GROUPS):
    """Store mean and M2 of a part's groups in `partial`, from those of its channels."""
    # channels to groups by a membership matrix
    lane = tl.arange(0, GROUPS)
    member = ((column // group_width)[:, None] == lane[None, :]) & inside[:, None]
    group_mean = tl.sum(tl.where(member, mean[:, None], 0.0), 0) / group_width.to(tl.float32)
    delta = tl.where(member, mean[:, None] - group_mean[None, :], 0.0)
    group_m2 = tl.sum(tl.where(member, m2[:, None], 0.0) + count * delta * delta, 0)

    group = tl.program_id(0) * (width // group_width) + lane
    valid = (lane < width // group_width) & (group < groups)
    at = (image * tl.num_programs(1) + tl.program_id(1)) * groups + group
    size = tl.num_programs(2).to(tl.int64) * tl.num_programs(1) * groups
    tl.store(partial + at, group_mean, mask=valid)
    tl.store(partial + size + at, group_m2, mask=valid)


@jit(do_not_specialize=["pixels", "groups", "group_width", "units", "shift_stride", "has_shift"])
def group_norm_part_statistics_kernel(
    x, shift, partial, pixels, channels, groups, group_width, units, shift_stride, has_shift, UNIT: constexpr,
    BLOCK: constexpr, GROUPS: constexpr, PIXELS: constexpr, PDL: constexpr,
):  # fmt: skip
    pdl_wait(PDL)
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
