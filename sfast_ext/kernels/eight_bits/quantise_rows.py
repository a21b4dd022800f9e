"""Rows as int8 with a scale each, after a rotation of groups of neighbours.

A row is represented by `scale * q`: scale is its largest magnitude / 127, q is row / scale rounded to the nearest
integer, ties to even. Outliers make the scale of a row large, and all else coarse. The rotation, an orthonormal
Walsh-Hadamard matrix, spreads an outlier over its group; the product with a weight that is rotated likewise stays the
same (QuaRot, Ashkboos et al. 2024).
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch
from torch import Tensor

from sfast_ext.kernels.backend import cuda_tier, nvrtc
from sfast_ext.kernels.backend.registry import kernel, require
from sfast_ext.kernels.backend.triton_runtime import HALF, cdiv, launch_kernel

GROUPS = (0, 64, 128, 256)
"""Columns that are rotated together; 0 for no rotation."""
LARGEST = 127
SMALLEST = 1e-30
"""A row whose largest magnitude is below has codes of zeros."""


def reference(x: Tensor, group: int = 0) -> tuple[Tensor, Tensor]:
    """x (..., K) -> (q (..., K) int8, scale (...) float32).

    Computes in float32 (float64 if x is). Each `group` neighbours of a row are multiplied by the orthonormal
    Walsh-Hadamard matrix first. A row without a magnitude of `SMALLEST` has scale 1, one that holds NaN or infinity has
    the scale NaN; the codes of both are zeros.
    """
    rotated_x = rotated(x.to(torch.promote_types(x.dtype, torch.float32)), group)
    largest = rotated_x.abs().amax(-1, keepdim=True) if x.shape[-1] else rotated_x.new_zeros((*x.shape[:-1], 1))
    some = (largest >= SMALLEST) & largest.isfinite()
    scale = torch.where(some, largest / LARGEST, 1.0)
    q = torch.where(some, (rotated_x / scale).round().clamp(-LARGEST, LARGEST), 0.0)
    scale = torch.where(largest.isfinite(), scale, float("nan"))
    return q.to(torch.int8), scale.squeeze(-1).to(torch.float32)


def rotated(x: Tensor, group: int) -> Tensor:
    """Each `group` neighbours of x (..., K) times the orthonormal Walsh-Hadamard matrix, in x's dtype; x if group is
    0."""
    if not group:
        return x
    y = x.contiguous().view(-1, group)
    step = 1
    while step < group:
        pairs = y.view(-1, group // (2 * step), 2, step)
        first, second = pairs[:, :, 0], pairs[:, :, 1]
        y = torch.stack([first + second, first - second], 2).reshape(-1, group)
        step *= 2
    return (y * group**-0.5).view(x.shape)


@functools.lru_cache(maxsize=None)
def hadamard(size: int) -> Tensor:
    """The orthonormal Walsh-Hadamard matrix in its natural order, float64: `rotated` multiplies by it."""
    matrix = torch.ones(1, 1, dtype=torch.float64, device="cpu")
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix * size**-0.5


_MIN_THREADS, _MAX_THREADS = 8, 1024  # of a row
_ELEMENTS = 40  # of a thread, until a row has _MAX_THREADS: by 5 the columns of Stable Diffusion divide
_MAX_CHUNKS = 10  # accesses of a thread
PACK = 8
"""Columns of a thread in an access, if rows allow it; a rotation needs it."""


def constants(columns: int, pack: int, dtype: torch.dtype, group: int = 0) -> dict[str, int] | None:
    """Compile-time parameters of csrc/quantise_rows.cu; None for rows that it does not take."""
    threads = max(_MIN_THREADS, group // PACK)
    most = min(_MAX_CHUNKS, _ELEMENTS // pack)
    while threads < _MAX_THREADS and columns > threads * pack * most:
        threads *= 2
    chunks = cdiv(columns, threads * pack)
    if not 0 < chunks <= most:
        return None
    return {
        "TYPE": cuda_tier.TYPES[dtype],
        "GROUP": group,
        **cuda_tier.of_rows(columns, threads, chunks, pack),
    }


def _prepared(*args: Any, **constants: int) -> tuple[list[Any], int, int]:
    *tensors, rows, columns = args
    numbers = ctypes.c_int(rows), ctypes.c_int(columns)
    return [*tensors, *numbers], constants["THREADS"] * constants["ROWS"], 0


SOURCE = nvrtc.Source("quantise_rows", _prepared, ("x", "out", "scales", "rows", "columns"))


def accepts(x: Tensor, group: int = 0) -> str | None:
    """Why the kernel does not take x; None if it does."""
    if group not in GROUPS or (group and x.shape[-1] % group):
        return "columns that are not divided into groups of 64, 128 or 256"
    if x.dtype not in HALF:
        return "no half precision"
    if not x.dim() or constants(x.shape[-1], PACK if x.shape[-1] % PACK == 0 else 1, x.dtype, group) is None:
        return "rows that are too long, or empty"
    return cuda_tier.accepts(SOURCE, x)


@kernel(reference, portable=True, cuda_sources=(SOURCE,))
def launch(x: Tensor, group: int = 0) -> tuple[Tensor, Tensor]:
    """`reference` in one launch, with one read and one write: rows stay in registers.

    x (..., C) is made contiguous; float16 or bfloat16; up to 40,960 columns that are a multiple of 8, or 10,240.
    """
    require(accepts(x, group))
    columns = x.shape[-1]
    x = x.contiguous()
    pack = cuda_tier.pack(columns, x)
    if group and pack < PACK:
        x, pack = x.clone(), PACK  # memory that begins at an odd place
    q = torch.empty(x.shape, dtype=torch.int8, device=x.device)
    scale = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    given = constants(columns, pack, x.dtype, group)
    require("rows that are too long" if given is None else None)
    assert given is not None
    if scale.numel():
        count = scale.numel()
        launch_kernel(SOURCE, (cdiv(count, given["ROWS"]),), x, q, scale, count, columns, **given)
    return q, scale
