"""Modules that are called about once for each picture and take long, such as a VAE, see `Config.rare_calls`.

Who makes one picture of a size must not pay for a plan. Who makes several pays for one run of it: the original's run at
that call is timed, which is the picture's own, and so is the first picture that the plan decodes.
"""

from __future__ import annotations

import time
from collections.abc import Hashable

import torch

_SEEN = 256  # calls that are remembered


class RareCalls:
    """When plans of such a module are made: at the second call of its kind, and at most one in a generation."""

    def __init__(self) -> None:
        self._seen: set[Hashable] = set()
        self._announced = self._built = False

    def new_generation(self) -> None:
        """A generation begins. If this is never called, plans are not counted."""
        self._announced, self._built = True, False

    def too_early(self, key: Hashable) -> bool:
        """Whether a call gets no plan yet. Call it once for each call that has none."""
        if key not in self._seen:
            if len(self._seen) >= _SEEN:
                self._seen.clear()
            self._seen.add(key)
            return True
        if self._announced and self._built:
            return True
        self._built = True
        return False


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

    def milliseconds(self) -> float:
        """Waits for the end of the run."""
        if self._marks is None:
            return 1000 * (self._ended - self._started)
        start, end = self._marks
        end.synchronize()
        return float(start.elapsed_time(end))
