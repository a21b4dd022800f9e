"""A 3x3 convolution of a picture that is enlarged to twice its size, nearest-neighbour, before it is enlarged.

Of four pixels that are the same pixel, each of the filter's nine taps makes the same product. So the products are made
once, of the small picture, as nine matrix products by cuBLAS, and added up where the enlarged picture's taps would meet
them: a quarter of the arithmetic, and nothing is enlarged.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from sfast_ext.kernels.backend.triton_runtime import (
    HALF,
    are_collected,
    begin_early,
    cdiv,
    channels_inner,
    channels_outer,
    constexpr,
    jit,
    runs,
    start,
    tl,
)
from sfast_ext.kernels.conv import conv2d, upsample

USES = (conv2d, upsample)

LEAST_CHANNELS = 128  # of either picture: with fewer, writing and reading products takes longer than making them
_DOWN, _ACROSS, _BLOCK = 2, 4, 64  # a tile: pixels of the small picture, and channels


def reference(x: Tensor, weight: Tensor, cut: tuple[int, int] = (0, 0)) -> Tensor:
    """x (N, C, H, W), weight (K, C, 3, 3) -> (N, K, 2 H - cut[0], 2 W - cut[1]).

    Pixel i of the enlarged picture is pixel i // 2 of x, without the last row or column where `cut` says 1; around it
    is a row of zeros. Computes in float32 (float64 where x is), rounds once.
    """
    compute = torch.promote_types(x.dtype, torch.float32)
    large = upsample.reference(x.to(compute), _size(x, cut), (0.5, 0.5))
    return F.conv2d(large, weight.to(compute), padding=1).to(x.dtype)


def library(x: Tensor, weight: Tensor, cut: tuple[int, int] = (0, 0)) -> Tensor:
    """`reference` by two operations, of which the first writes the enlarged picture."""
    return conv2d.launch(upsample.launch(x, _size(x, cut), (0.5, 0.5)), weight)


def _size(x: Tensor, cut: tuple[int, int]) -> tuple[int, int]:
    return 2 * x.shape[2] - cut[0], 2 * x.shape[3] - cut[1]


@jit(do_not_specialize=["images", "height", "width", "large_height", "large_width"])
def _kernel(
    products,
    out,
    images,
    height,
    width,
    large_height,
    large_width,
    channels,
    scale,
    DOWN: constexpr,
    ACROSS: constexpr,
    BLOCK: constexpr,
    EARLY: constexpr,
):
    begin_early(EARLY)
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
    source = products + ((image * height + y) * width + x)[:, None] * channels + channel[None, :]
    upper_left = tl.zeros((DOWN * ACROSS, BLOCK), tl.float32)
    upper_right = tl.zeros((DOWN * ACROSS, BLOCK), tl.float32)
    lower_left = tl.zeros((DOWN * ACROSS, BLOCK), tl.float32)
    lower_right = tl.zeros((DOWN * ACROSS, BLOCK), tl.float32)
    # Row 2 y of the large picture meets y - 1, y, y with its three taps, row 2 y + 1 meets y, y, y + 1. That makes five
    # pairs of tap and row: 0 with y - 1 and with y, 1 with y, which is for both, 2 with y and with y + 1.
    for i in tl.static_range(5):
        row = 2 * y + i - 1 - (i + 2) // 4  # of the large picture, where the tap lies
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


def launch(x: Tensor, weight: Tensor, cut: tuple[int, int] = (0, 0)) -> Tensor:
    """`reference` by nine products, each rounded to x's dtype, and a kernel of Triton that adds them up in float32;
    where that does not run, by `library`."""
    if not takes(x, weight, cut):
        return library(x, weight, cut)
    images, _, height, width = x.shape
    columns, size = weight.shape[0], _size(x, cut)
    out = torch.empty((images, *size, columns), dtype=x.dtype, device=x.device)
    start(
        _kernel,
        (images * cdiv(height, _DOWN) * cdiv(width, _ACROSS) * cdiv(columns, _BLOCK),),
        products(x, weight),
        out,
        images,
        height,
        width,
        *size,
        columns,
        1 / _scale(x.dtype),
        DOWN=_DOWN,
        ACROSS=_ACROSS,
        BLOCK=_BLOCK,
        num_warps=4,
    )
    return channels_outer(out)


def workspace(x: Tensor, weight: Tensor, cut: tuple[int, int] = (0, 0)) -> int:
    """Bytes of products, which `launch` holds beside its result."""
    return 9 * x.numel() // x.shape[1] * weight.shape[0] * x.element_size()


def products(x: Tensor, weight: Tensor, cut: tuple[int, int] = (0, 0)) -> Tensor:
    """All the arithmetic there is: of x (N, C, H, W) and weight (K, C, 3, 3), (9, N H W, K), pixels by each tap, times
    `_scale`."""
    columns, channels = weight.shape[:2]
    pixels = channels_inner(x).view(1, -1, channels)
    taps = weight.permute(2, 3, 1, 0).reshape(9, channels, columns)  # a view where the weight is channels last
    # with beta 0 nothing is read of the first, and nothing added
    return torch.baddbmm(x.new_empty(()), pixels.expand(9, -1, -1), taps, beta=0, alpha=_scale(x.dtype))


def _scale(dtype: torch.dtype) -> float:
    """In float16 a tap's products may be larger than any number where their sum is not; smaller ones than 2**-11 are so
    far below a UNet's activations that their last bits do not matter."""
    return 0.125 if dtype == torch.float16 else 1.0


def takes(x: Tensor, weight: Tensor, cut: tuple[int, int]) -> bool:
    """Whether it can be done so, and is the faster way."""
    if x.dim() != 4 or weight.dim() != 4 or not runs(x, weight) or not x.numel() or x.dtype not in HALF:
        return False
    columns, channels = weight.shape[:2]
    if weight.dtype != x.dtype or weight.shape[1:] != (x.shape[1], 3, 3) or not {*cut} <= {0, 1}:
        return False
    if min(columns, channels) < LEAST_CHANNELS:
        return False
    return are_collected() or weight.is_contiguous(memory_format=torch.channels_last)
