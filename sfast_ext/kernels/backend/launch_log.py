"""Launches, passed on to a listener (`plans.recorded_run`), and the kernel that makes them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple

from torch import Tensor


class TensorMap(NamedTuple):
    """A TMA tensor map over the memory of `tensor`; `encode` makes one over that at another address."""

    tensor: Tensor
    encoded: Any
    encode: Callable[[int], Any]


class AddressTable(NamedTuple):
    """A parameter by value that holds addresses of tensors: `encoded`, a ctypes structure of one launch, and by byte of
    it the tensor whose address is there."""

    encoded: Any
    places: dict[int, Tensor]


class CudaLaunch(NamedTuple):
    """A launch by the driver. Parameters are tensors or None for addresses, ctypes numbers, tensor maps, and tables of
    addresses. `early`: what it reads before it waits for the kernel in front, see `pdl`; None if it never waits, or if
    the GPU has no PDL."""

    function: int
    blocks: tuple[int, ...]
    threads: int
    shared: int
    parameters: list[Any]
    early: list[Tensor] | None = None


class TritonLaunch(NamedTuple):
    """kernel[grid](*args, **constants)"""

    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    constants: dict[str, Any]


class Opaque(NamedTuple):
    """Something that cannot or is not to be repeated."""

    reason: str


Entry = CudaLaunch | TritonLaunch | Opaque
kernel: ContextVar[str] = ContextVar("kernel", default="")
"""The name of the kernel whose launch function runs, the innermost one."""
_listener: ContextVar[Callable[[Entry], None] | None] = ContextVar("launch_listener", default=None)


@contextlib.contextmanager
def listening(listener: Callable[[Entry], None]) -> Iterator[None]:
    """Within, in this thread, a function is called with each launch."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


def put(entry: Entry) -> None:
    """Pass an entry on, if there is a listener."""
    listener = _listener.get()
    if listener is not None:
        listener(entry)
