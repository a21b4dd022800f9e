"""Handling of our own exceptions: report, then drop the plan, reject the key or disable the kernel that raised."""

from __future__ import annotations

import torch

from sfast_ext import reasons
from sfast_ext.kernels.backend import health, precompile
from sfast_ext.plans.graph_pool import pool_of
from sfast_ext.plans.plan import Plan
from sfast_ext.reasons import Detail, Reason, one_line
from sfast_ext.report import stage, words_of
from sfast_ext.runtime.eight_bits import because
from sfast_ext.runtime.model_state import ModuleContext
from sfast_ext.runtime.plan_cache import PlanCache
from sfast_ext.runtime.plan_finder import Lookup

MAX_OUT_OF_MEMORY = 3
"""A plan that ran out of memory this many times is rejected."""
# CUDA's libraries raise a plain RuntimeError
_NO_MEMORY = (
    "CUDA error: out of memory",
    "CUDA_ERROR_OUT_OF_MEMORY",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)
# by whether a plan was being built
_FAILED = {False: reasons.PLAN_FAILED, True: reasons.BUILD_FAILED}
_NO_MEMORY_FOR = {False: reasons.PLAN_NO_MEMORY, True: reasons.BUILD_NO_MEMORY}


def out_of_memory(exc: BaseException) -> bool:
    """Whether an exception says that the GPU is out of memory."""
    if isinstance(exc, torch.cuda.OutOfMemoryError):
        return True
    return isinstance(exc, RuntimeError) and any(words in str(exc) for words in _NO_MEMORY)


def without_eight_bits(exc: Exception) -> Reason:
    """Why 8 bits are not used, if making a plan with them raised."""
    short = out_of_memory(exc)
    return reasons.EIGHT_BITS_ROOM() if short else reasons.EIGHT_BITS_FAILED(stage(), Detail(one_line(words_of(exc))))


class Failures:
    """Handles the exceptions of one module's calls."""

    def __init__(self, context: ModuleContext, cache: PlanCache) -> None:
        self._context = context
        self._cache = cache

    def failed(self, exc: Exception, lookup: Lookup | None, *, building: bool) -> None:
        """Report an exception, and disable what raised it. Raises nothing.

        Args:
            lookup: the call, if it had been looked up: what raised before says nothing about a plan.
            building: whether it raised while the plan of the call was built.
        """
        report, where = self._context.report, stage()
        report.error(where, exc)
        if lookup is None or (lookup.plan is None and not building):
            return
        try:
            plan = None if building else lookup.plan
            if plan is not None and self.disable_kernels(exc, lookup.key.device):
                self._cache.drop(lookup.key)
                return
            if self._evict_for_memory(exc, plan):
                return
            kind = _NO_MEMORY_FOR[building] if out_of_memory(exc) else _FAILED[building]
            why = kind(where, Detail(one_line(words_of(exc))))
            if plan is not None and plan.banks:
                # the one without 8 bits may run
                self._cache.drop(lookup.key)
                self._context.model.eight_bits.stop(because(why), report)
            else:
                self._cache.reject(lookup.key, why)
        except Exception as again:
            report.error("giving up a plan", again)

    def disable_kernels(self, exc: Exception, device: torch.device) -> bool:
        """Disable the kernel that raised an exception, and all kernels that failed to compile if it is one of them.

        Returns False if the exception came from no kernel, or from one that is disabled already.
        """
        report = self._context.report
        reasons = health.culprits(exc)
        uncompiled = precompile.failed(device)
        if not uncompiled.keys().isdisjoint(reasons):
            reasons = uncompiled | reasons
        new = [name for name, reason in reasons.items() if health.disable(name, device, reason)]
        for name in new:
            report.count("kernels_disabled")
            report.event("kernel", f"{name} is disabled, and steps run without it: {reasons[name]}")
        return bool(new)

    def freed_memory_for(self, exc: Exception) -> bool:
        """The original forward raised: whether it ran out of memory, and CUDA graphs and banks were freed for it, or
        the host gave way."""
        device = self._context.device() if out_of_memory(exc) else None
        if device is None or device.type != "cuda":
            return False
        if not pool_of(device).holds_memory:
            short = self._context.hooks.short_of_memory
            try:
                return short is not None and short()
            except Exception as again:
                # the host knows what its forward raised, and nothing of this
                self._context.report.error("short_of_memory", again)
                return False
        self._context.report.count("out_of_memory")
        pool_of(device).make_room(self._context.report)
        return True

    def _evict_for_memory(self, exc: Exception, plan: Plan | None) -> bool:
        """Out of memory: evict all CUDA graphs, so that the original can run. True if `plan` may be used again."""
        if not out_of_memory(exc):
            return False
        self._context.report.count("out_of_memory")
        device = self._context.device()
        if device is not None and device.type == "cuda":
            pool_of(device).make_room(self._context.report)
        if plan is None:
            return False
        plan.out_of_memory += 1
        return plan.out_of_memory < MAX_OUT_OF_MEMORY
