"""Group norm (Wu and He 2018) of channels-last tensors, with an optional shift before it and SiLU after it.

Three paths. "whole": a group fits in registers, one launch with one program per group (one_pass.py). Otherwise the
pixels are split: the first launch writes mean and M2 (sum of squared deviations) of each (image, split, group), the
second combines them (Chan, Golub and LeVeque 1979) and normalises (two_pass.py). The first launch keeps a split in
registers if it fits ("parts", one_pass.py), or loops over it ("loop", here), which works for all sizes. No atomics:
results are bitwise reproducible.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from sfast_ext.kernels.backend import cuda_tier
from sfast_ext.kernels.backend.registry import Declined, kernel, require
from sfast_ext.kernels.backend.triton_runtime import (
    DTYPES,
    MAX_GRID_YZ,
    cdiv,
    channels_inner,
    channels_outer,
    constexpr,
    device_of,
    is_dry_run,
    jit,
    launch_kernel,
    multiprocessors,
    next_power_of_2,
    pdl_wait,
    tl,
)
from sfast_ext.kernels.group_norm import one_pass as tiles
from sfast_ext.kernels.group_norm import portable, two_pass
from sfast_ext.kernels.group_norm.two_pass import MAX_PARTS, Norm, Parts, normalise

_PATHS: tuple[str, ...] = ("whole", "parts")  # tried in this order before "loop"; paths not named are off
_FITS = {"whole": tiles.whole, "parts": tiles.parts}
_MAX_CHANNELS = 1 << 20  # offsets inside tiles are 32-bit
_MAX_PIXELS = 1 << 30  # of an image; loops over them are 32-bit
_BLOCK = 128  # channels of a tile, unless a group is wider
_MAX_WIDTH = 4096  # channels of the widest supported group
_PROGRAMS = 2  # per multiprocessor
_LARGE = 6 << 20  # elements of a batch from which twice as many programs use the bandwidth better
_TILE = 2048  # elements of a tile


def reference(
    x: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None, eps: float, shift: Tensor | None = None,
    silu: bool = False, out_dtype: torch.dtype | None = None, patches: bool = False, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """x (N, C, ...) plus shift (N, C), normalised by groups, times weight (C,), plus bias (C,), then SiLU.

    Channels last, in out_dtype (default: x's). Computes in float32 (float64 if x is) and rounds once. patches:
    return the im2col matrix of the result instead, see `patches_of`. out: memory that the result may take; not
    overwritten here.
    """
    compute = torch.promote_types(x.dtype, torch.float32)
    y = x.to(compute)
    if shift is not None:
        y = y + shift.to(compute).reshape(*x.shape[:2], *[1] * (x.dim() - 2))
    # not F.group_norm, which refuses one value per group; contiguous, as torch's channels-last CPU kernel computes the
    # variance as E[x^2] - E[x]^2
    weight, bias = (None if vector is None else vector.to(compute) for vector in (weight, bias))
    y = torch.group_norm(y.contiguous(), groups, weight, bias, eps)
    y = channels_outer(channels_inner((F.silu(y) if silu else y).to(out_dtype or x.dtype)))
    return patches_of(y) if patches else y


def patches_of(y: Tensor) -> Tensor:
    """im2col for a 3x3 convolution with padding 1: (N, C, H, W) -> (N, H, W, 9 C), each pixel's nine neighbours row by
    row.

    Its product with the convolution's weight in NHWC, (K, 9 C), is the convolution.
    """
    height, width = y.shape[2:]
    padded = F.pad(channels_inner(y), (0, 0, 1, 1, 1, 1))
    seen = [padded[:, i : i + height, j : j + width] for i in range(3) for j in range(3)]
    return torch.stack(seen, 3).flatten(3)


def accepts_patches(x: Tensor, groups: int, *, triton: bool = True) -> bool:
    """Whether the kernel itself, in Triton or else in CUDA C++, writes the im2col matrix for such an x."""
    if x.dim() != 4:
        return False
    pixels, width = x.shape[2] * x.shape[3], x.shape[1] // groups
    if triton:
        return fitting(pixels, groups, width)[0] == "whole"
    return portable.accepts_patches(pixels, width, x.dtype)


def accepts_out(x: Tensor, groups: int, *, triton: bool = True, fused: bool = False) -> bool:
    """Whether a norm of such an x takes given memory, that of x too: it is written by a second launch, after all of x
    was read. With `fused`, x is the first summand of what is normalised."""
    if x.dim() != 4 or not x.numel():
        return False
    pixels, width = x.shape[2] * x.shape[3], x.shape[1] // groups
    if triton:
        return fitting(pixels, groups, width)[0] != "whole"
    return not portable.is_one_launch(pixels, width, x.dtype, fused)


def room(out: Tensor | None, x: Tensor, inner: Tensor, dtype: torch.dtype) -> Tensor | None:
    """`out` as (N, ..., C), if it has room for the norm of x; `inner` is x as (N, ..., C). None: new memory is
    needed."""
    if out is None or out.dtype != dtype or out.shape != x.shape:
        return None
    if out is x or is_dry_run():  # each argument is a separate stand-in there
        return inner
    return channels_inner(out) if out.is_contiguous(memory_format=torch.channels_last) else None


def empty(inner: Tensor, dtype: torch.dtype, patches: bool) -> Tensor:
    """An uninitialised result for input (N, ..., C)."""
    channels = inner.shape[-1] * (9 if patches else 1)
    return torch.empty((*inner.shape[:-1], channels), dtype=dtype, device=inner.device)


# Grid (split, block of channels, image). x is (N, pixels, channels); a block is WIDTH channels, whole groups of
# group_width; partial is (2, N, splits, groups) in float32, means first.


@jit(do_not_specialize=["pixels", "per_split", "groups", "group_width", "shift_stride", "has_shift"])
def group_norm_looped_statistics_kernel(
    x, shift, partial, pixels, per_split, channels, groups, group_width, shift_stride, has_shift, WIDTH: constexpr,
    BLOCK: constexpr, GROUPS: constexpr, PIXELS: constexpr, PDL: constexpr,
):  # fmt: skip
    pdl_wait(PDL)
    image = tl.program_id(2).to(tl.int64)
    column = tl.arange(0, BLOCK)
    channel = tl.program_id(1) * WIDTH + column
    inside = (column < WIDTH) & (channel < channels)
    begin = tl.program_id(0) * per_split
    end = tl.minimum(begin + per_split, pixels)
    base = x + image * pixels * channels + channel

    # Deviations from the split's first pixel. As that is one of the values, the sum of squares is at most (1 + count)
    # times M2, which bounds cancellation however large the mean is.
    centre = tl.load(base + begin.to(tl.int64) * channels, mask=inside, other=0.0).to(tl.float32)
    sums = tl.zeros([PIXELS, BLOCK], tl.float32)
    squares = tl.zeros([PIXELS, BLOCK], tl.float32)
    for first in range(begin, end, PIXELS):
        pixel = first + tl.arange(0, PIXELS)
        mask = (pixel < end)[:, None] & inside[None, :]
        value = tl.load(base[None, :] + pixel.to(tl.int64)[:, None] * channels, mask=mask, other=0.0).to(tl.float32)
        deviation = tl.where(mask, value - centre[None, :], 0.0)
        sums += deviation
        squares += deviation * deviation
    count = (end - begin).to(tl.float32)
    deviations = tl.sum(sums, 0)
    m2 = tl.maximum(tl.sum(squares, 0) - deviations * deviations / count, 0.0)
    mean = centre + deviations / count
    shifted = inside & (has_shift != 0)
    mean += tl.load(shift + image * shift_stride + channel, mask=shifted, other=0.0).to(tl.float32)

    # Channels to groups by a membership matrix, as group widths are seldom powers of two.
    lane = tl.arange(0, GROUPS)
    member = ((column // group_width)[:, None] == lane[None, :]) & inside[:, None]
    group_mean = tl.sum(tl.where(member, mean[:, None], 0.0), 0) / group_width.to(tl.float32)
    delta = mean - tl.sum(tl.where(member, group_mean[None, :], 0.0), 1)
    m2 += count * delta * delta
    group_m2 = tl.sum(tl.where(member, m2[:, None], 0.0), 0)

    group = tl.program_id(1) * (WIDTH // group_width) + lane
    valid = (lane < WIDTH // group_width) & (group < groups)
    at = (image * tl.num_programs(0) + tl.program_id(0)) * groups + group
    size = tl.num_programs(2).to(tl.int64) * tl.num_programs(0) * groups
    tl.store(partial + at, group_mean, mask=valid)
    tl.store(partial + size + at, group_m2, mask=valid)


def _channel_blocks(groups: int, group_width: int) -> tuple[int, int]:
    """(blocks of channels, groups per block): balanced, and multiples of 8 channels if possible."""
    step = 8 // math.gcd(group_width, 8)  # whole groups in 16 bytes of fp16
    most = max(1, _BLOCK // group_width)
    if most >= step:
        most -= most % step
    each = cdiv(groups, cdiv(groups, most))
    if most >= step:
        each = min(most, cdiv(each, step) * step)
    return cdiv(groups, each), each


def _pixel_splits(pixels: int, others: int, programs: int) -> tuple[int, int]:
    """(splits of an image, pixels per split), for about so many programs in all."""
    wanted = max(1, min(MAX_PARTS, cdiv(programs, others)))
    each = cdiv(cdiv(pixels, wanted), 8) * 8  # eight pixels are one access by each of 128 threads
    return cdiv(pixels, each), each


def fitting(pixels: int, groups: int, group_width: int) -> tuple[str, tiles.Tile | None]:
    """The first of _PATHS that fits such an image, and its tile; else ("loop", None)."""
    if groups * group_width <= _MAX_CHANNELS:
        for path in _PATHS:
            tile = _FITS[path](pixels, groups, group_width)
            if tile is not None:
                return path, tile
    return "loop", None


def _loop(inner: Tensor, shift: Tensor | None, groups: int) -> tuple[Tensor, Parts]:
    """Statistics of inner (N, ..., C) by the looping kernel, and the parts they are of."""
    batch, channels = inner.shape[0], inner.shape[-1]
    pixels, group_width = inner.numel() // (batch * channels), channels // groups
    blocks, block_groups = _channel_blocks(groups, group_width)
    block = max(_BLOCK, next_power_of_2(group_width))
    programs = _PROGRAMS * multiprocessors(device_of(inner)) * (2 if inner.numel() >= _LARGE else 1)
    splits, per_split = _pixel_splits(pixels, blocks * batch, programs)
    partial = torch.empty((2, batch, splits, groups), dtype=torch.float32, device=inner.device)
    sizes = (pixels, per_split, channels, groups, group_width)
    launch_kernel(
        group_norm_looped_statistics_kernel,
        (splits, blocks, batch),
        inner,
        inner if shift is None else shift,
        partial,
        *sizes,
        0 if shift is None else shift.stride(0),
        int(shift is not None),
        WIDTH=block_groups * group_width,
        BLOCK=block,
        GROUPS=max(16 if block == _BLOCK else 1, next_power_of_2(block_groups)),
        PIXELS=max(1, _TILE // block),
        num_warps=4 if block <= 512 else 8,
    )
    return partial, Parts.of_rows(pixels, per_split)


@kernel(
    reference,
    writes=9,
    portable=True,
    cuda_sources=portable.SOURCES,
    triton_functions=(
        group_norm_looped_statistics_kernel,
        tiles.group_norm_one_pass_kernel,
        tiles.group_norm_part_statistics_kernel,
        two_pass.group_norm_combine_kernel,
        two_pass.group_norm_normalise_kernel,
    ),
)
def launch(
    x: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None, eps: float, shift: Tensor | None = None,
    silu: bool = False, out_dtype: torch.dtype | None = None, patches: bool = False, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """`reference` in one launch, or in two or three that read x twice, the second time mostly from L2.

    x (N, C, ...) is made channels last, shift (N, C) dense in C, weight and bias (C,) contiguous; float16, bfloat16 or
    float32, in CUDA C++ one dtype for all operands. Groups up to 4,096 channels wide, C up to 2**20. Patches that the
    kernel does not write are made of its result. A result of two launches or three is written to `out` (N, C, H, W), if
    that has its shape and dtype and is channels last; it may be x.
    """
    batch, channels = x.shape[:2]
    dtype = out_dtype or x.dtype
    triton, reason = cuda_tier.tier(portable.SOURCES, x, weight, bias, shift)
    require(reason)
    if groups < 1 or channels % groups or channels > _MAX_CHANNELS or channels // groups > _MAX_WIDTH:
        raise Declined("groups that do not divide the channels, or too many channels")
    if max(batch, groups) > MAX_GRID_YZ or not 0 < x.numel() < _MAX_PIXELS * batch * channels:
        raise Declined("no elements, or too many")
    if dtype not in DTYPES or (shift is not None and shift.shape != (batch, channels)):
        raise Declined("another dtype of the result, or a shift of another shape")
    if patches and not accepts_patches(x, groups, triton=triton):
        return patches_of(launch(x, groups, weight, bias, eps, shift, silu, out_dtype))
    inner = channels_inner(x)
    pixels, group_width = inner.numel() // (batch * channels), channels // groups
    shift = shift if shift is None or shift.stride(1) == 1 else shift.contiguous()
    norm = Norm(weight, bias, eps, silu, dtype).contiguous()
    if not triton:
        given = room(out, x, inner, dtype)
        done = portable.normalised(portable.Inputs(inner, shift), groups, norm, patches, given)
        if done is None and patches:
            return patches_of(launch(x, groups, weight, bias, eps, shift, silu, out_dtype))
        if done is None:
            raise Declined("images or groups that are too large")
        return done[1] if patches else channels_outer(done[1])
    rows, shift_stride = (inner, 0) if shift is None else (shift, shift.stride(0))
    vectors = (rows, *(inner if vector is None else vector for vector in norm[:2]))
    affine = (shift_stride, *(int(vector is not None) for vector in (shift, weight, bias)), int(silu))

    path, tile = fitting(pixels, groups, group_width)
    if tile is not None and path == "whole":
        y = empty(inner, dtype, patches)
        units = group_width // tile.constants["UNIT"]
        operands = (inner, *vectors, y, pixels, channels, units)
        last = (*affine, inner.shape[-2], eps)
        launch_kernel(
            tiles.group_norm_one_pass_kernel, (groups, batch), *operands, *last, PATCHES=patches, **tile.constants
        )
        return y if patches else channels_outer(y)

    if tile is not None:
        partial = torch.empty((2, batch, tile.parts, groups), dtype=torch.float32, device=x.device)
        units = tile.groups * group_width // tile.constants["UNIT"]
        sizes = (pixels, channels, groups, group_width, units, *affine[:2])
        grid = (tile.blocks, tile.parts, batch)
        launch_kernel(tiles.group_norm_part_statistics_kernel, grid, inner, rows, partial, *sizes, **tile.constants)
        parts = Parts.of_rows(pixels, tile.constants["PIXELS"])
    else:
        partial, parts = _loop(inner, shift, groups)
    return channels_outer(normalise(inner, shift, norm, partial, parts, room(out, x, inner, dtype)))
