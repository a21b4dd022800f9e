"""A branch of a CUDA graph: launches that run next to those of the graph until one of these needs their results.

A stream that is forked while the graph is captured becomes the branch. What is launched within `aside` is on it, in
order; `join` makes what follows on the stream of the capture wait for it. Outside of a capture both do nothing, and
launches run in the order of the calls. Nothing may be allocated aside: the memory of the graph's pool is reused in the
order of the stream of the capture.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar

import torch
from torch import Tensor

from sfast_ext.kernels.backend import pdl
from sfast_ext.kernels.backend.registry import Kernel


class _Branch:
    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.stream = stream
        self.begun = False
        self.ends: dict[int, torch.cuda.Event] = {}
        """Behind what was launched, by the address of what it wrote, until that is joined."""


_branch: ContextVar[_Branch | None] = ContextVar("graph_branch", default=None)


@contextlib.contextmanager
def branching(stream: torch.cuda.Stream) -> Iterator[None]:
    """Within, in this thread and while it captures: there is a branch, on that stream. All of it is joined at the
    end."""
    branch = _Branch(stream)
    token = _branch.set(branch)
    try:
        yield
        for address in list(branch.ends):
            _wait(branch, address)
    finally:
        _branch.reset(token)


def is_open() -> bool:
    """Whether there is a branch."""
    return _branch.get() is not None


@contextlib.contextmanager
def aside(results: Sequence[Tensor]) -> Iterator[None]:
    """Within, launches are on the branch, if there is one. They write `results`, which `join` waits for."""
    branch = _branch.get()
    if branch is None or not results:
        yield
        return
    if not branch.begun:
        branch.begun = True
        branch.stream.wait_stream(torch.cuda.current_stream(branch.stream.device))
    with torch.cuda.stream(branch.stream):
        pdl.wait_plainly()
        yield
        branch.ends[results[0].data_ptr()] = branch.stream.record_event()


def _wait(branch: _Branch, address: int) -> None:
    torch.cuda.current_stream(branch.stream.device).wait_event(branch.ends.pop(address))
    pdl.wait_plainly()


def _joined(results: Sequence[Tensor]) -> list[Tensor]:
    branch = _branch.get()
    if branch is not None and results and results[0].data_ptr() in branch.ends:
        _wait(branch, results[0].data_ptr())
    return list(results)


join: Kernel[[Sequence[Tensor]], list[Tensor]] = Kernel(_joined, _joined, writes=0, needs_triton=False, part=True)
"""The same tensors, once they are written: what follows waits for the part of the branch that writes them. It launches
nothing."""
