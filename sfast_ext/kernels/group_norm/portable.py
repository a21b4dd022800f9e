"""Group norm in CUDA C++ for any card: csrc/group_norm_statistics.cu and csrc/group_norm_normalise.cu.

Two launches: statistics of parts of each image, then their combination and the normalisation. No atomics: results are
bitwise reproducible.
"""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sfast_ext.kernels.backend import cuda_tier, nvrtc
from sfast_ext.kernels.backend.triton_runtime import cdiv, device_of, launch_kernel, multiprocessors

_THREADS = 256  # of a block, unless one pixel has more accesses
_MOST_PARTS = 128  # which each normalising block reads
_BLOCKS = 4  # per multiprocessor
_PIXELS = 4  # of a thread at least
_MOST_SHARED = 48 << 10  # bytes that every card gives a block


class Shape(NamedTuple):
    """Threads of a block: `lanes` pixels at a time, each by channels / pack threads."""

    pack: int
    lanes: int
    threads: int


def shape(channels: int, pack: int) -> Shape | None:
    """The shape of blocks; None for channels that they do not take."""
    across = channels // pack
    if across > cuda_tier.MOST_THREADS:
        return None
    lanes = max(1, _THREADS // across)
    if 8 * lanes * channels > _MOST_SHARED:
        return None
    # where channels are few the rest of the threads help with the groups
    return Shape(pack, lanes, max(_THREADS, cdiv(across * lanes, 32) * 32))


def pixels_per_block(pixels: int, images: int, lanes: int, blocks: int, most: int) -> int:
    """Pixels of a block, for about so many blocks in all and at most so many of an image."""
    wanted = max(1, min(most, cdiv(blocks, images)))
    return max(cdiv(pixels, wanted), min(pixels, _PIXELS * lanes))


def usable(x: Tensor, *others: Tensor | None) -> bool:
    """Whether both kernels can be launched with these tensors, see `cuda_tier.usable`."""
    return all(cuda_tier.usable(source, x, *others) for source in SOURCES)


def normalised(
    inner: Tensor,
    groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    shift: Tensor | None,
    silu: bool,
    dtype: torch.dtype,
) -> Tensor | None:
    """Group norm of inner (N, ..., C), as `group_norm.reference`; None for a shape that the kernels do not take.

    Args:
        inner, weight, bias, shift: `usable`. weight, bias: (C,), contiguous. shift: (N, C), its rows contiguous.
    """
    images, channels = inner.shape[0], inner.shape[-1]
    pixels = inner.numel() // (images * channels)
    stride = 0 if shift is None else shift.stride(0)
    pack = cuda_tier.pack(channels, inner, weight, bias, shift)
    while pack > 1 and stride % pack:
        pack //= 2
    found = shape(channels, pack)
    if found is None or _normalise_bytes(found.threads, groups) > _MOST_SHARED:
        return None
    blocks = _BLOCKS * multiprocessors(device_of(inner))
    per_part = pixels_per_block(pixels, images, found.lanes, blocks, _MOST_PARTS)
    per_block = pixels_per_block(pixels, images, found.lanes, blocks, pixels)
    parts = cdiv(pixels, per_part)
    partial = torch.empty((2, images, parts, groups), dtype=torch.float32, device=inner.device)
    out = torch.empty(inner.shape, dtype=dtype, device=inner.device)
    sizes = (pixels, per_part, channels, groups, found.lanes, stride)
    more = (pixels, per_block, per_part, parts, channels, groups, found.lanes, stride, eps)
    kind = cuda_tier.TYPES[inner.dtype]
    last = {"TYPE": kind, "OUT": cuda_tier.TYPES[dtype], "PACK": pack, "SILU": int(silu)}
    launch_kernel(STATISTICS, (parts, images), inner, shift, partial, *sizes, TYPE=kind, PACK=pack)
    grid = (cdiv(pixels, per_block), images)
    launch_kernel(NORMALISE, grid, inner, shift, weight, bias, partial, out, *more, **last)
    return out


def _normalise_bytes(threads: int, groups: int) -> int:
    return 4 * (2 + threads // 32) * groups


def _threads(channels: int, pack: int) -> int:
    found = shape(channels, pack)
    assert found is not None
    return found.threads


def _prepared_statistics(*args: Any, **constants: int) -> tuple[list[Any], int, int]:
    tensors, numbers = args[:3], args[3:]
    _, _, channels, _, lanes, _ = numbers
    return [*tensors, *map(ctypes.c_int, numbers)], _threads(channels, constants["PACK"]), 8 * lanes * channels


def _prepared_normalise(*args: Any, **constants: int) -> tuple[list[Any], int, int]:
    tensors, numbers, eps = args[:6], args[6:-1], args[-1]
    channels, groups = numbers[4:6]
    values = [*map(ctypes.c_int, numbers), ctypes.c_float(eps)]
    threads = _threads(channels, constants["PACK"])
    return [*tensors, *values], threads, _normalise_bytes(threads, groups)


STATISTICS = nvrtc.Source(
    "group_norm_statistics",
    _prepared_statistics,
    ("x", "shift", "partial", "pixels", "per_part", "channels", "groups", "lanes", "shift_stride"),
)
NORMALISE = nvrtc.Source(
    "group_norm_normalise",
    _prepared_normalise,
    (
        "x", "shift", "weight", "bias", "partial", "out", "pixels", "per_block", "per_part", "parts", "channels",
        "groups", "lanes", "shift_stride", "eps",
    ),
)  # fmt: skip
SOURCES = (STATISTICS, NORMALISE)
