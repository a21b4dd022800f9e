"""Nearest-neighbour upsampling of channels-last pictures."""

from __future__ import annotations

import torch
from torch import Tensor

from sfast_ext.kernels._triton import (
    MAX_GRID_YZ,
    cdiv,
    channels_inner,
    channels_outer,
    constexpr,
    jit,
    runs,
    start,
    tl,
)


def reference(x: Tensor, size: tuple[int, int], steps: tuple[float, float]) -> Tensor:
    """x (N, C, H, W) -> (N, C, *size), channels last: target pixel i is source pixel floor(i * step).

    steps are source pixels per target pixel, in float32 as torch counts them: 1 / scale_factor where that is given,
    else the quotient of the sizes.
    """
    at = []
    for length, target, step in zip(x.shape[2:], size, steps):
        place = torch.arange(target, dtype=torch.float32) * torch.tensor(step, dtype=torch.float32)
        at.append(place.floor().long().clamp(max=length - 1).to(x.device))
    return x[:, :, at[0]][..., at[1]].contiguous(memory_format=torch.channels_last)


_ROWS, _BLOCK = 16, 64  # a tile; the channels of Stable Diffusion's UNets are multiples of 64


@jit(do_not_specialize=["rows", "height", "width", "out_height", "out_width"])
def _kernel(
    x,
    out,
    rows,
    channels,
    height,
    width,
    out_height,
    out_width,
    step_y,
    step_x,
    ROWS: constexpr,
    BLOCK: constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = (row < rows)[:, None] & (channel < channels)[None, :]
    line = row // out_width
    y = (line % out_height).to(tl.float32) * step_y
    x_ = (row % out_width).to(tl.float32) * step_x
    source_y = tl.minimum(y.to(tl.int32), height - 1)
    source_x = tl.minimum(x_.to(tl.int32), width - 1)
    source = ((line // out_height) * height + source_y) * width + source_x
    value = tl.load(x + source[:, None] * channels + channel[None, :], mask=mask, other=0.0)
    tl.store(out + row[:, None] * channels + channel[None, :], value, mask=mask)


def launch(x: Tensor, size: tuple[int, int], steps: tuple[float, float]) -> Tensor:
    """`reference` as one Triton kernel."""
    batch, channels, height, width = x.shape
    if not runs(x) or not 0 < channels <= MAX_GRID_YZ * _BLOCK or min(height, width, *size) < 1:
        return reference(x, size, steps)
    inner = channels_inner(x)
    out = torch.empty((batch, *size, channels), dtype=x.dtype, device=x.device)
    count = out.numel() // channels
    if count:
        start(
            _kernel,
            (cdiv(count, _ROWS), cdiv(channels, _BLOCK)),
            inner,
            out,
            count,
            channels,
            height,
            width,
            *size,
            *map(float, steps),
            ROWS=_ROWS,
            BLOCK=_BLOCK,
            num_warps=4,
        )
    return channels_outer(out)
