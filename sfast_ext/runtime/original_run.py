"""A run of the original forward, after which a plan of its call is built."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sfast_ext.capture.live_trace import LiveTrace
from sfast_ext.capture.state import State
from sfast_ext.timing import Stopwatch


@dataclass
class OriginalRun:
    """The run of the original forward for a call whose plan is built."""

    again: Callable[[], Any]
    """Runs it again on the same inputs."""
    result: Any
    seconds: float
    trace: LiveTrace | None
    """Recorded meanwhile, if live tracing is possible."""
    watch: Stopwatch | None = None
    """Stopped after it, if calls are rare."""
    state: State | None = None
    """What the forward can reach, as it was before and after it."""
    lean: bool = False
    """Whether weights in system memory stayed there, see `lean_calls`."""
