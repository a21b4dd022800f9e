"""Builds plans: capture, passes, binding of weights, verification."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Hashable
from typing import Any

import torch

from sfast_ext import environment, reasons
from sfast_ext.argument_roles import ArgumentRoles
from sfast_ext.call_signature import flatten_output
from sfast_ext.capture import argument_kinds, block_reuse
from sfast_ext.capture.arguments import Edit, words
from sfast_ext.capture.capture import Captured, CaptureRefused, OpSequence, capture, capture_live
from sfast_ext.capture.live_trace import SUPPORTED, LiveTrace
from sfast_ext.capture.state import State
from sfast_ext.kernels.backend import choices
from sfast_ext.kernels.backend.graph_memory import peak_bytes
from sfast_ext.plans.graph_facts import has_gaps, lent, shared_results
from sfast_ext.plans.payback import CaptureBackoff
from sfast_ext.plans.plan import Plan
from sfast_ext.preparation import Interrupted
from sfast_ext.reasons import Declined, Reason
from sfast_ext.report import at, rehearsing, stage
from sfast_ext.runtime import lean_calls, residency
from sfast_ext.runtime.eight_bits import ATTEMPTS, EightBitsFailed, because, keep_faster, state_of_weights, unsupported
from sfast_ext.runtime.model_state import ModuleContext
from sfast_ext.runtime.original_run import OriginalRun
from sfast_ext.runtime.plan_cache import PlanCache, PlanKey, StateChanges
from sfast_ext.runtime.plan_finder import Lookup
from sfast_ext.runtime.plan_maker import PEAK_FACTOR, exact, make_plan
from sfast_ext.runtime.plan_runner import Failures, PlanRunner, out_of_memory, without_eight_bits
from sfast_ext.runtime.preparing import preparation
from sfast_ext.runtime.verify import Verification, excess, verify_plan
from sfast_ext.weights.weight import tensors_held

_MEASURING = 1.0  # seconds of a first call in which ways to compute the same are compared, at most
_MAX_MODELS = 16
"""So many models, the last that were captured, have their op sequences kept; see `PlanKey.model`."""


class PlanBuilder:
    """Builds the plans of one module.

    Args:
        cache: takes the new plan, or the reason why there is none.
        runner: runs the new plan in the way it will be run later.
        failures: disables kernels that fail.
        backoff: counts captures.
    """

    def __init__(
        self, context: ModuleContext, cache: PlanCache, runner: PlanRunner, failures: Failures, backoff: CaptureBackoff
    ) -> None:
        self._context, self._cache, self._runner = context, cache, runner
        self._failures, self._backoff = failures, backoff
        self._op_sequences: dict[Hashable, set[OpSequence]] = {}
        self.changes = StateChanges()
        self.roles = ArgumentRoles()
        self._filled = False
        """Whether a call of the model filled what was empty, which is no reason to report."""
        self._one_by_one = False
        """Whether equal blocks are recorded one by one: a plan was wrong in which they were recorded once."""
        self._noise: dict[tuple[torch.dtype, ...], list[float]] = {}
        """The least `Plan.noise` measured, by the dtypes of results. Nothing is measured for plans within it."""

    def live_trace(self, lookup: Lookup) -> LiveTrace | None:
        """A recorder for the original's run, if the same behaviour was captured before. Otherwise None."""
        known = SUPPORTED and lookup.key.model in self._op_sequences
        return LiveTrace(lookup.call, self._context.arena, lookup.key.device) if known else None

    def state(self) -> State:
        """The state that the forward can reach."""
        context = self._context
        return State(context.module, context.slot.original, context.hooks.ignored, contents=rehearsing())

    def unchanged(self, lookup: Lookup, state: State) -> bool:
        """Whether the original's run for a call left the state as it was. If not, the call gets no plan, and the reason
        is reported."""
        place = state.changed()
        if place is None:
            self.changes.settled(lookup.shape_signature, lookup.key)
            return True
        if self._context.bypassed():
            # the host gave way for want of memory, and has the model in another form since
            return False
        reason = reasons.KEEPS_STATE(place)
        if self.changes.record(lookup.shape_signature, lookup.key, place, reason):
            self._cache.reject(lookup.key, reason)
        elif state.only_filled() and not self._filled:
            # tables of rotary embeddings; the plan is made at the next call
            self._filled = True
            self._context.report.event("state", f"filled by the first call: {place}")
            return False
        else:
            self._context.report.bypassed(reason)
        # what it changes may be part of the key, which then is another one at each call
        self._backoff.record_capture(lookup.shape_signature)
        return False

    def forget(self) -> None:
        """Forget all known op sequences."""
        self._op_sequences.clear()

    def build(self, lookup: Lookup, run: OriginalRun) -> None:
        """Build the plan of a call and put it into the cache. If there can be none, reject the key with the reason.

        Raises:
            WeightsAway, WeightsChanged: see `WeightArena.sync`.
            Interrupted: by the user. There is no plan then, and the next call may build one.
        """
        started = time.perf_counter()
        context, device = self._context, lookup.key.device
        lean = run.lean and lean_calls.may_be(context, lookup.key)
        away = lean_calls.elsewhere(context, device, lean)
        if away is not None:
            # the key is not rejected: they may be back at the next call
            context.report.bypassed(reasons.WEIGHTS_SPLIT(away, device))
            return
        if residency.lacks_room(context, lookup.key):
            # the key is not rejected: there may be room at the next call
            context.report.bypassed(reasons.NO_ROOM())
            return
        if lookup.key.eight_bits and (obstacle := self._without_eight_bits(device)) is not None:
            context.model.eight_bits.stop(obstacle, context.report, for_good=True)
            lookup = lookup.exact()
            if self._is_settled(lookup.key):
                return
        with context.arena.gate.exclusive():
            # another thread that is inside the original forward would be in the way when the recording is done
            pass
        self._backoff.record_capture(lookup.shape_signature)
        if not self._cache.plans and not context.is_part:
            # their plans bind weights, which then cannot be packed for the whole
            for part in context.model.parts:
                part.forget_plans("the model is captured as a whole")
        label = self.label(lookup)
        try:
            with preparation(context, label, device):
                at("weights")
                if lean:
                    lean_calls.prepare(context, device)
                else:
                    context.arena.sync()
                plan = self._attempts(lookup, run)
        except Interrupted:
            self._backoff.forget_capture(lookup.shape_signature)
            raise
        if plan is not None:
            plan.label = label
            plan.first_call_s = round(run.seconds + time.perf_counter() - started, 3)
            context.report.event("plan", f"{plan.state}: {label}, built in {plan.first_call_s} s")

    def label(self, lookup: Lookup) -> str:
        signature, words = lookup.call.signature, self._context.hooks.words
        return (words(signature.shapes()) if words is not None else None) or signature.words()

    def _without_eight_bits(self, device: torch.device) -> Reason | None:
        """Why no plan of the module can use 8 bits; None if one can."""
        return unsupported(device, {p.dtype for p in self._context.module.parameters()})

    def _is_settled(self, key: PlanKey) -> bool:
        """Whether there is a plan for a key, or none is to be made."""
        return key in self._cache.plans or key in self._cache.rejected

    def _attempts(self, lookup: Lookup, run: OriginalRun) -> Plan | None:
        """A plan, if need be without the kernels that fail, or without 8 bits. None, with the reason reported, if there
        can be none, or if the plan without 8 bits is there already."""
        eight_bits, report, tries = self._context.model.eight_bits, self._context.report, 0
        declined: Reason | None = None
        while True:
            try:
                return self._best_attempt(lookup, run, declined)
            except Interrupted:
                raise
            except EightBitsFailed as exc:
                tries += 1
                if exc.here:
                    report.event("8 bits", exc.reason)
                    declined = exc.reason
                elif not exc.again or tries >= ATTEMPTS:
                    eight_bits.stop(exc.reason, report)
                    lookup = lookup.exact()
            except Declined:
                raise
            except Exception as exc:
                if not self._failures.disable_kernels(exc, lookup.key.device):
                    if not lookup.key.eight_bits:
                        raise
                    if not out_of_memory(exc):
                        report.error(stage(), exc)
                    eight_bits.stop(without_eight_bits(exc), report)
                    lookup = lookup.exact()
            if not lookup.key.eight_bits and self._is_settled(lookup.key):
                return None
            run.trace = None  # consumed by the attempt

    def _best_attempt(self, lookup: Lookup, run: OriginalRun, declined: Reason | None) -> Plan | None:
        """`_attempt`, while weights stay in system memory if the original ran so."""
        context = self._context
        if run.lean and declined is None and lean_calls.may_be(context, lookup.key):
            try:
                # before the locks of plans, which a thread takes that streams a forward
                with context.arena.resident.alone:
                    return self._attempt(lookup, run, lean=True)
            except Exception as exc:
                if not lean_calls.with_all(context, exc):
                    raise
        return self._attempt(lookup, run, declined)

    def _attempt(
        self, lookup: Lookup, run: OriginalRun, declined: Reason | None = None, lean: bool = False
    ) -> Plan | None:
        """A plan with the enabled kernels. None, with the reason reported, if there can be none.

        Args:
            declined: why the plan is made without 8 bits, for calls of this size; None if it may have them.
            lean: whether weights in system memory stay there, see `lean_calls`.
        """
        context, key, device = self._context, lookup.key, lookup.key.device
        report = context.report
        if not lean:
            # an attempt before this one may have set weights aside
            context.bring_back()
        at("capture")
        try:
            argument_kinds.refuse_code(lookup.call.tree)
            captured = self._captured(lookup, run, lean)
            tree, results = flatten_output(run.result)
            if tree != captured.output_tree:
                # a number that became a tensor is in it, say
                raise CaptureRefused(reasons.OTHER_RESULT(), reads_value=True)
            gaps = lent(results, filter(has_gaps, lookup.call.leaf_tensors()))
            captured.output_strides = [
                recorded if i in gaps else tuple(x.stride())
                for i, (x, recorded) in enumerate(zip(results, captured.output_strides))
            ]
            blocks_copied = block_reuse.holds_copies(captured.graph_module)
            selection = context.model.eight_bits.selection(key.model) if key.eight_bits else None
            with contextlib.ExitStack() as stack:
                if selection is not None:
                    selection.resident = declined is None and residency.wanted(context, device)
                    if selection.resident:
                        residency.clear_way(context)
                    room = residency.spare_bytes(context, device)
                    stack.enter_context(selection.on(lookup.call.tensors(device), room, declined))
                plan = make_plan(captured, lookup.call, context.arena, device, context.config, selection)
            read = selection is not None and selection.obstacle == reasons.EIGHT_BITS_READ()
            if read and residency.drop_others(context):
                plan.close()
                run.trace = None
                return self._attempt(lookup, run, declined, lean)
            if selection is not None and selection.obstacle is not None and selection.elsewhere_too:
                # it is the plan without 8 bits
                context.model.eight_bits.stop(selection.obstacle, report, for_good=selection.for_good)
                key = lookup.exact().key
                if self._is_settled(key):
                    plan.close()
                    return None
            plan.views = shared_results(results, alike=not gaps)
            plan.lent = lent(results, (*lookup.call.leaf_tensors(), *tensors_held(context.module)))
            plan.edits = self._own_edits(plan.edits)
            if device.type == "cuda":
                for sentence in environment.left_out(device):
                    report.once("kernels", sentence)
        except CaptureRefused as exc:
            if lean and lean_calls.is_why(exc):
                raise
            numbers = not exc.arguments or any(not _is_tensor(lookup.call.leaves[i]) for i in exc.arguments)
            if numbers and (
                self.roles.close_nested(lookup.call) or (exc.reads_value and self.roles.close_own(lookup.call))
            ):
                # it may read one of the numbers
                report.event("capture", f"numbers become part of the signature: {exc}")
                return None
            if exc.arguments and not numbers and self.roles.read_values(lookup.call, exc.arguments) is not False:
                report.event("capture", f"the content of arguments becomes part of the signature: {exc}")
                self._backoff.forget_capture(lookup.shape_signature)
                return None
            if exc.details:
                report.event("capture", exc.details)
            if exc.passing:
                report.bypassed(exc.reason)
            else:
                self._cache.reject(key, exc.reason)
            return None
        plan.shape_signature = lookup.shape_signature
        plan.built_for = lookup.call.nested if lookup.call.inputs else None
        at("binding of weights")
        self._cache.put(key, plan)
        report.count("captures")
        if not plan.fused:
            report.event("passes", "the graph reads strides or unknown sizes, so nothing in it is rewritten")
        dtypes = tuple(output.dtype for output in flatten_output(run.result)[1])
        plan.noise = self._noise.get(dtypes)
        try:
            residency.settle(context, plan)
            with choices.measuring(_MEASURING), self._runner.guard(plan):
                new = Verification(
                    plan,
                    context.config,
                    run=lambda: self._runner.outputs(plan, lookup.call),
                    run_original=run.again,
                    result=run.result,
                    original_s=run.seconds,
                    watch=run.watch,
                    exact=lambda: self._exact(lookup, run),
                    record=lambda: self._runner.record_launches(plan, lookup.call),
                )
                refusal = verify_plan(new)
                if plan.banks and plan.error is not None and all(bank.ready for bank in plan.banks):
                    plan.compared_weights.add(int(state_of_weights(plan)))
        except Exception as exc:
            self._cache.drop(key)
            if isinstance(exc, Interrupted):
                # nothing is prepared
                report.count("captures", -1)
            raise
        if plan.noise is not None and all(map(math.isfinite, plan.noise)):
            self._noise[dtypes] = list(map(min, plan.noise, self._noise.get(dtypes, plan.noise)))
        left_behind = run.state.put_back()[0] if run.state is not None else None
        if left_behind is not None:
            refusal = reasons.KEEPS_STATE(left_behind)
        elif refusal is not None and plan.banks and selection is not None:
            selection.excess = excess(plan, context.config)
            inaccurate = refusal.code == reasons.INACCURATE.code
            self._cache.drop(key)
            report.count("captures", -1)
            raise EightBitsFailed(because(refusal), again=inaccurate and selection.tighten())
        elif refusal is not None and refusal.code == reasons.INACCURATE.code and blocks_copied:
            # two blocks may differ in what their comparison does not read
            report.event("capture", f"equal blocks are recorded one by one from now on: {refusal}")
            self._cache.drop(key)
            report.count("captures", -1)
            self._one_by_one, run.trace = True, None
            return self._attempt(lookup, run, declined, lean)
        if refusal is not None:
            self._cache.reject(key, refusal)
            return None
        keep_faster(self._cache, key, plan, context.model.eight_bits, report, context.config.drop_slower)
        return plan

    def _exact(self, lookup: Lookup, run: OriginalRun) -> list[torch.Tensor] | None:
        """The outputs in float32; None if the forward cannot be recorded again or memory is short."""
        context, device = self._context, lookup.key.device
        if context.arena.resident:
            # what the graph would read is not on the GPU
            return None
        inputs = lookup.call.tensors(device)
        try:
            again = capture(context.slot.original, lookup.call, inputs, context.arena, context.hooks.ignored, run.state)
            needed = PEAK_FACTOR * peak_bytes(again.graph_module.graph)
            if device.type == "cuda" and residency.room(device) < needed:
                return None
            return exact(again.graph_module, inputs)
        except (CaptureRefused, torch.cuda.OutOfMemoryError):
            return None

    def _own_edits(self, edits: tuple[Edit, ...]) -> tuple[Edit, ...]:
        """Those that are repeated on the arguments of the caller."""
        hooks = self._context.hooks
        found = tuple(edit for edit in edits if edit.path[0] not in hooks.consumed | hooks.scratch)
        for edit in found:
            if edit.kept is None or hooks.arguments is not None:
                raise CaptureRefused(reasons.CHANGES_ARGUMENT(words(edit.path)))
        return found

    def _captured(self, lookup: Lookup, run: OriginalRun, lean: bool) -> Captured:
        context = self._context
        model = lookup.key.model
        op_sequences = self._op_sequences.pop(model, None) or set()
        self._op_sequences[model] = op_sequences
        while len(self._op_sequences) > _MAX_MODELS:
            del self._op_sequences[next(iter(self._op_sequences))]
        captured = capture_live(run.trace, op_sequences, context.arena) if run.trace is not None else None
        if captured is None:
            inputs = lookup.call.tensors(lookup.key.device)
            if run.state is not None:
                run.state.weights_replaced()
            original, ignored = context.slot.original, context.hooks.ignored
            one_by_one = block_reuse.one_by_one() if self._one_by_one else contextlib.nullcontext()
            with one_by_one, lean_calls.standing_in(context) if lean else contextlib.nullcontext():
                captured = capture(original, lookup.call, inputs, context.arena, ignored, run.state)
            op_sequences.add(captured.op_sequence)
        if run.state is not None:
            # plans lay weights elsewhere
            run.state.weights_replaced(for_good=True)
        return captured


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor)
