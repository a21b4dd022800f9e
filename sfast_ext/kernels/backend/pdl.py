"""Programmatic dependent launch (PDL): a kernel is launched while the one before it is still draining.

A CUDA C++ kernel that is launched with the attribute may start once all blocks of the kernel in front have called
`griddepcontrol.launch_dependents` or exited. Before its `griddepcontrol.wait` (`pdl_wait` in csrc/hopper.h) it may read
only memory that no kernel in the graph writes: weights, which it prefetches into shared memory. Which memory that is,
`pdl_capture` says. In a captured CUDA graph the edge between the two kernels becomes a programmatic one.

Kernels of Triton (`triton_runtime.pdl_enabled`) and those in CUDA C++ for any card (`pdl_wait` in csrc/elements.h) wait
in their first statement and so read nothing early.

https://docs.nvidia.com/cuda/cuda-c-programming-guide/#programmatic-dependent-launch-and-synchronization
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import functools
from collections.abc import Iterable, Iterator
from contextvars import ContextVar

import torch
from torch import Tensor

from sfast_ext.kernels.backend import cuda_driver, cuda_libraries

# sorted (begin, end) addresses that no captured kernel writes; None if kernels are launched without PDL
_readonly_spans: ContextVar[list[tuple[int, int]] | None] = ContextVar("readonly_spans", default=None)
MIN_CAPABILITY = 9, 0
"""The compute capability from which on GPUs have it."""
# CUDA's version from which stream capture keeps the launch attribute
_CAPTURED_SINCE = 12, 3


@contextlib.contextmanager
def pdl_capture(readonly: Iterable[Tensor]) -> Iterator[None]:
    """Within, in this thread and while it captures: CUDA C++ kernels are launched with PDL.

    Args:
        readonly: tensors whose memory nothing that is captured writes; kernels may read it before they wait.
    """
    token = _readonly_spans.set(readonly_spans(readonly) if capture_keeps_pdl() else None)
    try:
        yield
    finally:
        _readonly_spans.reset(token)


def in_pdl_capture() -> bool:
    """Whether this is within `pdl_capture`, and captures keep PDL."""
    return _readonly_spans.get() is not None


@functools.lru_cache(maxsize=None)
def capture_keeps_pdl() -> bool:
    """Whether torch's CUDA and the driver keep the launch attribute in a captured graph: from 12.3 on."""
    try:
        built = tuple(int(part) for part in str(torch.version.cuda).split(".")[:2])
        driver = cuda_libraries.bindings().driver.cuDriverGetVersion()  # type: ignore[union-attr]
    except Exception:
        return False
    major, minor = _CAPTURED_SINCE
    return built >= _CAPTURED_SINCE and driver >= 1000 * major + 10 * minor


def readonly_spans(readonly: Iterable[Tensor]) -> list[tuple[int, int]]:
    """Sorted (begin, end) addresses of the tensors on a GPU."""
    return sorted((t.data_ptr(), t.data_ptr() + t.nbytes) for t in readonly if t.is_cuda)


def allowed(read_before_wait: Iterable[Tensor]) -> bool:
    """Whether a kernel that reads these tensors before it waits may be launched with PDL now."""
    return in_pdl_capture() and allowed_at((x.data_ptr(), x.nbytes) if is_dense(x) else None for x in read_before_wait)


def allowed_at(read_before_wait: Iterable[tuple[int, int] | None]) -> bool:
    """`allowed` for memory, each with its address and bytes; None for a tensor that is not dense."""
    spans = _readonly_spans.get()
    if spans is None or not torch.cuda.is_current_stream_capturing():
        return False
    return all(each is not None and _is_readonly(*each, spans) for each in read_before_wait)


def is_dense(x: Tensor) -> bool:
    """Whether a tensor's elements lie next to each other, in the order of NCHW or NHWC."""
    return x.is_contiguous() or (x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last))


def _is_readonly(begin: int, size: int, spans: list[tuple[int, int]]) -> bool:
    """Whether memory lies within one of the spans."""
    place = bisect.bisect_right(spans, begin, key=lambda span: span[0]) - 1
    return place >= 0 and begin + size <= spans[place][1]


def launch_config(blocks: tuple[int, ...], threads: int, shared: int, stream: int) -> cuda_driver.CUlaunchConfig:
    """cuLaunchKernelEx's configuration with programmatic stream serialization."""
    attribute = cuda_driver.CUlaunchAttribute(id=cuda_driver.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION)
    attribute.value[0] = 1
    # the structure keeps the attribute alive
    return cuda_driver.CUlaunchConfig(*blocks, threads, 1, 1, shared, stream, ctypes.pointer(attribute), 1)
