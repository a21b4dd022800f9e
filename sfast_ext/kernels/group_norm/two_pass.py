"""Group norm by the statistics of parts of an image, which another kernel has taken.

A program that normalises reads the statistics of all parts. Of a large image that would be more than it reads of the
image: there they are combined first.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sfast_ext.kernels.backend.triton_runtime import (
    begin_early,
    cdiv,
    constexpr,
    device_of,
    jit,
    multiprocessors,
    next_power_of_2,
    start,
    tl,
)
from sfast_ext.kernels.group_norm.one_pass import silu_if

MOST = 128  # parts that a program which normalises reads; of more than these one is made
_FEW = 32  # what it makes room for where there are no more
_GROUPS = 8  # that a program combines
# Of the second launch: tiles of whole lines of memory, wherever groups begin. A program takes the statistics in once,
# for several tiles; as many programs fit in the registers of a multiprocessor.
_BLOCK, _PIXELS, _WARPS = 64, 64, 4
_PROGRAMS = 5


class Parts(NamedTuple):
    """How an image is cut into boxes: how many are side by side and above each other, and their columns and rows; and
    the rows and columns of the image. Pixels in a row make a column of boxes, one pixel wide."""

    wide: int
    high: int
    box_width: int
    box_height: int
    height: int
    width: int

    @classmethod
    def of_rows(cls, pixels: int, each: int) -> Parts:
        return cls(1, cdiv(pixels, each), 1, each, pixels, 1)

    @property
    def total(self) -> int:
        return self.wide * self.high

    @property
    def room(self) -> int:
        """For how many a program makes room; few sizes, as each is a compilation."""
        return next(room for room in (1, _FEW, MOST) if self.total <= room)


@jit()
def shares_of(part, wide, high, box_width, box_height, height, width):
    """Of parts, some of which may not be there, the shares of the image's pixels."""
    across = tl.minimum(box_width, width - part % wide * box_width)
    down = tl.minimum(box_height, height - part // wide * box_height)
    count = (across * down).to(tl.float32)
    return tl.where(part < wide * high, count / (height.to(tl.float32) * width.to(tl.float32)), 0.0)


@jit(do_not_specialize=["groups", "group_width", "wide", "high", "box_width", "box_height", "height", "width"])
def _combine(
    partial,
    combined,
    groups,
    group_width,
    wide,
    high,
    box_width,
    box_height,
    height,
    width,
    PARTS: constexpr,
    GROUPS: constexpr,
    EARLY: constexpr,
):
    begin_early(EARLY)
    image, images = tl.program_id(1).to(tl.int64), tl.num_programs(1).to(tl.int64)
    group = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    parts = wide * high
    values = height.to(tl.float32) * width.to(tl.float32) * group_width.to(tl.float32)
    start_ = image * parts * groups + group[None, :]
    size = images * parts * groups
    mean = tl.zeros([GROUPS], tl.float32)
    for first in range(0, parts, PARTS):
        part = first + tl.arange(0, PARTS)
        known = (part < parts)[:, None] & (group < groups)[None, :]
        means = tl.load(partial + start_ + part[:, None] * groups, mask=known, other=0.0)
        mean += tl.sum(means * shares_of(part, wide, high, box_width, box_height, height, width)[:, None], 0)
    m2 = tl.zeros([GROUPS], tl.float32)
    for first in range(0, parts, PARTS):
        part = first + tl.arange(0, PARTS)
        known = (part < parts)[:, None] & (group < groups)[None, :]
        means = tl.load(partial + start_ + part[:, None] * groups, mask=known, other=0.0)
        m2s = tl.load(partial + size + start_ + part[:, None] * groups, mask=known, other=0.0)
        counts = shares_of(part, wide, high, box_width, box_height, height, width)[:, None] * values
        offset = means - mean[None, :]
        m2 += tl.sum(m2s + counts * offset * offset, 0)
    place = image * groups + group
    tl.store(combined + place, mean, mask=group < groups)
    tl.store(combined + images * groups + place, m2, mask=group < groups)


def few(partial: Tensor, parts: Parts, group_width: int) -> tuple[Tensor, Parts]:
    """Statistics (2, N, parts, groups), means and sums of squared deviations, as they are, or where the parts are many
    combined to (2, N, 1, groups) (Chan, Golub and LeVeque 1979); and what parts they are of."""
    if parts.total <= MOST:
        return partial, parts
    _, images, _, groups = partial.shape
    combined = torch.empty((2, images, 1, groups), dtype=torch.float32, device=partial.device)
    grid = (cdiv(groups, _GROUPS), images)
    start(_combine, grid, partial, combined, groups, group_width, *parts, PARTS=MOST, GROUPS=_GROUPS, num_warps=4)
    return combined, Parts(1, 1, parts.width, parts.height, parts.height, parts.width)


@jit()
def centre_and_factor(partial, shares, part, parts, image, group, last, of_channel, pixels, groups, group_width, eps):
    """Of each channel the mean of its group, and 1 over its deviation, from the statistics of the parts of an image and
    the shares of its pixels that these have. The channels are of the groups given, up to the last."""
    known = (part < parts)[:, None] & (group <= last)[None, :]
    at = (image * parts + part[:, None]) * groups + group[None, :]
    size = tl.num_programs(2).to(tl.int64) * parts * groups
    means = tl.load(partial + at, mask=known, other=0.0)
    m2s = tl.load(partial + size + at, mask=known, other=0.0)
    mean = tl.sum(means * shares, 0)
    offset = means - mean[None, :]
    # one sum: the variance inside the parts and the one between them
    within = m2s / (pixels.to(tl.float32) * group_width.to(tl.float32))
    rstd = 1.0 / tl.sqrt(tl.sum(within + shares * offset * offset, 0) + eps)
    member = of_channel[:, None] == group[None, :]
    return tl.sum(tl.where(member, mean[None, :], 0.0), 1), tl.sum(tl.where(member, rstd[None, :], 0.0), 1)


@jit(
    do_not_specialize=[
        "pixels",
        "groups",
        "group_width",
        "wide",
        "high",
        "box_width",
        "box_height",
        "height",
        "width_of_image",
        "shift_stride",
        "has_shift",
        "has_weight",
        "has_bias",
        "silu",
    ]
)
def _normalise(
    x,
    shift,
    weight,
    bias,
    partial,
    out,
    pixels,
    channels,
    groups,
    group_width,
    wide,
    high,
    box_width,
    box_height,
    height,
    width_of_image,
    shift_stride,
    has_shift,
    has_weight,
    has_bias,
    silu,
    eps,
    BLOCK: constexpr,
    GROUPS: constexpr,
    PIXELS: constexpr,
    PARTS: constexpr,
    EARLY: constexpr,
):
    begin_early(EARLY)
    image = tl.program_id(2).to(tl.int64)
    column, row = tl.arange(0, BLOCK), tl.arange(0, PIXELS)
    start_channel = tl.program_id(0) * BLOCK
    channel = start_channel + column
    inside = channel < channels
    place = row[:, None] * channels + column[None, :]
    start = image * pixels * channels + start_channel
    first, step = tl.program_id(1) * PIXELS, tl.num_programs(1) * PIXELS
    mask = (row < pixels - first)[:, None] & inside[None, :]
    value = tl.load(x + start + first.to(tl.int64) * channels + place, mask=mask, other=0.0)

    addend = tl.load(shift + image * shift_stride + channel, mask=inside & (has_shift != 0), other=0.0).to(tl.float32)
    scale = tl.load(weight + channel, mask=inside & (has_weight != 0), other=1.0).to(tl.float32)
    term = tl.load(bias + channel, mask=inside & (has_bias != 0), other=0.0).to(tl.float32)
    of_channel = channel // group_width
    if PARTS == 1:
        known = image * groups + of_channel
        centre = tl.load(partial + known, mask=inside, other=0.0)
        m2 = tl.load(partial + tl.num_programs(2).to(tl.int64) * groups + known, mask=inside, other=0.0)
        factor = 1.0 / tl.sqrt(m2 / (pixels.to(tl.float32) * group_width.to(tl.float32)) + eps)
    else:
        group = start_channel // group_width + tl.arange(0, GROUPS)
        last = (tl.minimum(start_channel + BLOCK, channels) - 1) // group_width
        part, parts = tl.arange(0, PARTS), wide * high
        shares = shares_of(part, wide, high, box_width, box_height, height, width_of_image)[:, None]
        centre, factor = centre_and_factor(
            partial, shares, part, parts, image, group, last, of_channel, pixels, groups, group_width, eps
        )
    scale *= factor
    centre -= addend
    while first < pixels:
        after = first + step  # what is next is on its way while this is computed
        next_mask = (row < pixels - after)[:, None] & inside[None, :]
        next_value = tl.load(x + start + after.to(tl.int64) * channels + place, mask=next_mask, other=0.0)
        y = (value.to(tl.float32) - centre[None, :]) * scale[None, :] + term[None, :]
        y = silu_if(y, silu)
        # the mask anew: one that is handed on from tile to tile goes through shared memory, and takes registers
        mask = (row < pixels - first)[:, None] & inside[None, :]
        tl.store(out + start + first.to(tl.int64) * channels + place, y.to(out.dtype.element_ty), mask=mask)
        first, value = after, next_value


def normalise(
    x: Tensor,
    shift: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    partial: Tensor,
    parts: Parts,
    eps: float,
    silu: bool,
    dtype: torch.dtype,
) -> Tensor:
    """x (N, ..., C), contiguous, plus shift (N, C), dense in C, normalised by the statistics of its parts (2, N, parts,
    groups) in the dtype given: the second launch, and one before it where the parts are many."""
    images, channels, groups = x.shape[0], x.shape[-1], partial.shape[-1]
    pixels, group_width = x.numel() // (images * channels), channels // groups
    partial, parts = few(partial, parts, group_width)
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    blocks = cdiv(channels, _BLOCK)
    programs = max(1, _PROGRAMS * multiprocessors(device_of(x)) // (blocks * images))
    start(
        _normalise,
        (blocks, min(programs, cdiv(pixels, _PIXELS)), images),
        x,
        *(x if vector is None else vector for vector in (shift, weight, bias)),
        partial,
        out,
        pixels,
        channels,
        groups,
        group_width,
        *parts,
        0 if shift is None else shift.stride(0),
        *(int(vector is not None) for vector in (shift, weight, bias)),
        int(silu),
        eps,
        BLOCK=_BLOCK,
        GROUPS=_room_for_groups(group_width),
        PIXELS=_PIXELS,
        PARTS=parts.room,
        num_warps=_WARPS,
    )
    return out


def _room_for_groups(group_width: int) -> int:
    """For how many groups a program makes room whose channels begin and end anywhere in one."""
    most = _BLOCK // group_width if _BLOCK % group_width == 0 else (_BLOCK - 2) // group_width + 2
    return max(8, next_power_of_2(most))
