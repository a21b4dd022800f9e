"""The plans of one accelerator by key, in LRU order; the keys for which there is none, and why; which kinds of calls
get one."""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict, deque
from collections.abc import Hashable
from typing import NamedTuple, Protocol

import torch

from sfast_ext.call_signature import Signature
from sfast_ext.plans.payback import MAX_KINDS, Payback, Rejection, Runs
from sfast_ext.plans.plan import Plan
from sfast_ext.reasons import Reason
from sfast_ext.report import Report
from sfast_ext.timing import Stopwatch
from sfast_ext.weights.arena import WeightArena

MAX_CHANGING_CALLS = 3
"""A forward may fill what it keeps for later calls in so many calls in a row, in different places each time."""
_MAX_STATES = 64
KEPT_UNUSED = 3
"""Generations for which plans with 8 bits are kept while the setting is off: requests may switch it."""

GAIN = 0.4
"""The part of the original's time that a plan is taken to save before one was timed."""
FIRST_PLAN_MS = 4000.0
"""What a plan is taken to cost before one was made, in milliseconds: a UNet's or a transformer's, whose kernels are
compiled. Those of modules that are called rarely have fewer kernels, and another figure: `Config.rare_build_ms`."""
MAX_DEBT = 4
"""While the price of so many plans is not earned back, only what repeats and has lost the price of one gets a plan."""
PASSES = 4
"""So many of the last passes tell how many calls one has: the shortest."""


class PlanKey(NamedTuple):
    """What a plan is found by."""

    signature: Signature
    behaviour: int
    """The number of the behaviour, see `BehaviourKeys`."""
    host: Hashable
    """The host's own key, see `Hooks.key`."""
    device: torch.device
    eight_bits: bool = False
    """Whether linear layers may be computed with 8-bit integers."""

    @property
    def model(self) -> tuple[int, Hashable, torch.device]:
        """What it has in common with other calls of the same model."""
        return self.behaviour, self.host, self.device


class Waiting(NamedTuple):
    """A call of a kind that has no plan yet; see `Earnings`."""

    signature: Signature
    device: torch.device
    label: str


class PlanCache:
    """Caches plans. A plan is bound to its weights while it is cached.

    Attributes:
        size: the maximum number of plans.
        latest: the plan that was added or used last.
        waiting: the last call that got no plan because none was earned.
        rejected: why there is no plan for some keys.

    Args:
        lock: held while plans are added or removed.
    """

    def __init__(self, arena: WeightArena, report: Report, lock: threading.RLock, size: int) -> None:
        self.plans: OrderedDict[PlanKey, Plan] = OrderedDict()
        self.latest: Plan | None = None
        self.waiting: Waiting | None = None
        self.size = size
        self.rejected: OrderedDict[Hashable, Rejection] = OrderedDict()
        self._expired: dict[Hashable, int] = {}
        self._announced = False
        self._arena, self._report, self._lock = arena, report, lock

    def put(self, key: PlanKey, plan: Plan) -> None:
        """Add a plan. The least recently used one is dropped if there are too many."""
        with self._lock:
            try:
                self._arena.bind(plan.weights)
            except BaseException:
                plan.close()
                raise
            self.plans[key] = self.latest = plan
            self.plans.move_to_end(key)
            while len(self.plans) > self.size:
                self.drop(next(iter(self.plans)))

    def touch(self, key: PlanKey) -> None:
        """Mark as used most recently."""
        with self._lock:
            try:
                self.plans.move_to_end(key)
            except KeyError:
                pass  # dropped since
            else:
                self.latest = self.plans[key]

    def new_generation(self) -> None:
        """A generation begins: rejections expire. Their cause may be gone without a change of the key, as a patch of a
        function that no method calls directly."""
        with self._lock:
            self._announced = True
            for key, rejection in list(self.rejected.items()):
                if rejection.generations.pay():
                    self._expire(key)

    def new_generation_of_eight_bits(self, number: int, chosen: bool) -> None:
        """A generation begins: weights of plans with 8 bits may be others. While the setting is off, those that were
        not used for some generations are dropped, as they hold a second copy of weights."""
        with self._lock:
            for key, plan in [(key, plan) for key, plan in self.plans.items() if plan.banks]:
                plan.weights_due = True
                if not chosen and plan.generation_of_use < number - KEPT_UNUSED:
                    self.drop(key)

    def _expire(self, key: Hashable) -> None:
        self.rejected.pop(key, None)
        self._expired[key] = self._expired.pop(key, 0) + 1
        while len(self._expired) > 4 * self.size:
            del self._expired[next(iter(self._expired))]

    def rejection(self, key: Hashable) -> Reason | None:
        """The reason why a key is rejected, or None. Call it once for each call."""
        refused = self.rejected.get(key)
        if refused is None:
            return None
        if not self._announced:
            if refused.calls.due:
                with self._lock:
                    self._expire(key)
                return None
            refused.calls.pay()
        return refused.reason

    def reject(self, key: PlanKey, reason: Reason) -> None:
        """Drop the plan of a key, and build none until the rejection expires or is cleared."""
        with self._lock:
            # first: if freeing the plan's memory fails, it must not run again
            self.rejected[key] = Rejection(reason, self._expired.get(key, 0))
            while len(self.rejected) > 4 * self.size:
                self.rejected.popitem(last=False)
            self._report.event("refused", reason)
            self.drop(key)

    def clear_rejected(self) -> None:
        """Rejected keys may be tried again."""
        with self._lock:
            self.rejected.clear()
            self._expired.clear()

    def drop(self, key: PlanKey) -> None:
        """Close a plan, unbind its weights and free its memory."""
        with self._lock:
            plan = self.plans.pop(key, None)
            if plan is None:
                return
            self.latest = None
            try:
                self._arena.unbind(plan.weights)
            finally:
                plan.close()

    def clear(self, reason: str | None) -> None:
        """Drop all plans and clear all rejections. `reason` is reported if there were any plans."""
        with self._lock:
            if reason and self.plans:
                self._report.event("plans", f"all plans are dropped: {reason}")
            self.clear_rejected()
            self.waiting = None
            with contextlib.ExitStack() as each:
                # all of them, even if one raises
                for key in list(self.plans):
                    each.callback(self.drop, key)


class StateChanges:
    """Counts the calls in a row in which a forward changed the state that it can reach. Such a forward gets no plan, as
    a replay changes nothing."""

    def __init__(self) -> None:
        self._found: OrderedDict[PlanKey, tuple[str, int]] = OrderedDict()
        self._last: OrderedDict[Signature, Reason] = OrderedDict()

    def record(self, signature: Signature, key: PlanKey, place: str, reason: Reason) -> bool:
        """A call changed state. Returns whether it does so again and again.

        Args:
            key: that of the plan that it did not get.
            place: what it changed.
        """
        before, times = self._found.pop(key, ("", 0))
        self._found[key], self._last[signature] = (place, times + 1), reason
        for each in (self._found, self._last):
            while len(each) > _MAX_STATES:
                each.popitem(last=False)
        return before == place or times + 1 >= MAX_CHANGING_CALLS

    def settled(self, signature: Signature, key: PlanKey) -> None:
        """A call changed nothing."""
        self._found.pop(key, None)
        self._last.pop(signature, None)

    def reason(self, signature: Signature) -> Reason | None:
        """What the last call of a signature changed, or None."""
        return self._last.get(signature)


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

    A plan that the plans before have earned is made at once. Otherwise a new kind of call gets a plan if it is used in
    a second pass of the sampler, or if a plan pays in this one: the first of the module once going without it has lost
    its price, any other if it is expected to earn that in what is left of the pass. So a module whose calls repeat is
    accelerated as soon as its user can notice, and sizes that never repeat cost nothing that was not earned before.

    Args:
        wanted: whether the first plan is made at once in any case.

    Attributes:
        calls: of the module in this pass; counted by the caller.
    """

    def __init__(self, wanted: bool = False) -> None:
        self._wanted = wanted
        self._lock = threading.Lock()
        self.calls = 0
        self._passes: deque[int] = deque(maxlen=PASSES)
        self._generation = 1
        self._build_ms, self._gain = FIRST_PLAN_MS, GAIN
        self._settled = 0.0
        self._investments: deque[Investment] = deque()
        # the generation in which a kind was met first, and the runs of the original in it
        self._met: dict[Hashable, int] = {}
        self._runs: dict[Hashable, Runs] = {}

    def new_generation(self, wanted: bool = False) -> None:
        """A generation begins: a pass of the sampler.

        Args:
            wanted: whether the first plan is made at once from now on.
        """
        self._wanted = self._wanted or wanted
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
            made = bool(self._investments)
            if (made and debt + self._build_ms <= 0) or (self._wanted and not made):
                return True
            runs = self._runs.setdefault(kind, Runs())
            lost = self._gain * runs.spent()
            repeats = first < self._generation
            if not made:
                return repeats or Payback(self._build_ms, lost).due
            if debt >= MAX_DEBT * self._build_ms:
                return repeats and Payback(self._build_ms, lost).due
            expected = self._expected() * lost / max(1, runs.ended)
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
