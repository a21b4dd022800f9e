"""A linear layer, bias and residual, and the layer norm of the sum: csrc/linear_layer_norm.cu, for Hopper.

Blocks with parts of the same rows exchange the rows' statistics, so that the sum is normalised in registers. Elsewhere
a GEMM of cuBLAS and add_layer_norm are separate kernels.
"""

from __future__ import annotations

import ctypes
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from sfast_ext.kernels.backend import cuda_tier, nvrtc, smem_ring
from sfast_ext.kernels.backend.registry import SLOWER, Declined, kernel, require
from sfast_ext.kernels.backend.triton_runtime import cdiv, device_of, is_dry_run, launch_kernel, multiprocessors
from sfast_ext.kernels.pointwise import add_layer_norm, layer_norm

_MAX_PARTS = 16  # tiles of a row
_RECORD = 2  # 8-byte words of a block's statistics of a row
_VECTORS = 3  # in shared memory: post_bias, norm_weight, norm_bias
# model of cuBLAS's GEMM and the norm after it on an NVIDIA H200, within a tenth: microseconds of two launches, TFLOP/s,
# TB/s, and additional microseconds per million elements that exceed the L2 cache
_APART, _RATE, _BANDWIDTH = 5.2, 790, 4.5
_IN_CACHE, _BEYOND = 2.6, 0.75
_IN_DOUBT = 1.05  # ratio of the two models up to which one kernel is preferred to two


class Tile(NamedTuple):
    """A tile, rows (M) by columns (N), and the model of a wave's time on an NVIDIA H200 in microseconds, by which the
    fastest is chosen."""

    rows: int
    width: int
    start: float  # and end
    step: float  # of 64 of K
    pair: int = 1  # blocks that share the weight by multicast
    per_multiprocessor: int = 1


TILES = [
    Tile(128, 160, 5.6, 0.465, pair=2),
    Tile(128, 160, 5.4, 0.485),
    Tile(64, 160, 5.8, 0.55, per_multiprocessor=2),
    Tile(64, 160, 3.6, 0.43),
    Tile(128, 80, 5.0, 0.33),
    Tile(64, 80, 3.9, 0.235),
    Tile(192, 128, 6.6, 0.535, pair=2),
]


def reference(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, norm_weight: Tensor | None,
    norm_bias: Tensor | None, eps: float, post_bias: Tensor | None = None, records: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(sum, y): sum = x @ weight.T + bias + residual; y its layer norm, times norm_weight, plus norm_bias.

    x (..., K), weight (N, K), residual (..., N); bias, norm_weight, norm_bias, post_bias (N,). Computes in float32
    (float64 if x is). The sum is rounded once, to x's dtype; y is computed from the rounded sum and rounded once.
    post_bias is added to the returned sum, after the norm has read it. records is for the kernel, see `launch`.
    """
    compute = torch.promote_types(x.dtype, torch.float32)
    out_sum = F.linear(x.to(compute), weight.to(compute), None if bias is None else bias.to(compute))
    if residual is not None:
        out_sum = out_sum + residual.to(compute)
    out_sum = out_sum.to(x.dtype)
    y = layer_norm.reference(out_sum, norm_weight, norm_bias, eps)
    return out_sum if post_bias is None else (out_sum.to(compute) + post_bias.to(compute)).to(x.dtype), y


def fallback(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, norm_weight: Tensor | None,
    norm_bias: Tensor | None, eps: float, post_bias: Tensor | None = None, records: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`reference` as a GEMM of cuBLAS and a norm."""
    if residual is None:
        out_sum = F.linear(x, weight, bias)
        y = layer_norm.launch(out_sum, norm_weight, norm_bias, eps)
        return out_sum if post_bias is None else out_sum + post_bias, y
    return add_layer_norm.launch(F.linear(x, weight), residual, norm_weight, norm_bias, eps, None, bias, post_bias)


def accepts(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, *others: Tensor | None
) -> str | None:
    """Why the kernel does not take the operands on this GPU; None if it does, see `launch`.

    Args:
        others: norm_weight, norm_bias, post_bias.
    """
    vectors = bias, *others
    unfit = cuda_tier.accepts(_SOURCE, x, weight, residual, *vectors)
    if unfit is not None:
        return unfit
    if weight.dim() != 2 or not x.numel() or x.shape[-1] != weight.shape[1] or weight.shape[1] % 8:
        return "other shapes, or a depth that is no multiple of 8"
    if any(t.shape != (weight.shape[0],) for t in vectors if t is not None):
        return "vectors of another shape"
    if residual is not None and residual.shape != (*x.shape[:-1], weight.shape[0]):
        return "a residual of another shape"
    # x is made contiguous
    read = [t for t in (weight, residual, *vectors, x if x.is_contiguous() else None) if t is not None]
    if is_dry_run() or all(t.is_contiguous() and t.data_ptr() % 16 == 0 for t in read):
        return None
    return "operands that are not contiguous, or not aligned to 16 bytes"


def profitable(rows: int, columns: int, depth: int, device: torch.device) -> bool:
    """Whether the kernel is supported on this GPU, has tiles for a GEMM of M rows, N columns and K depth, and is faster
    than cuBLAS's GEMM and a norm."""
    if not _SOURCE.supported(device):
        return False
    tile = best(rows, columns, depth, device)
    elements = 1e-6 * rows * columns
    apart = _APART + elements * (2 * depth / _RATE + 8 / _BANDWIDTH) + _BEYOND * max(elements - _IN_CACHE, 0)
    return _microseconds(rows, columns, depth, tile, device) < _IN_DOUBT * apart


def best(rows: int, columns: int, depth: int, device: torch.device) -> Tile:
    """The fastest tile by the model."""
    return min(TILES, key=lambda tile: _microseconds(rows, columns, depth, tile, device))


def _microseconds(rows: int, columns: int, depth: int, tile: Tile, device: torch.device) -> float:
    if not _fits(tile, columns):
        return math.inf
    parts = columns // tile.width
    waves = cdiv(_tiles_down(rows, tile) * parts, _at_once(parts, tile, device))
    return waves * (tile.start + tile.step * cdiv(depth, smem_ring.DEPTH))


def _fits(tile: Tile, columns: int) -> bool:
    return columns % tile.width == 0 and 0 < columns // tile.width <= _MAX_PARTS


def _tiles_down(rows: int, tile: Tile) -> int:
    """M tiles, or pairs of them."""
    return cdiv(cdiv(rows, tile.rows), tile.pair)


def _at_once(parts: int, tile: Tile, device: torch.device) -> int:
    """Blocks, or pairs of them, of a wave: all of a row or none, as they wait for each other."""
    return max(1, multiprocessors(device) * tile.per_multiprocessor // tile.pair // parts) * parts


def record_count(rows: int, columns: int, depth: int, device: torch.device) -> int:
    """Size of `records` for the tile that `launch` uses: int64 words."""
    tile = best(rows, columns, depth, device)
    return _records_of(rows, columns, tile)


def _records_of(rows: int, columns: int, tile: Tile) -> int:
    return _RECORD * columns // tile.width * _tiles_down(rows, tile) * tile.pair * tile.rows


def _count(x: Tensor) -> int:
    return x.numel() // max(x.shape[-1], 1)


def constants(tile: Tile, columns: int, dtype: torch.dtype) -> dict[str, int]:
    """The kernel's compile-time parameters."""
    return {
        "ROWS": tile.rows,
        "WIDTH": tile.width,
        "PARTS": columns // tile.width,
        "STAGES": smem_ring.stages(tile.width, False, tile.rows, (2 * tile.rows + 2 * _VECTORS) * tile.width),
        "PAIR": tile.pair,
        "BF16": int(dtype == torch.bfloat16),
    }


def variants(given: dict[str, int]) -> list[dict[str, int]]:
    """Constants that other image sizes may need if one needs the given ones."""
    columns, dtype = given["WIDTH"] * given["PARTS"], torch.bfloat16 if given["BF16"] else torch.float16
    return [constants(tile, columns, dtype) for tile in TILES if _fits(tile, columns)]


def shared_bytes(constants: dict[str, int]) -> int:
    """Dynamic shared memory of a block in bytes: stages, and a tile of the result."""
    rows, width = constants["ROWS"], constants["WIDTH"]
    return smem_ring.shared_bytes(width, constants["STAGES"], False, rows) + 2 * rows * width


def _prepared(
    out_sum: Tensor, out: Tensor, x: Tensor, weight: Tensor, residual: Tensor | None, bias: Tensor | None,
    post_bias: Tensor | None, norm_weight: Tensor | None, norm_bias: Tensor | None, records: Tensor, eps: float,
    **constants: int,
) -> tuple[list[Any], int, int]:  # fmt: skip
    count, (columns, depth), size = _count(x), weight.shape, x.element_size()
    rows, width, pair = constants["ROWS"], constants["WIDTH"], constants["PAIR"]

    def boxes(t: Tensor, height: int) -> Any:
        # the widest swizzle that divides a tile's columns: 64 bytes, or 32
        return nvrtc.tensor_map(t, [columns, count], [size * columns], [16 if width % 32 else 32, height])

    maps = [
        boxes(out_sum, 64),
        boxes(out, 64),
        nvrtc.tensor_map(x, [depth, count], [size * depth], [smem_ring.DEPTH, rows]),
        nvrtc.tensor_map(weight, [depth, columns], [size * depth], [smem_ring.DEPTH, width // pair]),
        boxes(out_sum if residual is None else residual, rows),
    ]
    down = cdiv(cdiv(count, rows), pair)
    numbers = ctypes.c_float(eps), ctypes.c_int(cdiv(depth, smem_ring.DEPTH)), ctypes.c_int(down)
    added = ctypes.c_int(residual is not None)
    args = [*maps, added, bias, post_bias, norm_weight, norm_bias, records, *numbers]
    return args, 2 * rows + 128, shared_bytes(constants)


_NAMES = (
    "out_sum",
    "out",
    "x",
    "weight",
    "residual",
    "bias",
    "post_bias",
    "norm_weight",
    "norm_bias",
    "records",
    "eps",
)
_SOURCE = nvrtc.Source("linear_layer_norm", _prepared, _NAMES, variants, ("weight",), hopper=True)


def _launch(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, norm_weight: Tensor | None,
    norm_bias: Tensor | None, eps: float, post_bias: Tensor | None, records: Tensor | None, tile: Tile,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    rows, columns, device = _count(x), weight.shape[0], device_of(x)
    out_sum, out = (torch.empty((*x.shape[:-1], columns), dtype=x.dtype, device=x.device) for _ in range(2))
    if records is None:
        records = torch.zeros(_records_of(rows, columns, tile), dtype=torch.int64, device=x.device)
    assert records.numel() >= _records_of(rows, columns, tile), "records of another size"
    parts = columns // tile.width
    grid = min(_tiles_down(rows, tile) * parts, _at_once(parts, tile, device)) * tile.pair
    operands = out_sum, out, x.contiguous(), weight, residual, bias, post_bias, norm_weight, norm_bias, records, eps
    launch_kernel(_SOURCE, (grid,), *operands, **constants(tile, columns, x.dtype))
    return out_sum, out


@kernel(reference, fallback=fallback, uses=(add_layer_norm.launch, layer_norm.launch), cuda_sources=(_SOURCE,))
def launch(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, norm_weight: Tensor | None,
    norm_bias: Tensor | None, eps: float, post_bias: Tensor | None = None, records: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`reference` in one launch on Hopper, if that is `profitable`; else by `fallback`.

    All in one dtype, float16 or bfloat16. x (..., K) is made contiguous, the others are, all aligned to 16 bytes; K a
    multiple of 8, N of 80 or 128, up to 16 tiles of it.

    Args:
        records: `record_count` int64 zeros, or as a launch of the same sizes left them; launches that share them must
            not overlap. Allocated here if they are None.
    """
    require(accepts(x, weight, bias, residual, norm_weight, norm_bias, post_bias))
    sizes = _count(x), *weight.shape, device_of(x)
    if not profitable(*sizes):
        raise Declined(SLOWER)
    return _launch(x, weight, bias, residual, norm_weight, norm_bias, eps, post_bias, records, best(*sizes))
