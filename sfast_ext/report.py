"""What happened and why: for the log, the status page and the API."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterator
from typing import Any

from sfast_ext.reasons import FURTHER, Reason, given, one_line

logger = logging.getLogger("sfast_ext")


class ThreadState(threading.local):
    """What one thread is at. `current` is that of the running thread."""

    stage: str = "decision"
    """See `at`. A call that is replayed sets it directly: nobody watches its stages."""
    rehearsal: bool = False
    """See `rehearsal`."""


current = _thread = ThreadState()

EVENTS_KEPT = 200
REASONS_KEPT = 100

# counters of calls that are not bypassed
_CALLS = frozenset({"captures", "eager_runs", "replays"})
_ACCELERATED = frozenset({"eager_runs", "replays"})


def at(stage: str) -> None:
    """Set the stage of this thread. Exceptions are attributed to it until the next stage."""
    _thread.stage = stage
    watch = getattr(_thread, "watch", None)
    if watch is not None:
        watch(stage)


def advance(done: int, total: int) -> None:
    """Say how far the current stage of this thread is."""
    watch = getattr(_thread, "watch", None)
    if watch is not None:
        watch(stage(), done, total)


def breathe() -> None:
    """Let what watches the stages of this thread end a rehearsal within a stage: nobody waits for its result, and an
    image may wait for its end."""
    if rehearsing():
        advance(0, 0)


@contextlib.contextmanager
def watched_stages(watch: Callable[..., None]) -> Iterator[None]:
    """Call `watch` with each stage that this thread reaches in the meantime, and with (stage, done, total) if it
    advances in it. What `watch` raises ends the work."""
    before = getattr(_thread, "watch", None)
    _thread.watch = watch
    try:
        yield
    finally:
        _thread.watch = before


@contextlib.contextmanager
def rehearsal() -> Iterator[None]:
    """Calls of this thread in the meantime are no image's: no report of the last image, or of why steps were not
    accelerated, counts them. A `Report.tally` does."""
    before = rehearsing()
    _thread.rehearsal = True
    try:
        yield
    finally:
        _thread.rehearsal = before


def rehearsing() -> bool:
    """Whether calls of this thread are no image's."""
    return getattr(_thread, "rehearsal", False)


def stage() -> str:
    """The current stage of this thread."""
    return getattr(_thread, "stage", "decision")


def words_of(exc: BaseException) -> str:
    """The type and message of an exception. Only the type if its `__str__` raises."""
    try:
        return f"{type(exc).__name__}: {exc}".strip()
    except Exception:
        return type(exc).__name__


class _Reasons:
    """Reasons, and the number of calls that each bypassed. Those of one identity are one: see `Reason.identity`."""

    def __init__(self, *, latest: bool) -> None:
        self._latest = latest
        # by identity: the reason, the number of calls, when the last one was
        self._counted: dict[Hashable, tuple[Reason, int, float]] = {}

    def add(self, reason: Reason) -> Reason | None:
        """Count a reason. Returns it if it is new, otherwise None."""
        identity = reason.identity()
        first = identity not in self._counted
        if first and len(self._counted) >= REASONS_KEPT:
            # a reason that embeds a changing value must not grow without bound
            reason = FURTHER()
            identity = reason.identity()
        known, n, _ = self._counted.get(identity, (reason, 0, 0.0))
        self._counted[identity] = (reason if self._latest else known, n + 1, time.monotonic())
        return reason if first else None

    def most(self) -> Reason | None:
        """The reason of most calls; None if there is none."""
        return max(self._counted.values(), key=lambda counted: counted[1], default=(None,))[0]

    def merged(self, other: _Reasons, names: bool) -> dict[str, int]:
        """The calls by the text of their reason, summed with those of a later record."""
        found = dict(self._counted)
        for identity, (reason, n, when) in other._counted.items():
            found[identity] = (reason, n + (found[identity][1] if identity in found else 0), when)
        texts: Counter[str] = Counter()
        for reason, n, _ in found.values():
            texts[str(_named(reason, names))] += n
        return dict(texts)

    def listed(self, latest: _Reasons, names: bool) -> list[dict[str, Any]]:
        """Each reason with its calls, those in a later record, and seconds since the last one; most frequent first."""
        now, rows = time.monotonic(), []
        for identity, (reason, n, when) in self._counted.items():
            told = _named(reason, names).as_dict()
            row = {"reason": told.pop("text"), "reason_parts": _named(reason, names).pieces(), **told, "calls": n}
            row["calls_last"] = latest._counted[identity][1] if identity in latest._counted else 0
            row["seconds_ago"] = round(now - when, 1)
            rows.append(row)
        return sorted(rows, key=lambda row: (-row["calls_last"], -row["calls"]))


def _named(reason: Reason, names: bool) -> Reason:
    return reason if names else reason.anonymous()


class Tally:
    """The calls of one request, see `Report.tally`."""

    def __init__(self) -> None:
        self.accelerated = self.prepared = self.bypassed = 0
        self._reasons = _Reasons(latest=False)

    @property
    def reason(self) -> Reason | None:
        """Why most of the bypassed calls were bypassed; None if none was."""
        return self._reasons.most()

    def _count(self, name: str, n: int) -> None:
        if name in _ACCELERATED:
            self.accelerated += n
        else:
            self.prepared += n

    def _bypassed(self, reason: Reason) -> None:
        self.bypassed += 1
        self._reasons.add(reason)


class Report:
    """Counters, reasons and the last events. Thread-safe; its methods raise nothing.

    Args:
        instead: what happens after an error, for the log.
        see: where a user learns more about it, for the log.
    """

    def __init__(self, instead: str = "the original forward runs", see: str = "") -> None:
        self._instead, self._see = instead, f"; see {see}" if see else ""
        self._lock = threading.Lock()
        self._before, self._now = _Reasons(latest=True), _Reasons(latest=True)
        self._since_start = _Reasons(latest=False)
        # calls of the last generation that had any
        self._pass: Counter[str] = Counter()
        # whether there was a call in this generation
        self._called = False
        self._counters: Counter[str] = Counter()
        self._events: deque[dict[str, Any]] = deque(maxlen=EVENTS_KEPT)
        self._last_error: dict[str, Any] | None = None
        self._said: set[Hashable] = set()
        self._tallies: list[Tally] = []
        self._preparing: dict[str, Any] | None = None
        self.on_stage: Callable[[str | None], None] | None = None
        """Called with the words of each stage of a preparation, and with None at its end; see `preparation`."""

    def new_generation(self) -> None:
        """A generation begins. Reasons are listed for this generation and the last one with a call. If this is never
        called, they are listed since the start."""
        with self._lock:
            if self._called:
                self._before, self._now, self._called = self._now, _Reasons(latest=True), False

    def no_calls(self) -> None:
        """An image was made and no network that is accelerated was called. What is known is of an image before it."""
        with self._lock:
            self._before, self._now, self._called = _Reasons(latest=True), _Reasons(latest=True), False
            self._pass.clear()

    def bypassed(self, reason: Reason | str) -> None:
        """Record that a call was bypassed, and why."""
        reason = given(reason)
        if rehearsing():
            with self._lock:
                for tally in self._tallies:
                    tally._bypassed(reason)
            return
        with self._lock:
            self._begin_calls()
            self._pass["bypassed"] += 1
            self._now.add(reason)
            new = self._since_start.add(reason)
            self._counters["fallbacks"] += 1
            for tally in self._tallies:
                tally._bypassed(reason)
        if new is not None:
            self.event("bypassed", new)

    @contextlib.contextmanager
    def tally(self) -> Iterator[Tally]:
        """Count the calls while the `with` block lasts, those of all threads."""
        tally = Tally()
        with self._lock:
            self._tallies.append(tally)
        try:
            yield tally
        finally:
            with self._lock:
                self._tallies.remove(tally)

    def event(self, stage: str, message: Reason | str) -> None:
        """Record an event, in the ring buffer of the last events and in the log."""
        message = one_line(message) if isinstance(message, str) else message
        with self._lock:
            self._events.append({"time": time.time(), "stage": stage, "message": message})
        log(logging.INFO, "%s: %s", stage, message)

    def once(self, stage: str, message: Reason | str) -> None:
        """Record a fact that does not change while the process runs. Repetitions are ignored, those of a reason with
        other numbers too."""
        said = message.identity() if isinstance(message, Reason) else message
        with self._lock:
            if said in self._said or len(self._said) >= REASONS_KEPT:
                return
            self._said.add(said)
        self.event(stage, message)

    def error(self, stage: str, exc: BaseException) -> None:
        """Record an exception of the accelerator. The generation continues with the original forward."""
        text = one_line(words_of(exc))
        trace = "".join(traceback.format_exception(type(exc), exc, exc.__traceback__)[-8:])
        with self._lock:
            self._counters["errors"] += 1
            # An error of every call, or of several stages, must not push other events out of the ring buffer.
            again = any(event["message"] == text for event in self._events)
            self._last_error = {"time": time.time(), "stage": stage, "message": text, "traceback": trace}
            if not again:
                self._events.append({"time": time.time(), "stage": stage, "message": text})
        if not again:
            log(logging.WARNING, "%s failed, %s: %s%s", stage, self._instead, text, self._see)
        log(logging.DEBUG, "%s failed: %s\n%s", stage, text, trace)

    def preparing(self, label: str | None, stage: str = "", began: float = 0.0, left: float | None = None) -> None:
        """Say what is being prepared for later calls, which stage it is at, since when, and how many seconds it will
        take from now, if that is known; label None: nothing is."""
        ends = None if left is None else time.monotonic() + left
        self._preparing = None if label is None else {"label": label, "stage": stage, "began": began, "ends": ends}
        if self.on_stage is not None:
            about = "" if left is None else f", about {left:.0f} s left"
            try:
                self.on_stage(None if label is None else f"Stable Fast: {stage}{about}")
            except Exception as exc:
                self.error("showing a stage", exc)

    def _prepared(self) -> dict[str, Any] | None:
        now = self._preparing
        if now is None:
            return None
        clock, ends = time.monotonic(), now["ends"]
        left = None if ends is None else max(0.0, round(ends - clock, 1))
        seconds = round(clock - now["began"], 1)
        return {"label": now["label"], "stage": now["stage"], "seconds": seconds, "seconds_left": left}

    def count(self, name: str, n: int = 1) -> None:
        """Add to a counter."""
        with self._lock:
            if name in _CALLS:
                if not rehearsing():
                    self._begin_calls()
                    self._pass["accelerated" if name in _ACCELERATED else "prepared"] += n
                for tally in self._tallies:
                    tally._count(name, n)
            self._counters[name] += n

    def _begin_calls(self) -> None:
        if not self._called:
            self._called = True
            self._pass.clear()

    def counter(self, name: str) -> int:
        """The value of a counter. 0 if it was never counted."""
        with self._lock:
            return self._counters[name]

    def as_dict(self, names: bool = True) -> dict[str, Any]:
        """A JSON-compatible copy.

        Args:
            names: whether reasons have the names that belong to the user.
        """
        with self._lock:
            return {
                "preparing": self._prepared(),
                "last_pass": {name: self._pass[name] for name in ("accelerated", "bypassed", "prepared")},
                "reasons": self._before.merged(self._now, names),
                "reasons_since_start": self._since_start.merged(_Reasons(latest=False), names),
                "reasons_listed": self._since_start.listed(self._now if self._called else self._before, names),
                "counters": dict(self._counters),
                "events": [_told(event, names) for event in self._events],
                "last_error": dict(self._last_error) if self._last_error else None,
            }


def _told(event: dict[str, Any], names: bool) -> dict[str, Any]:
    message = event["message"]
    return {**event, "message": str(_named(message, names)) if isinstance(message, Reason) else message}


def log(level: int, message: str, *args: Any) -> None:
    """Write a line to the extension's log. Raises nothing."""
    try:
        logger.log(level, message, *args)
    except Exception:
        pass  # a foreign handler or filter raised; the generation must go on
