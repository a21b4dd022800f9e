"""A linear layer with GEGLU in the GEMM's epilogue: csrc/linear_geglu.cu on Hopper, `mma_gemm` on GeForce if it was
measured to be faster (`mma_choice`).

The gates never reach global memory. Values and gates are rows n and N + n of one weight; a tile has as many of both.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from sfast_ext.kernels.backend import cuda_tier, nvrtc, smem_ring
from sfast_ext.kernels.backend.registry import SLOWER, Declined, kernel
from sfast_ext.kernels.backend.triton_runtime import cdiv, device_of, launch_kernel, multiprocessors
from sfast_ext.kernels.linear import mma_choice, mma_gemm
from sfast_ext.kernels.pointwise import geglu

_choice = mma_choice.MmaChoice("linear and GEGLU")

_MIN_SHARE = 0.9  # of the multiprocessors that tiles must fill; below, cuBLAS is faster
_ALONE = 1.02  # time of a tile without a pair, relative to the same tile in a pair


class Tile(NamedTuple):
    """A tile, and the model of its time on an NVIDIA H200 in microseconds."""

    width: int  # N: values and gates
    start: float
    step: float  # of 64 of K
    pair: int = 2  # blocks that share the weight by multicast


TILES = [Tile(width, *taken, pair) for width, taken in ((160, (2.7, 0.335)), (128, (1.65, 0.306))) for pair in (2, 1)]


def reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gate_first: bool = False,
    approximate: str = "none",
    half_sums: bool = False,
) -> Tensor:
    """x (..., K), weight (2N, K), bias (2N) -> (..., N): value * gelu(gate) of the halves of x @ weight.T + bias.

    gate_first, approximate: see `geglu.reference`. Computes in float32 (float64 if x is) and rounds once. half_sums:
    whether sums may be in half precision; here they are not.
    """
    compute = torch.promote_types(x.dtype, torch.float32)
    product = F.linear(x.to(compute), weight.to(compute), None if bias is None else bias.to(compute))
    return geglu.reference(product, gate_first, approximate).to(x.dtype)


def fallback(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gate_first: bool = False,
    approximate: str = "none",
    half_sums: bool = False,
) -> Tensor:
    """`reference` as a GEMM and the kernel for GEGLU."""
    return geglu.launch(F.linear(x, weight, bias), gate_first, approximate)


def profitable(x: Tensor, weight: Tensor) -> bool:
    """Whether Hopper's kernel is faster than cuBLAS and GEGLU, for operands that it `accepts`."""
    tiles = cdiv(_count(x), smem_ring.ROWS) * cdiv(weight.shape[0] // 2, TILES[0].width // 2)
    return tiles >= _MIN_SHARE * multiprocessors(device_of(x))


def accepts(x: Tensor, weight: Tensor, bias: Tensor | None, approximate: str = "none") -> str | None:
    """Why Hopper's kernel does not take the operands on this GPU; None if it does, see `launch`."""
    unfit = cuda_tier.accepts(_SOURCE, x, weight, bias)
    if unfit is not None:
        return unfit
    if approximate not in ("none", "tanh") or weight.dim() != 2 or not weight.is_contiguous() or not x.numel():
        return "another approximation, or a weight that is not contiguous"
    half, depth = weight.shape[0] // 2, weight.shape[1]
    # TMA: pointers and rows are aligned to 16 bytes
    if weight.shape[0] % 2 or not half or half % 8 or depth % 8 or x.shape[-1] != depth:
        return "sizes that are no multiples of 8"
    if bias is not None and bias.shape != (2 * half,):
        return "a bias of another shape"
    aligned = not (any(t.data_ptr() % 16 for t in (x, weight)) or (bias is not None and bias.data_ptr() % 4))
    return None if aligned else "operands that are not aligned to 16 bytes"


def best(x: Tensor, weight: Tensor) -> Tile:
    """The fastest tile by the model."""

    def microseconds(tile: Tile) -> float:
        down, across = cdiv(cdiv(_count(x), smem_ring.ROWS), tile.pair), cdiv(weight.shape[0] // 2, tile.width // 2)
        waves = cdiv(down * across, multiprocessors(device_of(x)) // tile.pair)
        return waves * (tile.start + tile.step * x.shape[-1] / smem_ring.DEPTH) * (1 if tile.pair > 1 else _ALONE)

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
    launch_kernel(
        _SOURCE, (grid,), out, x.contiguous(), weight, added, **constants(tile, x.dtype, gate_first, approximate)
    )
    return out


def constants(tile: Tile, dtype: torch.dtype, gate_first: bool = False, approximate: str = "none") -> dict[str, int]:
    """The kernel's compile-time parameters."""
    return {
        "WIDTH": tile.width,
        "STAGES": smem_ring.stages(tile.width),
        "PAIR": tile.pair,
        "GATE_FIRST": int(gate_first),
        "TANH": int(approximate == "tanh"),
        "BF16": int(dtype == torch.bfloat16),
    }


def variants(given: dict[str, int]) -> list[dict[str, int]]:
    """Constants that other image sizes may need if one needs the given ones."""
    dtype = torch.bfloat16 if given["BF16"] else torch.float16
    approximate = "tanh" if given["TANH"] else "none"
    return [constants(tile, dtype, bool(given["GATE_FIRST"]), approximate) for tile in TILES]


def shared_bytes(constants: dict[str, int]) -> int:
    """Dynamic shared memory of a block in bytes."""
    return smem_ring.shared_bytes(constants["WIDTH"], constants["STAGES"])


def _prepared(
    out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, **constants: int
) -> tuple[list[Any], int, int]:
    count, depth, half = _count(x), x.shape[-1], weight.shape[0] // 2
    columns, size = constants["WIDTH"] // 2, x.element_size()
    x_map = nvrtc.tensor_map(x, [depth, count], [size * depth], [smem_ring.DEPTH, smem_ring.ROWS])
    weight_map = nvrtc.tensor_map(
        weight, [depth, half, 2], [size * depth, size * half * depth], [smem_ring.DEPTH, columns, 1]
    )
    tiles = cdiv(cdiv(count, smem_ring.ROWS), constants["PAIR"]), cdiv(half, columns)
    numbers = map(ctypes.c_int, (cdiv(depth, smem_ring.DEPTH), count, half, *tiles))
    args = [out, bias, x_map, weight_map, *numbers]
    return args, smem_ring.THREADS, shared_bytes(constants)


_NAMES = ("out", "x", "weight", "bias")
_SOURCE = nvrtc.Source("linear_geglu", _prepared, _NAMES, variants, ("weight",), hopper=True)


@kernel(
    reference, fallback=fallback, any_source=True, uses=(geglu.launch,), cuda_sources=(_SOURCE, mma_gemm._SOURCE)
)
def launch(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gate_first: bool = False,
    approximate: str = "none",
    half_sums: bool = False,
) -> Tensor:
    """`reference` in one launch: by Hopper's kernel if that is `profitable`, by `mma_gemm` if it was chosen; else by
    `fallback`.

    All in one dtype, float16 or bfloat16. x (..., K) is made contiguous, weight (2N, K) is, both aligned to 16 bytes; N
    and K multiples of 8, for `mma_gemm` K of 32.
    """
    unfit = accepts(x, weight, bias, approximate)
    if unfit is None and profitable(x, weight):
        return _launch(x, weight, bias, best(x, weight), gate_first, approximate)
    also_unfit = mma_gemm.accepts_linear_geglu(x, weight, bias, approximate)
    if also_unfit is not None:
        raise Declined(f"on Hopper: {unfit or SLOWER}; on GeForce and A100: {also_unfit}")
    two = functools.partial(fallback, x, weight, bias, gate_first, approximate)
    ours = functools.partial(mma_gemm.linear_geglu, x, weight, bias, gate_first, approximate)
    tiles = mma_gemm.tiles(_count(x), weight, mma_gemm.Epilogue(mma_gemm.GEGLU), half_sums)
    key = f"{mma_choice.key(x, weight, bias)}{', gate first' * gate_first}{', tanh' * (approximate == 'tanh')}"
    return _choice.run(x.device, key, two, ours, tiles, half_sums)
