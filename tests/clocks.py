"""Stand-in clocks: what a call takes is said by the test, not by the machine."""

from __future__ import annotations

from collections.abc import Callable


class StandInClock:
    """A clock in steps. Time passes when it is read, and when `work` is done.

    Args:
        step: seconds; what it shows is a multiple of it.
        reading: seconds that a reading takes; a small part of a coarse step unless told.
    """

    def __init__(self, step: float = 1e-9, reading: float | None = None) -> None:
        self.step, self.reading = step, max(5e-8, step / 20_000) if reading is None else reading
        self.now = 0.0
        self.calls = 0

    def __call__(self) -> float:
        self.now += self.reading
        return self.now // self.step * self.step

    def work(self, seconds: float) -> Callable[[], None]:
        """A call that takes so long; `calls` counts them."""

        def call() -> None:
            self.calls += 1
            self.now += seconds

        return call
