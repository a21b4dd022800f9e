"""Kernels in CUDA C++ for any card (csrc/elements.h): which operands they take, and how elements are accessed.

They need NVRTC, which torch brings, and compute capability 7.0. Triton's kernels go before them: on an NVIDIA H200 they
are as fast at large sizes, and faster by a microsecond at small ones.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sfast_ext.kernels.backend import nvrtc
from sfast_ext.kernels.backend.triton_runtime import INTERPRETED, device_of, is_dry_run, supported

TYPES = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2}
"""Values of TYPE and OUT in csrc/elements.h."""
MOST_THREADS = 1024
_ACCESS = 16  # bytes


def usable(source: nvrtc.Source, x: Tensor, *others: Tensor | None) -> bool:
    """Whether a kernel is launched with these tensors: all of x's dtype and device, and plain; and Triton's cannot be.

    In a dry run tensors without memory stand in for those of a GPU.
    """
    if INTERPRETED or x.dtype not in TYPES or supported(x, *others) or not source.available(device_of(x)):
        return False
    if is_dry_run():
        return all(t is None or t.dtype == x.dtype for t in others)
    return all(
        t is None or (t.dtype == x.dtype and t.device == x.device and type(t) in (Tensor, torch.nn.Parameter))
        for t in (x, *others)
    )


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
