"""The stages of a plan's preparation, for the console, the progress bar and the badge: what is being done, how long it
will take, and whether the user has interrupted it."""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from sfast_ext import cache_folder
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

FIRST, LATER = "first", "later"
"""The first preparation of a process compiles and loads what later ones find ready, so their times are kept apart."""
KINDS_KEPT = 32


_shown: list[tuple[Any, str]] = []


def show(holder: Any, name: str, text: str | None) -> None:
    """Put a stage into the attribute of an object by which the program around us shows it. That changes while a forward
    is recorded, and is no state of the forward, though its code may reach the object: see `is_shown`."""
    _shown[:] = [(holder, name)]
    setattr(holder, name, text)


def is_shown(holder: Any, name: str) -> bool:
    """Whether this attribute is the one that shows the stages; `holder` may also be the `__dict__` of its object."""
    return any(name == each and (holder is by or holder is getattr(by, "__dict__", _shown)) for by, each in _shown)


class Interrupted(Exception):
    """The user interrupts a preparation. The image goes on, or ends, without its plan."""


class StageTimes:
    """Seconds that the stages of the last preparation of a kind took, in this process and in those before.

    Args:
        folder: the cache folder that keeps them; None keeps them in this process alone.
    """

    def __init__(self, folder: Callable[[], Path] | None = None) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._known: dict[str, dict[str, float]] | None = None
        self._prepared: set[str] = set()

    def of(self, kind: str) -> dict[str, float]:
        """By stage, of what is about to be prepared; empty if none was."""
        with self._lock:
            known = self._read()
            return dict(known.get(self._name(kind)) or known.get(f"{LATER} {kind}") or {})

    def record(self, kind: str, seconds: dict[str, float]) -> None:
        """A preparation has ended. A folder that cannot be written is left alone."""
        with self._lock, contextlib.ExitStack() as turn:
            if self._folder is not None:
                with contextlib.suppress(RuntimeError):
                    turn.enter_context(cache_folder.turn(self._folder()))
                # other processes have added to it
                self._known = {**(self._known or {}), **self._on_disk()}
            known, name = self._read(), self._name(kind)
            known.pop(name, None)
            known[name] = {stage: round(taken, 2) for stage, taken in seconds.items()}
            while len(known) > KINDS_KEPT:
                del known[next(iter(known))]
            self._prepared.add(kind)
            if self._folder is not None:
                try:
                    cache_folder.write(self._folder() / "stages.json", self._folder(), json.dumps(known).encode())
                except (OSError, RuntimeError):
                    pass  # the next process does not know how long it takes

    def _name(self, kind: str) -> str:
        return f"{LATER if kind in self._prepared else FIRST} {kind}"

    def _read(self) -> dict[str, dict[str, float]]:
        if self._known is None:
            self._known = self._on_disk()
        return self._known

    def _on_disk(self) -> dict[str, dict[str, float]]:
        try:
            if self._folder is not None:
                folder = self._folder()
                return _checked(json.loads(cache_folder.read(folder / "stages.json", folder)))
        except (OSError, RuntimeError, ValueError):
            pass  # there is none, or one that is not this extension's
        return {}


def _checked(found: object) -> dict[str, dict[str, float]]:
    if not isinstance(found, dict):
        raise ValueError("not a table")
    return {
        str(kind): {str(stage): float(taken) for stage, taken in stages.items()}
        for kind, stages in found.items()
        if isinstance(stages, dict)
    }


class Preparation:
    """Tells the stages of one preparation while the `with` block lasts.

    Args:
        label: what is prepared, in a user's words.
        level: of the log; a part of a model is told at debug only.
        kind: what takes about as long each time; with `times`, says how many seconds are left.
        interrupted: asked between stages; if it says yes, the block ends with `Interrupted`.
    """

    def __init__(
        self,
        report: Report,
        label: str,
        level: int = logging.INFO,
        *,
        kind: str = "",
        times: StageTimes | None = None,
        interrupted: Callable[[], bool] | None = None,
    ) -> None:
        self._report, self._label, self._level = report, label, level
        self._kind, self._times, self._interrupted = kind, times, interrupted
        self._expected = times.of(kind) if times is not None else {}
        self.seconds: dict[str, float] = {}
        """By stage, those that have ended."""
        self._began = self._entered = time.monotonic()
        self._stage: str | None = None
        self._watch = watched_stages(self._enter)

    def __enter__(self) -> Preparation:
        self._report.preparing(self._label, "beginning", self._began, self._left())
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
            if self._times is not None:
                self._times.record(self._kind, self.seconds)

    def _enter(self, stage: str, done: int = 0, total: int = 0) -> None:
        word = WORDS.get(stage)
        if word is None:
            return
        if self._interrupted is not None and self._interrupted():
            raise Interrupted(f"preparing {self._label} was interrupted at: {self._stage or 'beginning'}")
        new = word != self._stage
        if not new and not total:
            return
        if new:
            self._end_stage()
            self._stage = word
        left = self._left()
        self._report.preparing(self._label, f"{word} {done} of {total}" if total else word, self._began, left)
        if new:
            log(self._level, "preparing %s: %s ...%s", self._label, word, _about(left))

    def _left(self) -> float | None:
        """Seconds from now to the end, by the last time; None if it is not known."""
        if not self._expected:
            return None
        names = [name for name in WORDS.values() if name in self._expected]
        rest = names[names.index(self._stage) :] if self._stage in names else names
        left = sum(self._expected[name] for name in rest)
        return max(0.0, left - (time.monotonic() - self._entered if self._stage in names else 0.0))

    def _end_stage(self) -> None:
        now = time.monotonic()
        if self._stage is not None:
            self.seconds[self._stage] = self.seconds.get(self._stage, 0.0) + now - self._entered
        self._entered = now


def _about(left: float | None) -> str:
    return "" if left is None else f" about {left:.0f} s left"
