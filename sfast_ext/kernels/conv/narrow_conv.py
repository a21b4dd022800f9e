"""3x3 convolutions of NHWC images with few input or few output channels: the first and the last of a UNet.

cuDNN has no tiles for them. Few input channels: an implicit GEMM with K = 9 taps x channels in one step. Few output
channels: one GEMM of pixels by 9 taps x channels, which reads the input once, and a kernel that adds up the taps.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from sfast_ext.kernels.backend import cuda_tier, triton_runtime
from sfast_ext.kernels.backend.registry import kernel, require
from sfast_ext.kernels.backend.triton_runtime import (
    accepts_products,
    cdiv,
    channels_inner,
    channels_outer,
    constexpr,
    is_dry_run,
    jit,
    launch_kernel,
    next_power_of_2,
    pdl_wait,
    tl,
)
from sfast_ext.kernels.conv import narrow_conv_portable as portable

MAX_IN = 16  # channels: latents, with mask and masked image for inpainting
OUT = (4, 8)
_MIN_SIZE = 16  # smallest dimension of tl.dot
_PIXELS, _COLUMNS = 128, 64  # few input channels: a tile
_ROWS, _DEPTH = 128, 64  # few output channels: M of a tile, K of a step
_GATHERED = 256  # pixels of a program that adds up taps


def reference(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x (N, C, H, W), weight (K, C, 3, 3), bias (K,) -> (N, K, H, W); padding 1.

    Computes in float32 (float64 if x is) and rounds once.
    """
    compute = torch.promote_types(x.dtype, torch.float32)
    bias = None if bias is None else bias.to(compute)
    return F.conv2d(x.to(compute), weight.to(compute), bias, padding=1).to(x.dtype)


def fallback(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`reference` by PyTorch, on CUDA by cuDNN."""
    return F.conv2d(x, weight, bias, padding=1)


@jit(do_not_specialize=["pixels", "height", "width", "x_image", "x_channel", "x_row", "x_column"])
def narrow_conv_in_kernel(
    x, weight, bias, out, pixels, height, width, columns, x_image, x_channel, x_row, x_column, HAS_BIAS: constexpr,
    CHANNELS: constexpr, PIXELS: constexpr, DEPTH: constexpr, COLUMNS: constexpr, PDL: constexpr,
):  # fmt: skip
    pdl_wait(PDL)
    pixel = tl.program_id(0).to(tl.int64) * PIXELS + tl.arange(0, PIXELS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    k = tl.arange(0, DEPTH)
    channel, down, across = k % CHANNELS, k // (3 * CHANNELS), k // CHANNELS % 3
    y = (pixel // width % height)[:, None] + down[None, :] - 1
    z = (pixel % width)[:, None] + across[None, :] - 1
    place = (pixel // width // height * x_image)[:, None] + (channel * x_channel)[None, :] + y * x_row + z * x_column
    inside = (y >= 0) & (y < height) & (z >= 0) & (z < width)
    there = (pixel < pixels)[:, None] & (k < 9 * CHANNELS)[None, :]
    patches = tl.load(x + place, mask=inside & there, other=0.0)
    filters = tl.load(
        weight + k[:, None] + column[None, :] * (9 * CHANNELS),
        mask=(k < 9 * CHANNELS)[:, None] & (column < columns)[None, :],
        other=0.0,
    )
    acc = tl.dot(patches, filters)
    if HAS_BIAS:
        acc += tl.load(bias + column, mask=column < columns, other=0.0).to(tl.float32)[None, :]
    mask = (pixel < pixels)[:, None] & (column < columns)[None, :]
    tl.store(out + pixel[:, None] * columns + column[None, :], acc.to(out.dtype.element_ty), mask=mask)


@jit(do_not_specialize=["pixels"])
def narrow_conv_taps_kernel(
    x, weight, out, pixels, depth, CHANNELS: constexpr, TAPS: constexpr, ROWS: constexpr, DEPTH: constexpr,
    PDL: constexpr,
):  # fmt: skip
    pdl_wait(PDL)
    pixel = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    tap = tl.arange(0, TAPS)  # (row of the filter, column, output channel)
    place = (tap % CHANNELS * 9 + tap // CHANNELS) * depth
    acc = tl.zeros((ROWS, TAPS), tl.float32)
    for first in range(0, depth, DEPTH):
        k = first + tl.arange(0, DEPTH)
        rows = tl.load(
            x + pixel[:, None] * depth + k[None, :],
            mask=(pixel < pixels)[:, None] & (k < depth)[None, :],
            other=0.0,
        )
        filters = tl.load(
            weight + k[:, None] + place[None, :],
            mask=(k < depth)[:, None] & (tap < 9 * CHANNELS)[None, :],
            other=0.0,
        )
        acc += tl.dot(rows, filters)
    mask = (pixel < pixels)[:, None] & (tap < 9 * CHANNELS)[None, :]
    tl.store(out + pixel[:, None] * (9 * CHANNELS) + tap[None, :], acc, mask=mask)


@jit(do_not_specialize=["pixels", "height", "width"])
def narrow_conv_out_kernel(
    taps, bias, out, pixels, height, width, HAS_BIAS: constexpr, CHANNELS: constexpr, PIXELS: constexpr, PDL: constexpr,
):  # fmt: skip
    pdl_wait(PDL)
    pixel = tl.program_id(0).to(tl.int64) * PIXELS + tl.arange(0, PIXELS)
    channel = tl.arange(0, CHANNELS)
    y, z = pixel // width % height, pixel % width
    acc = tl.zeros((PIXELS, CHANNELS), tl.float32)
    for down in tl.static_range(3):
        for across in tl.static_range(3):
            inside = (y + down >= 1) & (y + down <= height) & (z + across >= 1) & (z + across <= width)
            there = pixel + (down - 1) * width + across - 1
            place = there[:, None] * (9 * CHANNELS) + (3 * down + across) * CHANNELS + channel[None, :]
            acc += tl.load(taps + place, mask=(inside & (pixel < pixels))[:, None], other=0.0)
    if HAS_BIAS:
        acc += tl.load(bias + channel).to(tl.float32)[None, :]
    place = pixel[:, None] * CHANNELS + channel[None, :]
    tl.store(out + place, acc.to(out.dtype.element_ty), mask=(pixel < pixels)[:, None])


@kernel(
    reference,
    fallback=fallback,
    portable=True,
    triton_functions=(narrow_conv_in_kernel, narrow_conv_taps_kernel, narrow_conv_out_kernel),
    cuda_sources=portable.SOURCES,
)
def launch(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`reference` in one launch (at most 16 input channels) or two (4 or 8 output channels); channels last.

    All in one dtype: float16 or bfloat16 in Triton, on Hopper; float32 as well in CUDA C++. x (N, C, H, W) has any
    strides, weight (K, C, 3, 3) is channels last, bias (K,) contiguous.
    """
    require(accepts(x, weight, bias))
    by_triton = triton_runtime.accepts(x, weight, bias) is None
    n, channels, height, width = x.shape
    if not by_triton:
        compute = portable.from_few if channels <= MAX_IN else portable.to_few
        return channels_outer(compute(x, weight, bias))
    columns, pixels = weight.shape[0], n * height * width
    out = torch.empty((n, height, width, columns), dtype=x.dtype, device=x.device)
    some = weight if bias is None else bias
    if channels <= MAX_IN:
        launch_kernel(
            narrow_conv_in_kernel,
            (cdiv(pixels, _PIXELS), cdiv(columns, _COLUMNS)),
            x,
            weight,
            some,
            out,
            pixels,
            height,
            width,
            columns,
            *x.stride(),
            HAS_BIAS=bias is not None,
            CHANNELS=channels,
            PIXELS=_PIXELS,
            DEPTH=max(_MIN_SIZE, next_power_of_2(9 * channels)),
            COLUMNS=_COLUMNS,
            num_warps=4,
        )
        return channels_outer(out)
    inner = channels_inner(x)
    taps = torch.empty((pixels, 9 * columns), dtype=torch.float32, device=x.device)
    launch_kernel(
        narrow_conv_taps_kernel,
        (cdiv(pixels, _ROWS),),
        inner,
        weight,
        taps,
        pixels,
        channels,
        CHANNELS=columns,
        TAPS=next_power_of_2(9 * columns),
        ROWS=_ROWS,
        DEPTH=_DEPTH,
        num_warps=4,
        num_stages=3,
    )
    launch_kernel(
        narrow_conv_out_kernel,
        (cdiv(pixels, _GATHERED),),
        taps,
        some,
        out,
        pixels,
        height,
        width,
        HAS_BIAS=bias is not None,
        CHANNELS=columns,
        PIXELS=_GATHERED,
        num_warps=4,
    )
    return channels_outer(out)


def accepts(x: Tensor, weight: Tensor, bias: Tensor | None) -> str | None:
    """Why the kernels do not take the operands on this GPU, or are no faster than cuDNN; None if they do, see
    `launch`."""
    if x.dim() != 4 or weight.dim() != 4 or not x.numel():
        return "other dimensions, or no elements"
    triton, unfit = cuda_tier.tier(portable.SOURCES, x, weight, bias)
    if triton:
        unfit = accepts_products(x)
    elif x.numel() // x.shape[1] >= portable.MAX_PIXELS:
        unfit = unfit or "too many pixels"
    if unfit is not None:
        return unfit
    columns, channels = weight.shape[:2]
    if any(t.dtype != x.dtype for t in (weight, bias) if t is not None) or weight.shape[1:] != (x.shape[1], 3, 3):
        return "other shapes, or several dtypes"
    if bias is not None and (bias.shape != (columns,) or not bias.is_contiguous()):
        return "a bias of another shape, or that is not contiguous"
    if not is_dry_run() and not weight.is_contiguous(memory_format=torch.channels_last):
        return "a weight that is not channels last"
    return None if columns > 0 and (channels <= MAX_IN or columns in OUT) else "channels for which cuDNN has tiles"
