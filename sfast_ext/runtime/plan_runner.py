"""Runs the plans of one module, by CUDA graph if possible, and compares results with the original forward. What raises
is reported, and taken out of use: a plan, a key or a kernel."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

import torch

from sfast_ext import environment, reasons
from sfast_ext.call_signature import Call, flatten_output, rebuild_output
from sfast_ext.gc_pause import gc_paused
from sfast_ext.kernels.backend import health, precompile
from sfast_ext.plans.graph_pool import pool_of
from sfast_ext.plans.plan import DROPPED, Plan
from sfast_ext.reasons import Detail, Reason, one_line
from sfast_ext.report import current, stage, words_of
from sfast_ext.runtime.eight_bits import because, look, state_of_weights
from sfast_ext.runtime.model_state import ModuleContext
from sfast_ext.runtime.plan_cache import PlanCache
from sfast_ext.runtime.plan_finder import Lookup
from sfast_ext.runtime.verify import NOISE_OF_ONE, Comparison, comparable, most_of, too_slow
from sfast_ext.timing import Stopwatch
from sfast_ext.weights.weight import WeightsAway

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


class OriginalFailed(Exception):
    """The original forward raised. This is the host's error, and is passed on unchanged."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(words_of(cause))
        self.cause = cause


class PlanRunner:
    """Runs plans of one module.

    Args:
        cache: takes the keys of plans that differ from the original.
    """

    def __init__(self, context: ModuleContext, cache: PlanCache) -> None:
        self._context = context
        self._cache = cache

    def run(self, lookup: Lookup, run_original: Callable[[], Any]) -> Any:
        """The result of a call. It is the plan's, or the original's if the two are compared.

        Args:
            run_original: runs the original forward on the same inputs.

        Raises:
            OriginalFailed: the original forward raised.
            WeightsAway: another thread freed the memory of the weights.
        """
        plan = lookup.plan
        assert plan is not None
        current.stage = "replay"
        watch = Stopwatch(plan.device) if self._is_timed(plan) else None
        with self.guard(plan):
            outputs = self.outputs(plan, lookup.call)
            if plan.banks and not lookup.compared and self._context.config.check != "never":
                look(plan)
        if self._on_gpu(plan):
            plan.recapture.ran(plan.has_graph, time.perf_counter())
        if watch is not None:
            self._time(lookup, watch)
        if lookup.compared:
            return self._compared(lookup, outputs, run_original)
        current.stage = "result"
        return rebuild_output(plan.output_tree, outputs)

    def _compared(self, lookup: Lookup, outputs: list[torch.Tensor], run_original: Callable[[], Any]) -> Any:
        """The original's result. If the plan's differs from it, its key is rejected."""
        plan = lookup.plan
        assert plan is not None
        # before the original: it may need the memory of banks
        weights = int(state_of_weights(plan)) if plan.banks else 0
        try:
            result = run_original()
        except Exception as exc:
            raise OriginalFailed(exc) from exc
        current.stage = "check"
        plan.compare_again = False
        references = flatten_output(result)[1]
        if not comparable(references):
            return result
        refusal = Comparison(plan, outputs, references, self._context.config, run_original).difference()
        if refusal is None:
            if plan.banks:
                plan.compared_weights.add(weights)
        elif plan.banks:
            self._cache.drop(lookup.key)
            self._context.model.eight_bits.exceeded(lookup.key.model, refusal, self._context.report)
        else:
            self._cache.reject(lookup.key, refusal)
        return result

    def _is_timed(self, plan: Plan) -> bool:
        """Whether this use of a plan times it, see `Config.rare_calls`. The first one: it was run once before."""
        return self._context.config.rare_calls and plan.ms_after is None and plan.ms_before is not None

    def _time(self, lookup: Lookup, watch: Stopwatch) -> None:
        plan, config = lookup.plan, self._context.config
        assert plan is not None
        watch.stop()
        plan.ms_after = watch.milliseconds()
        slow = too_slow(plan, config, NOISE_OF_ONE) if self._on_gpu(plan) else None
        if slow is not None:
            self._cache.reject(lookup.key, slow)

    @staticmethod
    def _on_gpu(plan: Plan) -> bool:
        # on a CPU the original's time is that of a run with whatever else ran at that time
        return plan.device.type == "cuda"

    def reject_inaccurate(self) -> None:
        """Reject the plans whose known error exceeds the tolerance. Those with 8 bits are dropped: the next have more
        layers in half precision."""
        config = self._context.config
        if config.check == "never":
            return
        for key, plan in list(self._cache.plans.items()):
            if plan.error is not None and not plan.error <= (most := most_of(plan, config)):
                if plan.banks:
                    self._cache.drop(key)
                else:
                    self._cache.reject(key, reasons.INACCURATE(plan.error, most))

    def outputs(self, plan: Plan, call: Call) -> list[torch.Tensor]:
        """The flat outputs of a plan. The caller holds `guard`."""
        context = self._context
        if plan.state == DROPPED:
            # by another thread since the plan was found
            raise WeightsAway(reasons.PLAN_DROPPED())
        if context.arena.lacks(plan.weights):
            # freed by another thread since the last sync
            raise WeightsAway(reasons.WEIGHTS_GIVEN_BACK())
        if not context.arena.order.plan():
            raise WeightsAway(reasons.WEIGHTS_REPLACED())
        if plan.banks and context.arena.banks.vacant:
            self._occupy()
        if plan.resident and not context.arena.resident.ready:
            # freed by another thread since the last sync
            raise WeightsAway(reasons.WEIGHTS_GIVEN_BACK())
        if plan.pool is not None and context.config.cuda_graphs:
            if plan.graph is not None:
                return plan.replay(call.leaves)
            if plan.no_graph_reason is None:
                at_once = plan.recaptures_at_once()
                if plan.records_now(captures=at_once):
                    self.record_launches(plan, call, captures=at_once)
                if (at_once or not plan.waits_for_graph()) and self._capture_graph(plan, call):
                    return plan.replay(call.leaves)
        outputs = plan.run_eagerly(call.leaves)
        if plan.pool is not None and plan.records_now():
            self.record_launches(plan, call)
        return outputs

    def _occupy(self) -> None:
        """Allocate the memory of banks again."""
        context = self._context
        try:
            context.arena.banks.occupy()
        except torch.cuda.OutOfMemoryError as exc:
            reason = reasons.EIGHT_BITS_ROOM()
            context.model.eight_bits.stop(reason, context.report)
            raise WeightsAway(reason) from exc

    def record_launches(self, plan: Plan, call: Call, captures: bool = False) -> None:
        """See `Plan.record_launches`. Nothing with a CUDA graph. The caller holds `guard`."""
        if not plan.has_graph:
            with gc_paused(), self._context.own_shortages():
                plan.record_launches(call.leaves, self._context.report, captures)

    def guard(self, plan: Plan) -> contextlib.AbstractContextManager[Any]:
        """The lock to hold while a plan runs. Graphs of one pool share memory; on a CPU only the plan is protected."""
        return plan.pool.lock if plan.pool is not None else self._context.model.lock

    def _capture_graph(self, plan: Plan, call: Call) -> bool:
        config = self._context.config
        share = 1 / len(self._context.model.parts) if self._context.is_part else 1.0
        budget = config.graph_memory_mb
        if budget is None:
            # a program may have models on several cards
            budget = environment.graph_budget_mb(plan.device)
        return plan.capture_graph(call.leaves, self._context.report, config.max_graphs, budget, share)


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
        return out_of_memory(exc) and self._context.make_way()

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
