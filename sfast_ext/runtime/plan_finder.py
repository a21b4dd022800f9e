"""Looks up the plan of a call, and validates a speculative replay."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch

from sfast_ext.behaviour.key import BehaviourKeys
from sfast_ext.call_signature import NotOurs, Signature, first_difference, tensors_alone
from sfast_ext.capture.arguments import distinct
from sfast_ext.environment import unserved
from sfast_ext.report import at
from sfast_ext.runtime.argument_roles import ArgumentRoles
from sfast_ext.runtime.backoff import CaptureBackoff
from sfast_ext.runtime.changes import StateChanges
from sfast_ext.runtime.model_state import ModuleContext
from sfast_ext.runtime.plan import Plan
from sfast_ext.runtime.plan_cache import PlanCache
from sfast_ext.runtime.plan_runner import PlanRunner
from sfast_ext.runtime.replay_state import SPECULATION_BACKOFF, Lookup, Speculation
from sfast_ext.torch_state import records_graph
from sfast_ext.weights.host_order import READ_BY_GRAPH

READING_KEY = "behaviour key"
_BYPASS, _ARGUMENTS = "bypass_reason of the host", "arguments of the host"
_PREPARE, _KEY = "prepare of the host", "key of the host"
HOST_STAGES = (_BYPASS, _ARGUMENTS, _PREPARE, _KEY)
"""Stages at which callbacks of the host run."""


class PlanFinder:
    """Looks up the calls of one module.

    Args:
        roles: which numbers are inputs of plans.
        backoff: delays captures.
        changes: forwards that change state.
    """

    def __init__(
        self,
        context: ModuleContext,
        cache: PlanCache,
        runner: PlanRunner,
        roles: ArgumentRoles,
        backoff: CaptureBackoff,
        changes: StateChanges,
    ) -> None:
        self._context = context
        self._cache = cache
        self._runner = runner
        self._roles = roles
        self._backoff, self._changes = backoff, changes
        self._missed: Signature | None = None
        self.speculation = Speculation()
        self.keys = self._new_keys(0)

    def follow(self, behaviour: int) -> None:
        """The context has another module now. It has the behaviour with this number."""
        self.keys = self._new_keys(behaviour)

    def find(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, speculate: bool = True) -> Lookup:
        """Look up a call.

        Args:
            speculate: whether the weights may be confirmed after the replay. If False, they are confirmed here. The key
                may be unconfirmed in both cases: a caller that looks up again has read it a moment ago.

        Raises:
            NotOurs: the call is bypassed.
            WeightsAway, WeightsChanged: see `WeightArena.sync`.
        """
        hooks = self._context.hooks
        if torch.is_grad_enabled():
            raise NotOurs("gradients are being recorded")
        at(_BYPASS)
        reason = hooks.bypass_reason() if hooks.bypass_reason else None
        if reason:
            raise NotOurs(reason)
        device = self._served_device()
        if hooks.arguments is not None:
            at(_ARGUMENTS)
            read = hooks.arguments(args, kwargs)
            if isinstance(read, str):
                raise NotOurs(read)
            args, kwargs = read
        at("arguments")
        call = self._roles.flatten(args, kwargs, device)
        if hooks.prepare is not None:
            # before the key is read: it may add a bias to a layer
            at(_PREPARE)
            hooks.prepare()
        known, due = self.keys.last, self.keys.stale
        key_confirmed = known is None
        behaviour, foreign = self._read_key() if known is None else known
        if not key_confirmed and (self.speculation.key_first() or foreign):
            at(READING_KEY)
            behaviour, foreign = self.keys.current()
            key_confirmed = True
        if foreign:
            raise NotOurs(foreign)
        at(_KEY)
        host = hooks.key() if hooks.key else None
        key = (call.signature, behaviour, host, device)
        plan = self._cache.plans.get(key)
        if plan is None and self._roles.open_changed(call):
            call = self._roles.flatten(args, kwargs, device)
            key = (call.signature, *key[1:])
            plan = self._cache.plans.get(key)
        if plan is not None and plan.built_for is not None and plan.built_for != call.nested:
            # one value of an input tells little of how the forward uses it
            plan.built_for, plan.compare_again = None, True
        # weights often change between generations
        speculate = speculate and plan is not None and not due and self._may_speculate(plan)
        key_confirmed = key_confirmed or (not speculate and self.keys.trusted)
        if not key_confirmed and (plan is None or self._runner.is_compared(plan)):
            # An unconfirmed key is good enough to run a plan, but not to refuse one: the obstacle may be gone.
            # And a plan may only be compared with the behaviour that it was built for.
            now, foreign = self._read_key()
            if now != behaviour or foreign:
                return self.find(args, kwargs, speculate=speculate)
            key_confirmed = True
        refused = self._cache.rejection(key)
        if refused is not None:
            if self._roles.close_nested(call):
                return self.find(args, kwargs, speculate=speculate)
            raise NotOurs(refused)
        if plan is None:
            if self._context.arena.order.pinned:
                raise NotOurs(READ_BY_GRAPH)
            self._wait_for_rest(call.signature, key)
        elif plan.edits and not distinct(args, kwargs):
            raise NotOurs("the same list is there twice among its arguments, and its forward changes it")
        if not speculate:
            self._sync()
        return Lookup(call, key, plan, behaviour, device, key_confirmed, not speculate)

    def _wait_for_rest(self, signature: Signature, key: Hashable) -> None:
        """There is no plan of a call. Raises NotOurs if none is to be built yet."""
        alike = tensors_alone(signature)
        before, self._missed = self._missed, signature
        if self._backoff.must_wait(alike, key):
            if before is not None and tensors_alone(before) == alike:
                name = first_difference(before, signature)
                if name is not None:
                    raise NotOurs(f"an argument changes at each step, no plan is made for each of its values: {name}")
            changed = self._changes.reason(alike)
            if changed is not None:
                raise NotOurs(changed)
            raise NotOurs("what the model computes changes again and again: a plan is made when it stays the same")

    def validate(self, lookup: Lookup) -> bool:
        """Whether a speculative replay was valid: confirms the key and the weights if the lookup did not.

        Raises:
            WeightsAway, WeightsChanged: see `WeightArena.sync`.
        """
        if not lookup.key_confirmed:
            at(READING_KEY)
            behaviour, foreign = self.keys.current()
            if behaviour != lookup.behaviour or foreign:
                self.speculation.key_backoff = SPECULATION_BACKOFF
                return False
        if not lookup.weights_confirmed:
            # set first, as sync may raise
            self.speculation.weights_backoff = SPECULATION_BACKOFF
            if self._sync():
                return False
            self.speculation.weights_backoff = 0
        return True

    def _served_device(self) -> torch.device:
        device = self._context.device()
        if device is None or device.type not in ("cuda", "cpu"):
            raise NotOurs(f"the model is on {'no device' if device is None else device}, not on a GPU")
        if device.type == "cpu" and not self._context.config.allow_cpu:
            raise NotOurs("the model is on the CPU, and running there is switched off")
        refused = unserved(device)
        if refused is not None:
            raise NotOurs(refused)
        if records_graph(device):
            self._context.arena.order.pin()
            raise NotOurs("the program captures a CUDA graph on the current stream")
        return device

    def _may_speculate(self, plan: Plan) -> bool:
        """Whether a replay may be launched before the weights are confirmed. It reads valid memory in any case, and its
        result is discarded if the weights changed.

        Not if the result is compared with the original's: the plan would be blamed for old weights.
        """
        context = self._context
        if not (plan.has_graph and context.config.cuda_graphs) or self._runner.is_compared(plan):
            return False
        if not context.arena.order.is_plans():
            return False
        return not self.speculation.weights_first()

    def _read_key(self) -> tuple[int, str | None]:
        at(READING_KEY)
        return self.keys.read()

    def _sync(self) -> int:
        at("weights")
        copied = self._context.arena.sync()
        if copied:
            self._context.report.count("weights_copied", copied)
        return copied

    def _new_keys(self, first: int) -> BehaviourKeys:
        context, hooks = self._context, self._context.hooks
        kept = context.config.max_plans

        def below() -> Callable[..., Any] | None:
            return context.slot.previous

        return BehaviourKeys(context.module, hooks.ignored, hooks.recognised, kept, first, hooks.transparent, below)
