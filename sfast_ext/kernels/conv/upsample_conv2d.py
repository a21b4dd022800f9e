"""Nearest-neighbour upsampling by 2 and a 3x3 convolution, computed before upsampling.

The four copies of a pixel give the same product with each of the filter's nine taps. So the products are computed once,
of the small image, as nine GEMMs by cuBLAS, and a kernel adds them up where the taps of the upsampled image fall: a
quarter of the FLOPs, and the upsampled image is never written.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from sfast_ext import fp32_precision
from sfast_ext.kernels.backend import cuda_tier, nvrtc
from sfast_ext.kernels.backend.registry import kernel, require
from sfast_ext.kernels.backend.triton_runtime import (
    DTYPES,
    HALF,
    cdiv,
    channels_inner,
    channels_outer,
    constexpr,
    is_dry_run,
    jit,
    launch_kernel,
    pdl_wait,
    tl,
)
from sfast_ext.kernels.conv import conv2d, upsample

MIN_CHANNELS = 128  # in and out: with fewer, moving the GEMMs' results takes longer than computing them
_DOWN, _ACROSS, _BLOCK = 2, 4, 64  # a tile: pixels of the small image, and channels


def reference(x: Tensor, weight: Tensor, cut: tuple[int, int] = (0, 0)) -> Tensor:
    """x (N, C, H, W), weight (K, C, 3, 3) -> (N, K, 2 H - cut[0], 2 W - cut[1]).

    Pixel i of the upsampled image is pixel i // 2 of x, without the last row or column if `cut` is 1; padding 1.
    Computes in float32 (float64 if x is) and rounds once.
    """
    compute = torch.promote_types(x.dtype, torch.float32)
    large = upsample.reference(x.to(compute), _size(x, cut), (0.5, 0.5))
    return F.conv2d(large, weight.to(compute), padding=1).to(x.dtype)


def fallback(x: Tensor, weight: Tensor, cut: tuple[int, int] = (0, 0)) -> Tensor:
    """`reference` by two kernels, of which the first writes the upsampled image."""
    return conv2d.launch(upsample.launch(x, _size(x, cut), (0.5, 0.5)), weight)


def _size(x: Tensor, cut: tuple[int, int]) -> tuple[int, int]:
    return 2 * x.shape[2] - cut[0], 2 * x.shape[3] - cut[1]


@jit(do_not_specialize=["images", "height", "width", "large_height", "large_width"])
def upsample_conv2d_kernel(
    tap_results, out, images, height, width, large_height, large_width, channels, scale, DOWN: constexpr,
    ACROSS: constexpr, BLOCK: constexpr, PDL: constexpr,
):  # fmt: skip
    pdl_wait(PDL)
    tiles_across, tiles_down = tl.cdiv(width, ACROSS), tl.cdiv(height, DOWN)
    blocks = tl.cdiv(channels, BLOCK)
    tile = tl.program_id(0) // blocks
    image = (tile // tiles_across // tiles_down).to(tl.int64)
    pixel = tl.arange(0, DOWN * ACROSS)
    y = tile // tiles_across % tiles_down * DOWN + pixel // ACROSS
    x = tile % tiles_across * ACROSS + pixel % ACROSS
    channel = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    inside = (channel < channels)[None, :]
    there = (y < height) & (x < width)
    plane = height.to(tl.int64) * width * channels * images
    source = tap_results + ((image * height + y) * width + x)[:, None] * channels + channel[None, :]
    upper_left = tl.zeros((DOWN * ACROSS, BLOCK), tl.float32)
    upper_right = tl.zeros((DOWN * ACROSS, BLOCK), tl.float32)
    lower_left = tl.zeros((DOWN * ACROSS, BLOCK), tl.float32)
    lower_right = tl.zeros((DOWN * ACROSS, BLOCK), tl.float32)
    # The three taps of row 2 y of the upsampled image read rows y - 1, y, y of x, those of row 2 y + 1 read y, y, y +
    # 1: five pairs of tap and row, (0, y - 1), (0, y), (1, y) for both, (2, y), (2, y + 1).
    for i in tl.static_range(5):
        row = 2 * y + i - 1 - (i + 2) // 4  # of the upsampled image, read by the tap
        row_there = there & (row >= 0) & (row < large_height)
        by_rows = source + (i + i // 3) // 2 * 3 * plane + ((i + 3) // 4 + i // 4 - 1) * width * channels
        for j in tl.static_range(5):
            column = 2 * x + j - 1 - (j + 2) // 4
            seen = row_there & (column >= 0) & (column < large_width)
            place = by_rows + (j + j // 3) // 2 * plane + ((j + 3) // 4 + j // 4 - 1) * channels
            product = tl.load(place, mask=seen[:, None] & inside, other=0.0).to(tl.float32)
            if (i != 1 and i != 4) and (j != 1 and j != 4):
                upper_left += product
            if (i != 1 and i != 4) and (j != 0 and j != 3):
                upper_right += product
            if (i != 0 and i != 3) and (j != 1 and j != 4):
                lower_left += product
            if (i != 0 and i != 3) and (j != 0 and j != 3):
                lower_right += product
    target = out + ((image * large_height + 2 * y) * large_width + 2 * x)[:, None] * channels + channel[None, :]
    lower, right = there & (2 * y + 1 < large_height), 2 * x + 1 < large_width
    type = out.dtype.element_ty
    tl.store(target, (upper_left * scale).to(type), mask=there[:, None] & inside)
    tl.store(target + channels, (upper_right * scale).to(type), mask=(there & right)[:, None] & inside)
    target += large_width * channels
    tl.store(target, (lower_left * scale).to(type), mask=lower[:, None] & inside)
    tl.store(target + channels, (lower_right * scale).to(type), mask=(lower & right)[:, None] & inside)


def workspace(x: Tensor, weight: Tensor, cut: tuple[int, int] = (0, 0)) -> int:
    """Bytes of `tap_gemms`, which `launch` holds in addition to its result."""
    return 9 * x.numel() // x.shape[1] * weight.shape[0] * x.element_size()


def tap_gemms(x: Tensor, weight: Tensor, cut: tuple[int, int] = (0, 0)) -> Tensor:
    """All FLOPs of `launch`: x (N, C, H, W), weight (K, C, 3, 3) -> (9, N H W, K), pixels times each tap, times
    `_scale`."""
    columns, channels = weight.shape[:2]
    pixels = channels_inner(x).view(1, -1, channels)
    taps = weight.permute(2, 3, 1, 0).reshape(9, channels, columns)  # a view if the weight is channels last
    # with beta 0 the first operand is not read
    return torch.baddbmm(x.new_empty(()), pixels.expand(9, -1, -1), taps, beta=0, alpha=_scale(x.dtype))


def _scale(dtype: torch.dtype) -> float:
    """In float16 a tap's result may overflow although the sum of taps does not. The scale costs precision below 2**-11,
    far below a UNet's activations."""
    return 0.125 if dtype == torch.float16 else 1.0


def dtypes() -> tuple[torch.dtype, ...]:
    """In which `launch` computes a convolution by GEMMs: float32 is among them if both are rounded alike."""
    return DTYPES if fp32_precision.matmul_as_conv() else HALF


def accepts(x: Tensor, weight: Tensor, cut: tuple[int, int]) -> str | None:
    """Why `launch` does not compute it this way, or that is not the faster way; None if it does."""
    if x.dim() != 4 or weight.dim() != 4 or not x.numel() or x.dtype not in dtypes():
        return "other dimensions, no elements, or another dtype"
    unfit = cuda_tier.tier((_SOURCE,), x, weight).reason
    if unfit is not None:
        return unfit
    columns, channels = weight.shape[:2]
    if weight.dtype != x.dtype or weight.shape[1:] != (x.shape[1], 3, 3) or not {*cut} <= {0, 1}:
        return "other shapes, or several dtypes"
    if min(columns, channels) < MIN_CHANNELS:
        return "few channels"
    dense = is_dry_run() or weight.is_contiguous(memory_format=torch.channels_last)
    return None if dense else "a weight that is not channels last"


_TILE = {"DOWN": 4, "ACROSS": 8, "LANES": 8}  # of csrc/upsample_conv2d.cu
_PACK = 4  # elements of an access at most: a thread has four sums of each


def constants(pack: int, dtype: torch.dtype) -> dict[str, int]:
    """Compile-time parameters of csrc/upsample_conv2d.cu."""
    return {"TYPE": cuda_tier.TYPES[dtype], **_TILE, "PACK": min(pack, _PACK)}


def _prepared(*args: Any, **constants: int) -> tuple[list[Any], int, int]:
    tensors, sizes, scale = args[:2], args[2:-1], args[-1]
    threads = constants["DOWN"] * constants["ACROSS"] * constants["LANES"]
    return [*tensors, *map(ctypes.c_int, sizes), ctypes.c_float(scale)], threads, 0


_OPERANDS = ("products", "out", "images", "height", "width", "large_height", "large_width", "channels", "scale")
_SOURCE = nvrtc.Source("upsample_conv2d", _prepared, _OPERANDS)


@kernel(
    reference,
    fallback=fallback,
    workspace=workspace,
    flop_reference=tap_gemms,
    uses=(conv2d.launch, upsample.launch),
    portable=True,
    triton_functions=(upsample_conv2d_kernel,),
    cuda_sources=(_SOURCE,),
)
def launch(x: Tensor, weight: Tensor, cut: tuple[int, int] = (0, 0)) -> Tensor:
    """`reference` by nine GEMMs, each rounded to x's dtype, and a kernel that adds them up in float32.

    x (N, C, H, W) is made channels last, weight (K, C, 3, 3) is, in one dtype of `dtypes`; C and K from 128 on.
    """
    require(accepts(x, weight, cut))
    images, _, height, width = x.shape
    columns, size = weight.shape[0], _size(x, cut)
    out = torch.empty((images, *size, columns), dtype=x.dtype, device=x.device)
    products, scale = tap_gemms(x, weight), 1 / _scale(x.dtype)
    if not cuda_tier.tier((_SOURCE,), x, weight).triton:
        given = constants(cuda_tier.pack(columns, products), x.dtype)
        tiles = images * cdiv(height, given["DOWN"]) * cdiv(width, given["ACROSS"])
        grid = (tiles * cdiv(columns, given["LANES"] * given["PACK"]),)
        launch_kernel(_SOURCE, grid, products, out, images, height, width, *size, columns, scale, **given)
        return channels_outer(out)
    launch_kernel(
        upsample_conv2d_kernel,
        (images * cdiv(height, _DOWN) * cdiv(width, _ACROSS) * cdiv(columns, _BLOCK),),
        products,
        out,
        images,
        height,
        width,
        *size,
        columns,
        scale,
        DOWN=_DOWN,
        ACROSS=_ACROSS,
        BLOCK=_BLOCK,
        num_warps=4,
    )
    return channels_outer(out)
