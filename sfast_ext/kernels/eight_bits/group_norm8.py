"""Group norm, then SiLU, with an int8 result and one scale for each image: what a convolution in 8 bits reads.

A code stands for `(code - zero) * scale`. A sum over nine neighbours has no factor of a single pixel, so all pixels of
an image share a scale. It is known before the result is written, and without another reading of the image: see
csrc/group_norm8_normalise.cu. So there are always the two launches of portable.py; a launch that keeps a group in
registers knows nothing of other groups. SiLU's results are at least -0.28: with it the zero is near -127, so that all
codes are used, and the steps are half as wide. Without, it is 0. It is a whole number from -127 to 0.

Of a sum or a concatenation: add_group_norm8.py, cat_group_norm8.py.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from sfast_ext.kernels.backend import cuda_tier, nvrtc
from sfast_ext.kernels.backend.registry import Declined, kernel, require
from sfast_ext.kernels.backend.triton_runtime import (
    HALF,
    MAX_GRID_YZ,
    cdiv,
    channels_inner,
    channels_outer,
    launch_kernel,
)
from sfast_ext.kernels.eight_bits.quantise_rows import LARGEST, SMALLEST
from sfast_ext.kernels.group_norm import group_norm, portable
from sfast_ext.kernels.group_norm.portable import STATISTICS, Inputs
from sfast_ext.kernels.group_norm.two_pass import Norm

LEAST_SILU = 0.27846456
"""The magnitude of SiLU's minimum, in float32."""
CODES = 253
"""Between the codes of SiLU's minimum and of the largest value; rounding adds at most one."""
_MAX_GROUPS = 128  # of an image, all of which a block has


def reference(
    x: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None, eps: float, shift: Tensor | None = None,
    silu: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(q (N, C, ...) int8, scales and zeros (2, N) float32) of `group_norm.reference`. Without SiLU they are as
    `quantise_rows.reference` has them, with an image in a row's place, and zeros are 0.

    Computes in float32 (float64 if x is): the norm is not rounded in between. SiLU's minimum counts as one of the
    values if there is a negative value in front of it. Codes and zeros are 0 if a scale is 1 or NaN for the reasons
    of `quantise_rows.reference`.
    """
    compute = torch.promote_types(x.dtype, torch.float32)
    y = group_norm.reference(x, groups, weight, bias, eps, shift, False, compute)
    last = tuple(range(1, y.dim()))
    largest = y.abs().amax(last, keepdim=True)
    finite = largest.isfinite()
    below, codes = torch.zeros_like(largest), LARGEST
    if silu:
        below = LEAST_SILU * (y < 0).flatten(1).any(1).view_as(largest)
        above = F.silu(y.clamp(min=0)).amax(last, keepdim=True)
        largest, codes = below + torch.maximum(above, below), CODES
        y = F.silu(y)
    some = (largest * (LARGEST / codes) >= SMALLEST) & finite
    scale = torch.where(some, largest / codes, 1.0)
    zero = torch.where(some, (below / scale + 0.5).floor() - LARGEST, 0.0) if silu else below
    q = torch.where(some, (y / scale + zero).round().clamp(-128, LARGEST), 0.0).to(torch.int8)
    scale = torch.where(finite, scale, float("nan"))
    return channels_outer(channels_inner(q)), torch.stack([scale.flatten(), zero.flatten()]).to(torch.float32)


NORMALISE = nvrtc.Source(
    "group_norm8_normalise",
    portable.prepared,
    (
        "x", "shift", "weight", "bias", "partial", "extremes", "out", "scales", "pixels", "per_block", *portable.TILE,
        "shift_stride", "per_part", "parts", "with_silu", "eps",
    ),
)  # fmt: skip
SOURCES = (STATISTICS, NORMALISE)


def accepts(x: Tensor, channels: int, groups: int, *others: Tensor | None) -> str | None:
    """Why the kernels do not take a norm of so many channels of x (N, ..., C) and others; None if they do."""
    unfit = next((reason for source in SOURCES if (reason := cuda_tier.accepts(source, x, *others))), None)
    if unfit is not None:
        return unfit
    if x.dtype not in HALF:
        return "no half precision"
    if not 0 < groups <= _MAX_GROUPS or channels % groups or x.shape[0] > MAX_GRID_YZ or not x.numel():
        return "no elements, groups that do not divide the channels, or too many of them or of the images"
    if not portable.accepts_size(x.numel() // (x.shape[0] * x.shape[-1]), channels):
        return "images that are too large"
    return None


def normalised(inputs: Inputs, groups: int, norm: Norm) -> tuple[Tensor | None, Tensor, Tensor]:
    """(sum, q, scales and zeros); the sum is None without `inputs.fused`. Inputs are contiguous, but for the rows of an
    addend.

    Raises:
        Declined: the operands are not taken.
    """
    a, images, channels, pixels = inputs.a, inputs.a.shape[0], inputs.channels, inputs.pixels
    norm = norm.contiguous()
    operands = (a, inputs.b, inputs.addend, inputs.residual)
    require(accepts(a, channels, groups, *operands[1:], norm.weight, norm.bias))
    pack = inputs.pack(channels // groups, norm.weight, norm.bias)
    tile = portable.block(groups, channels // groups, pack)
    if tile is None:
        raise Declined("groups that are too wide")
    resident = portable.resident_of(tile)
    per_part = portable.pixels_of_block(pixels, images, groups, tile, resident, a, portable.MAX_PARTS)
    parts, blocks = cdiv(pixels, per_part), cdiv(groups, tile.groups)
    total = torch.empty((*a.shape[:-1], channels), dtype=a.dtype, device=a.device) if inputs.fused else None
    partial = torch.empty((2, images, parts, groups), dtype=torch.float32, device=a.device)
    extremes = torch.empty((2, images, parts, channels), dtype=a.dtype, device=a.device)
    sizes = (pixels, per_part, channels, groups, tile.groups, tile.lanes)
    constants = {"TYPE": cuda_tier.TYPES[a.dtype], "PACK": pack, "EACH": tile.each, **resident}
    rest = inputs.first, inputs.addend_stride, float(inputs.scale)
    own = {**constants, "FUSED": int(inputs.fused), "EXTREMES": 1}
    launch_kernel(STATISTICS, (parts, blocks, images), *operands, total, partial, extremes, *sizes, *rest, **own)

    x, shift = (a, inputs.addend) if total is None else (total, None)
    q = torch.empty(x.shape, dtype=torch.int8, device=a.device)
    scale = torch.empty((2, images), dtype=torch.float32, device=a.device)
    per_block = portable.pixels_of_block(pixels, images, groups, tile, resident, a, pixels)
    sizes = (pixels, per_block, channels, groups, tile.groups, tile.lanes)
    ends = (0 if shift is None else shift.stride(0), per_part, parts, int(norm.silu), float(norm.eps))
    grid = (cdiv(pixels, per_block), blocks, images)
    tensors = x, shift, norm.weight, norm.bias, partial, extremes, q, scale
    launch_kernel(NORMALISE, grid, *tensors, *sizes, *ends, **constants)
    return total, q, scale


@kernel(reference, portable=True, cuda_sources=SOURCES)
def launch(
    x: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None, eps: float, shift: Tensor | None = None,
    silu: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`reference` in two launches, which read x once each.

    x (N, C, ...) is made channels last, shift (N, C) dense in C, weight and bias (C,) contiguous; all in float16 or all
    in bfloat16; up to 128 groups.
    """
    if x.dim() < 3 or (shift is not None and shift.shape != x.shape[:2]):
        raise Declined("other dimensions, or a shift of another shape")
    shift = shift if shift is None or shift.stride(1) == 1 else shift.contiguous()
    norm = Norm(weight, bias, eps, silu, x.dtype)
    _, q, scale = normalised(Inputs(channels_inner(x), shift), groups, norm)
    return channels_outer(q), scale
