"""Whether system memory has room for copies of weights that are on the GPU, and what gives freed memory back."""

from __future__ import annotations

import contextlib
import ctypes
import os
from pathlib import Path

from sfast_ext import freed_memory
from sfast_ext.weights import pinned_buffers

RESERVE = 4 << 30
"""Bytes of system memory left free for what the host loads while a model is on the GPU."""

MARGIN = 1 << 30
"""Bytes of system memory left free next to weights that move there."""

_UNLIMITED = 1 << 62
_CGROUP_ROOT = Path("/sys/fs/cgroup")
_CGROUPS = (
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
)
"""For versions 2 and 1: files with the limit and what is used, and where it says how much of that are cached files."""


def available_bytes() -> int:
    """Bytes that this process may still take without swapping; 0 if it is not known."""
    try:
        # all hosts require it
        import psutil
    except ImportError:
        return 0
    contained = (_container_bytes(*names) for names in _CGROUPS)
    return min(int(psutil.virtual_memory().available), _committable_bytes(), *contained)


def has_room() -> bool:
    """Whether weights that are in system memory now may stay there in addition to those on the GPU."""
    return available_bytes() >= RESERVE


def has_room_for(size: int) -> bool:
    """Whether weights of so many bytes that are on the GPU may move to system memory."""
    return available_bytes() >= size + MARGIN


def trim() -> None:
    """Give memory that was freed back to the system: what torch keeps of pinned memory, and what the C library keeps.
    See `freed_memory` for how long it takes: call it after much was freed that is not made again soon. Raises
    nothing."""
    with contextlib.suppress(RuntimeError):
        pinned_buffers.free()
    freed_memory.give_back()


def _container_bytes(limit: str, usage: str, statistics: str, cached: str) -> int:
    """What the limit of a container leaves; psutil sees the whole machine."""
    try:
        left = int((_CGROUP_ROOT / limit).read_text()) - int((_CGROUP_ROOT / usage).read_text())
        lines = (_CGROUP_ROOT / statistics).read_text().splitlines()
        return left + next(int(value) for name, value in map(str.split, lines) if name == cached)
    except (OSError, ValueError, StopIteration):
        # no container, or "max"
        return _UNLIMITED


class _MemoryStatus(ctypes.Structure):
    """Windows' MEMORYSTATUSEX."""

    _fields_ = (
        ("dwLength", ctypes.c_uint32),
        ("dwMemoryLoad", ctypes.c_uint32),
        ("ullTotalPhys", ctypes.c_uint64),
        ("ullAvailPhys", ctypes.c_uint64),
        ("ullTotalPageFile", ctypes.c_uint64),
        ("ullAvailPageFile", ctypes.c_uint64),
        ("ullTotalVirtual", ctypes.c_uint64),
        ("ullAvailVirtual", ctypes.c_uint64),
        ("ullAvailExtendedVirtual", ctypes.c_uint64),
    )


def _committable_bytes() -> int:
    """What this process may still commit. Windows refuses more than memory and paging file hold together, even if
    memory is free, and counts what is on the GPU."""
    if os.name != "nt":
        return _UNLIMITED
    status = _MemoryStatus(dwLength=ctypes.sizeof(_MemoryStatus))
    windows = getattr(ctypes, "windll")  # noqa: B009
    return int(status.ullAvailPageFile) if windows.kernel32.GlobalMemoryStatusEx(ctypes.byref(status)) else 0
