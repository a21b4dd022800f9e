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
"""Characters of an event's message."""

# counters of calls that are not bypassed
_CALLS = frozenset({"captures", "eager_runs", "replays"})
_ADDRESS = re.compile(r"(?: at)? 0x[0-9a-fA-F]+")
# a number by itself; not that of a block ("blocks.3"), a device ("cuda:1") or a line of code
_NUMBER = re.compile(r"(?<![\w.:-])\d+(?:\.\d+)?(?:e[-+]?\d+)?(?!\w)")


def at(stage: str) -> None:
    """Set the stage of this thread: an exception from now on belongs to it."""
    _thread.stage = stage


def stage() -> str:
    """The stage of this thread."""
    return getattr(_thread, "stage", "decision")


def words_of(exc: BaseException) -> str:
    """An exception's type and message; its type alone where the message cannot be read."""
    try:
        return f"{type(exc).__name__}: {exc}".strip()
    except Exception:
        return type(exc).__name__


def one_line(text: str) -> str:
    """A text in one line, of bounded length, without the addresses of objects."""
    text = _ADDRESS.sub("", " ".join(text.split()))
    return text if len(text) <= LONGEST else text[: LONGEST - 3] + "..."


class _Reasons:
    """Reasons and how many calls were bypassed for each; those that differ in a size are one."""

    def __init__(self, *, latest: bool) -> None:
        self._latest = latest
        self._counted: dict[str, tuple[str, int]] = {}

    def add(self, reason: str) -> str | None:
        """Count a reason. Returns its text where it is new."""
        kind = _NUMBER.sub("#", reason)
        first = kind not in self._counted
        if first and len(self._counted) >= REASONS_KEPT:
            # a reason that embeds a changing value must not grow without bound
            kind = reason = "(further reasons)"
        text, n = self._counted.get(kind, (reason, 0))
        self._counted[kind] = (reason if self._latest else text, n + 1)
        return reason if first else None

    def merged(self, other: _Reasons) -> dict[str, int]:
        """The calls by reason, with those of a later record added."""
        found = dict(self._counted)
        for kind, (text, n) in other._counted.items():
            found[kind] = (text, n + found.get(kind, ("", 0))[1])
        return dict(found.values())


class Report:
    """Counters, reasons and the last events. Safe to use from several threads; raises nothing."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._before, self._now = _Reasons(latest=True), _Reasons(latest=True)
        self._since_start = _Reasons(latest=False)
        # whether the present generation has made a call
        self._called = False
        self._counters: Counter[str] = Counter()
        self._events: deque[dict[str, Any]] = deque(maxlen=EVENTS_KEPT)
        self._last_error: dict[str, Any] | None = None
        self._said: set[str] = set()

    def new_generation(self) -> None:
        """Begin a generation. Reasons are those of this generation and of the last one before it that made a call.
        Where this is never called, they are those since the start."""
        with self._lock:
            if self._called:
                self._before, self._now, self._called = self._now, _Reasons(latest=True), False

    def bypassed(self, reason: str) -> None:
        """Note that a call was bypassed (the original forward ran), and why."""
        reason = one_line(reason)
        with self._lock:
            self._called = True
            self._now.add(reason)
            new = self._since_start.add(reason)
            self._counters["fallbacks"] += 1
        if new is not None:
            self.event("bypassed", new)

    def event(self, stage: str, message: str) -> None:
        """Note what happened at a stage, in the list of the last events and in the log."""
        message = one_line(message)
        with self._lock:
            self._events.append({"time": time.time(), "stage": stage, "message": message})
        _log(logging.INFO, "%s: %s", stage, message)

    def once(self, stage: str, message: str) -> None:
        """Note an event that holds while the process lives; the same message is noted once."""
        with self._lock:
            if message in self._said or len(self._said) >= REASONS_KEPT:
                return
            self._said.add(message)
        self.event(stage, message)

    def error(self, stage: str, exc: BaseException) -> None:
        """Note an exception of the extension's. The generation continues with the original forward."""
        text = one_line(words_of(exc))
        trace = "".join(traceback.format_exception(type(exc), exc, exc.__traceback__)[-8:])
        with self._lock:
            self._counters["errors"] += 1
            # An exception at every call, or at several stages, must not push all other events out.
            again = any(event["message"] == text for event in self._events)
            self._last_error = {"time": time.time(), "stage": stage, "message": text, "traceback": trace}
            if not again:
                self._events.append({"time": time.time(), "stage": stage, "message": text})
        level = logging.DEBUG if again else logging.WARNING
        _log(level, "%s failed, the original forward runs instead: %s\n%s", stage, text, trace)

    def count(self, name: str, n: int = 1) -> None:
        """Add to a named counter."""
        with self._lock:
            self._called |= name in _CALLS
            self._counters[name] += n

    def counter(self, name: str) -> int:
        """The value of a named counter; 0 where it does not exist."""
        with self._lock:
            return self._counters[name]

    def as_dict(self) -> dict[str, Any]:
        """A snapshot that can be written as JSON."""
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
        pass  # a log handler or filter of another extension failed; the generation must not
