"""Linear layers and 3x3 convolutions with sums in half precision: csrc/mma_gemm.cu, from compute capability 7.5 on."""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sfast_ext.kernels.backend import cuda_tier, nvrtc, triton_runtime
from sfast_ext.kernels.backend.triton_runtime import (
    MAX_GRID_YZ,
    cdiv,
    device_of,
    is_dry_run,
    launch_kernel,
    multiprocessors,
)

DEPTH = 32
"""K of a stage; the sums of so many products are in float16."""
GEFORCE = {(7, 5), (8, 6), (8, 9), (12, 0)}
"""Compute capabilities whose tensor cores add up in float16 at twice the rate of float32, on GeForce."""
_AMPERE = (8, 0)
_ACROSS, _WARP_ROWS, _WARPS = 160, 32, 8
_LONGEST = 2**31  # elements of an operand


class Tile(NamedTuple):
    """A block's rows, as so many times 32, and its stages of shared memory."""

    down: int
    stages: int

    @property
    def rows(self) -> int:
        return _WARP_ROWS * self.down


def tile(rows: int, columns: int, device: torch.device) -> Tile:
    """The tile for a result of so many rows and columns."""
    across = cdiv(columns, _ACROSS)
    many = cdiv(rows, 128) * across >= multiprocessors(device)
    # 64 KB of shared memory on 7.5, at least 99 on later cards
    stages = 4 if triton_runtime.capability(device) >= _AMPERE else 2
    return Tile(4, stages) if many else Tile(2, stages)


def linear_readable(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether `linear` takes x (..., K), weight (N, K), bias (N): float16, K a multiple of 32, N of 8, dense."""
    if weight.dim() != 2 or x.dim() < 1 or x.shape[-1] != weight.shape[1] or not weight.is_contiguous():
        return False
    return _readable(x, weight, bias, weight.shape[0], weight.shape[1])


def conv2d_readable(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether `conv2d` takes x (N, C, H, W), weight (K, C, 3, 3), bias (K): float16, channels-last, C a multiple of 32,
    K of 8."""
    if x.dim() != 4 or weight.dim() != 4 or weight.shape[1:] != (x.shape[1], 3, 3):
        return False
    layout = torch.channels_last
    if not is_dry_run() and not all(t.is_contiguous(memory_format=layout) for t in (x, weight)):
        return False
    return _readable(x, weight, bias, weight.shape[0], x.shape[1])


def _readable(x: Tensor, weight: Tensor, bias: Tensor | None, columns: int, depth: int) -> bool:
    if x.dtype != torch.float16 or not cuda_tier.supported(_SOURCE, x, weight, bias):
        return False
    if not x.numel() or columns % 8 or not columns or depth % DEPTH or x.data_ptr() % 16 or weight.data_ptr() % 16:
        return False
    if bias is not None and (bias.shape != (columns,) or bias.stride(0) != 1 or bias.data_ptr() % 4):
        return False
    rows = x.numel() // depth
    if max(rows * depth, rows * columns, weight.numel()) >= _LONGEST or cdiv(rows, 64) > MAX_GRID_YZ:
        return False
    return available(device_of(x))


def available(device: torch.device) -> bool:
    """Whether a device's sums in half precision are faster, and the kernel can run there."""
    return _SOURCE.available(device) and halves_are_faster(device)


def halves_are_faster(device: torch.device) -> bool:
    """Whether a device's tensor cores add up faster in half precision."""
    return triton_runtime.capability(device) in GEFORCE


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x (..., K), weight (N, K), bias (N) -> (..., N), of operands that are `linear_readable`.

    Raises:
        Unavailable: the kernel cannot be compiled or loaded.
    """
    out = torch.empty((*x.shape[:-1], weight.shape[0]), dtype=x.dtype, device=x.device)
    _launch(out, x.contiguous(), weight, bias, x.numel() // x.shape[-1], (1,) * 6)
    return out


def conv2d(x: Tensor, weight: Tensor, bias: Tensor | None, stride: int = 1) -> Tensor:
    """x (N, C, H, W), weight (K, C, 3, 3), bias (K) -> (N, K, H / stride, W / stride), rounded up; padding 1; of
    operands that are `conv2d_readable`.

    Raises:
        Unavailable: the kernel cannot be compiled or loaded.
    """
    sizes = [cdiv(size, stride) for size in x.shape[2:]]
    out = torch.empty(
        (x.shape[0], weight.shape[0], *sizes), dtype=x.dtype, device=x.device, memory_format=torch.channels_last
    )
    _launch(out, x, weight, bias, x.shape[0] * sizes[0] * sizes[1], (x.shape[1], *sizes, *x.shape[2:], stride))
    return out


def _launch(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, rows: int, image: tuple[int, ...]) -> None:
    columns = weight.shape[0]
    chosen = tile(rows, columns, device_of(x))
    grid = cdiv(columns, _ACROSS), cdiv(rows, chosen.rows)
    numbers = rows, columns, weight.numel() // columns, *image
    launch_kernel(_SOURCE, grid, out, x, weight, bias, *numbers, **constants(chosen, weight.dim() == 4))


def constants(chosen: Tile, convolution: bool) -> dict[str, int]:
    """The kernel's compile-time parameters."""
    return {
        "TYPE": 0,
        "WIDTH": _ACROSS,
        "DOWN": chosen.down,
        "STAGES": chosen.stages,
        "CONV": int(convolution),
    }


def shared_bytes(given: dict[str, int]) -> int:
    """Dynamic shared memory of a block in bytes."""
    return given["STAGES"] * (_WARP_ROWS * given["DOWN"] + given["WIDTH"]) * (DEPTH + 8) * 2


def _prepared(
    out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, *numbers: int, **constants: int
) -> tuple[list[Any], int, int]:
    return [out, x, weight, bias, *map(ctypes.c_int, numbers)], 32 * _WARPS, shared_bytes(constants)


_NUMBERS = ("rows", "columns", "depth", "channels", "height", "width", "image_height", "image_width", "stride")
_SOURCE = nvrtc.Source("mma_gemm", _prepared, ("out", "x", "weight", "bias", *_NUMBERS))
