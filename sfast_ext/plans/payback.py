"""When something that costs is done: once going without it has cost as much.

What comes next is not known. Whoever buys once the rent paid so far equals the price pays at most twice what it would
have cost with that knowledge (the ski rental problem: A. R. Karlin et al., Competitive snoopy caching, 1988). `Payback`
is this rule. It decides

- whether a plan of a module that is called rarely is made: the price is the time to make it (`RareCalls`);
- whether a plan for another kind of call is made: as well, unless the last plan was earned back (`Earnings`);
- whether a CUDA graph that was evicted is captured again: the price is the time of a capture (`recapture.Recapture`),
  and it is paid ahead if the last stays were long enough;
- whether launches are recorded for such captures: the price is the number of captures that take as long (`RECORDING`);
- whether a plan is made although the last ones were of no use: the price is a number of calls with the same behaviour,
  which doubles each time (`CaptureBackoff`);
- whether a rejected key is tried again: a number of generations or calls, which doubles as well (`Rejection`);
- whether a replay is launched before it is validated, after one was discarded: a number of calls (`Speculation`).
"""

from __future__ import annotations

import math
import threading
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import TypeVar

from sfast_ext.config import Config
from sfast_ext.reasons import Reason
from sfast_ext.timing import Stopwatch

V = TypeVar("V")


@dataclass
class Payback:
    """What something costs, and what going without it has cost so far, in the same unit."""

    price: float = 0.0
    paid: float = 0.0

    @property
    def due(self) -> bool:
        """Whether it has paid for itself."""
        return self.paid >= self.price

    def pay(self, amount: float = 1.0) -> bool:
        """It was gone without. Returns whether it is due now."""
        self.paid += amount
        return self.due

    def waits(self) -> bool:
        """Count a call that goes without, if it has to. The price is zero once none has to any more."""
        if self.due:
            self.price = 0.0
            return False
        self.paid += 1
        return True

    def restart(self, price: float) -> None:
        """It was done. The next time it costs this."""
        self.price, self.paid = price, 0.0


def doubled(price: float, times: int) -> float:
    """The price after it doubled so many times."""
    return price * 2**times


SPECULATION_BACKOFF = 200
"""After a replay was discarded, this many calls confirm the weights, or the behaviour key, before the launch. So few
replays are wasted if these change in the middle of generations."""


class Speculation:
    """Counts the calls that still have to confirm before the launch."""

    def __init__(self) -> None:
        self.key, self.weights = Payback(), Payback()


REJECTED_FOR = 4
"""Generations after which a rejected key is tried again. Doubles each time."""
REJECTED_CALLS = 250
"""Calls after which it is, if the host announces no generations. Doubles each time."""


class Rejection:
    """Why no plan is made for a key, and for how long.

    Args:
        times: how often a rejection of the key has expired.
    """

    def __init__(self, reason: Reason, times: int) -> None:
        self.reason = reason
        self.generations = Payback(doubled(REJECTED_FOR, times))
        self.calls = Payback(doubled(REJECTED_CALLS, times))


MAX_UNUSED_CAPTURES = 2
"""Captures of one signature without waiting, although none of its plans has paid yet."""
PAID_AFTER = 10
"""A plan has paid for its capture after this many replays."""
MAX_SIGNATURES = 256
"""The counts of so many signatures are kept, the last ones."""


class CaptureBackoff:
    """Counts, for each signature, the captures since the last one that paid.

    If the behaviour of a model changes before its plans have paid for themselves, each further capture waits longer.
    After the first `max_unused` it waits for 2, 4, 8, ... consecutive calls of the signature with the same behaviour.
    If the behaviour changes at every call, there are no further captures. A single capture in a generation is not
    counted once the next begins: changed settings cause one.
    """

    def __init__(self, max_unused: int = MAX_UNUSED_CAPTURES) -> None:
        self.max_unused = max_unused
        self._in_generation: dict[Hashable, int] = {}
        self._unused_captures: dict[Hashable, int] = {}
        self._steady: dict[Hashable, tuple[Hashable, Payback]] = {}

    def record_capture(self, signature: Hashable) -> None:
        """A plan is about to be built."""
        for counts in (self._unused_captures, self._in_generation):
            _remember(counts, signature, counts.get(signature, 0) + 1)

    def forget_capture(self, signature: Hashable) -> None:
        """The plan that was about to be built is not: the user has interrupted it."""
        for counts in (self._unused_captures, self._in_generation):
            if counts.get(signature, 0) > 0:
                counts[signature] -= 1

    def new_generation(self) -> None:
        """A generation begins."""
        for signature, captures in self._in_generation.items():
            if captures == 1 and signature in self._unused_captures:
                self._unused_captures[signature] -= 1
        self._in_generation.clear()

    def record_replay(self, signature: Hashable, times: int) -> None:
        """A result of a plan was used, for the `times`-th time."""
        # equal, not greater: a plan that paid long ago says nothing about later ones
        if times == PAID_AFTER:
            self._unused_captures.pop(signature, None)
            self._steady.pop(signature, None)

    def must_wait(self, signature: Hashable, behaviour: Hashable) -> bool:
        """Whether a call without a plan gets none yet. Call it once for each such call.

        Args:
            behaviour: distinguishes the plans of one signature.
        """
        unused = self._unused_captures.get(signature, 0)
        if unused < self.max_unused:
            return False
        last, calls = self._steady.get(signature, (None, Payback()))
        if last != behaviour:
            calls = Payback()
        calls.price = doubled(2, unused - self.max_unused)
        _remember(self._steady, signature, (behaviour, calls))
        return not calls.pay()

    def restart_counts(self) -> None:
        """Something else changed: consecutive calls are counted from zero."""
        self._steady.clear()

    def clear(self) -> None:
        """Forget all."""
        self._unused_captures.clear()
        self._steady.clear()
        self._in_generation.clear()


def _remember(known: dict[Hashable, V], signature: Hashable, value: V) -> None:
    known.pop(signature, None)
    known[signature] = value
    while len(known) > MAX_SIGNATURES:
        del known[next(iter(known))]


MAX_KINDS = 256
"""Kinds of calls of a module that are remembered."""


@dataclass
class Runs:
    """The original's runs in calls of one kind: those that ended, and those that may not have ended."""

    fastest: float = math.inf
    """The time of the fastest that ended, in milliseconds."""
    ended: int = 0
    pending: list[Stopwatch] = field(default_factory=list)

    def spent(self) -> float:
        """The time of those that have ended by now, each taken for the fastest: the first in a process or of a size
        takes several times as long as those to come. One alone tells nothing."""
        times = [(watch, watch.elapsed()) for watch in self.pending]
        ended = [ms for _, ms in times if ms is not None]
        self.fastest, self.ended = min([self.fastest, *ended]), self.ended + len(ended)
        self.pending = [watch for watch, ms in times if ms is None]
        return self.ended * self.fastest if self.ended > 1 else 0.0


class RareCalls:
    """When plans of a module are made that is called about once for each image and takes long, as a VAE; see
    `Config.rare_calls`.

    A plan is made when it pays, at the third call of its kind at the earliest, or with an infinite gain at the second;
    at most one is made in a generation. Nothing is run only to be timed: the original's runs are those of the user's
    images, and so is the first one of the plan.
    """

    def __init__(self) -> None:
        self._runs: dict[Hashable, Runs] = {}
        self._build_ms: float | None = None
        self._announced = self._built = False
        # what was due to the plan that is being made; one is made at a time
        self._taken: tuple[Hashable, Runs] | None = None
        # previews are decoded in other threads than images
        self._lock = threading.Lock()

    def new_generation(self) -> None:
        """A generation begins. If this is never called, plans are not counted."""
        with self._lock:
            self._announced, self._built = True, False

    def is_due(self, key: Hashable, gain: float, first_ms: float = Config.rare_build_ms) -> bool:
        """Whether a call that has no plan gets one.

        Args:
            gain: see `Config.rare_gain`.
            first_ms: see `Config.rare_build_ms`.
        """
        with self._lock:
            return self._is_due(key, gain, first_ms)

    def take(self, key: Hashable, gain: float, first_ms: float = Config.rare_build_ms) -> bool:
        """`is_due`; if so, the plan is about to be made by this thread, and no other one is in this generation."""
        with self._lock:
            if not self._is_due(key, gain, first_ms):
                return False
            self._built = True
            self._taken = key, self._runs[key]
            # a plan that is evicted has to pay again
            self._runs[key] = Runs()
            return True

    def give_back(self) -> None:
        """What was taken last is due as before: no plan could be made now, which says nothing about the next call."""
        with self._lock:
            if self._taken is not None:
                key, runs = self._taken
                self._runs[key], self._taken, self._built = runs, None, False

    def ran(self, key: Hashable, watch: Stopwatch) -> None:
        """The original has run in a call that got no plan, for this time."""
        with self._lock:
            if key not in self._runs and len(self._runs) >= MAX_KINDS:
                self._runs.clear()
            self._runs.setdefault(key, Runs()).pending.append(watch)

    def built(self, milliseconds: float) -> None:
        """A plan was made in this time; the next is taken to cost as much."""
        self._build_ms = milliseconds

    def _is_due(self, key: Hashable, gain: float, first_ms: float) -> bool:
        if key not in self._runs or (self._announced and self._built):
            return False
        price = first_ms if self._build_ms is None else self._build_ms
        return not math.isfinite(gain) or Payback(price, self._runs[key].spent() * gain).due
