"""Kernels that failed on this machine. A failed kernel is disabled by name with its reason: plans do without it for the
rest of the process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import ModuleType, TracebackType
from typing import Any

import torch

from sfast_ext.kernels.backend import registry
from sfast_ext.kernels.backend.registry import Kernel

_HOME = "sfast_ext.kernels."
_LAUNCHES = ("launch", "fallback")
_down: dict[tuple[str, str], str] = {}
_lock = threading.Lock()


class KernelFailed(Exception):
    """Kernels that do not compile or run; `reasons` by name. They are not disabled yet."""

    def __init__(self, reasons: dict[str, str]) -> None:
        super().__init__("; ".join(f"{name}: {reason}" for name, reason in reasons.items()))
        self.reasons = reasons


def put_down(name: str, device: torch.device, reason: str) -> bool:
    """Disable a kernel on a device. False where it was already."""
    with _lock:
        known = (name, str(device)) in _down
        _down.setdefault((name, str(device)), reason)
        return not known


def reason(name: str, device: torch.device) -> str | None:
    """Why a kernel is disabled on a device, or None."""
    return _down.get((name, str(device))) if _down else None


def all_down(device: torch.device) -> dict[str, str]:
    """The kernels disabled on a device, with their reasons."""
    with _lock:
        return {name: why for (name, where), why in _down.items() if where == str(device)}


def clear() -> None:
    """Enable all kernels again."""
    with _lock:
        _down.clear()


def usable(kernel: Kernel | ModuleType, device: torch.device) -> bool:
    """Whether neither a kernel (or the kernel of a file) nor one that its launch may call is disabled on a device."""
    record = registry.of(kernel)
    if record is None:
        raise ValueError(f"{kernel} has no kernel")
    return not _down or all(reason(each.name, device) is None for each in _with_used(record))


def _with_used(kernel: Kernel) -> Iterator[Kernel]:
    yield kernel
    for used in kernel.uses:
        yield from _with_used(used)


def blamed(exc: BaseException) -> dict[str, str]:
    """The kernel that raised an exception, and its reason; empty for exceptions from elsewhere, and where memory ran
    out, which is no kernel's fault."""
    if isinstance(exc, KernelFailed):
        return exc.reasons
    if isinstance(exc, torch.cuda.OutOfMemoryError) or "out of memory" in str(exc):
        return {}
    found = _launcher(exc.__traceback__)
    return {} if found is None else {found: describe(exc)}


def describe(exc: BaseException) -> str:
    """An exception in one line: the last of its text, as compilers quote the whole kernel first."""
    lines = [line.strip() for line in str(exc).splitlines() if line.strip()]
    return f"{type(exc).__name__}: {lines[-1][:200]}" if lines else type(exc).__name__


def disturbed(exc: BaseException | None) -> bool:
    """Whether Python's parser failed with "AST constructor recursion depth mismatch", as 3.11 may where threads
    parse."""
    while exc is not None and not isinstance(exc, SystemError):
        exc = exc.__cause__ or exc.__context__
    return exc is not None


def _launcher(traceback: TracebackType | None) -> str | None:
    """The kernel of the innermost launch function in a traceback."""
    found = None
    while traceback is not None:
        found = launcher_of(traceback.tb_frame) or found
        traceback = traceback.tb_next
    return found


def launcher_of(frame: Any) -> str | None:
    """The file name of the kernel whose launch function, or fallback, a frame runs; None for other frames."""
    home = frame.f_globals.get("__name__", "")
    return home.rpartition(".")[2] if frame.f_code.co_name in _LAUNCHES and home.startswith(_HOME) else None
