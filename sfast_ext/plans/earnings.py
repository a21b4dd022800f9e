"""Whether a plan for a new kind of call is made at once, or only if such calls repeat: hires fix and an extension that
repaints faces make images of many sizes, each for a few steps, and a plan costs a second or more."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Hashable
from typing import Protocol

from sfast_ext.plans.payback import FIRST_BUILD_MS, Payback, Runs, Stopwatch

GAIN = 0.4
"""The part of the original's time that a plan is taken to save before one was timed."""
MAX_DEBT = 4
"""While the price of so many plans is not earned back, only what repeats and has lost the price of one gets a plan."""
PASSES = 4
"""So many of the last passes tell how many calls one has: the shortest."""
MAX_KINDS = 256
"""Kinds of calls that are remembered."""


class Timed(Protocol):
    """A plan, and what is known of its use."""

    replays: int
    ms_before: float | None
    ms_after: float | None


class Investment:
    """A plan and its price in milliseconds."""

    def __init__(self, plan: Timed, price: float) -> None:
        self._plan, self._price = plan, price

    def debt(self) -> float:
        """What is left of the price, below zero if its use has saved more. What was not timed has saved nothing."""
        before, after = self._plan.ms_before, self._plan.ms_after
        saved = 0.0 if before is None or after is None else self._plan.replays * max(0.0, before - after)
        return self._price - saved


class Earnings:
    """Decides for the kinds of calls of one module.

    The first plan is made at once, and so is any other that the plans before have earned. Otherwise a new kind of call
    gets a plan if it is expected to pay in what is left of this pass of the sampler, or if it is used in a second one.
    So a module whose calls repeat is accelerated as soon as its user can notice, and sizes that never repeat cost
    nothing that was not earned before.

    Attributes:
        calls: of the module in this pass; counted by the caller.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.calls = 0
        self._passes: deque[int] = deque(maxlen=PASSES)
        self._generation = 1
        self._build_ms, self._gain = FIRST_BUILD_MS, GAIN
        self._settled = 0.0
        self._investments: deque[Investment] = deque()
        # the generation in which a kind was met first, and the runs of the original in it
        self._met: dict[Hashable, int] = {}
        self._runs: dict[Hashable, Runs] = {}

    def new_generation(self) -> None:
        """A generation begins: a pass of the sampler."""
        if self.calls:
            self._passes.append(self.calls)
        self._generation, self.calls = self._generation + 1, 0

    def due(self, kind: Hashable) -> bool:
        """Whether a call of this kind, which has no plan, gets one. To ask again changes nothing, but
        more of the original's runs may have ended by then."""
        with self._lock:
            first = self._met.get(kind)
            if first is None:
                while len(self._met) >= MAX_KINDS:
                    forgotten = next(iter(self._met))
                    del self._met[forgotten]
                    self._runs.pop(forgotten, None)
                first = self._met[kind] = self._generation
            debt = self._debt()
            if not self._investments or debt + self._build_ms <= 0:
                return True
            runs = self._runs.setdefault(kind, Runs())
            lost = self._gain * runs.spent()
            repeats = first < self._generation
            if debt >= MAX_DEBT * self._build_ms:
                return repeats and Payback(self._build_ms, lost).due
            expected = self._expected() * lost / runs.ended if runs.ended else 0.0
            return repeats or Payback(self._build_ms, expected).due

    def ran(self, kind: Hashable, watch: Stopwatch) -> None:
        """The original has run in a call of this kind that got no plan, for this time."""
        with self._lock:
            if kind in self._met:
                self._runs.setdefault(kind, Runs()).pending.append(watch)

    def built(self, kind: Hashable, plan: Timed, milliseconds: float) -> None:
        """A plan was made in this time. The next is taken to cost as much, and to save the same part."""
        with self._lock:
            self._runs.pop(kind, None)
            self._build_ms = milliseconds
            if plan.ms_before and plan.ms_after is not None:
                self._gain = max(0.0, 1 - plan.ms_after / plan.ms_before)
            self._investments.append(Investment(plan, milliseconds))
            if len(self._investments) > MAX_KINDS:
                self._settled += self._investments.popleft().debt()

    def _expected(self) -> float:
        """How many calls are left in this pass. One of hires fix may have half the steps of the one before it."""
        known = min(self._passes, default=0)
        return (known if len(self._passes) == PASSES else known / 2) - self.calls

    def _debt(self) -> float:
        return self._settled + sum(each.debt() for each in self._investments)
