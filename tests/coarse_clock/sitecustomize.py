"""Clocks that move in coarse steps, as those of some virtual machines do: SFAST_TEST_CLOCK_STEP=0.004, in seconds.

tests/conftest.py imports this module first and puts its folder on PYTHONPATH, so that child processes import it as
they start: `from time import perf_counter` gets the stepped clock too. Sleeps and timeouts of locks are not changed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path

VARIABLE = "SFAST_TEST_CLOCK_STEP"
NAMES = ("perf_counter", "monotonic", "time")


def step_asked(environment: Mapping[str, str]) -> float | None:
    """Seconds of a step, None if none is asked for.

    Raises:
        ValueError: what is asked for is no positive number of seconds.
    """
    asked = environment.get(VARIABLE)
    if not asked:
        return None
    try:
        step = float(asked)
    except ValueError:
        step = 0.0
    if not 1e-9 <= step <= 1.0:
        raise ValueError(f"{VARIABLE}={asked}: give the step in seconds, from 1e-9 to 1, such as 0.004")
    return step


def stepped(nanoseconds: Callable[[], int], step: float) -> tuple[Callable[[], float], Callable[[], int]]:
    """A clock that moves in steps of so many seconds: its reading in seconds, and in nanoseconds."""
    width = round(1e9 * step)

    def read_ns() -> int:
        return nanoseconds() // width * width

    return lambda: read_ns() / 1e9, read_ns


def install(step: float) -> None:
    """Put stepped clocks into `time`, once in a process, and this folder on the path of child processes."""
    if hasattr(time, "sfast_test_clock_step"):
        return
    paths = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(os.pathsep.join(paths).split(os.pathsep)))
    for name in NAMES:
        seconds, nanoseconds = stepped(getattr(time, f"{name}_ns"), step)
        setattr(time, name, seconds)
        setattr(time, f"{name}_ns", nanoseconds)
    time.sfast_test_clock_step = step  # type: ignore[attr-defined]


_step = step_asked(os.environ)
if _step is not None:
    install(_step)
