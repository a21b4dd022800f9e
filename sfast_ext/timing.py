"""Times of calls by a clock, on one that moves in coarse steps too. What runs on a GPU is timed by CUDA events."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

Clock = Callable[[], float]
"""Returns seconds that never decrease."""

STEPS = 50
"""A time is told from at least so many steps of the clock: to 2 %."""
MAX_S = 0.5
"""If its steps are coarser than 10 ms, from fewer: calls are repeated for so many seconds, and one step at least."""

_CHANGES = 3
_READINGS = 10_000_000


class Timer:
    """Times calls on the CPU by a clock."""

    def __init__(self, clock: Clock = time.perf_counter) -> None:
        self._clock = clock

    def step(self) -> float:
        """Seconds between two readings of the clock that differ, the least of a few.

        Raises:
            RuntimeError: the clock stands still.
        """
        return min(self._next_change() for _ in range(_CHANGES))

    def _next_change(self) -> float:
        started = self._clock()
        for _ in range(_READINGS):
            taken = self._clock() - started
            if taken > 0:
                return taken
        raise RuntimeError(f"the clock stood still for {_READINGS:,} readings: nothing can be timed by it")

    def milliseconds(self, call: Callable[[], Any]) -> float:
        """The time of a call, greater than zero: the mean of as many as `STEPS` steps of the clock take.

        On a clock of nanoseconds that is a single call.

        Raises:
            RuntimeError: the clock stands still.
        """
        return self._mean(call)[0]

    def times(self, call: Callable[[], Any], count: int) -> list[float]:
        """Milliseconds of `count` calls: of each, or of fewer means that so many calls and more went into."""
        taken, calls = [], 0
        while calls < count:
            mean, several = self._mean(call)
            taken.append(mean)
            calls += several
        return taken

    def _mean(self, call: Callable[[], Any]) -> tuple[float, int]:
        """Milliseconds of a call, and how many were made."""
        enough = self._enough()
        while True:
            calls, taken, started = 0, 0.0, self._clock()
            while taken < enough:
                call()
                calls += 1
                taken = self._clock() - started
            # a virtual machine's cores may differ, and the thread may have come to one whose steps are coarser
            enough = self._enough()
            if taken >= enough:
                return 1e3 * taken / calls, calls

    def _enough(self) -> float:
        step = self.step()
        return max(min(STEPS * step, MAX_S), step)


class Pace:
    """How many calls come in a second, while they come one after the other. Takes a reading of the clock a call."""

    def __init__(self, clock: Clock = time.perf_counter) -> None:
        self._clock = clock
        self._first = self._last = 0.0
        self._calls = 0
        self._before: float | None = None

    def tick(self) -> None:
        """A call is done."""
        self._last = self._clock()
        if self._calls == 0:
            self._first = self._last
        self._calls += 1

    def restart(self) -> None:
        """What follows has nothing to do with the calls before, whose pace is kept until there is another."""
        self._before = self.per_second()
        self._calls = 0

    def per_second(self) -> float | None:
        """The pace of the calls since the last restart; before there are three of them, that of those before it."""
        taken = self._last - self._first
        return (self._calls - 1) / taken if self._calls > 2 and taken > 0 else self._before


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


timer = Timer()
"""That of `time.perf_counter`."""
