"""Kernels in CUDA C++: which operands they take, and how those for any card (csrc/elements.h) access elements.

They need NVRTC, which torch brings, and compute capability 7.0, or Hopper (`nvrtc.Source.hopper`). Before those for any
card go Triton's kernels: on an NVIDIA H200 they are as fast at large sizes, and faster by a microsecond at small ones.
Those for Hopper go before Triton's.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sfast_ext.kernels.backend import nvrtc, triton_runtime
from sfast_ext.kernels.backend.triton_runtime import HALF, INTERPRETED, accepts_tensors, device_of

TYPES = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2}
"""Values of TYPE and OUT in csrc/elements.h."""
MAX_THREADS = 1024
_BLOCK_THREADS = 128
"""Of a block, if the threads of a row are fewer: it has several rows then."""
_ACCESS = 16  # bytes


class Tier(NamedTuple):
    """Whose kernel is launched: Triton's, one in CUDA C++, or none, for a reason."""

    triton: bool
    reason: str | None = None


def accepts(source: nvrtc.Source, x: Tensor, *others: Tensor | None) -> str | None:
    """Why a kernel cannot be launched with these tensors, whether or not Triton is there; None if it can: they are of
    x's dtype, which one for Hopper takes in half precision, and the kernel is supported on their GPU."""
    if INTERPRETED or not source.supported(device_of(x)):
        return "kernels in CUDA C++ are not for this device, or not compiled here"
    if x.dtype not in (HALF if source.hopper else TYPES):
        return "another dtype"
    if any(t is not None and t.dtype != x.dtype for t in others):
        return "operands of several dtypes"
    return accepts_tensors(x, *others)


def tier(sources: tuple[nvrtc.Source, ...], x: Tensor, *others: Tensor | None) -> Tier:
    """Who launches an operation for any card: Triton if it takes these tensors, else all of `sources`."""
    if triton_runtime.accepts(x, *others) is None:
        return Tier(True)
    reasons = (accepts(source, x, *others) for source in sources)
    return Tier(False, next((reason for reason in reasons if reason is not None), None))


def of_rows(columns: int, threads: int, chunks: int, pack: int) -> dict[str, int]:
    """The compile-time parameters of a kernel whose threads keep a row in registers.

    Args:
        threads: of a row.
        chunks: accesses of a thread.
        pack: elements of an access.
    """
    return {
        "THREADS": threads,
        "ROWS": max(1, _BLOCK_THREADS // threads),
        "CHUNKS": chunks,
        "PACK": pack,
        "EXACT": int(columns == threads * chunks * pack),
    }


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
