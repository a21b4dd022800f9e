"""Whether system memory has room for copies of weights that are on the GPU."""

from __future__ import annotations

from pathlib import Path

RESERVE = 4 << 30
"""Bytes of system memory left free for what the host loads while a model is on the GPU."""

_CGROUP_ROOT = Path("/sys/fs/cgroup")
_CGROUPS = (
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
)
"""For versions 2 and 1: files with the limit and what is used, and where it says how much of that are cached files."""


def available_bytes() -> int:
    """Bytes that this process may still take without swapping; 0 where it is not known."""
    try:
        # all hosts require it
        import psutil
    except ImportError:
        return 0
    return min(int(psutil.virtual_memory().available), *(_container_bytes(*names) for names in _CGROUPS))


def has_room() -> bool:
    """Whether weights that are in system memory now may stay there beside those on the GPU."""
    return available_bytes() >= RESERVE


def _container_bytes(limit: str, usage: str, statistics: str, cached: str) -> int:
    """What the limit of a container leaves; psutil sees the whole machine."""
    try:
        left = int((_CGROUP_ROOT / limit).read_text()) - int((_CGROUP_ROOT / usage).read_text())
        lines = (_CGROUP_ROOT / statistics).read_text().splitlines()
        return left + next(int(value) for name, value in map(str.split, lines) if name == cached)
    except (OSError, ValueError, StopIteration):
        # no container, or "max"
        return 1 << 62
