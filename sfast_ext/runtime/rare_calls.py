"""Modules that are called about once for each picture and take long, such as a VAE, see `Config.rare_calls`.

Whether the user makes one more picture of a size or a hundred is not known. So a plan is made once the original's runs
have cost, over what a plan would have, as much as making the plan: at worst that is twice the time of who knew it (the
ski-rental problem: Karlin, Manasse, Rudolph, Sleator, Competitive snoopy caching, 1988). Nothing is run only to be
timed: the original's runs are the pictures' own, and so is the first one that the plan decodes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Hashable
from dataclasses import dataclass, field

import torch

_SEEN = 256  # kinds of calls that are remembered
FIRST_BUILD_MS = 1500.0
"""What a plan is taken to cost before one was made: 600 to 2000 ms beside an NVIDIA H200."""


@dataclass
class _Runs:
    """The original's runs in calls of one kind: the time of those that ended, and those that may not have ended."""

    milliseconds: float = 0.0
    pending: list[Stopwatch] = field(default_factory=list)


class RareCalls:
    """When plans of such a module are made: when they pay, at the second call of their kind at the earliest, and at
    most one in a generation."""

    def __init__(self) -> None:
        self._runs: dict[Hashable, _Runs] = {}
        self._build_ms = FIRST_BUILD_MS
        self._announced = self._built = False

    def new_generation(self) -> None:
        """A generation begins. If this is never called, plans are not counted."""
        self._announced, self._built = True, False

    def too_early(self, key: Hashable, gain: float) -> bool:
        """Whether a call gets no plan yet. Call it once for each call that has none.

        Args:
            gain: see `Config.rare_gain`.
        """
        if key not in self._runs or (math.isfinite(gain) and self._spent(key) * gain < self._build_ms):
            return True
        if self._announced and self._built:
            return True
        self._built = True
        # a plan that is evicted has to pay again
        self._runs[key] = _Runs()
        return False

    def ran(self, key: Hashable, watch: Stopwatch) -> None:
        """The original has run in a call that got no plan, for this time."""
        if key not in self._runs and len(self._runs) >= _SEEN:
            self._runs.clear()
        self._runs.setdefault(key, _Runs()).pending.append(watch)

    def built(self, milliseconds: float) -> None:
        """A plan was made in this time; the next is taken to cost as much."""
        self._build_ms = milliseconds

    def _spent(self, key: Hashable) -> float:
        runs = self._runs[key]
        times = [(watch, watch.elapsed()) for watch in runs.pending]
        runs.milliseconds += sum(ms for _, ms in times if ms is not None)
        runs.pending = [watch for watch, ms in times if ms is None]
        return runs.milliseconds


class Stopwatch:
    """The time of one run, from its making to `stop`: on a GPU by events, without waiting."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._started, self._ended = 0.0, 0.0
        self._marks = tuple(torch.cuda.Event(enable_timing=True) for _ in range(2)) if device.type == "cuda" else None
        if self._marks is not None:
            self._marks[0].record(torch.cuda.current_stream(device))
        else:
            self._started = time.perf_counter()

    def stop(self) -> None:
        """The run has been launched."""
        if self._marks is not None:
            self._marks[1].record(torch.cuda.current_stream(self._device))
        else:
            self._ended = time.perf_counter()

    def elapsed(self) -> float | None:
        """Milliseconds, or None while the run has not ended."""
        return None if self._marks is not None and not self._marks[1].query() else self.milliseconds()

    def milliseconds(self) -> float:
        """Waits for the end of the run."""
        if self._marks is None:
            return 1000 * (self._ended - self._started)
        start, end = self._marks
        end.synchronize()
        return float(start.elapsed_time(end))
