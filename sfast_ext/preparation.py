"""The stages of a plan's preparation, for the console and the badge: what is being done, and how long each took."""

from __future__ import annotations

import logging
import time
from types import TracebackType

from sfast_ext.report import Report, log, watched_stages

WORDS = {
    "weights": "arranging weights",
    "capture": "recording",
    "choice of kernels": "compiling kernels",
    "first run": "first run",
    "check": "comparing with the original",
    "timing": "timing both",
}
"""The stages that are told, by the name that `report.at` has for them. Others belong to the one before."""


class Preparation:
    """Tells the stages of one preparation while the `with` block lasts.

    Args:
        label: what is prepared, in a user's words.
        level: of the log; a part of a model is told at debug only.
    """

    def __init__(self, report: Report, label: str, level: int = logging.INFO) -> None:
        self._report, self._label, self._level = report, label, level
        self.seconds: dict[str, float] = {}
        """By stage, those that have ended."""
        self._began = self._entered = time.monotonic()
        self._stage: str | None = None
        self._watch = watched_stages(self._enter)

    def __enter__(self) -> Preparation:
        self._tell("beginning")
        self._watch.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._watch.__exit__(None, None, None)
        self._report.preparing(None)
        self._end_stage()
        taken = time.monotonic() - self._began
        stages = ", ".join(f"{name} {seconds:.1f}" for name, seconds in self.seconds.items())
        if kind is None:
            log(self._level, "prepared %s in %.1f s (%s)", self._label, taken, stages)

    def _enter(self, stage: str) -> None:
        word = WORDS.get(stage)
        if word is None or word == self._stage:
            return
        self._end_stage()
        self._stage = word
        self._tell(word)
        log(self._level, "preparing %s: %s ...", self._label, word)

    def _end_stage(self) -> None:
        now = time.monotonic()
        if self._stage is not None:
            self.seconds[self._stage] = self.seconds.get(self._stage, 0.0) + now - self._entered
        self._entered = now

    def _tell(self, word: str) -> None:
        self._report.preparing(self._label, word, self._began)
