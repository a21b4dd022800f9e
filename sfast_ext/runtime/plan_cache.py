"""The plans of one accelerator by key, in LRU order, and the rejected keys."""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Hashable

from sfast_ext.reasons import Reason
from sfast_ext.report import Report
from sfast_ext.runtime.graph_pool import GraphPool, pool_of
from sfast_ext.runtime.plan import Plan
from sfast_ext.weights.arena import WeightArena

REJECTED_FOR = 4
"""Generations after which a rejected key is tried again. Doubles each time."""
REJECTED_CALLS = 250
"""Calls after which it is, for a host that announces no generations. Doubles each time."""


class PlanCache:
    """Caches plans. A plan is bound to its weights while it is cached.

    Args:
        lock: held while plans are added or removed.
        size: the maximum number of plans.
    """

    def __init__(self, arena: WeightArena, report: Report, lock: threading.RLock, size: int) -> None:
        self.plans: OrderedDict[Hashable, Plan] = OrderedDict()
        self.size = size
        # (reason, generation in which it expires)
        self._rejected: OrderedDict[Hashable, tuple[Reason, int]] = OrderedDict()
        self._expired: dict[Hashable, int] = {}
        self._refused_calls: dict[Hashable, int] = {}
        self._generation = 0
        self._arena, self._report, self._lock = arena, report, lock

    def put(self, key: Hashable, plan: Plan) -> None:
        """Add a plan. The least recently used one is dropped if there are too many."""
        with self._lock:
            try:
                self._arena.bind(plan.weights)
            except BaseException:
                plan.close(None)
                raise
            self.plans[key] = plan
            while len(self.plans) > self.size:
                self.drop(next(iter(self.plans)))

    def touch(self, key: Hashable) -> None:
        """Mark as used most recently."""
        with self._lock:
            try:
                self.plans.move_to_end(key)
            except KeyError:
                pass  # dropped since

    def new_generation(self) -> None:
        """A generation begins: rejections expire. Their cause may be gone without a change of the key, as a patch of a
        function that no method calls directly."""
        with self._lock:
            self._generation += 1
            for key, (_, until) in list(self._rejected.items()):
                if self._generation >= until:
                    self._expire(key)

    def _expire(self, key: Hashable) -> None:
        self._rejected.pop(key, None)
        self._refused_calls.pop(key, None)
        self._expired[key] = self._expired.pop(key, 0) + 1
        while len(self._expired) > 4 * self.size:
            del self._expired[next(iter(self._expired))]

    def rejection(self, key: Hashable) -> Reason | None:
        """The reason why a key is rejected, or None. Call it once for each call."""
        refused = self._rejected.get(key) if self._rejected else None
        if refused is None:
            return None
        if not self._generation:
            calls = self._refused_calls[key] = self._refused_calls.get(key, 0) + 1
            if calls > REJECTED_CALLS * 2 ** self._expired.get(key, 0):
                with self._lock:
                    self._expire(key)
                return None
        return refused[0]

    def reject(self, key: Hashable, reason: Reason) -> None:
        """Drop the plan of a key, and build none until the rejection expires or is cleared."""
        with self._lock:
            # first: if freeing the plan's memory fails, it must not run again
            self._rejected[key] = reason, self._generation + REJECTED_FOR * 2 ** self._expired.get(key, 0)
            self._refused_calls.pop(key, None)
            while len(self._rejected) > 4 * self.size:
                forgotten, _ = self._rejected.popitem(last=False)
                self._refused_calls.pop(forgotten, None)
            self._report.event("refused", reason)
            self.drop(key)

    def clear_rejected(self) -> None:
        """Rejected keys may be tried again."""
        with self._lock:
            self._rejected.clear()
            self._expired.clear()
            self._refused_calls.clear()

    def drop(self, key: Hashable) -> None:
        """Close a plan, unbind its weights and free its memory."""
        with self._lock:
            plan = self.plans.pop(key, None)
            if plan is None:
                return
            try:
                self._arena.unbind(plan.weights)
            finally:
                plan.close(pool_for(plan))

    def clear(self, reason: str | None) -> None:
        """Drop all plans and clear all rejections. `reason` is reported if there were any plans."""
        with self._lock:
            if reason and self.plans:
                self._report.event("plans", f"all plans are dropped: {reason}")
            self.clear_rejected()
            with contextlib.ExitStack() as each:
                # all of them, even if one raises
                for key in list(self.plans):
                    each.callback(self.drop, key)


def pool_for(plan: Plan) -> GraphPool | None:
    """The graph pool of a plan's device. None on a CPU."""
    return pool_of(plan.device) if plan.device.type == "cuda" else None
