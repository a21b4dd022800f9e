"""What the runs of a plan tell of when its CUDA graph is captured again."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from sfast_ext.plans.payback import Payback


def clocked(run: Callable[..., Any], inputs: Sequence[torch.Tensor], device: torch.device) -> tuple[float, float]:
    """Seconds until the CPU has launched a run on a GPU, and until the GPU is done."""
    torch.cuda.synchronize(device)
    began = time.perf_counter()
    run(*inputs)
    launched = time.perf_counter()
    torch.cuda.synchronize(device)
    return launched - began, time.perf_counter() - began


FEW_RUNS = 8
"""A stay of fewer runs gives nothing back, if it is not known what a run without a graph takes."""
HIDDEN_MS = 100.0
"""A GPU that takes longer for a run hides what the CPU does meanwhile."""
STEPS = 32
"""So many of the last runs with a graph, and of those without, tell how far two that follow each other are apart."""
STAYS = 2
"""So many of the last stays tell how long the next one is: the shortest."""
RECORDING = 2
"""A graph that was captured so often is taken to go with each image. A recording takes about as long as the launches of
four captures."""


@dataclass
class Recapture:
    """When the CUDA graph of a plan is captured again after it was evicted; times in milliseconds.

    On a small card the memory of graphs goes with each image, to the VAE or to the model that comes next. To capture
    takes a run of the CPU, a synchronisation, and the allocator's cache. Without a graph a run takes the CPU longer
    (`recorded_run`). A slow GPU hides that, unless the host takes its own time between two runs: once it is known how
    far runs were apart with a graph and without, that counts. A graph is captured at once if a stay as long as the last
    ones gives that back; a stay is the runs of the plan from one eviction to the next. Otherwise the plan runs without
    one until that has cost what a capture costs.
    """

    capture: Payback = field(default_factory=Payback)
    """The price is what the quickest capture took: of the first one a part is memory that others had."""
    without_ms: float | None = None
    """A run without a graph."""
    waits_ms: float = 0.0
    """What the CPU does in addition before such a run, and next to the GPU's work with a graph."""
    stays: deque[int] = field(default_factory=lambda: deque(maxlen=STAYS))
    """Runs of the plan in each."""
    captures: int = 0
    """Those of the plan so far."""
    launch_s: float = 0.0
    """Seconds that the CPU took for the launches of the last one."""
    _steps: dict[bool, deque[float]] = field(default_factory=lambda: {k: deque(maxlen=STEPS) for k in (False, True)})
    """Milliseconds from one run to the next, with a graph and without."""
    _last: tuple[bool, float] | None = None
    _expected: bool = False
    """Whether the price is what a capture is expected to take: none was timed since."""

    def captured(self, milliseconds: float, launch_ms: float) -> None:
        """A graph was captured in this time, of which launches took a part."""
        before = 0.0 if self._expected else self.capture.price
        self._expected = False
        self.capture.restart(min(before, milliseconds) if before else milliseconds)
        self.captures += 1
        self.launch_s = launch_ms / 1000

    def recorded(self, saved_ms: float) -> None:
        """The CPU launches a run in so much less time from now on."""
        self.capture.price, self._expected = max(0.0, self.capture.price - saved_ms), True

    @property
    def recurs(self) -> bool:
        """Whether there were so many captures that there will be more."""
        return self.captures >= RECORDING

    def evicted(self, runs: int) -> None:
        """The graph is gone, after so many runs since the one before went."""
        if runs:
            self.stays.append(runs)

    def ran(self, with_graph: bool, seconds: float) -> None:
        """A run for the host has been launched.

        Args:
            seconds: on the CPU's clock.
        """
        before, self._last = self._last, (with_graph, seconds)
        if before is not None and before[0] == with_graph:
            self._steps[with_graph].append(1000 * (seconds - before[1]))

    def ran_without(self, with_ms: float | None) -> None:
        """A run without a graph, which takes `with_ms` with one."""
        self.capture.pay(self._gain(with_ms) or 0.0)

    def is_due(self, with_ms: float | None) -> bool:
        """Whether to capture now. Also if times are not known."""
        return with_ms is None or self.without_ms is None or self.capture.due

    def pays_at_once(self, with_ms: float | None, runs: int) -> bool:
        """Whether the rest of a stay is expected to give a capture back.

        Args:
            runs: those of this stay so far.
        """
        left, gain = min(self.stays, default=0) - runs, self._gain(with_ms)
        if gain is None:
            return with_ms is not None and with_ms < HIDDEN_MS and left >= FEW_RUNS
        return left > 0 and Payback(self.capture.price, left * gain).due

    def _gain(self, with_ms: float | None) -> float | None:
        """What a graph saves in a run."""
        if with_ms is None or self.without_ms is None:
            return None
        without, step = self._step(False), self._step(True)
        if without is not None and step is not None:
            # launches may be ahead of the GPU
            return max(0.0, max(without, with_ms) - max(step, with_ms))
        return max(0.0, self.without_ms + self.waits_ms - with_ms)

    def _step(self, with_graph: bool) -> float | None:
        """How far two runs that follow each other are apart; None before there were a few."""
        known = self._steps[with_graph]
        return statistics.median(known) if len(known) >= FEW_RUNS else None
