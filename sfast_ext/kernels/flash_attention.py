"""Attention over many keys, with heads of 40, 64 or 80: csrc/flash_attention.cu, for Hopper.

cuDNN computes heads of 40 as such of 64, those of 80 as such of 128.
"""

from __future__ import annotations

import ctypes
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sfast_ext.kernels import _attention, _cuda
from sfast_ext.kernels._attention import can_be_mapped, heads_map, in_base_2, like_queries, strides
from sfast_ext.kernels._triton import INTERPRETED, cdiv, device_of, multiprocessors, start

_ROWS, _KEYS = 64, 64
_WIDE, _NARROW = 64, 16  # columns of a key that go to shared memory together: the first, and where there are more
_FEWEST_KEYS = 256  # for which a ring of blocks of keys is worth its start


class Shape(NamedTuple):
    """How the rows of a head are cut up; by measurements on an NVIDIA H200."""

    groups: int  # of 64 rows each in a block
    blocks: int  # on a multiprocessor
    stages: int
    lag: int
    sum_by_product: bool
    fewest: int = 0  # keys for which it is an answer
    round: float = 1.0  # what a round of blocks takes, beside those of the other shapes for the same size
    fill: float = 0.0  # the least share of their rounds that blocks fill, for the kernel to be the faster way


SHAPES = {
    40: [Shape(4, 1, 12, 2, True, fill=0.7)],
    64: [Shape(1, 4, 3, 1, False), Shape(2, 2, 6, 2, True, fewest=2048, round=0.93)],
    80: [Shape(2, 1, 10, 3, True, round=0.82), Shape(3, 1, 9, 3, True)],
}


def takes(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> bool:
    """Whether `launch` can read the operands, and is the faster way."""
    if not reads(q, k, v, scale) or k.shape[2] < _FEWEST_KEYS:
        return False
    shape = best(q, k)
    rounds = _rounds(q, shape)
    return rounds >= shape.fill * math.ceil(rounds)


def best(q: Tensor, k: Tensor) -> Shape:
    """What takes the shortest time for q (B, H, L, D) and k (B, H, S, D)."""
    shapes = [shape for shape in SHAPES[q.shape[3]] if k.shape[2] >= shape.fewest]
    return min(shapes, key=lambda shape: math.ceil(_rounds(q, shape)) * shape.round)


def _rounds(q: Tensor, shape: Shape) -> float:
    blocks = q.shape[0] * q.shape[1] * cdiv(q.shape[2], _ROWS * shape.groups)
    return blocks / (multiprocessors(device_of(q)) * shape.blocks)


def reads(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> bool:
    """Whether `launch` can read the operands, on this GPU."""
    if q.shape[-1] not in SHAPES or INTERPRETED or not _attention.takes(q, k, v, scale):
        return False
    if not can_be_mapped(k, v):
        return False
    # queries are read by twos
    if q.data_ptr() % 4 or any(stride % 2 for stride in q.stride()[:3]):
        return False
    return _KERNEL.available(device_of(q))


def launch(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
    """`attention.reference` without a mask, of operands that it `reads`; _cuda.Unavailable where it cannot be had."""
    images, heads, queries, size = q.shape
    shape, out = best(q, k), like_queries(q)
    grid = cdiv(queries, _ROWS * shape.groups), images * heads
    start(_KERNEL, grid, out, q, k, v, in_base_2(scale, size), **constants(size, shape, q.dtype))
    return out


def constants(size: int, shape: Shape, dtype: torch.dtype) -> dict[str, int]:
    """What the kernel is compiled for."""
    return {
        "SIZE": size,
        "GROUPS": shape.groups,
        "BLOCKS": shape.blocks,
        "STAGES": shape.stages,
        "LAG": shape.lag,
        "SUM_BY_PRODUCT": int(shape.sum_by_product),
        "BF16": int(dtype == torch.bfloat16),
    }


def siblings(given: dict[str, int]) -> list[dict[str, int]]:
    """What another size of picture may ask for where this one asks for the given constants."""
    size, dtype = given["SIZE"], torch.bfloat16 if given["BF16"] else torch.float16
    return [constants(size, shape, dtype) for shape in SHAPES[size]]


def shared_bytes(size: int, stages: int) -> int:
    """What a block asks for: 1 KB to begin at, keys and values."""
    return 1024 + stages * 2 * _KEYS * 2 * (_WIDE + (_NARROW if size > _WIDE else 0))


def _prepared(
    out: Tensor, q: Tensor, k: Tensor, v: Tensor, scale: float, **constants: int
) -> tuple[list[Any], int, int]:
    maps = [heads_map(x, _WIDE, _KEYS) for x in (k, v)]
    if q.shape[3] > _WIDE:
        maps += [heads_map(x, _NARROW, _KEYS) for x in (k, v)]
    numbers = [ctypes.c_int(x) for x in (q.shape[1], q.shape[2], k.shape[2])]
    offsets = [ctypes.c_longlong(x) for x in (*strides(q), *strides(out))]
    args = [out, q, *maps, *numbers, ctypes.c_float(scale), *offsets]
    return args, 128 * constants["GROUPS"], shared_bytes(q.shape[3], constants["STAGES"])


_KERNEL = _cuda.Source("flash_attention", _prepared, ("out", "q", "k", "v", "scale"), siblings, ())
