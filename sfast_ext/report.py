"""What happened and why: for the log, the status page and the API."""

from __future__ import annotations

import logging
import re
import threading
import time
import traceback
from collections import Counter, deque
from typing import Any

logger = logging.getLogger("sfast_ext")
_thread = threading.local()

EVENTS_KEPT = 200
REASONS_KEPT = 100
LONGEST = 500
"""The maximum length of a message in characters."""

# counters of calls that are not bypassed
_CALLS = frozenset({"captures", "eager_runs", "replays"})
_ADDRESS = re.compile(r"(?: at)? 0x[0-9a-fA-F]+")
# a number by itself, not the number of a block ("blocks.3"), a device ("cuda:1") or a line of code
_NUMBER = re.compile(r"(?<![\w.:-])\d+(?:\.\d+)?(?:e[-+]?\d+)?(?!\w)")


def at(stage: str) -> None:
    """Set the stage of this thread. Exceptions are attributed to it until the next stage."""
    _thread.stage = stage


def stage() -> str:
    """The current stage of this thread."""
    return getattr(_thread, "stage", "decision")


def words_of(exc: BaseException) -> str:
    """The type and message of an exception. Only the type if its `__str__` raises."""
    try:
        return f"{type(exc).__name__}: {exc}".strip()
    except Exception:
        return type(exc).__name__


def one_line(text: str) -> str:
    """A text as one line of bounded length, without addresses of objects."""
    text = _ADDRESS.sub("", " ".join(text.split()))
    return text if len(text) <= LONGEST else text[: LONGEST - 3] + "..."


class _Reasons:
    """Reasons, and the number of calls that each bypassed. Reasons that differ in numbers only are merged."""

    def __init__(self, *, latest: bool) -> None:
        self._latest = latest
        self._counted: dict[str, tuple[str, int]] = {}

    def add(self, reason: str) -> str | None:
        """Count a reason. Returns its text if it is new, otherwise None."""
        kind = _NUMBER.sub("#", reason)
        first = kind not in self._counted
        if first and len(self._counted) >= REASONS_KEPT:
            # a reason that embeds a changing value must not grow without bound
            kind = reason = "(further reasons)"
        text, n = self._counted.get(kind, (reason, 0))
        self._counted[kind] = (reason if self._latest else text, n + 1)
        return reason if first else None

    def merged(self, other: _Reasons) -> dict[str, int]:
        """The calls by reason, summed with those of a later record."""
        found = dict(self._counted)
        for kind, (text, n) in other._counted.items():
            found[kind] = (text, n + found.get(kind, ("", 0))[1])
        return dict(found.values())


class Report:
    """Counters, reasons and the last events. Thread-safe; its methods raise nothing."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._before, self._now = _Reasons(latest=True), _Reasons(latest=True)
        self._since_start = _Reasons(latest=False)
        # whether there was a call in this generation
        self._called = False
        self._counters: Counter[str] = Counter()
        self._events: deque[dict[str, Any]] = deque(maxlen=EVENTS_KEPT)
        self._last_error: dict[str, Any] | None = None
        self._said: set[str] = set()

    def new_generation(self) -> None:
        """A generation begins. Reasons are listed for this generation and the last one with a call. If this is never
        called, they are listed since the start."""
        with self._lock:
            if self._called:
                self._before, self._now, self._called = self._now, _Reasons(latest=True), False

    def bypassed(self, reason: str) -> None:
        """Record that a call was bypassed, and why."""
        reason = one_line(reason)
        with self._lock:
            self._called = True
            self._now.add(reason)
            new = self._since_start.add(reason)
            self._counters["fallbacks"] += 1
        if new is not None:
            self.event("bypassed", new)

    def event(self, stage: str, message: str) -> None:
        """Record an event, in the ring buffer of the last events and in the log."""
        message = one_line(message)
        with self._lock:
            self._events.append({"time": time.time(), "stage": stage, "message": message})
        _log(logging.INFO, "%s: %s", stage, message)

    def once(self, stage: str, message: str) -> None:
        """Record a fact that does not change while the process runs. Repetitions are ignored."""
        with self._lock:
            if message in self._said or len(self._said) >= REASONS_KEPT:
                return
            self._said.add(message)
        self.event(stage, message)

    def error(self, stage: str, exc: BaseException) -> None:
        """Record an exception of ours. The generation continues with the original forward."""
        text = one_line(words_of(exc))
        trace = "".join(traceback.format_exception(type(exc), exc, exc.__traceback__)[-8:])
        with self._lock:
            self._counters["errors"] += 1
            # An error of every call, or of several stages, must not push other events out of the ring buffer.
            again = any(event["message"] == text for event in self._events)
            self._last_error = {"time": time.time(), "stage": stage, "message": text, "traceback": trace}
            if not again:
                self._events.append({"time": time.time(), "stage": stage, "message": text})
        level = logging.DEBUG if again else logging.WARNING
        _log(level, "%s failed, the original forward runs instead: %s\n%s", stage, text, trace)

    def count(self, name: str, n: int = 1) -> None:
        """Add to a counter."""
        with self._lock:
            self._called |= name in _CALLS
            self._counters[name] += n

    def counter(self, name: str) -> int:
        """The value of a counter. 0 if it was never counted."""
        with self._lock:
            return self._counters[name]

    def as_dict(self) -> dict[str, Any]:
        """A JSON-compatible copy."""
        with self._lock:
            return {
                "reasons": self._before.merged(self._now),
                "reasons_since_start": self._since_start.merged(_Reasons(latest=False)),
                "counters": dict(self._counters),
                "events": list(self._events),
                "last_error": dict(self._last_error) if self._last_error else None,
            }


def _log(level: int, message: str, *args: Any) -> None:
    try:
        logger.log(level, message, *args)
    except Exception:
        pass  # a foreign handler or filter raised; the generation must go on
