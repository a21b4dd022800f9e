"""Looks up the plan of a call, and validates a speculative replay.

    call -> PlanFinder.find
      |
      +-- not ours: NotOurs, WeightsAway, WeightsChanged, an error ---------> BYPASS
      |                                                        the original forward, the reason in the report
      +-- no plan ----------------------------------------------------------> BUILD
      |                                                        the original forward, then a plan for the next call
      +-- a plan; key and weights confirmed --------------------------------> REPLAY_CONFIRMED
      |                                                        replay; the result is used
      +-- a plan; the key or the weights not looked at, or not to the end --> REPLAY_SPECULATIVE
             replay; validate while the GPU works
               |-- unchanged: the result is used
               |-- changed: the result is discarded, the backoff is set, and the call is looked up again:
               |            REPLAY_CONFIRMED or BUILD
               '-- NotOurs, WeightsAway, WeightsChanged, an error: BYPASS

The second lookup of a call confirms the weights. The key is not validated again: it was read a moment ago.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch
from torch import nn

from sfast_ext import reasons
from sfast_ext.argument_contents import of_one_value, settled
from sfast_ext.argument_roles import ArgumentRoles
from sfast_ext.behaviour.key import BehaviourKeys
from sfast_ext.call_signature import Call, NotOurs, Signature, first_difference, flatten_call, tensors_alone
from sfast_ext.capture.arguments import distinct
from sfast_ext.environment import unserved
from sfast_ext.plans.payback import SPECULATION_BACKOFF, CaptureBackoff, Speculation
from sfast_ext.plans.plan import Plan
from sfast_ext.reasons import Reason
from sfast_ext.report import current, words_of
from sfast_ext.runtime import residency
from sfast_ext.runtime.model_state import ModuleContext
from sfast_ext.runtime.plan_cache import PlanCache, PlanKey, StateChanges
from sfast_ext.weights.weight import WeightsAway, WeightsChanged


class HostFailed(Exception):
    """A callback of the host raised.

    Attributes:
        callback: which one, for the report.
        cause: what it raised.
    """

    def __init__(self, callback: str, cause: Exception) -> None:
        super().__init__(words_of(cause))
        self.callback, self.cause = callback, cause


class ReplayState(enum.Enum):
    """How a call is served; see the diagram."""

    BYPASS = "the original forward runs"
    REPLAY_CONFIRMED = "replay of a valid plan"
    REPLAY_SPECULATIVE = "replay, validated while it runs"
    BUILD = "the original forward runs, a plan is built"


class Lookup(NamedTuple):
    """The result of looking up a call: its key and its plan, None if one is to be built."""

    call: Call
    key: PlanKey
    plan: Plan | None
    key_confirmed: bool
    """Whether the behaviour key is known to be current. Otherwise it is that of the last reading."""
    weights_confirmed: bool
    """Whether the plan reads the current weights of the module."""
    compared: bool
    """Whether the plan's result is compared with the original's, which then is the result of the call."""
    state: ReplayState
    """Never BYPASS: a call that is bypassed has no lookup."""
    copied: int = 0
    """See `WeightArena.copied`: what other threads copy from then on the plan's run may have been without."""

    def exact(self) -> Lookup:
        """The same call, for a plan without 8 bits."""
        return self._replace(key=self.key._replace(eight_bits=False), plan=None)

    @property
    def shape_signature(self) -> Signature:
        """What it has in common with calls that differ in constants."""
        return tensors_alone(self.call.signature)


def state_of(plan: Plan | None, key_confirmed: bool, weights_confirmed: bool) -> ReplayState:
    """How a call is served that is not bypassed."""
    if plan is None:
        return ReplayState.BUILD
    return ReplayState.REPLAY_CONFIRMED if key_confirmed and weights_confirmed else ReplayState.REPLAY_SPECULATIVE


class PlanFinder:
    """Looks up the calls of one module.

    Args:
        roles: which numbers are inputs of plans.
        backoff: delays captures.
        changes: forwards that change state.

    Attributes:
        builds: whether a call with this key gets a plan if it has none. The key may be that of the last reading.
    """

    def __init__(
        self,
        context: ModuleContext,
        cache: PlanCache,
        roles: ArgumentRoles,
        backoff: CaptureBackoff,
        changes: StateChanges,
    ) -> None:
        self._context = context
        self._cache = cache
        self._roles = roles
        self._backoff, self._changes = backoff, changes
        self._missed: Signature | None = None
        self.speculation = Speculation()
        self.builds: Callable[[PlanKey], bool] = lambda key: True
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
            HostFailed: a callback of the host raised.
            WeightsAway, WeightsChanged: see `WeightArena.sync`.
        """
        hooks = self._context.hooks
        if torch.is_grad_enabled():
            raise NotOurs(reasons.GRADIENTS())
        reason = _ask("bypass_reason", hooks.bypass_reason) if hooks.bypass_reason else None
        if reason:
            raise NotOurs(reasons.given(reason))
        device = self._served_device()
        if hooks.arguments is not None:
            read = _ask("arguments", hooks.arguments, args, kwargs)
            if isinstance(read, (str, Reason)):
                raise NotOurs(reasons.given(read))
            args, kwargs = read
        current.stage = "arguments"
        call = flatten_call(args, kwargs, device)
        if len(call.leaves) == 1 and self._loses_digits(call.leaves[0]):
            raise NotOurs(reasons.ONE_VALUE())
        known, due = self.keys.last, self.keys.stale
        rare = self._context.config.rare_calls
        # they are counted by their key
        host = self._prepared() if rare else None
        unread = None if known is None or known[1] else PlanKey(call.signature, known[0], host, device)
        if unread is not None and self._gets_no_plan(unread):
            # what makes the key costs a slow CPU as much as some layers; that it is not confirmed tells
            return Lookup(call, unread, None, False, False, False, ReplayState.BUILD)
        if self._roles.known:
            call = self._roles.flatten(call, args, kwargs, device, trust=speculate)
        if not rare:
            host = self._prepared()
        current.stage = "behaviour key"
        key_confirmed = known is None
        behaviour, foreign = self.keys.read() if known is None else known
        waits = self.speculation.key
        if not key_confirmed and ((waits.price and waits.waits()) or foreign):
            behaviour, foreign = self.keys.current()
            key_confirmed = True
        if foreign:
            raise NotOurs(foreign)
        if hooks.key:
            # what it returned may have no hash
            current.stage = "key of the host"
        key = PlanKey(call.signature, behaviour, host, device)
        if self._context.config.eight_bits and self._may_use_eight_bits(device):
            key = key._replace(eight_bits=True)
        plan = self._cache.plans.get(key)
        if plan is None and self._roles.open_changed(call):
            call = self._roles.flatten(call, args, kwargs, device, trust=speculate)
            key = key._replace(signature=call.signature)
            plan = self._cache.plans.get(key)
        if plan is not None and plan.built_for is not None and plan.built_for != call.nested:
            # one value of an input tells little of how the forward uses it
            plan.built_for, plan.compare_again = None, True
        compared = plan is not None and self._is_compared(plan)
        # those that come back from system memory are read for changes while the plan runs
        later = speculate and not compared
        # weights often change between generations
        speculate = speculate and plan is not None and not compared and not due and self._may_speculate(plan)
        if not speculate and not settled(call.pending):
            return self.find(args, kwargs, speculate=False)
        key_confirmed = key_confirmed or (not speculate and self.keys.trusted)
        if plan is None and not self._cache.rejected and not (rare or self.builds(key)):
            # neither the key nor the weights matter to the original forward; its own order of them stays. No plan is
            # made: that it is not confirmed tells
            return Lookup(call, key, None, False, False, False, ReplayState.BUILD)
        if not key_confirmed and (plan is None or compared):
            # An unconfirmed key is good enough to run a plan, but not to refuse one: the obstacle may be gone.
            # And a plan may only be compared with the behaviour that it was built for.
            current.stage = "behaviour key"
            now, foreign = self.keys.read()
            if now != behaviour or foreign:
                return self.find(args, kwargs, speculate=speculate)
            key_confirmed = True
        refused = self._cache.rejection(key) if self._cache.rejected else None
        if refused is not None:
            if self._roles.close_nested(call):
                return self.find(args, kwargs, speculate=speculate)
            raise NotOurs(refused)
        if plan is None:
            if self._context.arena.order.pinned:
                raise NotOurs(reasons.CAPTURED_GRAPH())
            self._wait_for_rest(call.signature, key)
        elif plan.edits and not distinct(args, kwargs):
            raise NotOurs(reasons.SAME_LIST())
        confirmed = not speculate
        if not speculate:
            self._sync(plan, later)
            confirmed = not self._reads(plan)
        state = state_of(plan, key_confirmed, confirmed)
        return Lookup(call, key, plan, key_confirmed, confirmed, compared, state, self._context.arena.copied)

    def _prepared(self) -> Hashable:
        """Have the host prepare the module for a plan, before its behaviour is read: it may add a bias to a layer.
        Returns the host's part of the key."""
        hooks = self._context.hooks
        if hooks.prepare is not None:
            _ask("prepare", hooks.prepare)
        return _ask("key", hooks.key) if hooks.key else None

    def _gets_no_plan(self, key: PlanKey) -> bool:
        """Whether calls of the kind of this one have no plan and get none, whatever the model and the host are like."""
        if self._cache.rejected:
            return False
        kind = tensors_alone(key.signature)
        return all(plan.shape_signature != kind for plan in list(self._cache.plans.values())) and not self.builds(key)

    def planned_bytes(self, args: tuple[Any, ...]) -> int | None:
        """See `Accelerator.planned_bytes`."""
        # the module may be in system memory, until it is called
        device = next((each.device for each in args if isinstance(each, torch.Tensor)), None)
        if device is None or not self._context.config.enabled:
            return None
        try:
            kind = tensors_alone(flatten_call(args, {}, device).signature)
        except NotOurs:
            return None
        alike = [plan for plan in list(self._cache.plans.values()) if plan.shape_signature == kind]
        # the original forward runs as well if a plan is compared with it
        if any(map(self._is_compared, alike)):
            return None
        return max((plan.peak_bytes for plan in alike if plan.peak_bytes is not None), default=None)

    def _loses_digits(self, leaf: Any) -> bool:
        """Whether the forward of an image alone, a VAE's, normalises maps that are constant. Differences from their
        mean are rounding, which the norm divides by next to nothing: two correct results may be anywhere."""
        if not isinstance(leaf, torch.Tensor) or leaf.dim() != 4:
            return False
        return any(map(_of_single_channels, self._context.module.modules())) and of_one_value(leaf)

    def _may_use_eight_bits(self, device: torch.device) -> bool:
        context = self._context
        if context.model.eight_bits.reason is not None:
            return False
        # those of a part are a second copy, for which a small card has no room
        return not context.is_part or not residency.is_small(context, device)

    def _wait_for_rest(self, signature: Signature, key: PlanKey) -> None:
        """There is no plan of a call. Raises NotOurs if none is to be built yet."""
        alike = tensors_alone(signature)
        before, self._missed = self._missed, signature
        if self._backoff.must_wait(alike, key):
            # a plan of this signature was made for the model as it was before: no argument is new
            known = any(each.signature == signature for each in self._cache.plans)
            if before is not None and not known and tensors_alone(before) == alike:
                name = first_difference(before, signature)
                if name is not None:
                    raise NotOurs(reasons.ARGUMENT_CHANGES(name))
            changed = self._changes.reason(alike)
            if changed is not None:
                raise NotOurs(changed)
            raise NotOurs(reasons.MODEL_CHANGES())

    def validate(self, lookup: Lookup) -> bool:
        """Whether a speculative replay was valid: confirms the key and the weights if the lookup did not.

        Raises:
            WeightsAway, WeightsChanged: see `WeightArena.sync`.
        """
        if not settled(lookup.call.pending):
            return False
        if not lookup.key_confirmed:
            current.stage = "behaviour key"
            behaviour, foreign = self.keys.current()
            if behaviour != lookup.key.behaviour or foreign:
                self.speculation.key.restart(SPECULATION_BACKOFF)
                return False
        if not lookup.weights_confirmed:
            valid = False
            try:
                valid = not self._sync(lookup.plan) and self._context.arena.copied == lookup.copied
            finally:
                # also if it raises
                if not valid:
                    self.speculation.weights.restart(SPECULATION_BACKOFF)
            return valid
        return True

    def _served_device(self) -> torch.device:
        device = self._context.device()
        if device is None or device.type not in ("cuda", "cpu"):
            raise NotOurs(reasons.NOT_ON_GPU("no device" if device is None else device))
        if device.type == "cpu" and not self._context.config.allow_cpu:
            raise NotOurs(reasons.ON_CPU())
        refused = unserved(device)
        if refused is not None:
            raise NotOurs(refused)
        if records_graph(device):
            self._context.arena.order.pin()
            raise NotOurs(reasons.CAPTURES_GRAPH())
        return device

    def _is_compared(self, plan: Plan) -> bool:
        """Whether the next result of the plan is compared with the original's."""
        check = self._context.config.check
        return check == "always" or (check == "first" and (plan.error is None or plan.compare_again))

    def _may_speculate(self, plan: Plan) -> bool:
        """Whether a replay may be launched before the weights are confirmed. It reads valid memory in any case, and its
        result is discarded if the weights changed.

        Precondition: the result is not compared with the original's. Old weights would have the plan rejected.
        """
        context = self._context
        if plan.graph is None or not context.config.cuda_graphs or not context.arena.order.is_plans():
            return False
        waits = self.speculation.weights
        return not waits.price or not waits.waits()

    def _reads(self, plan: Plan | None) -> bool:
        return plan is not None and plan.resident and self._context.arena.resident.reads

    def _sync(self, plan: Plan | None, later: bool = False) -> int:
        """Bring weights up to date. With `later`, without what is read of them at the time of the call's run."""
        current.stage = "weights"
        copied = residency.sync(self._context, plan, later)
        while self._reads(plan) and not later:
            copied += residency.sync(self._context, plan)
        if copied:
            self._context.report.count("weights_copied", copied)
        return copied

    def _new_keys(self, first: int) -> BehaviourKeys:
        context, hooks = self._context, self._context.hooks
        kept = context.config.max_plans

        def below() -> Callable[..., Any] | None:
            return context.slot.previous

        known = hooks.transparent, below, hooks.ignored_globals
        return BehaviourKeys(context.module, hooks.ignored, hooks.recognised, kept, first, *known)


def _of_single_channels(module: nn.Module) -> bool:
    """Whether each channel is normalised by itself. Those of a group have different constants, and keep digits."""
    if isinstance(module, nn.GroupNorm):
        return module.num_groups == module.num_channels
    return isinstance(module, (nn.InstanceNorm1d, nn.InstanceNorm2d))


def records_graph(device: torch.device) -> bool:
    """Whether the program captures a CUDA graph on the current stream."""
    return device.type == "cuda" and torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def _ask(name: str, callback: Callable[..., Any], *args: Any) -> Any:
    """What a callback of the host returns. It may say by an exception that the call is bypassed."""
    try:
        return callback(*args)
    except (NotOurs, WeightsAway, WeightsChanged):
        raise
    except Exception as exc:
        raise HostFailed(f"{name} of the host", exc) from exc
