"""The second pass of a group norm: normalisation by the statistics of parts of an image from another kernel.

A program that normalises reads the statistics of all parts. For a large image that would be more than it reads of the
image, so they are combined first (Chan, Golub and LeVeque 1979).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sfast_ext.kernels.backend.triton_runtime import (
    cdiv,
    constexpr,
    device_of,
    jit,
    launch_kernel,
    multiprocessors,
    next_power_of_2,
    pdl_wait,
    tl,
)
from sfast_ext.kernels.group_norm.one_pass import silu_if

MAX_PARTS = 128  # parts that a normalising program reads; more are combined to one
_FEW = 32  # size of its block for at most so many parts
_GROUPS = 8  # per combining program
# Normalising tiles are whole cache lines, wherever groups begin. A program reads the statistics once for several tiles;
# _PROGRAMS fit the registers of a multiprocessor.
_BLOCK, _PIXELS, _WARPS = 64, 64, 4
_PROGRAMS = 5


class Parts(NamedTuple):
    """An image divided into boxes: boxes across (wide) and down (high), columns and rows of a box, rows and columns of
    the image. Splits of consecutive pixels are a column of boxes, one pixel wide."""

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
    def boxes(self) -> int:
        return self.wide * self.high

    @property
    def room(self) -> int:
        """Block size for the parts of a program; few sizes, as each is a compilation."""
        return next(room for room in (1, _FEW, MAX_PARTS) if self.boxes <= room)


@jit()
def shares_of(part, wide, high, box_width, box_height, height, width):
    """Each part's fraction of the image's pixels, 0 for parts beyond the last."""
    across = tl.minimum(box_width, width - part % wide * box_width)
    down = tl.minimum(box_height, height - part // wide * box_height)
    count = (across * down).to(tl.float32)
    return tl.where(part < wide * high, count / (height.to(tl.float32) * width.to(tl.float32)), 0.0)


@jit(do_not_specialize=["groups", "group_width", "wide", "high", "box_width", "box_height", "height", "width"])
def group_norm_combine_kernel(
    partial, combined, groups, group_width, wide, high, box_width, box_height, height, width, PARTS: constexpr,
    GROUPS: constexpr, PDL: constexpr,
):  # fmt: skip
    pdl_wait(PDL)
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
        delta = means - mean[None, :]
        m2 += tl.sum(m2s + counts * delta * delta, 0)
    place = image * groups + group
    tl.store(combined + place, mean, mask=group < groups)
    tl.store(combined + images * groups + place, m2, mask=group < groups)


def combine_if_many(partial: Tensor, parts: Parts, group_width: int) -> tuple[Tensor, Parts]:
    """Statistics (2, N, parts, groups), means and sums of squared deviations, combined to (2, N, 1, groups) if there
    are more than `MAX_PARTS` parts; and the parts they are of."""
    if parts.boxes <= MAX_PARTS:
        return partial, parts
    _, images, _, groups = partial.shape
    combined = torch.empty((2, images, 1, groups), dtype=torch.float32, device=partial.device)
    grid = (cdiv(groups, _GROUPS), images)
    launch_kernel(
        group_norm_combine_kernel,
        grid,
        partial,
        combined,
        groups,
        group_width,
        *parts,
        PARTS=MAX_PARTS,
        GROUPS=_GROUPS,
        num_warps=4,
    )
    return combined, Parts(1, 1, parts.width, parts.height, parts.height, parts.width)


@jit()
def mean_and_rstd(partial, shares, part, parts, image, group, last, of_channel, pixels, groups, group_width, eps):
    """Per channel, the mean of its group and 1 / standard deviation, from the parts' statistics and their shares of the
    pixels. The channels belong to groups `group`, up to `last`."""
    known = (part < parts)[:, None] & (group <= last)[None, :]
    at = (image * parts + part[:, None]) * groups + group[None, :]
    size = tl.num_programs(2).to(tl.int64) * parts * groups
    means = tl.load(partial + at, mask=known, other=0.0)
    m2s = tl.load(partial + size + at, mask=known, other=0.0)
    mean = tl.sum(means * shares, 0)
    delta = means - mean[None, :]
    # one reduction of the variances within the parts and between them
    within = m2s / (pixels.to(tl.float32) * group_width.to(tl.float32))
    rstd = 1.0 / tl.sqrt(tl.sum(within + shares * delta * delta, 0) + eps)
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
def group_norm_normalise_kernel(
    x, shift, weight, bias, partial, out, pixels, channels, groups, group_width, wide, high, box_width, box_height,
    height, width_of_image, shift_stride, has_shift, has_weight, has_bias, silu, eps, BLOCK: constexpr,
    GROUPS: constexpr, PIXELS: constexpr, PARTS: constexpr, PDL: constexpr,
):  # fmt: skip
    pdl_wait(PDL)
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
    gamma = tl.load(weight + channel, mask=inside & (has_weight != 0), other=1.0).to(tl.float32)
    beta = tl.load(bias + channel, mask=inside & (has_bias != 0), other=0.0).to(tl.float32)
    of_channel = channel // group_width
    if PARTS == 1:
        known = image * groups + of_channel
        mean = tl.load(partial + known, mask=inside, other=0.0)
        m2 = tl.load(partial + tl.num_programs(2).to(tl.int64) * groups + known, mask=inside, other=0.0)
        rstd = 1.0 / tl.sqrt(m2 / (pixels.to(tl.float32) * group_width.to(tl.float32)) + eps)
    else:
        group = start_channel // group_width + tl.arange(0, GROUPS)
        last = (tl.minimum(start_channel + BLOCK, channels) - 1) // group_width
        part, parts = tl.arange(0, PARTS), wide * high
        shares = shares_of(part, wide, high, box_width, box_height, height, width_of_image)[:, None]
        mean, rstd = mean_and_rstd(
            partial, shares, part, parts, image, group, last, of_channel, pixels, groups, group_width, eps
        )
    gamma *= rstd
    mean -= addend
    while first < pixels:
        following = first + step  # prefetch the next tile
        next_mask = (row < pixels - following)[:, None] & inside[None, :]
        next_value = tl.load(x + start + following.to(tl.int64) * channels + place, mask=next_mask, other=0.0)
        y = (value.to(tl.float32) - mean[None, :]) * gamma[None, :] + beta[None, :]
        y = silu_if(y, silu)
        # recompute the mask: carried through the loop it would take registers and go through shared memory
        mask = (row < pixels - first)[:, None] & inside[None, :]
        tl.store(out + start + first.to(tl.int64) * channels + place, y.to(out.dtype.element_ty), mask=mask)
        first, value = following, next_value


class Norm(NamedTuple):
    """What follows the statistics: times weight (C,), plus bias (C,), SiLU; and the dtype of the result."""

    weight: Tensor | None
    bias: Tensor | None
    eps: float
    silu: bool
    dtype: torch.dtype

    def contiguous(self) -> Norm:
        weight, bias = (vector if vector is None else vector.contiguous() for vector in self[:2])
        return self._replace(weight=weight, bias=bias)


def normalise(
    x: Tensor, shift: Tensor | None, norm: Norm, partial: Tensor, parts: Parts, out: Tensor | None = None
) -> Tensor:
    """x (N, ..., C), contiguous, plus shift (N, C), dense in C, normalised by the statistics of its
    parts; `norm` is contiguous.

    partial is (2, N, parts, groups): means and sums of squared deviations of x + shift. One launch, or two if the
    parts are many. The result has x's shape; it is written to `out`, if that is given. `out` may be x: a program loads
    the values of a tile before it stores its result.
    """
    images, channels, groups = x.shape[0], x.shape[-1], partial.shape[-1]
    pixels, group_width = x.numel() // (images * channels), channels // groups
    partial, parts = combine_if_many(partial, parts, group_width)
    out = torch.empty(x.shape, dtype=norm.dtype, device=x.device) if out is None else out
    blocks = cdiv(channels, _BLOCK)
    programs = max(1, _PROGRAMS * multiprocessors(device_of(x)) // (blocks * images))
    launch_kernel(
        group_norm_normalise_kernel,
        (blocks, min(programs, cdiv(pixels, _PIXELS)), images),
        x,
        *(x if vector is None else vector for vector in (shift, norm.weight, norm.bias)),
        partial,
        out,
        pixels,
        channels,
        groups,
        group_width,
        *parts,
        0 if shift is None else shift.stride(0),
        *(int(vector is not None) for vector in (shift, norm.weight, norm.bias)),
        int(norm.silu),
        norm.eps,
        BLOCK=_BLOCK,
        GROUPS=_room_for_groups(group_width),
        PIXELS=_PIXELS,
        PARTS=parts.room,
        num_warps=_WARPS,
    )
    return out


def _room_for_groups(group_width: int) -> int:
    """Block size for the groups of a program whose channels may begin and end inside a group."""
    most = _BLOCK // group_width if _BLOCK % group_width == 0 else (_BLOCK - 2) // group_width + 2
    return max(8, next_power_of_2(most))
