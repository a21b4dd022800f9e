"""Finds the plan of a call, and says whether a replay that was launched computed what is wanted."""

from __future__ import annotations

from typing import Any

import torch

from sfast_ext.behaviour.key import BehaviourKeys
from sfast_ext.call_signature import NotOurs, Signature, flatten_call
from sfast_ext.environment import unserved
from sfast_ext.report import at
from sfast_ext.runtime.backoff import CaptureBackoff
from sfast_ext.runtime.model_state import ModuleContext
from sfast_ext.runtime.plan import Plan
from sfast_ext.runtime.plan_cache import PlanCache
from sfast_ext.runtime.plan_runner import PlanRunner
from sfast_ext.runtime.replay_state import SPECULATION_BACKOFF, Lookup, Speculation

READING_KEY = "behaviour key"
_BYPASS, _PREPARE, _KEY = "bypass_reason of the host", "prepare of the host", "key of the host"
HOST_STAGES = (_BYPASS, _PREPARE, _KEY)
"""Stages at which the host is asked."""


class PlanFinder:
    """Looks up the calls of one module.

    Args:
        static_numbers: the signatures whose numbers are part of the key.
        backoff: says whether a call without a plan is to have none yet.
    """

    def __init__(
        self,
        context: ModuleContext,
        cache: PlanCache,
        runner: PlanRunner,
        static_numbers: set[Signature],
        backoff: CaptureBackoff,
    ) -> None:
        self._context = context
        self._cache = cache
        self._runner = runner
        self._static_numbers = static_numbers
        self._backoff = backoff
        self.speculation = Speculation()
        self.keys = self._new_keys(0)

    def follow(self, behaviour: int) -> None:
        """The context's module is another one, which behaves as the number `behaviour` says."""
        self.keys = self._new_keys(behaviour)

    def find(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, speculate: bool = True) -> Lookup:
        """The call, its key and its plan, None where one is to be built.

        Args:
            speculate: whether its weights may be looked at after the replay. The key may be in either case: where the
                caller looks a call up again, it was read a moment ago.

        Raises:
            NotOurs: the original forward is to run.
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
        at("arguments")
        call = flatten_call(args, kwargs, device)
        shape_signature = call.signature
        if self._static_numbers and shape_signature in self._static_numbers:
            call = flatten_call(args, kwargs, device, static_numbers=True)
        if hooks.prepare is not None:
            # first of all: it may give a layer a bias, which the key is to show
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
        # at the beginning of a generation weights are likely to be others
        speculate = speculate and plan is not None and not due and self._may_speculate(plan)
        key_confirmed = key_confirmed or (not speculate and self.keys.trusted)
        if not key_confirmed and (plan is None or self._runner.is_compared(plan)):
            # only a plan may run on the key of the last call: what keeps one away may be gone; and what a plan is
            # compared with must be what it was made for
            now, foreign = self._read_key()
            if now != behaviour or foreign:
                return self.find(args, kwargs, speculate=speculate)
            key_confirmed = True
        refused = self._cache.rejection(key)
        if refused is not None:
            raise NotOurs(refused)
        if plan is None and self._backoff.must_wait(shape_signature, key):
            raise NotOurs("what the model computes changes again and again: a plan is made when it stays the same")
        if not speculate:
            self._sync()
        return Lookup(call, shape_signature, key, plan, behaviour, device, key_confirmed, not speculate)

    def validate(self, lookup: Lookup) -> bool:
        """Whether a replay that was launched computes what is wanted: what was put off is looked at now.

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
            # also where it raises
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
            raise NotOurs("the model is on the CPU, and running there is switched off in the settings")
        refused = unserved(device)
        if refused is not None:
            raise NotOurs(refused)
        return device

    def _may_speculate(self, plan: Plan) -> bool:
        """Whether a replay may be launched before the weights are looked at: they lie still for the GPU to read, and
        where a look at them says that others are wanted, the result goes to nobody.

        Not where the result is about to be compared with the original's, which would blame the plan for old weights.
        """
        if not (plan.has_graph and self._context.config.cuda_graphs) or self._runner.is_compared(plan):
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
        return BehaviourKeys(context.module, hooks.ignored, hooks.recognised, kept, first, hooks.transparent)
