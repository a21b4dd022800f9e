"""What the attention kernels share: checks of their operands, tensor maps and block sizes."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from sfast_ext.kernels.backend import nvrtc
from sfast_ext.kernels.backend.triton_runtime import MAX_GRID_YZ, mma_supported, next_power_of_2, supported

LEAST = 16  # smallest dimension of tl.dot
_LONGEST = 2**31


def readable(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> bool:
    """Whether a kernel in Triton can read q (B, H, L, D), k and v (B, H, S, D), on a GPU where it was measured."""
    return supported(q, k, v) and mma_supported(q) and addressable(q, k, v, scale)


def addressable(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> bool:
    """Whether shapes, strides and scale of q (B, H, L, D), k and v (B, H, S, D) are such that our kernels can read
    them."""
    if q.dim() != 4 or k.shape != v.shape or q.shape[:2] != k.shape[:2] or q.shape[3] != k.shape[3]:
        return False
    if not q.numel() or not k.numel() or not (scale is None or scale > 0):
        return False
    if any(x.dtype != q.dtype or x.stride(3) != 1 for x in (q, k, v)) or q.shape[0] * q.shape[1] > MAX_GRID_YZ:
        return False
    # offsets within an image are 32-bit
    return all(x.shape[1] * x.stride(1) + x.shape[2] * x.stride(2) < _LONGEST for x in (q, k, v))


def can_be_mapped(*tensors: Tensor) -> bool:
    """Whether TMA can address the tensors (`heads_map`): pointers and strides are multiples of 16 bytes."""
    return not any(x.data_ptr() % 16 or any(stride % 8 for stride in x.stride()[:3]) for x in tensors)


def heads_map(x: Tensor, columns: int, keys: int) -> Any:
    """A TMA tensor map over (B, H, S, D) with boxes of so many columns and keys of a head, zeros out of bounds."""
    images, heads, count, size = x.shape
    image, row, head = (stride * x.element_size() for stride in strides(x))
    return nvrtc.tensor_map(x, [size, heads, count, images], [head, row, image], [columns, 1, keys, 1])


def blocks(size: int) -> tuple[int, int]:
    """Two powers of two, the second may be 0, whose sum covers `size` with little padding: 77 -> 64 and 16."""
    first = max(LEAST, next_power_of_2(size + 1) // 2)
    if size <= first:
        return first, 0
    second = max(LEAST, next_power_of_2(size - first))
    return (2 * first, 0) if second == first else (first, second)


def like_queries(q: Tensor) -> Tensor:
    """An uninitialised result with q's shape and order of strides."""
    order = sorted(range(4), key=lambda dim: -q.stride(dim))
    out = torch.empty([q.shape[dim] for dim in order], dtype=q.dtype, device=q.device)
    return out.permute([order.index(dim) for dim in range(4)])


def in_base_2(scale: float | None, size: int) -> float:
    """The factor of scores before exp2: scale * log2(e), with SDPA's default scale where it is None."""
    return (size**-0.5 if scale is None else scale) * math.log2(math.e)


def strides(x: Tensor) -> tuple[int, int, int]:
    """Strides of images, rows and heads."""
    return x.stride(0), x.stride(2), x.stride(1)
