"""Rows as 8-bit integers with a scale each, rotated first if asked for."""

from __future__ import annotations

import torch
from torch import Tensor

from sfast_ext.kernels.backend.registry import kernel

MOST = 127
"""The largest value; -128 is not used, so that a row and its negative are the same up to the sign."""
TINY = 1e-30
"""Rows of values below it are zeros."""
GROUPS = (256, 128, 64)
"""So many neighbours may be rotated, the preferred number first."""


def reference(x: Tensor, group: int = 0) -> tuple[Tensor, Tensor]:
    """x (..., K) -> (q, scale): q (..., K) in int8, scale (...,) in float32, x about q * scale.

    group: each so many neighbours of a row are multiplied by the orthonormal Walsh-Hadamard matrix first; 0: they are
    not. K is a multiple of it. The scale is the largest magnitude of the row / 127, 1 for a row of zeros, and NaN for
    a row that holds a value that is not finite. Rounds half to even. Computes in float32 (float64 if x is).
    """
    y = rotated(x.to(torch.promote_types(x.dtype, torch.float32)), group)
    peak = y.abs().amax(-1)
    scale = torch.where(peak < TINY, torch.ones_like(peak), peak / MOST)
    scale = torch.where(torch.isfinite(peak), scale, torch.full_like(peak, torch.nan))
    y = torch.where((peak < TINY)[..., None], torch.zeros_like(y), y)
    q = (y / scale[..., None]).nan_to_num(0.0).round().clamp(-MOST, MOST)
    return q.to(torch.int8), scale.float()


def rotated(x: Tensor, group: int) -> Tensor:
    """x (..., K) with each `group` neighbours rotated; x itself if that is 0."""
    if not group:
        return x
    return (x.unflatten(-1, (-1, group)) @ hadamard(group, x.dtype, x.device)).flatten(-2)


def hadamard(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The orthonormal Walsh-Hadamard matrix (Sylvester's order), which is symmetric and its own inverse."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return (matrix / size**0.5).to(device, dtype)


@kernel(reference)
def launch(x: Tensor, group: int = 0) -> tuple[Tensor, Tensor]:
    """`reference`."""
    return reference(x, group)
