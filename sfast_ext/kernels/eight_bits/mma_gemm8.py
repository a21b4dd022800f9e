"""Linear layers of 8-bit integers by mma.sync, with a residual or GEGLU in the epilogue, on every card from compute
capability 7.5 on: csrc/mma_gemm8.cu."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from sfast_ext.kernels.backend import cuda_tier, nvrtc, triton_runtime
from sfast_ext.kernels.backend.triton_runtime import (
    HALF,
    INTERPRETED,
    MAX_GRID_YZ,
    cdiv,
    device_of,
    is_dry_run,
    launch_kernel,
    multiprocessors,
)
from sfast_ext.kernels.eight_bits import MIN_CAPABILITY, mma8_tiles
from sfast_ext.kernels.eight_bits.mma8_tiles import DEPTH
from sfast_ext.kernels.linear import mma_gemm
from sfast_ext.kernels.linear.mma_gemm import GEGLU, NOTHING, PLAIN, RESIDUAL, Epilogue
from sfast_ext.kernels.linear.mma_tiles import Tile

MAX_DEPTH = (2**31 - 1) // 127**2
"""Terms of a sum that int32 holds, whatever the operands: 133144."""
_MAX_ELEMENTS = 2**31  # elements of an operand or result


def supported(device: torch.device) -> bool:
    """Whether the kernel can be launched on a device."""
    return not INTERPRETED and _SOURCE.supported(device)


def tiles(rows: int, weight: Tensor, epilogue: Epilogue = NOTHING) -> list[Tile]:
    """The tiles for a product of so many rows with a weight (N, K); what is expected to be the fastest stands first."""
    device = device_of(weight)
    size, card = (rows, weight.shape[0], weight.shape[1]), triton_runtime.capability(device)
    return mma8_tiles.worth_measuring(size, card, multiprocessors(device), epilogue.kind == GEGLU)


def accepts(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    dtype: torch.dtype,
) -> str | None:
    """Why `linear` does not take x (..., K), x_scale (...), weight (N, K), weight_scale (N), bias (N) and residual
    (..., N); None if it does: x and weight in int8, scales in float32, the rest in `dtype`, which is float16 or
    bfloat16; K a multiple of 64, N of 8; all but x dense."""
    unfit = unfit_operands(supported(device_of(x)), x, x_scale, weight, weight_scale, bias, residual, dtype)
    return unfit or _accepts_sizes(x, x_scale, weight, weight_scale, bias, residual)


def unfit_operands(
    has_kernels: bool,
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    dtype: torch.dtype,
) -> str | None:
    """Why a product of 8-bit integers does not take operands of whatever sizes; None if it may."""
    if not has_kernels:
        return "kernels in CUDA C++ for 8-bit integers are not for this device, or not compiled here"
    if not x.dtype == weight.dtype == torch.int8 or not x_scale.dtype == weight_scale.dtype == torch.float32:
        return "operands other than int8, or scales other than float32"
    added = [each for each in (bias, residual) if each is not None]
    if dtype not in HALF or any(each.dtype != dtype for each in added):
        return "a result other than float16 and bfloat16, or a bias or residual of another dtype"
    given = [x, x_scale, weight, weight_scale, *added]
    if not is_dry_run() and any(t.device != x.device or type(t) not in (Tensor, torch.nn.Parameter) for t in given):
        return "tensors of several devices, or of a subclass of Tensor"
    return None


def _accepts_sizes(
    x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None, residual: Tensor | None
) -> str | None:
    if weight.dim() != 2 or x.dim() < 1 or x.shape[-1] != weight.shape[1] or not weight.is_contiguous():
        return "other shapes, or a weight that is not contiguous"
    columns, depth = weight.shape
    if not x.numel() or not columns or columns % 8 or depth % DEPTH or depth > MAX_DEPTH:
        return f"columns that are no multiple of 8, or a depth that is no multiple of {DEPTH} up to {MAX_DEPTH}"
    if x_scale.shape != x.shape[:-1] or weight_scale.shape != (columns,):
        return "scales of other shapes"
    if bias is not None and bias.shape != (columns,):
        return "a bias of another shape"
    if residual is not None and residual.shape != (*x.shape[:-1], columns):
        return "a residual of another shape"
    dense = [each for each in (x_scale, weight_scale, bias, residual) if each is not None]
    if not is_dry_run() and not all(each.is_contiguous() for each in dense):
        return "scales, a bias or a residual that is not contiguous"
    if any(each is not None and each.data_ptr() % 16 for each in (x, weight, residual)):
        return "operands or a residual that are not aligned to 16 bytes"
    rows = x.numel() // depth
    too_large = max(rows * depth, rows * columns, weight.numel()) >= _MAX_ELEMENTS or cdiv(rows, 64) > MAX_GRID_YZ
    return "too many elements" if too_large else None


def accepts_geglu(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    approximate: str,
    dtype: torch.dtype,
) -> str | None:
    """Why `geglu` does not take x (..., K), weight (2N, K), bias (2N); None if it does: as `accepts`."""
    if approximate not in ("none", "tanh") or weight.dim() != 2 or weight.shape[0] % 16:
        return "another approximation, or columns that are no multiple of 16"
    return accepts(x, x_scale, weight, weight_scale, bias, None, dtype)


def linear(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    residual: Tensor | None = None,
    *,
    tile: Tile | None = None,
) -> Tensor:
    """x (..., K), weight (N, K) -> (..., N), of operands that it accepts (`accepts`).

    Args:
        residual: is added, and overwritten by the result.
        tile: one of `tiles`, by default the first.

    Raises:
        Unavailable: the kernel cannot be compiled or loaded.
    """
    out = residual
    if out is None:
        out = torch.empty((*x.shape[:-1], weight.shape[0]), dtype=dtype, device=x.device)
    epilogue = Epilogue(PLAIN if residual is None else RESIDUAL)
    _launch(out, x, x_scale, weight, weight_scale, bias, residual, tile, epilogue)
    return out


def geglu(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    gate_first: bool = False,
    approximate: str = "none",
    *,
    tile: Tile | None = None,
) -> Tensor:
    """x (..., K), weight (2N, K) -> (..., N): value * gelu(gate), of operands that it accepts (`accepts_geglu`).

    gate_first, approximate: see `kernels.pointwise.geglu.reference`. tile and errors: as of `linear`.
    """
    out = torch.empty((*x.shape[:-1], weight.shape[0] // 2), dtype=dtype, device=x.device)
    epilogue = Epilogue(GEGLU, gate_first, approximate == "tanh")
    _launch(out, x, x_scale, weight, weight_scale, bias, None, tile, epilogue)
    return out


def _launch(
    out: Tensor, x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None,
    residual: Tensor | None, tile: Tile | None, epilogue: Epilogue,
) -> None:  # fmt: skip
    rows = x.numel() // x.shape[-1]
    chosen = tile or tiles(rows, weight, epilogue)[0]
    grid = cdiv(weight.shape[0], chosen.width), cdiv(rows, chosen.rows)
    operands = out, x.contiguous(), x_scale, weight, weight_scale, bias, residual
    numbers = rows, out.shape[-1], weight.shape[1]
    launch_kernel(_SOURCE, grid, *operands, *numbers, **constants(chosen, out.dtype, epilogue))


def constants(chosen: Tile, dtype: torch.dtype, epilogue: Epilogue = NOTHING) -> dict[str, int]:
    """The kernel's compile-time parameters."""
    return {
        "TYPE": cuda_tier.TYPES[dtype],
        **mma_gemm.of_tile(chosen),
        "EPILOGUE": epilogue.kind,
        "GATE_FIRST": int(epilogue.gate_first),
        "TANH": int(epilogue.tanh),
    }


def _prepared(
    out: Tensor, x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None,
    residual: Tensor | None, *numbers: int, **constants: int,
) -> tuple[list[Any], int, int]:  # fmt: skip
    tile = mma_gemm.tile_of(constants)
    shared = mma8_tiles.shared_bytes(tile, constants["EPILOGUE"] == GEGLU)
    operands = [out, x, x_scale, weight, weight_scale, bias, residual]
    return [*operands, *map(ctypes.c_int, numbers)], tile.threads, shared


_NAMES = ("out", "x", "x_scale", "weight", "weight_scale", "bias", "residual", "rows", "columns", "depth")
_SOURCE = nvrtc.Source("mma_gemm8", _prepared, _NAMES, since=MIN_CAPABILITY)
