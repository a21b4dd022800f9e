"""Attention over many keys, with heads of 40, 64 or 80: csrc/flash_attention.cu, for Hopper.

cuDNN computes heads of 40 as such of 64, those of 80 as such of 128.
"""

from __future__ import annotations

import ctypes
import functools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sfast_ext.kernels.attention import operands
from sfast_ext.kernels.attention.operands import can_be_mapped, heads_map, in_base_2, like_queries, strides
from sfast_ext.kernels.backend import health, nvrtc
from sfast_ext.kernels.backend.triton_runtime import INTERPRETED, cdiv, device_of, multiprocessors, start

_ROWS, _KEYS = 64, 64
_WIDE, _NARROW = 64, 16  # columns of a key that go to shared memory together: the first, and where there are more
# Fitted to what 54 sizes took on an NVIDIA H200: what is chosen by it takes 0.5 % longer than the quickest, on average.
_BETWEEN = 120  # keys that a block could have read in the time from one place to the next
_BY_BLOCKS = 0.8  # of a round's time, the share that a multiprocessor is spared of blocks that it does not have
_FEWEST_KEYS = 256  # for which a ring of blocks of keys is worth its start


class Shape(NamedTuple):
    """How the rows of a head are cut up; by measurements on an NVIDIA H200."""

    groups: int  # of 64 rows each in a block
    blocks: int  # on a multiprocessor
    stages: int
    lag: int
    sum_by_mma: bool
    even: bool = False  # as many blocks as multiprocessors, with as much to do each
    fewest: int = 0  # keys for which it is an answer
    round: float = 1.0  # what a round takes, of time and energy, beside those of the other shapes for the same size
    fill: float = 0.0  # the least share of their rounds that blocks fill, for the kernel to be the faster way


SHAPES = {
    40: [Shape(4, 1, 12, 2, True, fill=0.7)],
    64: [
        Shape(1, 4, 3, 1, False, round=1.08),
        Shape(2, 2, 6, 2, True, fewest=768),
        Shape(4, 1, 12, 4, True, even=True, fewest=_FEWEST_KEYS, round=1.03),
    ],
    80: [Shape(2, 1, 10, 3, True, round=0.82), Shape(3, 1, 9, 3, True)],
}


def takes(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> bool:
    """Whether `launch` can read the operands, and is the faster way."""
    if health.reason("flash_attention", device_of(q)) is not None:
        return False
    if not reads(q, k, v, scale) or k.shape[2] < _FEWEST_KEYS:
        return False
    shape = best(q, k)
    return _filled(q, shape) >= shape.fill


def best(q: Tensor, k: Tensor) -> Shape:
    """What takes the shortest time for q (B, H, L, D) and k (B, H, S, D)."""
    shapes = [shape for shape in SHAPES[q.shape[3]] if k.shape[2] >= shape.fewest]
    return min(shapes, key=lambda shape: _taken(q, k, shape))


def _taken(q: Tensor, k: Tensor, shape: Shape) -> float:
    """Rounds of blocks, beside those of the other shapes for the same size."""
    divided, between = division(q, shape), _BETWEEN / k.shape[2]
    if shape.even:
        if not divided.stacks:
            return math.inf  # blocks with nothing but shares were slower at any size
        return (divided.rounds + cdiv(divided.stacks + divided.shares, divided.blocks) * between) * shape.round
    # in a last round that is not full, a multiprocessor with fewer blocks is done sooner
    by_blocks = cdiv(divided.blocks, multiprocessors(device_of(q))) / shape.blocks
    return (_BY_BLOCKS * by_blocks + (1 - _BY_BLOCKS) * divided.rounds) * (1 + between) * shape.round


def _filled(q: Tensor, shape: Shape) -> float:
    """The share of their rounds that blocks fill."""
    divided = division(q, shape)
    return divided.blocks / (divided.rounds * multiprocessors(device_of(q)) * shape.blocks)


class Division(NamedTuple):
    """What blocks take: so many stacks, of `groups` times 64 rows of a head each; before these, 64 at a time, the rows
    of the stacks that are parted and of each head's end that makes no stack."""

    stacks: int
    parted: int
    shares: int  # times 64 rows
    blocks: int
    rounds: float  # of stacks, in the time of what takes longest


def division(q: Tensor, shape: Shape) -> Division:
    """What blocks take of q (B, H, L, D)."""
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

    return min(by(stacks), by(stacks - stacks % at_once), key=lambda division: division.rounds)


def reads(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> bool:
    """Whether `launch` can read the operands, on this GPU."""
    if q.shape[-1] not in SHAPES or INTERPRETED or not operands.takes(q, k, v, scale):
        return False
    if not can_be_mapped(k, v):
        return False
    # queries are read by twos
    if q.data_ptr() % 4 or any(stride % 2 for stride in q.stride()[:3]):
        return False
    return _KERNEL.available(device_of(q))


def launch(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
    """`attention.reference` without a mask, of operands that it `reads`; _cuda.Unavailable where it cannot be had."""
    size, shape, out = q.shape[3], best(q, k), like_queries(q)
    stacks, parted, shares, blocks, _ = division(q, shape)
    operands = out, q, k, v, in_base_2(scale, size), stacks, parted, shares
    start(_KERNEL, (blocks,), *operands, **constants(size, shape, q.dtype))
    return out


def constants(size: int, shape: Shape, dtype: torch.dtype) -> dict[str, int]:
    """What the kernel is compiled for."""
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


def siblings(given: dict[str, int]) -> list[dict[str, int]]:
    """What another size of picture may ask for where this one asks for the given constants."""
    size, dtype = given["SIZE"], torch.bfloat16 if given["BF16"] else torch.float16
    return [constants(size, shape, dtype) for shape in SHAPES[size]]


def shared_bytes(given: dict[str, int]) -> int:
    """What a block asks for: 1 KB to begin at, keys and values, and what two groups have of 64 rows."""
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
_KERNEL = nvrtc.Source("flash_attention", _prepared, _NAMES, siblings, ())
