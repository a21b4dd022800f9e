"""A 3x3 convolution, what is added to its result, and the group norm of the sum, for Hopper.

The convolution adds what is to be added and takes the statistics of its tiles while they lie in registers
(csrc/conv2d.cu), so that the norm reads the sum once, to normalise it. Elsewhere the two kernels follow each other.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sfast_ext.kernels import _cuda, add_group_norm, conv2d, group_norm
from sfast_ext.kernels import _group_norm as tiles
from sfast_ext.kernels._triton import (
    DTYPES,
    are_collected,
    begin_early,
    channels_inner,
    channels_outer,
    constexpr,
    jit,
    start,
    tl,
)

_MOST_BOXES = 128  # of an image: each program that normalises reads the statistics of all


def reference(
    x: Tensor,
    conv_weight: Tensor,
    shift: Tensor | None,
    residual: Tensor | None,
    groups: int,
    weight: Tensor | None,
    term: Tensor | None,
    eps: float,
    silu: bool = False,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor | None, Tensor]:
    """(sum, y): sum = conv2d(x) + shift + residual in x's dtype, y its group norm, times weight, plus term, then SiLU.

    x (N, C, H, W), conv_weight (K, C, 3, 3); shift (N, K), or (K,) with a residual (N, K, H, W); without a residual the
    sum is not handed out. y comes from the rounded sum, and is rounded once to out_dtype (default: x's).
    """
    compute = torch.promote_types(x.dtype, torch.float32)
    total = conv2d.reference(x.to(compute), conv_weight.to(compute))
    if shift is not None:
        total = total + shift.to(compute).reshape(-1, total.shape[1], 1, 1)
    if residual is not None:
        total = total + residual.to(compute)
    total = total.to(x.dtype)
    y = group_norm.reference(total, groups, weight, term, eps, None, silu, out_dtype)
    return None if residual is None else total, y


@jit(
    do_not_specialize=[
        "pixels",
        "groups",
        "group_width",
        "units",
        "height",
        "width_of_image",
        "wide",
        "high",
        "box_width",
        "box_height",
        "has_weight",
        "has_bias",
        "silu",
    ]
)
def _normalise(
    x,
    weight,
    bias,
    partial,
    out,
    pixels,
    channels,
    groups,
    group_width,
    units,
    height,
    width_of_image,
    wide,
    high,
    box_width,
    box_height,
    has_weight,
    has_bias,
    silu,
    eps,
    UNIT: constexpr,
    BLOCK: constexpr,
    GROUPS: constexpr,
    PIXELS: constexpr,
    PARTS: constexpr,
    EARLY: constexpr,
):
    begin_early(EARLY)
    image = tl.program_id(2).to(tl.int64)
    width = units * UNIT
    column = tl.arange(0, BLOCK)
    channel = tl.program_id(1) * width + column
    inside = (column < width) & (channel < channels)
    first = tl.program_id(0) * PIXELS
    row = tl.arange(0, PIXELS)
    mask = (row < pixels - first)[:, None] & inside[None, :]
    place = row[:, None] * channels + channel[None, :]
    start_ = (image * pixels + first) * channels
    value = tl.load(x + start_ + place, mask=mask, other=0.0)
    scale = tl.load(weight + channel, mask=inside & (has_weight != 0), other=1.0).to(tl.float32)
    term = tl.load(bias + channel, mask=inside & (has_bias != 0), other=0.0).to(tl.float32)

    lane = tl.arange(0, GROUPS)
    group = tl.program_id(1) * (width // group_width) + lane
    part, parts = tl.arange(0, PARTS), wide * high
    # the pixels of each box
    across = tl.minimum(box_width, width_of_image - part % wide * box_width)
    down = tl.minimum(box_height, height - part // wide * box_height)
    shares = tl.where(part < parts, (across * down).to(tl.float32) / pixels.to(tl.float32), 0.0)[:, None]
    here = lane < width // group_width
    centre, factor = tiles.centre_and_factor(
        partial, shares, part, parts, image, group, here, lane, column, inside, pixels, groups, group_width, eps
    )
    scale *= factor
    y = (value.to(tl.float32) - centre[None, :]) * scale[None, :] + term[None, :]
    if silu != 0:
        y = tiles.silu_of(y)
    tl.store(out + start_ + place, y.to(out.dtype.element_ty), mask=mask)


def launch(
    x: Tensor,
    conv_weight: Tensor,
    shift: Tensor | None,
    residual: Tensor | None,
    groups: int,
    weight: Tensor | None,
    term: Tensor | None,
    eps: float,
    silu: bool = False,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor | None, Tensor]:
    """`reference` as the convolution and one Triton kernel, where both take such tensors; else as two kernels of norms
    after the convolution."""
    dtype = out_dtype or x.dtype
    if fits(x, conv_weight, shift, residual, groups, weight, term, dtype):
        try:
            return _fused(x, conv_weight, shift, residual, groups, weight, term, eps, silu, dtype)
        except _cuda.Unavailable:
            pass  # the log has it; it is not asked again
    picture = conv2d.launch(x, conv_weight)
    if residual is None:
        return None, group_norm.launch(picture, groups, weight, term, eps, shift, silu, out_dtype)
    return add_group_norm.launch(picture, shift, residual, 1.0, groups, weight, term, eps, silu, out_dtype)


def fits(
    x: Tensor,
    conv_weight: Tensor,
    shift: Tensor | None,
    residual: Tensor | None,
    groups: int,
    weight: Tensor | None,
    term: Tensor | None,
    dtype: torch.dtype,
) -> bool:
    """Whether the kernels take the operands."""
    if x.dim() != 4 or conv_weight.dim() != 4 or dtype not in DTYPES or groups < 1:
        return False
    if not conv2d.sums_groups(x, conv_weight, groups):
        return False
    images, _, height, width = x.shape
    columns = conv_weight.shape[0]
    others = [t for t in (shift, residual, weight, term) if t is not None]
    if not all(t.dtype in DTYPES and t.device == x.device for t in others):
        return False
    if shift is not None:
        wanted = (images, columns) if residual is None else (columns,)
        if shift.dtype != x.dtype or shift.shape != wanted or shift.stride(-1) != 1:
            return False
        if shift.data_ptr() % 4 or (shift.dim() == 2 and shift.stride(0) % 2):  # read by twos
            return False
    if residual is not None:
        if residual.dtype != x.dtype or residual.shape != (images, columns, height, width) or residual.data_ptr() % 16:
            return False
        if not are_collected() and not residual.is_contiguous(memory_format=torch.channels_last):
            return False
    path, _ = group_norm.fitting(height * width, groups, columns // groups)
    return path == "parts" and conv2d.boxes_of_an_image(x) <= _MOST_BOXES


def _fused(
    x: Tensor,
    conv_weight: Tensor,
    shift: Tensor | None,
    residual: Tensor | None,
    groups: int,
    weight: Tensor | None,
    term: Tensor | None,
    eps: float,
    silu: bool,
    dtype: torch.dtype,
) -> tuple[Tensor | None, Tensor]:
    total, partial, boxes = conv2d.with_statistics(x, conv_weight, groups, shift, residual)
    images, _, height, width = x.shape
    columns, pixels = conv_weight.shape[0], height * width
    inner = channels_inner(total)
    out = torch.empty(inner.shape, dtype=dtype, device=x.device)
    weights, terms = (inner if v is None else v.contiguous() for v in (weight, term))
    tile = tiles.parts(pixels, groups, columns // groups)
    assert tile is not None
    start(
        _normalise,
        (tile.parts, tile.blocks, images),
        inner,
        weights,
        terms,
        partial,
        out,
        pixels,
        columns,
        groups,
        columns // groups,
        tile.groups * (columns // groups) // tile.constants["UNIT"],
        height,
        width,
        *boxes,
        int(weight is not None),
        int(term is not None),
        int(silu),
        eps,
        PARTS=tiles.room(boxes[0] * boxes[1]),
        **(tile.constants | {"num_warps": tiles.NORMALISE_WARPS}),
    )
    return None if residual is None else total, channels_outer(out)
