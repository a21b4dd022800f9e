"""Linear layers and 3x3 convolutions by mma.sync, with a residual or GEGLU in the epilogue, on GeForce and A100:
csrc/mma_gemm.cu."""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sfast_ext.kernels.backend import cuda_tier, nvrtc, triton_runtime
from sfast_ext.kernels.backend.triton_runtime import (
    HALF,
    MAX_GRID_YZ,
    cdiv,
    device_of,
    is_dry_run,
    launch_kernel,
    multiprocessors,
)
from sfast_ext.kernels.linear import mma_tiles
from sfast_ext.kernels.linear.mma_tiles import AMPERE, CARDS, DEPTH, GEFORCE, Tile

MIN_ROWS = 64
"""Of a result that the kernel takes; with fewer, most of a tile would be empty."""
_MAX_ELEMENTS = 2**31  # elements of an operand
PLAIN, RESIDUAL, GEGLU = range(3)  # EPILOGUE in csrc/mma_gemm.cu


class Epilogue(NamedTuple):
    """What is computed of the sums, and how GEGLU is."""

    kind: int = PLAIN
    gate_first: bool = False
    tanh: bool = False


NOTHING = Epilogue()


def tiles(rows: int, weight: Tensor, epilogue: Epilogue = NOTHING, half_sums: bool = False) -> list[Tile]:
    """The tiles for a product of so many rows with a weight (N, K) or (N, C, 3, 3); what is expected to be the fastest
    stands first."""
    device, pairs = device_of(weight), epilogue.kind == GEGLU
    size, card = (rows, weight.shape[0], weight.shape[1]), triton_runtime.capability(device)
    return mma_tiles.worth_measuring(size, card, multiprocessors(device), pairs, half_sums)


def accepts_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None = None
) -> str | None:
    """Why `linear` does not take x (..., K), weight (N, K), bias (N), residual (..., N); None if it does: in half
    precision, K a multiple of 32, N of 8, weight and residual dense."""
    if weight.dim() != 2 or x.dim() < 1 or x.shape[-1] != weight.shape[1] or not weight.is_contiguous():
        return "other shapes, or a weight that is not contiguous"
    if residual is not None:
        if residual.shape != (*x.shape[:-1], weight.shape[0]) or not residual.is_contiguous():
            return "a residual of another shape, or that is not contiguous"
        if residual.dtype != x.dtype or residual.device != x.device or residual.data_ptr() % 16:
            return "a residual of another dtype or device, or that is not aligned"
    return _accepts(x, weight, bias, weight.shape[0], weight.shape[1])


def accepts_linear_geglu(x: Tensor, weight: Tensor, bias: Tensor | None, approximate: str) -> str | None:
    """Why `linear_geglu` does not take x (..., K), weight (2N, K), bias (2N); None if it does: as `accepts_linear`."""
    if approximate not in ("none", "tanh") or weight.dim() != 2 or weight.shape[0] % 16:
        return "another approximation, or columns that are no multiple of 16"
    return accepts_linear(x, weight, bias)


def accepts_conv2d(x: Tensor, weight: Tensor, bias: Tensor | None) -> str | None:
    """Why `conv2d` does not take x (N, C, H, W), weight (K, C, 3, 3), bias (K); None if it does: in half precision,
    channels-last, C a multiple of 32, K of 8."""
    if x.dim() != 4 or weight.dim() != 4 or weight.shape[1:] != (x.shape[1], 3, 3):
        return "other shapes"
    layout = torch.channels_last
    if not is_dry_run() and not all(t.is_contiguous(memory_format=layout) for t in (x, weight)):
        return "an image or a weight that is not channels last"
    return _accepts(x, weight, bias, weight.shape[0], x.shape[1])


def _accepts(x: Tensor, weight: Tensor, bias: Tensor | None, columns: int, depth: int) -> str | None:
    unfit = cuda_tier.accepts(_SOURCE, x, weight, bias)
    if unfit is not None or not supported(device_of(x), x.dtype):
        return unfit or "tensor cores do not take the dtype"
    if not x.numel() or columns % 8 or not columns or depth % DEPTH or x.data_ptr() % 16 or weight.data_ptr() % 16:
        return "sizes that are no multiples of 8 and 32, or operands that are not aligned to 16 bytes"
    if bias is not None and (bias.shape != (columns,) or bias.stride(0) != 1 or bias.data_ptr() % 4):
        return "a bias of another shape, or that is not contiguous or aligned"
    rows = x.numel() // depth
    too_large = max(rows * depth, rows * columns, weight.numel()) >= _MAX_ELEMENTS or cdiv(rows, 64) > MAX_GRID_YZ
    return "too many elements" if too_large else None


def supported(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernel is supported on a device, and its tensor cores take a dtype."""
    if dtype == torch.bfloat16 and triton_runtime.capability(device) < AMPERE:
        return False
    return dtype in HALF and _SOURCE.supported(device)


def half_sums_profitable(device: torch.device) -> bool:
    """Whether it is a GeForce: its tensor cores add up faster in half precision."""
    return triton_runtime.capability(device) in GEFORCE


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None = None,
    *,
    half_sums: bool = False,
    tile: Tile | None = None,
) -> Tensor:
    """x (..., K), weight (N, K), bias (N), residual (..., N) -> (..., N), of operands that
    `accepts_linear` takes.

    Args:
        residual: is added, and overwritten by the result.
        half_sums: sums of `DEPTH` products are in float16; x is in float16.
        tile: one of `tiles`, by default the first.

    Raises:
        Unavailable: the kernel cannot be compiled or loaded.
    """
    out = residual
    if out is None:
        out = torch.empty((*x.shape[:-1], weight.shape[0]), dtype=x.dtype, device=x.device)
    epilogue = Epilogue(PLAIN if residual is None else RESIDUAL)
    _launch(out, x.contiguous(), weight, bias, residual, x.numel() // x.shape[-1], half_sums, tile, epilogue)
    return out


def linear_geglu(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gate_first: bool = False,
    approximate: str = "none",
    *,
    half_sums: bool = False,
    tile: Tile | None = None,
) -> Tensor:
    """x (..., K), weight (2N, K), bias (2N) -> (..., N): value * gelu(gate), of operands that it accepts
    (`accepts_linear_geglu`).

    gate_first, approximate: see `geglu.reference`. half_sums, tile and errors: as of `linear`.
    """
    out = torch.empty((*x.shape[:-1], weight.shape[0] // 2), dtype=x.dtype, device=x.device)
    epilogue = Epilogue(GEGLU, gate_first, approximate == "tanh")
    _launch(out, x.contiguous(), weight, bias, None, x.numel() // x.shape[-1], half_sums, tile, epilogue)
    return out


def conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: int = 1,
    *,
    half_sums: bool = False,
    tile: Tile | None = None,
) -> Tensor:
    """x (N, C, H, W), weight (K, C, 3, 3), bias (K) -> (N, K, H / stride, W / stride), rounded up; padding 1; of
    operands that it accepts (`accepts_conv2d`). half_sums, tile and errors: as of `linear`."""
    sizes = [cdiv(size, stride) for size in x.shape[2:]]
    out = torch.empty(
        (x.shape[0], weight.shape[0], *sizes), dtype=x.dtype, device=x.device, memory_format=torch.channels_last
    )
    image = x.shape[1], *sizes, *x.shape[2:], stride
    _launch(out, x, weight, bias, None, x.shape[0] * sizes[0] * sizes[1], half_sums, tile, NOTHING, image)
    return out


def _launch(
    out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, rows: int, half_sums: bool,
    tile: Tile | None, epilogue: Epilogue, image: tuple[int, ...] = (1,) * 6,
) -> None:  # fmt: skip
    columns = out.numel() // rows
    chosen = tile or tiles(rows, weight, epilogue, half_sums)[0]
    grid = cdiv(weight.shape[0], chosen.width), cdiv(rows, chosen.rows)
    numbers = rows, columns, weight.numel() // weight.shape[0], *image
    given = constants(chosen, x.dtype, weight.dim() == 4, half_sums, epilogue)
    launch_kernel(_SOURCE, grid, out, x, weight, bias, residual, *numbers, **given)


def constants(
    chosen: Tile,
    dtype: torch.dtype,
    convolution: bool = False,
    half_sums: bool = False,
    epilogue: Epilogue = NOTHING,
) -> dict[str, int]:
    """The kernel's compile-time parameters."""
    return {
        "TYPE": cuda_tier.TYPES[dtype],
        **of_tile(chosen),
        "CONV": int(convolution),
        "HALF_SUMS": int(half_sums),
        "EPILOGUE": epilogue.kind,
        "GATE_FIRST": int(epilogue.gate_first),
        "TANH": int(epilogue.tanh),
    }


def of_tile(tile: Tile) -> dict[str, int]:
    """Those of `constants` that say which tile it is."""
    return {name.upper(): value for name, value in tile._asdict().items()}


def tile_of(given: dict[str, int]) -> Tile:
    """The tile of `constants`."""
    return Tile(*(given[name.upper()] for name in Tile._fields))


def _prepared(
    out: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    *numbers: int,
    **constants: int,
) -> tuple[list[Any], int, int]:
    tile = tile_of(constants)
    shared = mma_tiles.shared_bytes(tile, constants["EPILOGUE"] == GEGLU)
    return [out, x, weight, bias, residual, *map(ctypes.c_int, numbers)], tile.threads, shared


_NUMBERS = ("rows", "columns", "depth", "channels", "height", "width", "image_height", "image_width", "stride")
_SOURCE = nvrtc.Source("mma_gemm", _prepared, ("out", "x", "weight", "bias", "residual", *_NUMBERS), only=CARDS)
