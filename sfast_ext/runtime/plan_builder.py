"""From a call without a plan to a plan that may be used: capture, passes, binding, verification."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from sfast_ext import environment
from sfast_ext.call_signature import Call, Signature
from sfast_ext.capture.capture import Captured, CaptureRefused, OpSequence, capture, capture_live
from sfast_ext.capture.live_trace import SUPPORTED, LiveTrace
from sfast_ext.config import Config
from sfast_ext.kernels.backend.precompile import precompile
from sfast_ext.kernels.group_norm import group_norm
from sfast_ext.passes import PassContext, run_passes
from sfast_ext.passes.layout_time import channels_last_pays
from sfast_ext.report import at
from sfast_ext.runtime.backoff import CaptureBackoff
from sfast_ext.runtime.failures import Failures
from sfast_ext.runtime.model_state import ModuleContext
from sfast_ext.runtime.plan import Plan
from sfast_ext.runtime.plan_cache import PlanCache
from sfast_ext.runtime.plan_runner import PlanRunner
from sfast_ext.runtime.replay_state import Lookup
from sfast_ext.runtime.verify import verify_plan
from sfast_ext.weights.submodule_arena import Arena


@dataclass
class OriginalRun:
    """The run of the original forward for a call that gets a plan."""

    again: Callable[[], Any]
    """Runs it once more on the same inputs."""
    result: Any
    seconds: float
    trace: LiveTrace | None
    """What was recorded meanwhile."""


class PlanBuilder:
    """Builds the plans of one module.

    Args:
        cache: takes a new plan, or the reason why there is none.
        runner: runs a new plan as it will be run.
        failures: takes kernels that fail out of use.
        backoff: is told of each capture.
    """

    def __init__(
        self, context: ModuleContext, cache: PlanCache, runner: PlanRunner, failures: Failures, backoff: CaptureBackoff
    ) -> None:
        self._context = context
        self._cache = cache
        self._runner = runner
        self._failures = failures
        self._backoff = backoff
        self._op_sequences: dict[Hashable, set[OpSequence]] = {}
        self.static_numbers: set[Signature] = set()
        """Signatures of forwards that may branch on a number: numbers are part of their keys."""

    def live_trace(self, lookup: Lookup) -> LiveTrace | None:
        """What is to record the original's run for a plan, where the same behaviour was captured before."""
        known = SUPPORTED and lookup.key[1:] in self._op_sequences  # type: ignore[index]
        return LiveTrace(lookup.call, self._context.arena, lookup.device) if known else None

    def forget(self) -> None:
        """Forget what was captured before."""
        self._op_sequences.clear()

    def build(self, lookup: Lookup, run: OriginalRun) -> None:
        """Build the plan of a call, and put it into the cache, or the reason why there is none.

        Raises:
            WeightsAway, WeightsChanged: see `WeightArena.sync`.
        """
        started = time.perf_counter()
        context, device = self._context, lookup.device
        away = next((p.device for p in context.module.parameters() if p.device != device), None)
        if away is not None:
            # not refused: they may be back at the next call
            context.report.bypassed(f"some weights are on {away}, others on {device}")
            return
        self._backoff.record_capture(lookup.shape_signature)
        if not self._cache.plans and not context.is_part:
            # theirs would keep the weights from being packed for all of it
            for part in context.model.parts:
                part.forget_plans("the model is captured as a whole")
        at("weights")
        context.arena.sync()
        while True:
            try:
                plan = self._attempt(lookup, run)
                break
            except Exception as exc:
                if not self._failures.put_down(exc, device):
                    raise
            run.trace = None  # it was used up
        if plan is not None:
            plan.first_call_s = round(run.seconds + time.perf_counter() - started, 3)
            context.report.event("plan", f"{plan.state}: {plan.signature.words()}, built in {plan.first_call_s} s")

    def _attempt(self, lookup: Lookup, run: OriginalRun) -> Plan | None:
        """A plan of the kernels that are in use; None, with the reason noted, where the call gets none."""
        context, key, device = self._context, lookup.key, lookup.device
        report = context.report
        at("capture")
        try:
            plan = make_plan(self._captured(lookup, run), lookup.call, context.arena, device, context.config)
            if device.type == "cuda":
                for sentence in environment.left_out(device):
                    report.once("kernels", sentence)
        except CaptureRefused as exc:
            has_numbers = any(not isinstance(leaf, torch.Tensor) for leaf in lookup.call.leaves)
            if exc.reads_value and has_numbers and lookup.shape_signature not in self.static_numbers:
                # it may be one of the numbers that it looks at: next time they are part of the signature
                self.static_numbers.add(lookup.shape_signature)
                report.event("capture", f"numbers become part of the signature: {exc}")
                return None
            if exc.details:
                report.event("capture", exc.details)
            self._cache.reject(key, str(exc))
            return None
        plan.behaviour = lookup.behaviour
        at("binding of weights")
        self._cache.put(key, plan)
        report.count("captures")
        if not plan.fused:
            report.event("passes", "the graph reads strides or unknown sizes, so nothing in it is rewritten")
        try:
            with self._runner.guard(plan):
                refusal = verify_plan(
                    plan,
                    lambda: self._runner.outputs(plan, lookup.call),
                    run.again,
                    lookup.call,
                    run.result,
                    run.seconds,
                    context.config,
                )
        except Exception:
            self._cache.drop(key)
            raise
        if refusal:
            self._cache.reject(key, refusal)
            return None
        return plan

    def _captured(self, lookup: Lookup, run: OriginalRun) -> Captured:
        context = self._context
        op_sequences = self._op_sequences.setdefault(lookup.key[1:], set())  # type: ignore[index]
        captured = capture_live(run.trace, op_sequences, context.arena) if run.trace is not None else None
        if captured is None:
            inputs = lookup.call.tensors(lookup.device)
            captured = capture(context.slot.original, lookup.call, inputs, context.arena, context.hooks.ignored)
            op_sequences.add(captured.op_sequence)
        return captured


def make_plan(captured: Captured, call: Call, arena: Arena, device: torch.device, config: Config) -> Plan:
    """The plan of a captured forward: its graph after all passes, with the kernels that `device` and `config` allow."""
    at("choice of kernels")
    graph = captured.graph_module.graph
    triton = (
        config.triton
        and environment.triton_runs_on(device)
        and environment.triton_refusal(device, *_dtypes(graph)) is None
    )
    context = PassContext(arena, device, triton)
    if device.type == "cuda" and not context.serves(group_norm):
        context.channels_last = arena.memoize("channels last", lambda: channels_last_pays(graph, device))
    fused = run_passes(captured.graph_module, context)
    if triton:
        # before the plan takes the shapes out of the graph
        precompile(graph, device)
    at("binding of weights")
    return Plan(call, captured.graph_module, captured.output_tree, captured.output_strides, device, fused)


def _dtypes(graph: fx.Graph) -> set[torch.dtype]:
    """Of the values of a captured graph."""
    found = (node.meta.get("val") for node in graph.nodes)
    return {val.dtype for val in found if isinstance(val, torch.Tensor)}
