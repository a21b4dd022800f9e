"""Builds, checks and runs the plans of one module; who decides which call gets one is `Accelerator`."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from sfast_ext.behaviour.forward_slot import Slot
from sfast_ext.call_signature import Call, Signature, flatten_output
from sfast_ext.capture.capture import CaptureRefused, Recipe, capture, capture_watched
from sfast_ext.capture.live_trace import WORKS, Watched
from sfast_ext.config import Config
from sfast_ext.environment import left_out
from sfast_ext.hooks import Hooks
from sfast_ext.kernels.backend import health, precompile
from sfast_ext.report import Report, at, stage
from sfast_ext.runtime.backoff import Backoff
from sfast_ext.runtime.graph_pool import GraphPool, pool_of
from sfast_ext.runtime.plan import Plan, comparable, relative_error
from sfast_ext.runtime.plan_cache import Shelf, pool_for
from sfast_ext.runtime.verify import prove, rewritten, too_far
from sfast_ext.weights.arena import WeightArena, WeightsAway

if TYPE_CHECKING:
    from sfast_ext.accelerator import Accelerator

# times that one plan may run out of memory before it is given up
OUT_OF_MEMORY = 3
# calls that look at the weights, or at the behaviour, before their replay, after one was made in vain: few are wasted
# where these change in the midst of generations
WARY = 200


@dataclass
class Found:
    """A call on its way: `sure` where its behaviour key is known to hold, `ahead` where its weights are looked at while
    the GPU is busy with it."""

    call: Call
    generic: Signature
    key: Hashable
    plan: Plan | None
    behaviour: int
    device: torch.device
    sure: bool
    ahead: bool


class Planner:
    """What an accelerator does with plans.

    Args:
        whole: the accelerator of a network that `module` is a part of; weights and locks are shared with it.
    """

    def __init__(
        self, module: nn.Module, config: Config, hooks: Hooks, report: Report, whole: Accelerator | None
    ) -> None:
        self.module = module
        self.config = config
        self.hooks = hooks
        self.report = report
        self.whole = whole
        self.parts: list[Accelerator] = []
        self.arena: WeightArena = WeightArena(module) if whole is None else whole.arena.part(module)
        self._lock: threading.RLock = threading.RLock() if whole is None else whole._lock
        self._building: threading.Lock = threading.Lock() if whole is None else whole._building
        self._shelf = Shelf(self.arena, report, self._lock, config.max_plans)
        self._static_numbers: set[Signature] = set()
        self._backoff = Backoff()
        self._recipes: dict[Hashable, set[Recipe]] = {}
        self._wary_of_weights = self._wary_of_behaviour = 0
        self.lends = True
        """Whether `state_dict()` of the module lays its weights out as the host knows them; see `BeforeSaving`."""
        self._slot = Slot(module, self)  # type: ignore[arg-type]

    @property
    def plans(self) -> OrderedDict[Hashable, Plan]:
        """The plans there are, least recently used first."""
        return self._shelf.plans

    def original(self, *args: Any, **kwargs: Any) -> Any:
        """The forward that was there before."""
        with self.arena.gate:
            return self._slot.original(*args, **kwargs)

    def _asked_in_vain(self, exc: Exception, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The original's result, where the host raised what it was asked. One that it meets in its own forward too is
        its own error."""
        where = stage()
        try:
            result = self.original(*args, **kwargs)
        except Exception as its:
            if type(its) is not type(exc):
                self.report.error(where, exc)
            raise
        self.report.error(where, exc)
        return result

    def give_memory_back(self) -> bool:
        """Give back the GPU memory of the plans, while the host has the weights of the module on another device.

        The plans stay. At the next call for which the weights are back, they are copied to memory that is taken anew,
        and the CUDA graphs, which read the old addresses, are captured again.

        Returns:
            Whether they hold none of it now: False where the module's own parameters lie in that memory.
        """
        with self._lock, contextlib.ExitStack() as locks:
            plans = [plan for each in (self, *self.parts) for plan in each.plans.values()]
            for pool in {id(pool): pool for plan in plans if (pool := pool_for(plan)) is not None}.values():
                locks.enter_context(pool.lock)
            given = self.arena.vacancies([weight for plan in plans for weight in plan.weights])
            if not given:
                return given is not None
            for plan in plans:
                plan.drop_graph(pool_for(plan))
            for device in {plan.device for plan in plans if plan.device.type == "cuda"}:
                # what was launched last may read it still
                torch.cuda.synchronize(device)
            self.arena.vacate(given)
        self.report.count("memory_given_back")
        return True

    def fetch_weights(self) -> int:
        """Copy the weights of the module from another device into the memory that plans read; see `WeightArena.fetch`.

        Returns:
            How many were copied.

        Raises:
            WeightsAway, WeightsChanged: see `WeightArena.sync`; the module is as it was, or partly there.
        """
        with self._lock:
            return self.arena.fetch()

    def _run(self, found: Found, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        plan = found.plan
        assert plan is not None
        at("replay")
        with self._guard(plan):
            outputs = self._outputs(plan, found.call)
        if self._is_compared(plan):
            try:
                result = self.original(*args, **kwargs)
            except Exception as exc:
                raise OriginalFailed(exc) from exc
            at("check")
            references = flatten_output(result)[1]
            if not comparable(references):
                return result
            plan.error = relative_error(outputs, references)
            if not plan.error <= self.config.tolerance:
                self._shelf.refuse(found.key, too_far(plan.error, self.config))
            return result
        at("result")
        return plan.output(outputs)

    def _is_compared(self, plan: Plan) -> bool:
        """Whether the plan's next result is compared with the original's."""
        return self.config.check == "always" or (self.config.check == "first" and plan.error is None)

    def _runs_ahead(self, plan: Plan) -> bool:
        """Whether a replay may be launched before the weights are looked at: they lie still for the GPU to read, and
        where a look at them says that others are wanted, the result goes to nobody.

        Not where the result is about to be compared with the original's, which would blame the plan for old weights.
        """
        if not (plan.has_graph and self.config.cuda_graphs) or self._is_compared(plan):
            return False
        if self._wary_of_weights:
            self._wary_of_weights -= 1
            return False
        return True

    def _used(self, found: Found, result: Any) -> Any:
        plan = found.plan
        assert plan is not None
        at("keeping the plan")
        self._shelf.touch(found.key)
        plan.replays += 1
        self._backoff.replayed(found.generic, plan.replays)
        self.report.count("replays" if plan.has_graph else "eager_runs")
        return result

    def _outputs(self, plan: Plan, call: Call) -> list[torch.Tensor]:
        if self.arena.vacant:
            # another thread gave it back since the weights were looked at
            raise WeightsAway("the memory of the weights was given back to the host")
        if plan.device.type == "cuda" and self.config.cuda_graphs:
            pool = pool_of(plan.device)
            # evicted since: the plan is still good, its graph comes back
            if plan.has_graph or (plan.no_graph_reason is None and self._capture_graph(plan, call, pool)):
                return plan.replay(call.leaves, pool)
        return plan.run_eagerly(call.leaves)

    def _capture_graph(self, plan: Plan, call: Call, pool: GraphPool) -> bool:
        config = self.config
        share = 1.0 if self.whole is None else 1 / len(self.whole.parts)
        return plan.capture_graph(call.leaves, pool, self.report, config.max_graphs, config.graph_memory_mb, share)

    def _watched(self, found: Found) -> Watched | None:
        """What is to watch the original's run for a plan, where the same behaviour was captured before."""
        known = WORKS and found.key[1:] in self._recipes  # type: ignore[index]
        return Watched(found.call, self.arena, found.device) if known else None

    def _build(
        self,
        found: Found,
        result: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        original_s: float,
        watched: Watched | None,
    ) -> None:
        started = time.perf_counter()
        device = found.device
        away = next((p.device for p in self.module.parameters() if p.device != device), None)
        if away is not None:
            # not refused: they may be back at the next call
            self.report.bypassed(f"some weights are on {away}, others on {device}")
            return
        self._backoff.captured(found.generic)
        if not self.plans:
            # theirs would keep the weights from being packed for all of it
            for part in self.parts:
                part._forget_plans("the model is captured as a whole")
        at("weights")
        self.arena.sync()
        while True:
            try:
                plan = self._attempt(found, result, args, kwargs, original_s, watched)
                break
            except Exception as exc:
                if not self._put_down(exc, device):
                    raise
            watched = None  # it was used up
        if plan is not None:
            plan.first_call_s = round(original_s + time.perf_counter() - started, 3)
            self.report.event("plan", f"{plan.state}: {plan.signature.words()}, built in {plan.first_call_s} s")

    def _attempt(
        self,
        found: Found,
        result: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        original_s: float,
        watched: Watched | None,
    ) -> Plan | None:
        """A plan of the kernels that are in use; None, with the reason noted, where the call gets none."""
        call, key, device = found.call, found.key, found.device
        at("capture")
        try:
            recipes = self._recipes.setdefault(key[1:], set())  # type: ignore[index]
            captured = capture_watched(watched, recipes, self.arena) if watched is not None else None
            if captured is None:
                inputs = call.tensors(device)
                captured = capture(self._slot.original, call, inputs, self.arena, self.hooks.ignored)
                recipes.add(captured.recipe)
            plan = rewritten(captured, call, self.arena, device, self.config)
            if device.type == "cuda":
                for sentence in left_out(device):
                    self.report.once("kernels", sentence)
        except CaptureRefused as exc:
            has_numbers = any(not isinstance(leaf, torch.Tensor) for leaf in call.leaves)
            if exc.reads_value and has_numbers and found.generic not in self._static_numbers:
                # it may be one of the numbers that it looks at: next time they are part of the signature
                self._static_numbers.add(found.generic)
                self.report.event("capture", f"numbers become part of the signature: {exc}")
                return None
            if exc.details:
                self.report.event("capture", exc.details)
            self._shelf.refuse(key, str(exc))
            return None
        plan.behaviour = found.behaviour
        at("binding of weights")
        self._shelf.put(key, plan)
        self.report.count("captures")
        if not plan.fused:
            self.report.event("passes", "the graph reads strides or unknown sizes, so nothing in it is rewritten")
        try:
            with self._guard(plan):
                refusal = prove(
                    plan,
                    lambda: self._outputs(plan, call),
                    lambda: self.original(*args, **kwargs),
                    call,
                    result,
                    original_s,
                    self.config,
                )
        except Exception:
            self._shelf.drop(key)
            raise
        if refusal:
            self._shelf.refuse(key, refusal)
            return None
        return plan

    def _refuse_what_is_too_far(self) -> None:
        """Give up the plans whose error is known to be over the tolerance."""
        if self.config.check == "never":
            return
        for key, plan in list(self.plans.items()):
            if plan.error is not None and not plan.error <= self.config.tolerance:
                self._shelf.refuse(key, too_far(plan.error, self.config))

    def _put_down(self, exc: Exception, device: torch.device) -> bool:
        """Take the kernel that an exception came from out of use, and with it those that did not compile.

        False where the exception came from no kernel, or from one that is out of use already.
        """
        reasons = health.blamed(exc)
        uncompiled = precompile.failed(device)
        if not uncompiled.keys().isdisjoint(reasons):
            reasons = uncompiled | reasons
        new = [name for name, reason in reasons.items() if health.put_down(name, device, reason)]
        for name in new:
            self.report.count("kernels_put_down")
            self.report.event("kernel", f"{name} is put down, plans are made without it: {reasons[name]}")
        return bool(new)

    def _made_room(self, exc: Exception, plan: Plan | None) -> bool:
        """Out of memory: the graphs' memory goes to the original's run. True where `plan` may be used again."""
        if not isinstance(exc, torch.cuda.OutOfMemoryError):
            return False
        device = self._device()
        if device is not None and device.type == "cuda":
            pool_of(device).make_room(self.report)
        if plan is None:
            return False
        plan.out_of_memory += 1
        return plan.out_of_memory < OUT_OF_MEMORY

    def _forget_plans(self, reason: str | None, *, at_once: bool = True) -> None:
        """Drop the plans; `at_once` where new ones need not wait."""
        with self._lock:
            (self._backoff.clear if at_once else self._backoff.interrupted)()
            self._recipes.clear()
            self._shelf.clear(reason)

    def _guard(self, plan: Plan) -> Any:
        # graphs of one pool share memory; on a CPU only the plan's own state is at stake
        pool = pool_for(plan)
        return pool.lock if pool is not None else self._lock

    def _device(self) -> torch.device | None:
        first = _first_parameter(self.module)
        return first.device if first is not None else None


def _first_parameter(module: nn.Module) -> torch.Tensor | None:
    """What `module.parameters()` gives first, without what that takes for itself."""
    for parameter in module._parameters.values():
        if parameter is not None:
            return parameter
    for child in module._modules.values():
        found = _first_parameter(child) if child is not None else None
        if found is not None:
            return found
    return None


class OriginalFailed(Exception):
    """The original forward itself raised: the host's error, to be passed on as it is."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(str(cause))
        self.cause = cause
