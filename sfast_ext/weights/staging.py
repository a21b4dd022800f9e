"""Copies from pageable system memory to the GPU.

CUDA's driver copies pageable memory in one thread, through one pinned buffer. Here threads fill one pinned
buffer while the other is on its way: about three times as fast with six of them (docs/small-cards.md). The method is
that of "How to Optimize Data Transfers in CUDA C/C++" (NVIDIA's developer blog, 2012), with two buffers.

The threads are not torch's: those of OpenMP wait for each other after each tensor, and where other work has the cores,
that takes a turn of the scheduler for each of a UNet's 700 weights.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import torch

from sfast_ext.weights import pinned_buffers
from sfast_ext.weights.original_layout import live_tensor
from sfast_ext.weights.pinned_buffers import Arrival

BUFFER_BYTES = 32 << 20
_ALIGNED = 64  # where a tensor begins in a buffer, in bytes
_MIN_THREADS, _MAX_THREADS = 2, 6  # with one, the driver is faster; more than six gain little
_TASK_BYTES = 1 << 20  # what a thread takes at a time, or a single tensor


Copy = Callable[[torch.Tensor, torch.Tensor], object]
"""`copy(to, source)`, for tensors of the same shape and dtype."""


class Event(Arrival, Protocol):
    """What is used of `torch.cuda.Event`. One that was never recorded is not waited for."""

    def record(self, stream: torch.cuda.Stream | None = None) -> object:
        """On this stream, or on the current one."""


class Staging:
    """Two pinned buffers, taken when they are first needed. The function to copy with is that of a `with` block:

        with Staging() as copy:
            copy(there, source)

    All copies must be to one device, on its current stream. At the end of the `with` block they are complete, in the
    order of that stream, and the sources may be written. Before, and after an exception, a target may be without its
    values.

    Args:
        size: bytes of each buffer.
    """

    def __init__(self, size: int = BUFFER_BYTES) -> None:
        self._size = size
        self._buffers: list[tuple[torch.Tensor, Event]] | None = None
        self._used = 0  # bytes of the first buffer
        self._pieces: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []  # target, place in the buffer, source
        self._pool: ThreadPoolExecutor | None = None
        self._helpers = 0
        self._arrival: Event | None = None  # of what was sent last

    def __enter__(self) -> Copy:
        return self.copy

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            if kind is None:
                self._send()
                self._give_back()
        finally:
            self._pieces.clear()
            if self._pool is not None:
                self._pool.shutdown()

    def _give_back(self) -> None:
        """The next copies may take the buffers. After an exception it is not known what still reads them."""
        if self._buffers:
            pinned_buffers.give_back([buffer for buffer, _ in self._buffers], self._arrival)
            self._buffers = None

    def deliver(self) -> None:
        """What was copied is complete, in the order of the device's stream, before the end of the `with` block."""
        if self._pieces:
            self._next()

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        """`to.copy_(source)`, through the buffers if `source` is on the CPU and `to` on the GPU."""
        staged = to.is_cuda and not source.is_cuda and is_dense(source) and not source.is_pinned()
        if not staged or not self._allocated():
            to.copy_(source)
            return
        source = live_tensor(source)
        same = to.stride() == source.stride()
        there = to if same else torch.empty_strided(source.shape, source.stride(), dtype=to.dtype, device=to.device)
        self._stage(in_memory_order(there).view(torch.uint8), in_memory_order(source).view(torch.uint8))
        if not same:
            self._send()
            to.copy_(there)

    def _allocated(self) -> bool:
        if self._buffers is None:
            self._buffers = []
            threads = _threads()
            buffers = pinned_buffers.take(self._size) if threads else None
            if buffers is not None:
                self._helpers = threads - 1
                self._pool = ThreadPoolExecutor(self._helpers, thread_name_prefix="sfast: weights")
                self._buffers = [(buffer, self._event()) for buffer in buffers]
        return bool(self._buffers)

    def _event(self) -> Event:
        return torch.cuda.Event()

    def _stream(self, device: torch.device) -> torch.cuda.Stream | None:
        return torch.cuda.current_stream(device)

    def _stage(self, to: torch.Tensor, source: torch.Tensor) -> None:
        assert self._buffers is not None
        done, size = 0, source.numel()
        while done < size:
            if self._used >= self._size:
                self._next()
            buffer, _ = self._buffers[0]
            n = min(self._size - self._used, size - done)
            filled = buffer[self._used : self._used + n]
            self._pieces.append((to[done : done + n], filled, source[done : done + n]))
            done += n
            self._used += -(-n // _ALIGNED) * _ALIGNED

    def _send(self) -> None:
        """Fill the first buffer with what was staged, and copy it to the GPU."""
        if self._pieces:
            assert self._pool is not None and self._buffers is not None
            # each thread takes what is next until nothing is left: few wake-ups, and none waits for a slow one's share
            _share(self._pool, self._helpers, [(filled.numpy(), source.numpy()) for _, filled, source in self._pieces])
            for to, filled, _ in self._pieces:
                to.copy_(filled, non_blocking=True)
            # a copy is on the stream of the device that it is to, which need not be the current one
            self._arrival = self._buffers[0][1]
            self._arrival.record(self._stream(self._pieces[0][0].device))
            self._pieces.clear()

    def _next(self) -> None:
        """Go on with the other buffer, once what was copied from it has arrived."""
        assert self._buffers is not None
        self._send()
        self._buffers.reverse()
        self._buffers[0][1].synchronize()
        self._used = 0


def _threads() -> int:
    """How many copy; none if the driver is faster."""
    threads = min(torch.get_num_threads(), _MAX_THREADS)
    return threads if threads >= _MIN_THREADS else 0


_Copy = tuple[Any, Any]
"""Arrays of NumPy: to, from. Copying between them needs no GIL, and no thread of torch."""


def _tasks(copies: Iterable[_Copy]) -> Iterator[list[_Copy]]:
    """Copies in groups of about `_TASK_BYTES`, large ones in parts."""
    group: list[_Copy] = []
    size = 0
    for to, source in copies:
        for start in range(0, len(to), _TASK_BYTES):
            part = slice(start, start + _TASK_BYTES)
            group.append((to[part], source[part]))
            size += len(group[-1][0])
            if size >= _TASK_BYTES:
                yield group
                group, size = [], 0
    if group:
        yield group


def _fill(left: deque[list[_Copy]]) -> None:
    """Copy until nothing is left."""
    while True:
        try:
            task = left.popleft()
        except IndexError:
            return
        for to, source in task:
            to[:] = source


def to_system_memory(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copies of tensors of a GPU in new system memory, as `to("cpu")` makes them. Threads empty one pinned buffer, and
    touch new pages, while the other is filled."""
    threads = _threads()
    one_gpu = len({t.device for t in tensors}) == 1 and tensors[0].is_cuda
    worth = threads and one_gpu and sum(t.nbytes for t in tensors) >= BUFFER_BYTES
    buffers = pinned_buffers.take(BUFFER_BYTES) if worth else None
    if buffers is None:
        return [tensor.to("cpu") for tensor in tensors]
    stream = torch.cuda.current_stream(tensors[0].device)

    def mark() -> Event:
        event = torch.cuda.Event()
        event.record(stream)
        return event

    made = _through(buffers, tensors, threads, mark)
    pinned_buffers.give_back(buffers)
    return made


def _through(
    buffers: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor], threads: int, mark: Callable[[], Event]
) -> list[torch.Tensor]:
    """Copies of tensors in new system memory, through two buffers. `mark` gives what waits until all that was copied to
    buffers before is there."""
    made = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype) if is_dense(t) else t.to("cpu") for t in tensors]
    pairs = [(in_memory_order(to).view(torch.uint8), in_memory_order(source).view(torch.uint8))
             for to, source in zip(made, tensors) if is_dense(source)]  # fmt: skip
    with ThreadPoolExecutor(threads - 1, thread_name_prefix="sfast: weights") as pool:
        emptied: list[_Copy] = []
        for number, group in enumerate(_groups(pairs, len(buffers[0]))):
            buffer, filled, used = buffers[number % 2], [], 0
            for to, source in group:
                place = buffer[used : used + len(to)]
                place.copy_(source, non_blocking=True)
                filled.append((to.numpy(), place.numpy()))
                used += -(-len(to) // _ALIGNED) * _ALIGNED
            arrived = mark()
            # the other buffer, while this one is filled
            _share(pool, threads - 1, emptied)
            arrived.synchronize()
            emptied = filled
        _share(pool, threads - 1, emptied)
    return made


_Pair = tuple[torch.Tensor, torch.Tensor]


def _groups(pairs: Iterable[_Pair], size: int) -> Iterator[list[_Pair]]:
    """Pairs of bytes in groups that fit into a buffer of so many, large ones in parts."""
    group: list[_Pair] = []
    used = 0
    for to, source in pairs:
        done = 0
        while done < len(to):
            n = min(len(to) - done, size - used)
            if n <= 0:
                yield group
                group, used = [], 0
                continue
            group.append((to[done : done + n], source[done : done + n]))
            done += n
            used += -(-n // _ALIGNED) * _ALIGNED
    if group:
        yield group


def _share(pool: ThreadPoolExecutor, helpers: int, copies: list[_Copy]) -> None:
    """Copy by several threads, and wait for them."""
    left = deque(_tasks(copies))
    others = [pool.submit(_fill, left) for _ in range(helpers if left else 0)]
    _fill(left)
    for other in others:
        other.result()


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor's elements fill a range of memory in an order that is known here."""
    return tensor.is_contiguous() or (tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last))


def in_memory_order(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a dense tensor as they lie in memory. Shape: (elements,)."""
    return tensor.as_strided((tensor.numel(),), (1,))
