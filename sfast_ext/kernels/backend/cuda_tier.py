"""Kernels in CUDA C++: which operands they take, and how those for any card (csrc/elements.h) access elements.

They need NVRTC, which torch brings, and compute capability 7.0, or Hopper (`nvrtc.Source.hopper`). Before those for any
card go Triton's kernels: on an NVIDIA H200 they are as fast at large sizes, and faster by a microsecond at small ones.
Those for Hopper go before Triton's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sfast_ext.kernels.backend import nvrtc, triton_runtime
from sfast_ext.kernels.backend.triton_runtime import HALF, INTERPRETED, device_of, plain

TYPES = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2}
"""Values of TYPE and OUT in csrc/elements.h."""
MOST_THREADS = 1024
_ACCESS = 16  # bytes


def supported(source: nvrtc.Source, x: Tensor, *others: Tensor | None) -> bool:
    """Whether a kernel can be launched with these tensors, whether or not Triton is there: they are `plain` and of x's
    dtype, which one for Hopper takes in half precision, and the kernel is available on their GPU."""
    if INTERPRETED or x.dtype not in (HALF if source.hopper else TYPES):
        return False
    if any(t is not None and t.dtype != x.dtype for t in others):
        return False
    return plain(x, *others) and source.available(device_of(x))


def usable(source: nvrtc.Source, x: Tensor, *others: Tensor | None) -> bool:
    """Whether a kernel for any card is launched with these tensors: they are `supported`, and not by Triton's
    kernels."""
    return not triton_runtime.supported(x, *others) and supported(source, x, *others)


def pack(width: int, *operands: Tensor | None) -> int:
    """Elements of one access: as many as fit 16 bytes, divide the width, and are aligned in all operands.

    Args:
        width: elements between the beginnings of rows.
        operands: dense tensors of one dtype, or None.
    """
    size = next(t.element_size() for t in operands if t is not None)
    count = _ACCESS // size
    places = [t.data_ptr() for t in operands if t is not None]
    while count > 1 and (width % count or any(place % (count * size) for place in places)):
        count //= 2
    return count
