"""Exceptions of ours: they are noted, and what they came from is put aside. The call goes on with the original."""

from __future__ import annotations

import torch

from sfast_ext.kernels.backend import health, precompile
from sfast_ext.report import stage, words_of
from sfast_ext.runtime.graph_pool import pool_of
from sfast_ext.runtime.model_state import ModuleContext
from sfast_ext.runtime.plan import Plan
from sfast_ext.runtime.plan_cache import PlanCache
from sfast_ext.runtime.plan_finder import READING_KEY
from sfast_ext.runtime.replay_state import Lookup

# times that one plan may run out of memory before it is given up
OUT_OF_MEMORY = 3


class Failures:
    """Deals with the exceptions of one module's calls."""

    def __init__(self, context: ModuleContext, cache: PlanCache) -> None:
        self._context = context
        self._cache = cache

    def failed(self, exc: Exception, lookup: Lookup | None, *, building: bool) -> None:
        """Note an exception of ours, and put aside what it came from. Raises nothing."""
        report, where = self._context.report, stage()
        report.error(where, exc)
        if lookup is None or (lookup.plan is None and not building) or where == READING_KEY:
            return
        try:
            plan = None if building else lookup.plan
            if plan is not None and self.put_down(exc, lookup.device):
                self._cache.drop(lookup.key)
                return
            if not self._evict_for_memory(exc, plan):
                what = "no plan could be built" if building else "its plan failed"
                self._cache.reject(lookup.key, f"{what}: {where}: {words_of(exc)}")
        except Exception as again:
            report.error("giving up a plan", again)

    def put_down(self, exc: Exception, device: torch.device) -> bool:
        """Take the kernel that an exception came from out of use, and with it those that did not compile.

        False where the exception came from no kernel, or from one that is out of use already.
        """
        report = self._context.report
        reasons = health.blamed(exc)
        uncompiled = precompile.failed(device)
        if not uncompiled.keys().isdisjoint(reasons):
            reasons = uncompiled | reasons
        new = [name for name, reason in reasons.items() if health.put_down(name, device, reason)]
        for name in new:
            report.count("kernels_put_down")
            report.event("kernel", f"{name} is put down, plans are made without it: {reasons[name]}")
        return bool(new)

    def _evict_for_memory(self, exc: Exception, plan: Plan | None) -> bool:
        """Out of memory: the graphs' memory goes to the original's run. True where `plan` may be used again."""
        if not isinstance(exc, torch.cuda.OutOfMemoryError):
            return False
        device = self._context.device()
        if device is not None and device.type == "cuda":
            pool_of(device).make_room(self._context.report)
        if plan is None:
            return False
        plan.out_of_memory += 1
        return plan.out_of_memory < OUT_OF_MEMORY
