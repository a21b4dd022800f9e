"""The memory of a long run, and how it grew."""

from __future__ import annotations

import mmap
import statistics
from pathlib import Path
from typing import Any

from benchmarks.fuzz.stress import MB


def host_mb() -> float | None:
    """The memory of this process; None if there is no /proc."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except OSError:
        return None
    return round(pages * mmap.PAGESIZE / MB, 1)


def growth(timeline: list[dict[str, Any]], name: str) -> dict[str, float] | None:
    """What a number was after the warm-up, its medians in the first and last quarter, its greatest; None if it was
    not read. A single look may meet the allocator between two graphs, so growth is told by the medians."""
    values = [line[name] for line in timeline]
    if None in values:
        return None
    quarter = max(1, len(values) // 4)
    return {
        "after the warm-up": values[0],
        "median of the first quarter": statistics.median(values[:quarter]),
        "median of the last quarter": statistics.median(values[-quarter:]),
        "most": max(values),
        "end": values[-1],
    }
