"""Runs the plans of one module, by CUDA graph if possible, and compares results with the original forward."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

from sfast_ext import environment, reasons
from sfast_ext.call_signature import Call, flatten_output, rebuild_output
from sfast_ext.plans.payback import Stopwatch
from sfast_ext.plans.plan import Plan
from sfast_ext.report import current, words_of
from sfast_ext.runtime.eight_bits import look, state_of_weights
from sfast_ext.runtime.model_state import ModuleContext
from sfast_ext.runtime.plan_cache import PlanCache
from sfast_ext.runtime.plan_finder import Lookup
from sfast_ext.runtime.verify import NOISE_OF_ONE, Comparison, comparable, tolerance, too_slow
from sfast_ext.weights.weight import WeightsAway


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
            if plan.error is not None and not plan.error <= (most := tolerance(plan, config)):
                if plan.banks:
                    self._cache.drop(key)
                else:
                    self._cache.reject(key, reasons.INACCURATE(plan.error, most))

    def outputs(self, plan: Plan, call: Call) -> list[torch.Tensor]:
        """The flat outputs of a plan. The caller holds `guard`."""
        context = self._context
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
                known, at_once = plan.was_captured, plan.recaptures_at_once()
                if not at_once and plan.records_now():
                    self.record_launches(plan, call)
                if at_once or not plan.waits_for_graph():
                    outputs = self._capture_graph(plan, call)
                    if outputs is not None:
                        # Of one that was evicted the run before the capture serves this call. Of a new one the replay
                        # is what is compared and timed.
                        return outputs if known else plan.replay(call.leaves)
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

    def record_launches(self, plan: Plan, call: Call) -> None:
        """See `Plan.record_launches`. Nothing with a CUDA graph. The caller holds `guard`."""
        if not plan.has_graph:
            plan.record_launches(call.leaves, self._context.report)

    def guard(self, plan: Plan) -> contextlib.AbstractContextManager[Any]:
        """The lock to hold while a plan runs. Graphs of one pool share memory; on a CPU only the plan is protected."""
        return plan.pool.lock if plan.pool is not None else self._context.model.lock

    def _capture_graph(self, plan: Plan, call: Call) -> list[torch.Tensor] | None:
        config = self._context.config
        share = 1 / len(self._context.model.parts) if self._context.is_part else 1.0
        budget = environment.graph_budget_mb() if config.graph_memory_mb is None else config.graph_memory_mb
        return plan.capture_graph(call.leaves, self._context.report, config.max_graphs, budget, share)
