"""A 3x3 convolution of 8-bit integers: scales, bias and a residual are applied to the sums of its products."""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.nn import functional as F

from sfast_ext.kernels.backend import triton_runtime
from sfast_ext.kernels.backend.registry import kernel, require
from sfast_ext.kernels.backend.triton_runtime import device_of, is_dry_run
from sfast_ext.kernels.eight_bits import choice8, gain, mma_conv8, wgmma_conv8

_choice = choice8.choices("conv2d, 8 bits")
MIN_PRODUCTS = {(8, 0): 10**9}
"""By compute capability: with fewer multiplications, a convolution in 8 bits takes as long as one in half precision."""
MIN_PRODUCTS_ELSEWHERE = 10**8
"""GeForce cards take four times as long for products in half precision with exact sums."""
HOPPER = (9, 0)
"""There `conv2d` has Hopper's instructions, as `wgmma_conv8` has, and `mma_conv8` has not."""


def reference(
    x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None = None,
    residual: Tensor | None = None, stride: int = 1, dtype: torch.dtype = torch.float16,
) -> Tensor:  # fmt: skip
    """x (N, C, H, W) and weight (K, 9 C), of nine taps row by row, in int8; x_scale (2, N), scales and zeros as of
    `group_norm8`, which are whole numbers from -127 to 0, and weight_scale (10, K), of which only the first row is read
    here, in float32; bias (K), residual (N, K, H / stride, W / stride), rounded up -> the same: scale * weight_scale *
    conv2d(x - zero, weight) + bias + residual, with padding 1, rounded once to dtype.

    Computes in float32 (float64 if scales are).
    """
    wide = x_scale.dtype
    taps = weight.view(weight.shape[0], 3, 3, -1).permute(0, 3, 1, 2)
    scale, zero = x_scale[:, :, None, None, None]
    y = F.conv2d(x.to(wide) - zero, taps.to(wide), padding=1, stride=stride)
    y = y * scale * weight_scale[0, :, None, None]
    if bias is not None:
        y = y + bias.to(wide)[:, None, None]
    if residual is not None:
        y = y + residual.to(wide)
    return y.to(dtype).contiguous(memory_format=torch.channels_last)


def profitable(rows: int, columns: int, depth: int, device: torch.device, stride: int = 1) -> bool:
    """Whether a convolution is faster in 8 bits. On a CPU it counts as such.

    Args:
        rows: pixels of the result.
        depth: terms of a sum.
    """
    if device.type != "cuda":
        return True
    card = triton_runtime.capability(device)
    if card == HOPPER:
        fits = stride == 1 and columns % wgmma_conv8.FITTING == 0
        return fits and gain.convolution_pays(gain.Product(rows, columns, depth), device)
    return rows * columns * depth >= MIN_PRODUCTS.get(card, MIN_PRODUCTS_ELSEWHERE)


@kernel(reference, portable=True, any_source=True, cuda_sources=(mma_conv8.SOURCE, *wgmma_conv8.SOURCES))
def launch(
    x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None = None,
    residual: Tensor | None = None, stride: int = 1, dtype: torch.dtype = torch.float16,
) -> Tensor:  # fmt: skip
    """`reference`, by `wgmma_conv8` on Hopper if that takes the operands, else by `mma_conv8`. x and residual are made
    channels last; C a multiple of 64, K of 8; the rest is contiguous, bias and residual in dtype, which is float16 or
    bfloat16. Behind its first row weight_scale has the sums of the codes of the weight's rows (`sums_of_codes`)."""
    layout = torch.channels_last
    if not is_dry_run() and x.dim() == 4:
        x = x.contiguous(memory_format=layout)
        residual = None if residual is None or residual.dim() != 4 else residual.contiguous(memory_format=layout)
    operands = (x, x_scale, weight, weight_scale, bias, residual, stride, dtype)
    if wgmma_conv8.accepts(*operands) is None:
        return wgmma_conv8.conv2d(x, x_scale, weight, weight_scale, bias, residual, dtype)
    require(mma_conv8.accepts(*operands))
    images, columns, height, width = mma_conv8.size_of(x, weight.shape[0], stride)
    tiles = mma_conv8.tiles(images * height * width, columns, x.shape[1], device_of(x))
    ways = [functools.partial(mma_conv8.conv2d, *operands, tile=tile) for tile in tiles]
    if is_dry_run():
        return [way() for way in ways][-1]
    kind = f"{str(dtype).removeprefix('torch.')}{', bias' * (bias is not None)}{', residual' * (residual is not None)}"
    key = f"{'x'.join(map(str, x.shape))} to {columns}, stride {stride} {kind}, {tiles[0]}"
    return _choice.run(x.device, key, ways[0], dict(zip(map(str, tiles[1:]), ways[1:])), choice8.EXPECTED)
