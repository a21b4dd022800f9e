"""Copies from pageable system memory to the GPU.

CUDA's driver copies pageable memory in one thread, through a pinned buffer of its own. Here all of torch's threads fill
one pinned buffer while the other is on its way: about three times as fast with six threads (docs/small-cards.md). The
method is that of "How to Optimize Data Transfers in CUDA C/C++" (NVIDIA's developer blog, 2012), with two buffers.
"""

from __future__ import annotations

from typing import Protocol

import torch

from sfast_ext.weights.original_layout import live_tensor

BUFFER_BYTES = 32 << 20
_ALIGNED = 64  # where a tensor begins in a buffer, in bytes
_LEAST_THREADS = 2  # with one, the driver is faster


class Event(Protocol):
    """What is used of `torch.cuda.Event`."""

    def record(self, stream: torch.cuda.Stream | None = None) -> object:
        """On this stream, or on the current one."""

    def synchronize(self) -> object:
        """Wait until the stream has come there; not at all where it was never recorded."""


class Staging:
    """Two pinned buffers, allocated when they are first needed.

    All copies must be to one device, on its current stream. A source may be written as soon as its copy was called.

    Args:
        size: bytes of each buffer.
    """

    def __init__(self, size: int = BUFFER_BYTES) -> None:
        self._size = size
        self._buffers: list[tuple[torch.Tensor, Event]] | None = None
        self._used = 0  # bytes of the first buffer

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        """`to.copy_(source)` for tensors of the same shape and dtype, asynchronously where `source` is on the CPU and
        `to` on the GPU."""
        staged = to.is_cuda and not source.is_cuda and is_dense(source) and not source.is_pinned()
        if not staged or not self._allocated():
            to.copy_(source)
            return
        source = live_tensor(source)
        same = to.stride() == source.stride()
        there = to if same else torch.empty_strided(source.shape, source.stride(), dtype=to.dtype, device=to.device)
        self._stage(in_memory_order(there).view(torch.uint8), in_memory_order(source).view(torch.uint8))
        if not same:
            to.copy_(there)

    def _allocated(self) -> bool:
        if self._buffers is None:
            self._buffers = []
            try:
                if torch.get_num_threads() >= _LEAST_THREADS:
                    self._buffers = [self._buffer(self._size) for _ in range(2)]
            except RuntimeError:
                # no more memory can be pinned
                pass
        return bool(self._buffers)

    def _buffer(self, size: int) -> tuple[torch.Tensor, Event]:
        # torch keeps its memory until the last copy from it is done
        return torch.empty(size, dtype=torch.uint8, pin_memory=True), torch.cuda.Event()

    def _stream(self, device: torch.device) -> torch.cuda.Stream | None:
        return torch.cuda.current_stream(device)

    def _stage(self, to: torch.Tensor, source: torch.Tensor) -> None:
        assert self._buffers is not None
        done, size = 0, source.numel()
        while done < size:
            if self._used >= self._size:
                self._next(to.device)
            buffer, _ = self._buffers[0]
            n = min(self._size - self._used, size - done)
            filled = buffer[self._used : self._used + n]
            filled.copy_(source[done : done + n])
            to[done : done + n].copy_(filled, non_blocking=True)
            done += n
            self._used += -(-n // _ALIGNED) * _ALIGNED

    def _next(self, device: torch.device) -> None:
        """Go on with the other buffer, once what was copied from it has arrived."""
        assert self._buffers is not None
        # a copy is on the stream of the device that it is to, which need not be the current one
        self._buffers[0][1].record(self._stream(device))
        self._buffers.reverse()
        self._buffers[0][1].synchronize()
        self._used = 0


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor's elements fill a range of memory in an order that is known here."""
    return tensor.is_contiguous() or (tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last))


def in_memory_order(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a dense tensor as they lie in memory. Shape: (elements,)."""
    return tensor.as_strided((tensor.numel(),), (1,))
