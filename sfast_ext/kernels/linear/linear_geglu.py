"""A linear layer and the GEGLU of its result as one matrix product: csrc/linear_geglu.cu, for Hopper.

The gates never reach memory. Values and gates are rows of one weight, n and N + n; a tile has as many of both.
"""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from sfast_ext.kernels.backend import nvrtc, smem_ring
from sfast_ext.kernels.backend.triton_runtime import (
    INTERPRETED,
    cdiv,
    device_of,
    multiplies,
    multiprocessors,
    runs,
    start,
)
from sfast_ext.kernels.pointwise import geglu

USES = (geglu,)

_LEAST_SHARE = 0.9  # of a GPU's multiprocessors that tiles must fill: of fewer cuBLAS makes more
_ALONE = 1.02  # what a tile takes that shares nothing, for the same tile in a pair


class Tile(NamedTuple):
    """What a block computes at a time, and the microseconds it takes on an NVIDIA H200."""

    width: int  # columns of the product: values and gates
    start: float
    step: float  # of 64 terms of the sum
    pair: int = 2  # blocks that share what they load of the weight


TILES = [Tile(width, *taken, pair) for width, taken in ((160, (2.7, 0.335)), (128, (1.65, 0.306))) for pair in (2, 1)]


def reference(
    x: Tensor, weight: Tensor, bias: Tensor | None, gate_first: bool = False, approximate: str = "none"
) -> Tensor:
    """x (..., K), weight (2N, K), bias (2N) -> (..., N): value * gelu(gate) of the halves of x @ weight.T + bias.

    Computes in float32 (float64 where x is), rounds once.
    """
    compute = torch.promote_types(x.dtype, torch.float32)
    product = F.linear(x.to(compute), weight.to(compute), None if bias is None else bias.to(compute))
    return geglu.reference(product, gate_first, approximate).to(x.dtype)


def launch(
    x: Tensor, weight: Tensor, bias: Tensor | None, gate_first: bool = False, approximate: str = "none"
) -> Tensor:
    """`reference` by the kernel where it is there and the quicker way, else as a product and the kernel for GEGLU."""
    if takes(x, weight, bias, approximate):
        try:
            return _launch(x, weight, bias, best(x, weight), gate_first, approximate)
        except nvrtc.Unavailable:
            pass  # the log has it; it is not asked again
    return geglu.launch(F.linear(x, weight, bias), gate_first, approximate)


def takes(x: Tensor, weight: Tensor, bias: Tensor | None, approximate: str = "none") -> bool:
    """Whether the kernel can read the operands, on this GPU, and is the faster way."""
    if not reads(x, weight, bias, approximate):
        return False
    tiles = cdiv(_count(x), smem_ring.ROWS) * cdiv(weight.shape[0] // 2, TILES[0].width // 2)
    return tiles >= _LEAST_SHARE * multiprocessors(device_of(x))


def reads(x: Tensor, weight: Tensor, bias: Tensor | None, approximate: str = "none") -> bool:
    """Whether the kernel can read the operands, on this GPU."""
    if INTERPRETED or approximate not in ("none", "tanh") or not runs(x, weight, bias) or not multiplies(x):
        return False
    if weight.dtype != x.dtype or weight.dim() != 2 or not weight.is_contiguous() or not x.numel():
        return False
    half, depth = weight.shape[0] // 2, weight.shape[1]
    # tensor maps: rows and memory begin at 16 bytes
    if weight.shape[0] % 2 or not half or half % 8 or depth % 8 or x.shape[-1] != depth:
        return False
    if bias is not None and (bias.shape != (2 * half,) or bias.dtype != x.dtype):
        return False
    if any(t.data_ptr() % 16 for t in (x, weight)) or (bias is not None and bias.data_ptr() % 4):
        return False
    return _KERNEL.available(device_of(x))


def best(x: Tensor, weight: Tensor) -> Tile:
    """What takes the shortest time."""

    def microseconds(tile: Tile) -> float:
        down, across = cdiv(cdiv(_count(x), smem_ring.ROWS), tile.pair), cdiv(weight.shape[0] // 2, tile.width // 2)
        rounds = cdiv(down * across, multiprocessors(device_of(x)) // tile.pair)
        return rounds * (tile.start + tile.step * x.shape[-1] / smem_ring.DEPTH) * (1 if tile.pair > 1 else _ALONE)

    return min(TILES, key=microseconds)


def _count(x: Tensor) -> int:
    return x.numel() // max(x.shape[-1], 1)


def _launch(
    x: Tensor, weight: Tensor, bias: Tensor | None, tile: Tile, gate_first: bool = False, approximate: str = "none"
) -> Tensor:
    half = weight.shape[0] // 2
    out = torch.empty((*x.shape[:-1], half), dtype=x.dtype, device=x.device)
    tiles = cdiv(cdiv(_count(x), smem_ring.ROWS), tile.pair) * cdiv(half, tile.width // 2)
    grid = min(tiles, multiprocessors(device_of(x)) // tile.pair) * tile.pair
    added = None if bias is None else bias.contiguous()
    start(_KERNEL, (grid,), out, x.contiguous(), weight, added, **constants(tile, x.dtype, gate_first, approximate))
    return out


def constants(tile: Tile, dtype: torch.dtype, gate_first: bool = False, approximate: str = "none") -> dict[str, int]:
    """What the kernel is compiled for."""
    return {
        "WIDTH": tile.width,
        "STAGES": smem_ring.stages(tile.width),
        "PAIR": tile.pair,
        "GATE_FIRST": int(gate_first),
        "TANH": int(approximate == "tanh"),
        "BF16": int(dtype == torch.bfloat16),
    }


def siblings(given: dict[str, int]) -> list[dict[str, int]]:
    """What another size of picture may ask for where this one asks for the given constants."""
    dtype = torch.bfloat16 if given["BF16"] else torch.float16
    approximate = "tanh" if given["TANH"] else "none"
    return [constants(tile, dtype, bool(given["GATE_FIRST"]), approximate) for tile in TILES]


def shared_bytes(constants: dict[str, int]) -> int:
    """What a block asks for."""
    return smem_ring.shared_bytes(constants["WIDTH"], constants["STAGES"])


def _prepared(
    out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, **constants: int
) -> tuple[list[Any], int, int]:
    count, depth, half = _count(x), x.shape[-1], weight.shape[0] // 2
    columns, size = constants["WIDTH"] // 2, x.element_size()
    rows = nvrtc.tensor_map(x, [depth, count], [size * depth], [smem_ring.DEPTH, smem_ring.ROWS])
    matrix = nvrtc.tensor_map(
        weight, [depth, half, 2], [size * depth, size * half * depth], [smem_ring.DEPTH, columns, 1]
    )
    tiles = cdiv(cdiv(count, smem_ring.ROWS), constants["PAIR"]), cdiv(half, columns)
    numbers = map(ctypes.c_int, (cdiv(depth, smem_ring.DEPTH), count, half, *tiles))
    args = [out, bias, rows, matrix, *numbers]
    return args, smem_ring.THREADS, shared_bytes(constants)


_KERNEL = nvrtc.Source("linear_geglu", _prepared, ("out", "x", "weight", "bias"), siblings, ("weight",))
