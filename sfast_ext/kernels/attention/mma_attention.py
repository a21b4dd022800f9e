"""Attention on tensor cores of any card from compute capability 7.5 on: csrc/mma_attention.cu.

The head dimension is not padded: FlashAttention-2 computes 40 as 64, and 80 as 96.
"""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sfast_ext.kernels.attention.operands import (
    accepts_alignment,
    accepts_layout,
    in_base_2,
    like_queries,
    reference,
    strides,
)
from sfast_ext.kernels.backend import cuda_tier, health, nvrtc, triton_runtime
from sfast_ext.kernels.backend.registry import kernel
from sfast_ext.kernels.backend.triton_runtime import (
    HALF,
    cdiv,
    device_of,
    launch_kernel,
    multiprocessors,
)

_TURING, _AMPERE, _HOPPER = (7, 5), (8, 0), (9, 0)
MAX_SIZE = 160
"""The widest heads."""
_MAX_SIZE_OF_TWO_TILES = 48
MAX_SIZE_IN_HALF = 96
"""Head dimension for whose sums in half precision there are registers."""


class Shape(NamedTuple):
    """A configuration of the kernel."""

    keys: int  # of a stage
    tiles: int  # of 16 rows, of a warp
    warps: int  # of a block
    blocks: int  # per multiprocessor, for which registers suffice
    once: bool = False  # whether all keys are in one stage

    @property
    def rows(self) -> int:
        """Of queries, of a block."""
        return 16 * self.tiles * self.warps


_FEW = (16, 80, 160)
"""Keys that one stage may hold: of a few image tokens, of a prompt, and of a prompt twice as long."""
MAX_KEYS_AT_ONCE = _FEW[-1]
# Heads wider than that hold only the first two of them, and still wider ones none, for lack of shared memory on 7.5
_WIDE, _WIDER, _MAX_KEYS_OF_WIDE = 64, 128, 80
# by measurements on an NVIDIA H100, of a block's time: with 16 rows a warp, against half of one with 32
_HALVES = 1.1


def shape(size: int, keys: int, rows: int, multiprocessors: int) -> Shape:
    """The configuration for a head dimension, keys, and rows of queries of all heads."""
    few = next((n for n in _FEW if keys <= n), None)
    if few is not None and (size <= _WIDE or (size <= _WIDER and few <= _MAX_KEYS_OF_WIDE)):
        blocks = 2 if few > _MAX_KEYS_OF_WIDE or size > 80 else 3 if size > _WIDE else 4
        return Shape(few, 1, 4, blocks, once=True)
    if size > 96:
        return Shape(32, 1, 4, 2)
    if size > 64:
        return Shape(64, 1, 8, 1)
    found = [Shape(64, 2, 4, 2), Shape(64, 1, 4, 3)]

    def waves(given: Shape) -> float:
        count = cdiv(cdiv(rows, given.rows), multiprocessors * given.blocks)
        return count * given.blocks * given.rows * (_HALVES if given.tiles == 1 else 1)

    return min(found, key=waves)


def shared_bytes(size: int, given: Shape) -> int:
    """Dynamic shared memory of a block in bytes: keys and values, and queries if those do not begin in a stage."""
    rows = 2 * given.keys + given.rows if given.once else 4 * given.keys
    return rows * (size // 8 | 1) * 16


def accepts(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> str | None:
    """Why `launch` does not take q (B, H, L, D), k and v (B, H, S, D); None if it does: in half precision, bfloat16
    from 8.0 on, D a multiple of 8 up to 160, rows aligned to 16 bytes."""
    device = device_of(q)
    if health.reason("mma_attention", device) is not None or q.dtype not in HALF:
        return "it is disabled, or another dtype than float16 and bfloat16"
    unfit = accepts_layout(q, k, v, scale) or cuda_tier.accepts(_SOURCE, q, k, v)
    if unfit is not None:
        return unfit
    if q.shape[3] % 8 or q.shape[3] > MAX_SIZE:
        return "heads whose width is no multiple of 8 up to 160"
    if triton_runtime.capability(device) < (_TURING if q.dtype == torch.float16 else _AMPERE):
        return "tensor cores do not take the dtype"
    return accepts_alignment(q, k, v)


def sums_in_half(k: Tensor) -> bool:
    """Whether `launch` may add up in half precision: k (B, H, S, D) in float16, with more keys than one stage holds, as
    with few the time is that of memory, and heads no wider than `MAX_SIZE_IN_HALF`."""
    return k.dtype == torch.float16 and k.shape[2] > MAX_KEYS_AT_ONCE and k.shape[3] <= MAX_SIZE_IN_HALF


def half_sums_shape(given: Shape, size: int, capability: tuple[int, int]) -> Shape:
    """`shape` with sums in half precision. They take more registers, of which NVRTC spills some on 7.5 and from 9.0 on
    if heads are wide (docs/generated/cuda.md)."""
    spills = size > _MAX_SIZE_OF_TWO_TILES and size <= _WIDE and not _AMPERE <= capability < _HOPPER
    return Shape(64, 1, 4, 2) if spills else given


def constants(size: int, given: Shape, dtype: torch.dtype, half_sums: bool = False) -> dict[str, int]:
    """The kernel's compile-time parameters."""
    return {
        "TYPE": int(dtype == torch.bfloat16),
        "SIZE": size,
        "KEYS": given.keys,
        "TILES": given.tiles,
        "WARPS": given.warps,
        "BLOCKS": given.blocks,
        "ONCE": int(given.once),
        "HALF_SUMS": int(half_sums),
    }


def _prepared(
    out: Tensor, q: Tensor, k: Tensor, v: Tensor, heads: int, queries: int, keys: int, rounds: int, scale: float,
    *offsets: int, **constants: int,
) -> tuple[list[Any], int, int]:  # fmt: skip
    numbers = map(ctypes.c_int, (heads, queries, keys, rounds))
    types = (ctypes.c_longlong, ctypes.c_int, ctypes.c_int)  # of images, rows and heads
    strides = [types[i % 3](offset) for i, offset in enumerate(offsets)]
    keys_of_stage, tiles, warps, blocks = (constants[name] for name in ("KEYS", "TILES", "WARPS", "BLOCKS"))
    given = Shape(keys_of_stage, tiles, warps, blocks, bool(constants["ONCE"]))
    args = [out, q, k, v, *numbers, ctypes.c_float(scale), *strides]
    return args, 32 * warps, shared_bytes(constants["SIZE"], given)


_NAMES = ("out", "q", "k", "v", "heads", "queries", "keys", "rounds", "scale")
_OFFSETS = tuple(f"{x}_{name}" for x in ("q", "k", "v", "out") for name in ("image", "row", "head"))
_SOURCE = nvrtc.Source("mma_attention", _prepared, (*_NAMES, *_OFFSETS))


@kernel(reference, part=True, cuda_sources=(_SOURCE,))
def launch(q: Tensor, k: Tensor, v: Tensor, scale: float | None, half_sums: bool = False) -> Tensor:
    """`operands.reference` for operands that it `accepts`. The result is laid out like q.

    Args:
        half_sums: products of probabilities and values are added up in float16 over the keys of a stage, for k that
            `sums_in_half`. GeForce cards do that at twice the rate.
    """
    images, heads, queries, size = q.shape
    at_once = multiprocessors(device_of(q))
    chosen = shape(size, k.shape[2], images * heads * queries, at_once)
    if half_sums:
        chosen = half_sums_shape(chosen, size, triton_runtime.capability(device_of(q)))
    stacks = cdiv(queries, chosen.rows)
    # a block keeps few keys for as many rows as make a single wave
    rounds = cdiv(stacks * images * heads, chosen.blocks * at_once) if chosen.once else 1
    out = like_queries(q)
    grid = (cdiv(stacks, rounds), images * heads)
    offsets = [offset for x in (q, k, v, out) for offset in strides(x)]
    numbers = heads, queries, k.shape[2], rounds, in_base_2(scale, size), *offsets
    launch_kernel(_SOURCE, grid, out, q, k, v, *numbers, **constants(size, chosen, q.dtype, half_sums))
    return out
