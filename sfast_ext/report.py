"""What happened and why: for the log, the status page and the API."""

from __future__ import annotations

import logging
import threading
import time
import traceback
from collections import Counter, deque
from typing import Any

logger = logging.getLogger("sfast_ext")
_thread = threading.local()

EVENTS_KEPT = 200
REASONS_KEPT = 100


def at(stage: str) -> None:
    """Say what this thread is about to do: an exception from then on is one of that stage."""
    _thread.stage = stage


def stage() -> str:
    """What this thread was last about to do."""
    return getattr(_thread, "stage", "decision")


def words_of(exc: BaseException) -> str:
    """An exception's type and message; its type alone where it cannot say more."""
    try:
        return f"{type(exc).__name__}: {exc}".strip()
    except Exception:
        return type(exc).__name__


class Report:
    """Counts, reasons and the last events; safe to use from several threads, and raises nothing."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reasons: Counter[str] = Counter()
        self._counters: Counter[str] = Counter()
        self._events: deque[dict[str, Any]] = deque(maxlen=EVENTS_KEPT)
        self._last_error: dict[str, Any] | None = None
        self._said: set[str] = set()

    def fallback(self, reason: str) -> None:
        """Note that a call went to the original forward, and why."""
        with self._lock:
            first = reason not in self._reasons
            if first and len(self._reasons) >= REASONS_KEPT:
                # a reason that embeds a changing value must not grow without bound
                reason = "(further reasons)"
            self._reasons[reason] += 1
            self._counters["fallbacks"] += 1
        if first:
            self.event("fallback", f"the original forward runs: {reason}")

    def event(self, stage: str, message: str) -> None:
        """Note what happened at a stage, in the ring of the last events and in the log."""
        with self._lock:
            self._events.append({"time": time.time(), "stage": stage, "message": message})
        _log(logging.INFO, "%s: %s", stage, message)

    def once(self, stage: str, message: str) -> None:
        """Note what holds for as long as the process lives; a second time nothing is noted."""
        with self._lock:
            if message in self._said or len(self._said) >= REASONS_KEPT:
                return
            self._said.add(message)
        self.event(stage, message)

    def error(self, stage: str, exc: BaseException) -> None:
        """Note an exception of ours; the generation goes on without it."""
        text = words_of(exc)
        trace = "".join(traceback.format_exception(type(exc), exc, exc.__traceback__)[-8:])
        with self._lock:
            self._counters["errors"] += 1
            last = self._last_error
            # one that comes at every call must not push everything else out
            again = last is not None and (last["stage"], last["message"]) == (stage, text)
            self._last_error = {"time": time.time(), "stage": stage, "message": text, "traceback": trace}
            if not again:
                self._events.append({"time": time.time(), "stage": stage, "message": text})
        level = logging.DEBUG if again else logging.WARNING
        _log(level, "%s failed, the original forward goes on: %s\n%s", stage, text, trace)

    def count(self, name: str, n: int = 1) -> None:
        """Add to a named counter."""
        with self._lock:
            self._counters[name] += n

    def counter(self, name: str) -> int:
        """The value of a named counter; 0 where it was never counted."""
        with self._lock:
            return self._counters[name]

    def as_dict(self) -> dict[str, Any]:
        """A snapshot that JSON can carry."""
        with self._lock:
            return {
                "reasons": dict(self._reasons),
                "counters": dict(self._counters),
                "events": list(self._events),
                "last_error": dict(self._last_error) if self._last_error else None,
            }


def _log(level: int, message: str, *args: Any) -> None:
    try:
        logger.log(level, message, *args)
    except Exception:
        pass  # somebody's handler or filter; a generation does not end for it
