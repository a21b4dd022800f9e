"""Times calls by turns, each as a CUDA graph."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

from benchmarks.kernels.run import graph_of
from sfast_ext.kernels.backend import gpu_clock

SLEEP = 1_000_000
"""Clock cycles that the GPU waits before what is timed, so that a launch is not part of it."""
_REPEATS, _ROUNDS = 20, 7

Call = Callable[[], Any]


def in_turns(calls: dict[str, Call]) -> dict[str, float]:
    """Median microseconds of each call."""
    graphs = {name: graph_of(call, _REPEATS) for name, call in calls.items()}
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(_ROUNDS):
        for name, graph in graphs.items():
            taken[name].append(1e3 * gpu_clock.milliseconds(graph.replay, 1, SLEEP) / _REPEATS)
    return {name: round(statistics.median(times), 2) for name, times in taken.items()}
