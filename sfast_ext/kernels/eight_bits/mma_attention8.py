"""Attention over many keys whose products of queries and keys are of 8-bit integers, on tensor cores of any card from
compute capability 7.5 on: csrc/mma_attention8.cu, csrc/quantise_keys.cu.

A key has a factor, after the mean of some of its head's keys is subtracted, which changes no softmax (SageAttention,
Zhang et al. 2024). A query has a factor. The softmax and the products with values are those of `mma_attention`.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from sfast_ext.kernels.attention import mma_attention
from sfast_ext.kernels.attention.mma_attention import Shape
from sfast_ext.kernels.attention.operands import in_base_2, like_queries, reference, strides
from sfast_ext.kernels.backend import health, nvrtc, triton_runtime
from sfast_ext.kernels.backend.registry import kernel
from sfast_ext.kernels.backend.triton_runtime import cdiv, device_of, launch_kernel, multiprocessors
from sfast_ext.kernels.eight_bits.quantise_rows import LARGEST, SMALLEST

DEPTH = 32
"""Columns of a product: a head's are filled up with zeros."""
SAMPLES = 64
"""Keys of a head whose mean is subtracted."""
_MAX_KEYS = 2**20  # 4096 times which is 32-bit
_MAX_OFFSET = 2**31
_FACTORS = 64
"""The factors of a head are a multiple of these: as many as the keys of a stage are copied at once."""
THREADS = 128
"""Of a block that quantises keys."""
_TURNS = 4


def quantised_keys(k: Tensor) -> tuple[Tensor, Tensor]:
    """k (B, H, S, D) -> (codes (B, H, S, D) int8, factors (B, H, S) float32), in plain PyTorch."""
    wide = k.float()
    rest = wide - mean(wide)
    largest = rest.abs().amax(-1, keepdim=True)
    some = (largest >= SMALLEST) & largest.isfinite()
    scale = torch.where(some, largest / LARGEST, 1.0)
    codes = torch.where(some, (rest / scale).round(), 0.0).to(torch.int8)
    return codes, torch.where(largest.isfinite(), scale, float("nan")).squeeze(-1)


def mean(keys: Tensor) -> Tensor:
    """(B, H, 1, D): that of `SAMPLES` of the keys (B, H, S, D), which are spread over all of them."""
    places = [(i * SAMPLES + i * 23 % SAMPLES) * keys.shape[2] // SAMPLES**2 for i in range(SAMPLES)]
    return torch.cat([keys[:, :, at : at + 1] for at in places], 2).mean(2, keepdim=True)


def accepts(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> str | None:
    """Why `launch` does not take q (B, H, L, D), k and v (B, H, S, D); None if it does: what `mma_attention` takes,
    with more keys than one of its stages holds."""
    device = device_of(q)
    unfit = health.reason("mma_attention8", device) or mma_attention.accepts(q, k, v, scale)
    if unfit is not None:
        return unfit
    if not all(source.supported(device) for source in SOURCES):
        return "kernels in CUDA C++ are not for this device, or not compiled here"
    images, heads, keys, size = k.shape
    if keys <= mma_attention.MAX_KEYS_AT_ONCE:
        return "few keys"
    too_many = keys >= _MAX_KEYS or heads * keys * depth(size) >= _MAX_OFFSET
    return "offsets beyond 32 bits" if too_many else None


def depth(size: int) -> int:
    """Codes of a key."""
    return cdiv(size, DEPTH) * DEPTH


def shared_bytes(size: int, given: Shape) -> int:
    """Dynamic shared memory of a block in bytes: keys, values and factors, twice."""
    return 2 * given.keys * ((depth(size) // 16 | 1) * 16 + (size // 8 | 1) * 16 + 4)


def constants(size: int, given: Shape, dtype: torch.dtype, half_sums: bool = False) -> dict[str, int]:
    """The compile-time parameters of csrc/mma_attention8.cu."""
    found = mma_attention.constants(size, given, dtype, half_sums)
    del found["ONCE"]
    return found


def keys_constants(size: int, dtype: torch.dtype) -> dict[str, int]:
    """The compile-time parameters of csrc/quantise_keys.cu."""
    lanes = triton_runtime.next_power_of_2(depth(size) // 8)
    return {"TYPE": int(dtype == torch.bfloat16), "SIZE": size, "LANES": lanes, "TURNS": _TURNS}


def _prepared_keys(
    k: Tensor, codes: Tensor, factors: Tensor, heads: int, keys: int, key_factors: int, *offsets: int, **constants: int
) -> tuple[list[Any], int, int]:
    numbers = map(ctypes.c_int, (heads, keys, key_factors))
    return [k, codes, factors, *numbers, *_strides(offsets)], THREADS, 0


def _prepared(
    out: Tensor, q: Tensor, codes: Tensor, factors: Tensor, v: Tensor, heads: int, queries: int, keys: int,
    key_factors: int, scale: float, *offsets: int, **constants: int,
) -> tuple[list[Any], int, int]:  # fmt: skip
    keys_of_stage, tiles, warps, blocks = (constants[name] for name in ("KEYS", "TILES", "WARPS", "BLOCKS"))
    given = Shape(keys_of_stage, tiles, warps, blocks)
    numbers = map(ctypes.c_int, (heads, queries, keys, key_factors))
    args = [out, q, codes, factors, v, *numbers, ctypes.c_float(scale), *_strides(offsets)]
    return args, 32 * given.warps, shared_bytes(constants["SIZE"], given)


def _strides(offsets: tuple[int, ...]) -> list[Any]:
    types = (ctypes.c_longlong, ctypes.c_int, ctypes.c_int)  # of images, rows and heads
    return [types[i % 3](offset) for i, offset in enumerate(offsets)]


def _offsets(*names: str) -> tuple[str, ...]:
    return tuple(f"{x}_{name}" for x in names for name in ("image", "row", "head"))


KEYS_SOURCE = nvrtc.Source(
    "quantise_keys", _prepared_keys, ("k", "codes", "factors", "heads", "keys", "key_factors", *_offsets("k"))
)
_NAMES = ("out", "q", "codes", "factors", "v", "heads", "queries", "keys", "key_factors", "scale")
_SOURCE = nvrtc.Source("mma_attention8", _prepared, (*_NAMES, *_offsets("q", "v", "out")))
SOURCES = (_SOURCE, KEYS_SOURCE)


def keys_in_8_bits(k: Tensor) -> tuple[Tensor, Tensor]:
    """`quantised_keys` by its kernel: codes (B, H, S, `depth`), with zeros behind those of a key, and factors (B, H,
    S'), of which the first S are those of the keys."""
    images, heads, keys, size = k.shape
    codes = torch.empty((images, heads, keys, depth(size)), dtype=torch.int8, device=k.device)
    key_factors = cdiv(keys, _FACTORS) * _FACTORS
    factors = torch.empty((images, heads, key_factors), dtype=torch.float32, device=k.device)
    given = keys_constants(size, k.dtype)
    grid = (cdiv(keys, _TURNS * (THREADS // given["LANES"])), images * heads)
    launch_kernel(KEYS_SOURCE, grid, k, codes, factors, heads, keys, key_factors, *strides(k), **given)
    return codes, factors


@kernel(reference, part=True, cuda_sources=SOURCES)
def launch(q: Tensor, k: Tensor, v: Tensor, scale: float | None, half_sums: bool = False) -> Tensor:
    """`operands.reference` for operands that it `accepts`. The result is laid out like q.

    Args:
        half_sums: see `mma_attention.launch`.
    """
    images, heads, queries, size = q.shape
    device = device_of(q)
    codes, factors = keys_in_8_bits(k)
    chosen = mma_attention.shape(size, k.shape[2], images * heads * queries, multiprocessors(device))
    if half_sums:
        chosen = mma_attention.half_sums_shape(chosen, size, triton_runtime.capability(device))
    out = like_queries(q)
    grid = (cdiv(queries, chosen.rows), images * heads)
    offsets = [offset for x in (q, v, out) for offset in strides(x)]
    numbers = heads, queries, k.shape[2], factors.shape[2], in_base_2(scale, size), *offsets
    given = constants(size, chosen, q.dtype, half_sums)
    launch_kernel(_SOURCE, grid, out, q, codes, factors, v, *numbers, **given)
    return out
