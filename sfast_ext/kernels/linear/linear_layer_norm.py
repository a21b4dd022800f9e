"""A linear layer, what is added to its result, and the layer norm of the sum: csrc/linear_layer_norm.cu, for Hopper.

Blocks that have parts of the same rows tell each other what they know of these, so that the sum is normalised while it
lies in registers. Elsewhere a product of cuBLAS and the kernel of add_layer_norm follow each other.
"""

from __future__ import annotations

import ctypes
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from sfast_ext.kernels.backend import nvrtc, smem_ring
from sfast_ext.kernels.backend.triton_runtime import (
    INTERPRETED,
    are_collected,
    cdiv,
    device_of,
    hopper,
    multiplies,
    multiprocessors,
    runs,
    start,
)
from sfast_ext.kernels.pointwise import add_layer_norm, layer_norm

USES = (add_layer_norm, layer_norm)

_MOST_PARTS = 16  # of a row
_RECORD = 2  # numbers of 8 bytes
_VECTORS = 3  # of a tile's columns, in shared memory
# of cuBLAS's product and the norm after it, on an NVIDIA H200, to a tenth: microseconds of two launches, TFLOP/s, TB/s,
# and microseconds more of a million elements where they do not all stay in the L2 cache
_APART, _RATE, _BANDWIDTH = 5.2, 790, 4.5
_IN_CACHE, _BEYOND = 2.6, 0.75
_IN_DOUBT = 1.05  # where the two are that near, one kernel is better than two


class Tile(NamedTuple):
    """What a block computes, rows by columns of the result, and the microseconds a round of blocks takes on an NVIDIA
    H200, by which the quickest is chosen."""

    rows: int
    width: int
    start: float  # and end
    step: float  # of 64 terms of the sum
    pair: int = 1  # blocks that share what they load of the weight
    beside: int = 1  # blocks of a multiprocessor


TILES = [
    Tile(128, 160, 5.6, 0.465, pair=2),
    Tile(128, 160, 5.4, 0.485),
    Tile(64, 160, 5.8, 0.55, beside=2),
    Tile(64, 160, 3.6, 0.43),
    Tile(128, 80, 5.0, 0.33),
    Tile(64, 80, 3.9, 0.235),
    Tile(192, 128, 6.6, 0.535, pair=2),
]


def reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    factor: Tensor | None,
    offset: Tensor | None,
    eps: float,
    after: Tensor | None = None,
    records: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(sum, y): sum = x @ weight.T + bias + residual, y its layer norm, times factor, plus offset.

    x (..., K), weight (N, K), residual (..., N); bias, factor, offset, after (N,). Computes in float32 (float64 where x
    is). The sum is rounded once, to x's dtype; y comes from the rounded sum, and is rounded once. `after` is added to
    the sum that is handed out, once the norm has it. `records` is for the kernel, see `launch`.
    """
    compute = torch.promote_types(x.dtype, torch.float32)
    total = F.linear(x.to(compute), weight.to(compute), None if bias is None else bias.to(compute))
    if residual is not None:
        total = total + residual.to(compute)
    total = total.to(x.dtype)
    y = layer_norm.reference(total, factor, offset, eps)
    return total if after is None else (total.to(compute) + after.to(compute)).to(x.dtype), y


def launch(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    factor: Tensor | None,
    offset: Tensor | None,
    eps: float,
    after: Tensor | None = None,
    records: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`reference` by the kernel where it is there and the quicker way, else by two kernels.

    records: `record_count` zeros of int64, or as a launch of the same sizes left them; of launches that share them none
    may begin before the last has ended. Made here where they are not given.
    """
    if takes(x, weight, bias, residual, factor, offset, after):
        try:
            tile = best(_count(x), weight.shape[0], weight.shape[1], device_of(x))
            return _launch(x, weight, bias, residual, factor, offset, eps, after, records, tile)
        except nvrtc.Unavailable:
            pass  # the log has it; it is not asked again
    if residual is None:
        total = F.linear(x, weight, bias)
        y = layer_norm.launch(total, factor, offset, eps)
        return total if after is None else total + after, y
    return add_layer_norm.launch(F.linear(x, weight), residual, factor, offset, eps, None, bias, after)


def takes(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    factor: Tensor | None,
    offset: Tensor | None,
    after: Tensor | None = None,
) -> bool:
    """Whether the kernel can read the operands, on this GPU, and is the faster way."""
    tensors = [bias, residual, factor, offset, after]
    given = [t for t in tensors if t is not None]
    if INTERPRETED or not runs(x, weight, *tensors) or not multiplies(x) or weight.dim() != 2 or not x.numel():
        return False
    columns, depth = weight.shape
    if any(t.dtype != x.dtype for t in (weight, *given)) or x.shape[-1] != depth or depth % 8:
        return False
    if any(t.shape != (columns,) for t in (bias, factor, offset, after) if t is not None):
        return False
    if residual is not None and residual.shape != (*x.shape[:-1], columns):
        return False
    # x is laid out anew where that is wanted
    read = [weight, *given, x] if x.is_contiguous() else [weight, *given]
    if not are_collected() and not all(t.is_contiguous() and t.data_ptr() % 16 == 0 for t in read):
        return False
    return pays(_count(x), columns, depth, device_of(x))


def pays(rows: int, columns: int, depth: int, device: torch.device) -> bool:
    """Whether the kernel runs on this GPU, has tiles for a product of these sizes, and is quicker than cuBLAS's product
    and a norm."""
    if not hopper(device) or not _KERNEL.available(device):
        return False
    tile = best(rows, columns, depth, device)
    elements = 1e-6 * rows * columns
    apart = _APART + elements * (2 * depth / _RATE + 8 / _BANDWIDTH) + _BEYOND * max(elements - _IN_CACHE, 0)
    return _microseconds(rows, columns, depth, tile, device) < _IN_DOUBT * apart


def best(rows: int, columns: int, depth: int, device: torch.device) -> Tile:
    """What takes the shortest time."""
    return min(TILES, key=lambda tile: _microseconds(rows, columns, depth, tile, device))


def _microseconds(rows: int, columns: int, depth: int, tile: Tile, device: torch.device) -> float:
    if not _fits(tile, columns):
        return math.inf
    parts = columns // tile.width
    rounds = cdiv(_tiles_down(rows, tile) * parts, _at_once(parts, tile, device))
    return rounds * (tile.start + tile.step * cdiv(depth, smem_ring.DEPTH))


def _fits(tile: Tile, columns: int) -> bool:
    return columns % tile.width == 0 and 0 < columns // tile.width <= _MOST_PARTS


def _tiles_down(rows: int, tile: Tile) -> int:
    """By pairs, where blocks are."""
    return cdiv(cdiv(rows, tile.rows), tile.pair)


def _at_once(parts: int, tile: Tile, device: torch.device) -> int:
    """Blocks, or pairs of them, that are launched: those of a row all or none, as they wait for each other."""
    return max(1, multiprocessors(device) * tile.beside // tile.pair // parts) * parts


def record_count(rows: int, columns: int, depth: int, device: torch.device) -> int:
    """Numbers that blocks leave for each other, of the tile that is taken."""
    tile = best(rows, columns, depth, device)
    return _records_of(rows, columns, tile)


def _records_of(rows: int, columns: int, tile: Tile) -> int:
    return _RECORD * columns // tile.width * _tiles_down(rows, tile) * tile.pair * tile.rows


def _count(x: Tensor) -> int:
    return x.numel() // max(x.shape[-1], 1)


def _launch(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    factor: Tensor | None,
    offset: Tensor | None,
    eps: float,
    after: Tensor | None,
    records: Tensor | None,
    tile: Tile,
) -> tuple[Tensor, Tensor]:
    rows, columns, device = _count(x), weight.shape[0], device_of(x)
    total, out = (torch.empty((*x.shape[:-1], columns), dtype=x.dtype, device=x.device) for _ in range(2))
    if records is None:
        records = torch.zeros(_records_of(rows, columns, tile), dtype=torch.int64, device=x.device)
    assert records.numel() >= _records_of(rows, columns, tile), "records of another size"
    parts = columns // tile.width
    grid = min(_tiles_down(rows, tile) * parts, _at_once(parts, tile, device)) * tile.pair
    operands = total, out, x.contiguous(), weight, residual, bias, after, factor, offset, records, eps
    start(_KERNEL, (grid,), *operands, **constants(tile, columns, x.dtype))
    return total, out


def constants(tile: Tile, columns: int, dtype: torch.dtype) -> dict[str, int]:
    """What the kernel is compiled for."""
    return {
        "ROWS": tile.rows,
        "WIDTH": tile.width,
        "PARTS": columns // tile.width,
        "STAGES": smem_ring.stages(tile.width, False, tile.rows, (2 * tile.rows + 2 * _VECTORS) * tile.width),
        "PAIR": tile.pair,
        "BF16": int(dtype == torch.bfloat16),
    }


def siblings(given: dict[str, int]) -> list[dict[str, int]]:
    """What another size of picture may ask for where this one asks for the given constants."""
    columns, dtype = given["WIDTH"] * given["PARTS"], torch.bfloat16 if given["BF16"] else torch.float16
    return [constants(tile, columns, dtype) for tile in TILES if _fits(tile, columns)]


def shared_bytes(constants: dict[str, int]) -> int:
    """What a block asks for: slots, and a tile of the result."""
    rows, width = constants["ROWS"], constants["WIDTH"]
    return smem_ring.shared_bytes(width, constants["STAGES"], False, rows) + 2 * rows * width


def _prepared(
    total: Tensor,
    out: Tensor,
    x: Tensor,
    weight: Tensor,
    residual: Tensor | None,
    bias: Tensor | None,
    after: Tensor | None,
    factor: Tensor | None,
    offset: Tensor | None,
    records: Tensor,
    eps: float,
    **constants: int,
) -> tuple[list[Any], int, int]:
    count, (columns, depth), size = _count(x), weight.shape, x.element_size()
    rows, width, pair = constants["ROWS"], constants["WIDTH"], constants["PAIR"]

    def boxes(t: Tensor, height: int) -> Any:
        # the widest that a tile's columns are a multiple of: 64 bytes, or 32
        return nvrtc.tensor_map(t, [columns, count], [size * columns], [16 if width % 32 else 32, height])

    maps = [
        boxes(total, 64),
        boxes(out, 64),
        nvrtc.tensor_map(x, [depth, count], [size * depth], [smem_ring.DEPTH, rows]),
        nvrtc.tensor_map(weight, [depth, columns], [size * depth], [smem_ring.DEPTH, width // pair]),
        boxes(total if residual is None else residual, rows),
    ]
    down = cdiv(cdiv(count, rows), pair)
    numbers = ctypes.c_float(eps), ctypes.c_int(cdiv(depth, smem_ring.DEPTH)), ctypes.c_int(down)
    added = ctypes.c_int(residual is not None)
    args = [*maps, added, bias, after, factor, offset, records, *numbers]
    return args, 2 * rows + 128, shared_bytes(constants)


_NAMES = ("total", "out", "x", "weight", "residual", "bias", "after", "factor", "offset", "records", "eps")
_KERNEL = nvrtc.Source("linear_layer_norm", _prepared, _NAMES, siblings, ("weight",))
