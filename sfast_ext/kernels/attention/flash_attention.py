"""Attention over many keys, with head dimension 40, 64 or 80: csrc/flash_attention.cu, for Hopper.

Not padded: cuDNN computes 40 as 64, and 80 as 128.
"""

from __future__ import annotations

import ctypes
import functools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sfast_ext.kernels.attention import operands
from sfast_ext.kernels.attention.operands import accepts_alignment, heads_map, in_base_2, like_queries, strides
from sfast_ext.kernels.backend import cuda_tier, health, nvrtc
from sfast_ext.kernels.backend.registry import kernel
from sfast_ext.kernels.backend.triton_runtime import cdiv, device_of, launch_kernel, multiprocessors

_ROWS, _KEYS = 64, 64
_WIDE, _NARROW = 64, 16  # columns of a TMA box of keys: the first 64, and those beyond
# A model fitted to 54 sizes on an NVIDIA H200; its choice is 0.5 % slower than the fastest on average.
_BETWEEN = 120  # time between two work items of a block, in keys
_BY_BLOCKS = 0.8  # of a wave's time, the share proportional to the blocks of a multiprocessor
_MIN_KEYS = 256  # that are worth the start of the ring


class Shape(NamedTuple):
    """A configuration of the kernel, and the model of its time by measurements on an NVIDIA H200."""

    groups: int  # warpgroups of a block, 64 rows each
    blocks: int  # per multiprocessor
    stages: int
    lag: int
    sum_by_mma: bool
    even: bool = False  # persistent: one block per multiprocessor, with equal work
    fewest: int = 0  # keys from which it is considered
    wave_cost: float = 1.0  # of a wave, in time and energy, relative to the other shapes of the same size
    fill: float = 0.0  # least occupancy of its waves at which the kernel is faster than cuDNN


SHAPES = {
    40: [Shape(4, 1, 12, 2, True, fill=0.7)],
    64: [
        Shape(1, 4, 3, 1, False, wave_cost=1.08),
        Shape(2, 2, 6, 2, True, fewest=768),
        Shape(4, 1, 12, 4, True, even=True, fewest=_MIN_KEYS, wave_cost=1.03),
    ],
    80: [Shape(2, 1, 10, 3, True, wave_cost=0.82), Shape(3, 1, 9, 3, True)],
}


def accepts(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> str | None:
    """Why `launch` does not take the operands; None if it does: heads of 40, 64 or 80 in half precision on Hopper, k
    and v aligned to 16 bytes, q to pairs of elements."""
    if health.reason("flash_attention", device_of(q)) is not None:
        return "it is disabled"
    if q.shape[-1] not in SHAPES:
        return "heads that are not 40, 64 or 80 wide"
    unfit = cuda_tier.accepts(_SOURCE, q, k, v) or operands.accepts_layout(q, k, v, scale) or accepts_alignment(k, v)
    if unfit is None and (q.data_ptr() % 4 or any(stride % 2 for stride in q.stride()[:3])):
        return "queries that are not in aligned pairs"
    return unfit


def profitable(q: Tensor, k: Tensor) -> bool:
    """Whether `launch` is faster than cuDNN, for operands that it `accepts`."""
    if k.shape[2] < _MIN_KEYS:
        return False
    shape = best(q, k)
    return _fill(q, shape) >= shape.fill


def best(q: Tensor, k: Tensor) -> Shape:
    """The fastest shape for q (B, H, L, D) and k (B, H, S, D), by the model."""
    shapes = [shape for shape in SHAPES[q.shape[3]] if k.shape[2] >= shape.fewest]
    return min(shapes, key=lambda shape: _cost(q, k, shape))


def _cost(q: Tensor, k: Tensor, shape: Shape) -> float:
    """Time of a shape in waves, relative to the other shapes of the same size."""
    divided, between = division(q, shape), _BETWEEN / k.shape[2]
    if shape.even:
        if not divided.stacks:
            return math.inf  # blocks with shares only were slower at any size
        return (divided.waves + cdiv(divided.stacks + divided.shares, divided.blocks) * between) * shape.wave_cost
    # in a last, partial wave a multiprocessor with fewer blocks finishes earlier
    by_blocks = cdiv(divided.blocks, multiprocessors(device_of(q))) / shape.blocks
    return (_BY_BLOCKS * by_blocks + (1 - _BY_BLOCKS) * divided.waves) * (1 + between) * shape.wave_cost


def _fill(q: Tensor, shape: Shape) -> float:
    """The occupancy of the waves: blocks over their capacity."""
    divided = division(q, shape)
    return divided.blocks / (divided.waves * multiprocessors(device_of(q)) * shape.blocks)


class Division(NamedTuple):
    """Work items: `stacks` of `groups` times 64 rows of a head; before these `shares` of 64 rows, which are the parted
    stacks and the ends of heads that make no stack."""

    stacks: int
    parted: int
    shares: int  # times 64 rows
    blocks: int
    waves: float  # of stacks, in the time of the longest block


def division(q: Tensor, shape: Shape) -> Division:
    """The work items of q (B, H, L, D)."""
    heads, units = q.shape[0] * q.shape[1], cdiv(q.shape[2], _ROWS)
    if shape.even:
        return _evenly(heads, units, shape.groups, multiprocessors(device_of(q)))
    stacks = heads * cdiv(units, shape.groups)
    return Division(stacks, 0, 0, stacks, math.ceil(stacks / (multiprocessors(device_of(q)) * shape.blocks)))


@functools.lru_cache(maxsize=256)
def _evenly(heads: int, units: int, groups: int, at_once: int) -> Division:
    stacks, odd = heads * (units // groups), heads * (units % groups)

    def by(whole: int) -> Division:
        shares = (stacks - whole) * groups + odd
        blocks = min(whole + shares, at_once)
        longest = 0.0
        for block in range(blocks):
            taken, shared = (len(range(block, n, blocks)) for n in (whole + shares, shares))
            longest = max(longest, taken - shared + shared / groups)
        return Division(whole, stacks - whole, shares, blocks, longest)

    return min(by(stacks), by(stacks - stacks % at_once), key=lambda division: division.waves)


def constants(size: int, shape: Shape, dtype: torch.dtype) -> dict[str, int]:
    """The kernel's compile-time parameters."""
    return {
        "SIZE": size,
        "GROUPS": shape.groups,
        "BLOCKS": shape.blocks,
        "STAGES": shape.stages,
        "LAG": shape.lag,
        "SUM_BY_MMA": int(shape.sum_by_mma),
        "EVEN": int(shape.even),
        "BF16": int(dtype == torch.bfloat16),
    }


def variants(given: dict[str, int]) -> list[dict[str, int]]:
    """Constants that other image sizes may need if one needs the given ones."""
    size, dtype = given["SIZE"], torch.bfloat16 if given["BF16"] else torch.float16
    return [constants(size, shape, dtype) for shape in SHAPES[size]]


def shared_bytes(given: dict[str, int]) -> int:
    """Dynamic shared memory of a block in bytes: alignment, keys and values, and partial results of two warpgroups."""
    size = given["SIZE"]
    parts = 2 * _ROWS * (4 * size + 8) if given["EVEN"] else 0
    return 1024 + given["STAGES"] * 2 * _KEYS * 2 * (_WIDE + (_NARROW if size > _WIDE else 0)) + parts


def _prepared(
    out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    stacks: int,
    parted: int,
    shares: int,
    **constants: int,
) -> tuple[list[Any], int, int]:
    maps = [heads_map(x, _WIDE, _KEYS) for x in (k, v)]
    if q.shape[3] > _WIDE:
        maps += [heads_map(x, _NARROW, _KEYS) for x in (k, v)]
    numbers = [ctypes.c_int(x) for x in (q.shape[1], q.shape[2], k.shape[2], stacks, parted, shares)]
    offsets = [ctypes.c_longlong(x) for x in (*strides(q), *strides(out))]
    args = [out, q, *maps, *numbers, ctypes.c_float(scale), *offsets]
    return args, 128 * constants["GROUPS"], shared_bytes(constants)


_NAMES = ("out", "q", "k", "v", "scale", "stacks", "parted", "shares")
_SOURCE = nvrtc.Source("flash_attention", _prepared, _NAMES, variants, (), hopper=True)


@kernel(operands.reference, part=True, cuda_sources=(_SOURCE,))
def launch(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
    """`operands.reference` for operands that it `accepts`: q (B, H, L, D), k and v (B, H, S, D). The result is laid out
    like q."""
    size, shape, out = q.shape[3], best(q, k), like_queries(q)
    stacks, parted, shares, blocks, _ = division(q, shape)
    operands = out, q, k, v, in_base_2(scale, size), stacks, parted, shares
    launch_kernel(_SOURCE, (blocks,), *operands, **constants(size, shape, q.dtype))
    return out
