"""When a CUDA graph that was evicted is captured again.

On a small card the memory of graphs goes with each picture, to the VAE or to the model that comes next. To capture
takes two runs of the CPU, a synchronisation, and the allocator's cache. Without a graph a run takes the CPU longer
(`recorded_run`), which a slow GPU hides. So the plan runs without one until that has cost what a capture costs: at
most twice what it costs whoever knows what comes (ski rental: A. R. Karlin et al., Competitive snoopy caching, 1988).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Recapture:
    """Of one plan; times in milliseconds."""

    capture_ms: float = 0.0
    """What the last capture took."""
    without_ms: float | None = None
    """A run without a graph."""
    lost_ms: float = 0.0
    """By runs without one since there was one."""

    def captured(self, ms: float) -> None:
        """There is a graph."""
        self.capture_ms, self.lost_ms = ms, 0.0

    def ran_without(self, with_ms: float | None) -> None:
        """A run without a graph, which takes `with_ms` with one."""
        if self.without_ms is not None and with_ms is not None:
            self.lost_ms += max(0.0, self.without_ms - with_ms)

    def is_due(self, with_ms: float | None) -> bool:
        """Whether to capture now. Also where times are not known."""
        return with_ms is None or self.without_ms is None or self.lost_ms >= self.capture_ms
