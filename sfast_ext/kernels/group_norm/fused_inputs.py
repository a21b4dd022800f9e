"""Group norm whose kernel first computes its input: a sum, or a concatenation.

The input is written, as others read it, and its statistics are computed from the same registers. In Triton tiles are
those of one_pass.py and the second of two launches is that of two_pass.py; for CUDA C++ see portable.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sfast_ext.kernels.backend import cuda_tier
from sfast_ext.kernels.backend.registry import Declined, require
from sfast_ext.kernels.backend.triton_runtime import (
    DTYPES,
    MAX_GRID_YZ,
    channels_inner,
    channels_outer,
    constexpr,
    jit,
    launch_kernel,
    pdl_wait,
    tl,
)
from sfast_ext.kernels.group_norm import group_norm, portable
from sfast_ext.kernels.group_norm import one_pass as tiles
from sfast_ext.kernels.group_norm.two_pass import Norm, Parts, normalise


@jit()
def _assemble_tile(
    a, b, conv_bias, residual, out_sum, begin, row, channel, mask, inside, channels, first, biased, scale, JOIN,
    RESIDUAL,
):  # fmt: skip
    """One tile of out_sum, rounded as stored: (a + conv_bias + residual) * scale, with b concatenated."""
    place = row[:, None] * channels + channel[None, :]
    if JOIN:
        rest = channels - first
        left, right = mask & (channel < first)[None, :], mask & (channel >= first)[None, :]
        of_a, of_b = row[:, None] * first + channel[None, :], row[:, None] * rest + (channel - first)[None, :]
        value = tl.load(a + begin * first + of_a, mask=left, other=0.0).to(tl.float32)
        value += tl.load(b + begin * rest + of_b, mask=right, other=0.0).to(tl.float32)
        if RESIDUAL:
            value += tl.load(residual + begin * first + of_a, mask=left, other=0.0).to(tl.float32)
    else:
        value = tl.load(a + begin * channels + place, mask=mask, other=0.0).to(tl.float32)
        if RESIDUAL:
            value += tl.load(residual + begin * channels + place, mask=mask, other=0.0).to(tl.float32)
    value += tl.load(conv_bias + channel, mask=inside & (channel < biased), other=0.0).to(tl.float32)[None, :]
    stored = (value * scale).to(out_sum.dtype.element_ty)
    tl.store(out_sum + begin * channels + place, stored, mask=mask)
    return stored.to(tl.float32)


@jit(do_not_specialize=["pixels", "units", "biased", "has_weight", "has_bias", "silu", "across"])
def fused_group_norm_one_pass_kernel(
    a, b, conv_bias, residual, weight, bias, out_sum, out, pixels, channels, first, units, biased, has_weight, has_bias,
    silu, across, scale, eps, PATCHES: constexpr, JOIN: constexpr, RESIDUAL: constexpr, UNIT: constexpr,
    BLOCK: constexpr, PIXELS: constexpr, PDL: constexpr,
):  # fmt: skip
    pdl_wait(PDL)
    image = tl.program_id(1).to(tl.int64)
    width = units * UNIT
    column = tl.arange(0, BLOCK)
    channel = tl.program_id(0) * width + column
    inside = column < width
    row = tl.arange(0, PIXELS)
    mask = (row < pixels)[:, None] & inside[None, :]
    begin = image * pixels
    gamma = tl.load(weight + channel, mask=inside & (has_weight != 0), other=1.0).to(tl.float32)
    beta = tl.load(bias + channel, mask=inside & (has_bias != 0), other=0.0).to(tl.float32)
    value = _assemble_tile(
        a,
        b,
        conv_bias,
        residual,
        out_sum,
        begin,
        row,
        channel,
        mask,
        inside,
        channels,
        first,
        biased,
        scale,
        JOIN,
        RESIDUAL,
    )
    count = (pixels * width).to(tl.float32)
    mean = tiles.sum_of(tl.where(mask, value, 0.0)) / count
    centred = tl.where(mask, value - mean, 0.0)
    rstd = 1.0 / tl.sqrt(tiles.sum_of(centred * centred) / count + eps)
    y = centred * (gamma * rstd)[None, :] + beta[None, :]
    y = tiles.silu_if(y, silu)
    tiles.store_tile(out, y, row, channel, mask, image, pixels, channels, across, PATCHES)


@jit(do_not_specialize=["pixels", "groups", "group_width", "units", "biased"])
def fused_group_norm_part_statistics_kernel(
    a, b, conv_bias, residual, out_sum, partial, pixels, channels, first, groups, group_width, units, biased, scale,
    JOIN: constexpr, RESIDUAL: constexpr, UNIT: constexpr, BLOCK: constexpr, GROUPS: constexpr, PIXELS: constexpr,
    PDL: constexpr,
):  # fmt: skip
    pdl_wait(PDL)
    image = tl.program_id(2).to(tl.int64)
    width = units * UNIT
    column = tl.arange(0, BLOCK)
    channel = tl.program_id(0) * width + column
    inside = (column < width) & (channel < channels)
    first_pixel = tl.program_id(1) * PIXELS
    here = tl.minimum(pixels - first_pixel, PIXELS)
    row = tl.arange(0, PIXELS)
    mask = (row < here)[:, None] & inside[None, :]
    begin = image * pixels + first_pixel
    value = _assemble_tile(
        a,
        b,
        conv_bias,
        residual,
        out_sum,
        begin,
        row,
        channel,
        mask,
        inside,
        channels,
        first,
        biased,
        scale,
        JOIN,
        RESIDUAL,
    )
    count = here.to(tl.float32)
    mean = tl.sum(tl.where(mask, value, 0.0), 0) / count
    centred = tl.where(mask, value - mean[None, :], 0.0)
    m2 = tl.sum(centred * centred, 0)
    tiles.write_statistics(mean, m2, count, column, inside, partial, image, groups, group_width, width, GROUPS)


TOO_LARGE = "images or groups that are too large for one kernel"


def run(
    a: Tensor,
    b: Tensor | None,
    conv_bias: Tensor | None,
    residual: Tensor | None,
    scale: float,
    groups: int,
    norm: Norm,
    patches: bool,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(out_sum, its norm) channels last. The norm is written to `out`, if there is room for it and a second launch
    writes it; it may be `a`, unless there is a `b`.

    Raises:
        Declined: no tile fits such tensors; nothing was launched.
    """
    batch, channels = a.shape[0], a.shape[1] + (0 if b is None else b.shape[1])
    others = [t for t in (b, residual) if t is not None]
    triton, reason = cuda_tier.tier(portable.SOURCES, a, b, conv_bias, residual, *norm[:2])
    require(reason)
    if a.numel() == 0 or any(t.dtype != a.dtype for t in others) or norm.dtype not in DTYPES:
        raise Declined("no elements, or another dtype")
    if (b is not None and (b.shape[0], *b.shape[2:]) != (batch, *a.shape[2:])) or (
        (residual is not None and residual.shape != a.shape)
        or (conv_bias is not None and conv_bias.shape != (a.shape[1],))
    ):
        raise Declined("operands of other shapes")
    if groups < 1 or channels % groups or max(batch, groups) > MAX_GRID_YZ:
        raise Declined("groups that do not divide the channels, or too many of them")
    norm = norm.contiguous()
    pixels, group_width = a.numel() // (batch * a.shape[1]), channels // groups
    if not triton:
        images = [None if x is None else channels_inner(x) for x in (residual, b)]
        addend = None if conv_bias is None else conv_bias.contiguous()
        inputs = portable.Inputs(channels_inner(a), addend, images[0], images[1], scale, fused=True)
        room = group_norm.room(out, a, inputs.a, norm.dtype)
        done = portable.normalised(inputs, groups, norm, patches, room)
        if done is None or done[0] is None:
            raise Declined(TOO_LARGE)
        return channels_outer(done[0]), done[1] if patches else channels_outer(done[1])
    path, tile = group_norm.fitting(pixels, groups, group_width)
    if tile is None or (patches and path != "whole"):
        raise Declined(TOO_LARGE)
    inner = channels_inner(a)
    second = inner if b is None else channels_inner(b)
    added = inner if residual is None else channels_inner(residual)
    out_sum = torch.empty((*inner.shape[:-1], channels), dtype=a.dtype, device=a.device)
    vector = inner if conv_bias is None else conv_bias.contiguous()
    first, biased = a.shape[1], 0 if conv_bias is None else a.shape[1]
    constants = tile.constants
    flags, unit = {"JOIN": b is not None, "RESIDUAL": residual is not None}, constants["UNIT"]
    if path == "whole":
        y = group_norm.empty(out_sum, norm.dtype, patches)
        has = (int(norm.weight is not None), int(norm.bias is not None), int(norm.silu))
        sizes = (pixels, channels, first, group_width // unit, biased, *has, out_sum.shape[-2])
        tensors = (second, vector, added, *(out_sum if v is None else v for v in norm[:2]), out_sum, y)
        flags["PATCHES"] = patches
        last = (*sizes, float(scale), norm.eps)
        launch_kernel(fused_group_norm_one_pass_kernel, (groups, batch), inner, *tensors, *last, **flags, **constants)
        return channels_outer(out_sum), y if patches else channels_outer(y)
    units = tile.groups * group_width // unit
    grid = (tile.blocks, tile.parts, batch)
    partial = torch.empty((2, batch, tile.parts, groups), dtype=torch.float32, device=a.device)
    counts = (pixels, channels, first, groups, group_width, units, biased)
    first_launch = (second, vector, added, out_sum, partial, *counts, float(scale))
    launch_kernel(fused_group_norm_part_statistics_kernel, grid, inner, *first_launch, **flags, **constants)
    parts = Parts.of_rows(pixels, constants["PIXELS"])
    y = normalise(out_sum, None, norm, partial, parts, group_norm.room(out, a, inner, norm.dtype))
    return channels_outer(out_sum), channels_outer(y)


KERNELS = (fused_group_norm_one_pass_kernel, fused_group_norm_part_statistics_kernel)
"""What `run` launches in Triton, two_pass.py aside."""
