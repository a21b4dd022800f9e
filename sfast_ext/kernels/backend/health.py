"""Kernels that failed on this machine. A failed kernel is disabled by name with its reason: plans do without it for the
rest of the process."""

from __future__ import annotations

import threading

import torch

_disabled: dict[tuple[str, str], str] = {}
_lock = threading.Lock()


class KernelFailed(Exception):
    """Kernels that do not compile or run; `reasons` by name. They are not disabled yet."""

    def __init__(self, reasons: dict[str, str]) -> None:
        super().__init__("; ".join(f"{name}: {reason}" for name, reason in reasons.items()))
        self.reasons = reasons


def disable(name: str, device: torch.device, reason: str) -> bool:
    """Disable a kernel on a device. False if it was already."""
    with _lock:
        known = (name, str(device)) in _disabled
        _disabled.setdefault((name, str(device)), reason)
        return not known


def reason(name: str, device: torch.device) -> str | None:
    """Why a kernel is disabled on a device, or None."""
    return _disabled.get((name, str(device))) if _disabled else None


def disabled(device: torch.device) -> dict[str, str]:
    """The kernels disabled on a device, with their reasons."""
    with _lock:
        return {name: why for (name, where), why in _disabled.items() if where == str(device)}


def clear() -> None:
    """Enable all kernels again."""
    with _lock:
        _disabled.clear()


def attribute(exc: BaseException, name: str) -> None:
    """Note the kernel that an exception passes through; the innermost one stays."""
    if not hasattr(exc, "_sfast_kernel"):
        exc._sfast_kernel = name  # type: ignore[attr-defined]


def culprits(exc: BaseException) -> dict[str, str]:
    """The kernel that raised an exception, and its reason; empty for exceptions from elsewhere, and if memory ran out,
    which is no kernel's fault."""
    if isinstance(exc, KernelFailed):
        return exc.reasons
    if isinstance(exc, torch.cuda.OutOfMemoryError) or "out of memory" in str(exc):
        return {}
    found = getattr(exc, "_sfast_kernel", None)
    return {} if found is None else {found: describe(exc)}


def describe(exc: BaseException) -> str:
    """An exception in one line: the last of its text, as compilers quote the whole kernel first."""
    lines = [line.strip() for line in str(exc).splitlines() if line.strip()]
    return f"{type(exc).__name__}: {lines[-1][:200]}" if lines else type(exc).__name__


def disturbed(exc: BaseException | None) -> bool:
    """Whether Python's parser failed with "AST constructor recursion depth mismatch", as 3.11 may if threads parse."""
    while exc is not None and not isinstance(exc, SystemError):
        exc = exc.__cause__ or exc.__context__
    return exc is not None
