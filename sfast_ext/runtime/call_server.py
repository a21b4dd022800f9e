"""Serves one call of a module: by a plan, or by the original forward, after which a plan may be built. The states of a
call are those of `plan_finder`."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from sfast_ext import torch_state
from sfast_ext.call_signature import NotOurs, tensors_alone
from sfast_ext.capture import arguments
from sfast_ext.capture.state import State
from sfast_ext.gc_pause import gc_paused
from sfast_ext.kernels.backend import precompile
from sfast_ext.plans.payback import PAID_AFTER, CaptureBackoff, RareCalls
from sfast_ext.plans.plan import Plan
from sfast_ext.preparation import Interrupted
from sfast_ext.reasons import NEW_KIND, NO_ROOM
from sfast_ext.report import at, current, rehearsing, stage
from sfast_ext.runtime import lean_calls, residency
from sfast_ext.runtime.building import marked_as_building
from sfast_ext.runtime.eight_bits import is_due
from sfast_ext.runtime.model_state import ModuleContext
from sfast_ext.runtime.original_run import OriginalRun
from sfast_ext.runtime.plan_builder import PlanBuilder
from sfast_ext.runtime.plan_cache import Earnings, PlanCache, PlanKey, Waiting
from sfast_ext.runtime.plan_finder import HostFailed, Lookup, PlanFinder, ReplayState
from sfast_ext.runtime.plan_runner import Failures, OriginalFailed, PlanRunner
from sfast_ext.runtime.run_again import Before
from sfast_ext.timing import Pace, Stopwatch
from sfast_ext.weights.weight import WeightsAway, WeightsChanged

T = TypeVar("T")
TRIES = 3
"""Runs of the original forward for one call, if memory is freed after each but the last."""


class CallServer:
    """Serves the calls of one module.

    Attributes:
        generation: the number of the current one, see `Accelerator.new_generation`.
        pace: of the calls that plans served.
    """

    def __init__(
        self,
        context: ModuleContext,
        cache: PlanCache,
        finder: PlanFinder,
        runner: PlanRunner,
        builder: PlanBuilder,
        failures: Failures,
        backoff: CaptureBackoff,
    ) -> None:
        self._context, self._report = context, context.report
        self._cache, self._finder, self._runner = cache, finder, runner
        self._builder, self._failures, self._backoff = builder, failures, backoff
        self._rare, self._earnings = RareCalls(), Earnings()
        self.generation, self.pace = 1, Pace()
        finder.builds = self._is_earned

    def new_generation(self) -> None:
        """A generation begins."""
        self.generation += 1
        self._rare.new_generation()
        self._earnings.new_generation(self._context.config.eight_bits)
        self.pace.restart()
        self._cache.new_generation_of_eight_bits(self.generation, self._context.config.eight_bits)

    def forget_earnings(self) -> None:
        """Plans are made as at the start, without being earned: the user has dropped them, or other settings hold."""
        self._earnings = Earnings(wanted=True)

    def serve(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of a call of the module with these arguments."""
        precompile.defer()
        obstacle = torch_state.obstacle()
        if obstacle is not None:
            self._report.bypassed(obstacle)
            return self.run_original(*args, **kwargs)
        lookup: Lookup | None = None
        # an exception leaves it so
        state = ReplayState.BYPASS
        try:
            lookup = self._finder.find(args, kwargs)
            if lookup.state is ReplayState.REPLAY_SPECULATIVE:
                # validated while the GPU works
                result = self._run(lookup, args, kwargs)
                launched, lookup = lookup, None
                if self._finder.validate(launched) and not self._is_compared(launched):
                    self._edit(launched, args, kwargs)
                    return self._record_use(launched, result)
                self._report.count("misspeculated")
                lookup = self._finder.find(args, kwargs, speculate=False)
            if lookup.state is not ReplayState.BUILD:
                result = self._run(lookup, args, kwargs)
                if self._is_compared(lookup):
                    lookup = self._finder.find(args, kwargs, speculate=False)
                    result = self._run(lookup, args, kwargs)
                if not lookup.compared:
                    self._edit(lookup, args, kwargs)
                return self._record_use(lookup, result)
            state = ReplayState.BUILD
        except (NotOurs, WeightsAway) as exc:
            self._report.bypassed(exc.reason)
        except WeightsChanged as exc:
            self._weights_changed(exc)
        except OriginalFailed as exc:
            raise exc.cause from None
        except HostFailed as exc:
            return self._host_failed(exc, args, kwargs)
        except Exception as exc:
            self._failures.failed(exc, lookup, building=False)

        if state is ReplayState.BYPASS or lookup is None:
            return self._leaving_no_trace(lambda: self.run_original(*args, **kwargs))
        building = lookup
        if not self._guarded(lambda: self._begin_to_build(building), False):
            return self._leaving_no_trace(lambda: self._without_plan(building, args, kwargs, build=False))
        try:
            with gc_paused():
                return self._without_plan(lookup, args, kwargs, build=True)
        finally:
            self._context.model.build_lock.release()

    def _begin_to_build(self, lookup: Lookup) -> bool:
        """Whether this call builds the plan. If so, this thread holds the lock for it."""
        config, lock, key = self._context.config, self._context.model.build_lock, lookup.key
        if not (lookup.key_confirmed and self._is_earned(key)):
            # if it was not when it was looked up, its key may be an old one
            if not config.rare_calls:
                self._report.bypassed(NEW_KIND())
                self._cache.waiting = Waiting(key.signature, key.device, self._builder.label(lookup))
            return False
        if residency.lacks_room(self._context, key):
            self._report.bypassed(NO_ROOM())
            return False
        if not lock.acquire(blocking=False):
            return False
        begins = False
        try:
            # another thread may have made it since it was looked up
            if key not in self._cache.plans and key not in self._cache.rejected:
                begins = not config.rare_calls or self._rare.take(key, config.rare_gain, config.rare_build_ms)
        finally:
            if not begins:
                lock.release()
        return begins

    def _guarded(self, action: Callable[[], T], otherwise: T) -> T:
        """What an action returns that the original's result does not depend on. If it raises, that is reported."""
        try:
            return action()
        except Exception as exc:
            self._report.error(stage(), exc)
            return otherwise

    def _is_earned(self, key: PlanKey) -> bool:
        """Whether a plan for calls like this has been earned, or need not be."""
        if (config := self._context.config).rare_calls:
            return self._rare.is_due(key, config.rare_gain, config.rare_build_ms)
        # steps that read weights by layer take some twenty times as long
        slow = config.eight_bits and self._context.model.crowded
        return not self._must_earn() or slow or self._earnings.due(tensors_alone(key.signature))

    def _must_earn(self) -> bool:
        """Whether it matters if a plan is earned back. What is prepared was asked for."""
        config = self._context.config
        return config.earned and not config.rare_calls and not rehearsing()

    def _run(self, lookup: Lookup, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._runner.run(lookup, lambda: self._compared_with(lookup, args, kwargs))

    def _compared_with(self, lookup: Lookup, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The original forward's result, which a plan's is compared with."""
        if lookup.plan is not None and lookup.plan.resident:
            context = self._context
            before = Before(args, kwargs, context.device())
            with context.own_shortages(), marked_as_building() if context.parts else contextlib.nullcontext():
                try:
                    return context.run_streamed(context.slot.original, *args, **context.unconsumed(kwargs))
                except Exception as exc:
                    self._report.event("8 bits", f"all weights come back for a comparison: {type(exc).__name__}: {exc}")
            before.put_back()
        return self.run_original(*args, **kwargs)

    def _is_compared(self, lookup: Lookup) -> bool:
        """Whether a plan is to be compared with the original before its result is used, as the run showed."""
        plan = lookup.plan
        if plan is None or not plan.banks or lookup.compared or self._context.config.check == "never":
            return False
        return is_due(plan)

    def _edit(self, lookup: Lookup, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Change the arguments as the original forward would have done, in place of which a plan ran."""
        assert lookup.plan is not None
        if lookup.plan.edits:
            arguments.apply(lookup.plan.edits, args, kwargs)

    def _record_use(self, lookup: Lookup, result: Any) -> Any:
        plan = lookup.plan
        assert plan is not None
        current.stage = "keeping the plan"
        if self._cache.latest is not plan:
            self._cache.touch(lookup.key)
        plan.replays += 1
        if not current.rehearsal:
            self._earnings.calls += 1
            self.pace.tick()
            if plan.generation_of_use != self.generation:
                plan.generation_of_use, plan.used_at = self.generation, time.time()
        if plan.replays == PAID_AFTER and plan.shape_signature is not None:
            self._backoff.record_replay(plan.shape_signature, plan.replays)
        self._report.count("replays" if plan.graph is not None else "eager_runs")
        return result

    def _without_plan(self, lookup: Lookup, args: tuple[Any, ...], kwargs: dict[str, Any], build: bool) -> Any:
        """The original forward's result for a call without a plan. With `build`, also builds the plan."""
        rare = self._context.config.rare_calls
        lean = build and self._guarded(lambda: lean_calls.may_be(self._context, lookup.key), False)
        if not lean and not self._context.model.crowded:
            # before the trace and the state, which would take it for what the forward does; what fails is met again
            # below
            with self._context.own_shortages(), contextlib.suppress(WeightsAway, torch.cuda.OutOfMemoryError):
                self._context.bring_back()
        if build and lookup.key.eight_bits and residency.wanted(self._context, lookup.key.device):
            self._guarded(self._context.slot.watch, None)
        # a recorded run takes longer, and its time would be the original's
        traced = build and not rare and not lean
        trace = self._guarded(lambda: self._builder.live_trace(lookup), None) if traced else None
        state = self._state() if build else None
        # the original may take away what is in them
        again = arguments.with_own_containers(args, kwargs) if build else ((), {})
        timed = rare or (self._must_earn() and not build)
        watch = self._guarded(lambda: Stopwatch(lookup.key.device), None) if timed else None
        # before the trace, which would record what is done to weights
        with contextlib.ExitStack() as as_hosts:
            if trace is not None:
                try:
                    as_hosts.enter_context(self._context.arena.order.host())
                except Exception as exc:
                    # nothing is recorded: `run_original` tries it again, with more room
                    at("weights as the host laid them")
                    self._report.error(stage(), exc)
                    trace = None
            started = time.perf_counter()
            if lean:
                result = lean_calls.run(self._context, state, args, kwargs, self.run_original)
            elif trace is None or state is None:
                result = self.run_original(*args, **kwargs)
            else:
                result = trace.run(self.run_original, args, kwargs, state.put_back)
        if watch is not None and not self._guarded(functools.partial(_stopped, watch), False):
            watch = None
        tried = False
        if state is not None:
            seconds = time.perf_counter() - started
            run = OriginalRun(lambda: self._again(lookup.key, lean, *again), result, seconds, trace, watch, state, lean)
            began = time.perf_counter()
            tried = self._try_to_build(lookup, run)
            plan = self._cache.plans.get(lookup.key)
            if plan is not None:
                milliseconds = 1000 * (time.perf_counter() - began)
                self._guarded(lambda: self._built(lookup, plan, milliseconds), None)
        self._guarded(lambda: self._account(lookup, watch, build, tried), None)
        return result

    def _account(self, lookup: Lookup, watch: Stopwatch | None, build: bool, tried: bool) -> None:
        """The original has run in this call.

        Args:
            tried: whether it is settled if a plan can be made.
        """
        if not rehearsing():
            self._earnings.calls += 1
        if watch is not None and not self._context.config.rare_calls:
            self._earnings.ran(lookup.shape_signature, watch)
        elif watch is not None and not tried:
            if build:
                self._rare.give_back()
            self._rare.ran(lookup.key, watch)
        self.pace.restart()

    def _built(self, lookup: Lookup, plan: Plan, milliseconds: float) -> None:
        """A plan was made in this time."""
        if self._context.config.rare_calls:
            self._rare.built(milliseconds)
        elif self._must_earn():
            self._earnings.built(lookup.shape_signature, plan, milliseconds)

    def _state(self) -> State | None:
        """The state that the forward can reach; None if it could not be read, which is reported."""
        at("state of the forward")
        try:
            return self._builder.state()
        except Exception as exc:
            self._report.error(stage(), exc)
            return None

    def _leaving_no_trace(self, run: Callable[[], Any]) -> Any:
        """The result of a run of the original. It leaves no trace if no user made the call."""
        state = self._state() if rehearsing() else None
        try:
            return run()
        finally:
            if state is not None:
                state.put_back()

    def _again(self, key: PlanKey, lean: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The original forward once more, on containers that it may change."""
        args, kwargs = arguments.with_own_containers(args, kwargs)
        context = self._context
        if lean and lean_calls.may_be(context, key):
            return context.run_by_layer(context.slot.original, *args, **context.unconsumed(kwargs))
        return self.run_original(*args, **kwargs)

    def _try_to_build(self, lookup: Lookup, run: OriginalRun) -> bool:
        """Returns whether that is settled for now: False if another thread, the host or the user was in the way."""
        assert run.state is not None
        try:
            if not self._builder.unchanged(lookup, run.state):
                if rehearsing():
                    run.state.put_back()
                return False
            context = self._context
            with marked_as_building(), residency.building(context.model), context.own_shortages():
                self._builder.build(lookup, run)
            return True
        except Interrupted as exc:
            self._report.event("interrupted", str(exc))
        except WeightsAway as exc:
            self._report.bypassed(exc.reason)
        except WeightsChanged as exc:
            self._weights_changed(exc)
        except Exception as exc:
            self._failures.failed(exc, lookup, building=True)
            return True
        finally:
            self._context.model.restore_layout(self._report)
        return False

    def _host_failed(self, failed: HostFailed, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A callback of the host raised: return the original forward's result. If that raises the same type of
        exception, it is the host's own error, and is not reported as ours."""
        try:
            result = self.run_original(*args, **kwargs)
        except Exception as its:
            if type(its) is not type(failed.cause):
                self._report.error(failed.callback, failed.cause)
            raise
        self._report.error(failed.callback, failed.cause)
        return result

    def _weights_changed(self, exc: WeightsChanged) -> None:
        try:
            # the backoff keeps its counts: weights that change at every call must not be captured for ever
            self._context.model.forget_plans(str(exc), at_once=False)
            # else weights that cannot be laid out end each later call before a plan is made
            self._context.model.restore_layout(self._report)
        except Exception as again:
            self._report.error("giving up a plan", again)

    def run_original(self, *args: Any, **kwargs: Any) -> Any:
        """Run the original forward. Parts run their original forwards too: they are accelerated for a third party's
        forward that calls them itself.

        If it runs out of memory while there are CUDA graphs or weights in 8 bits, they are freed, and it runs again: it
        would have that memory without the extension. Another thread may have made new ones meanwhile.
        """
        context = self._context
        before = Before(args, kwargs, context.device())
        with marked_as_building() if context.parts else contextlib.nullcontext():
            for _ in range(TRIES - 1):
                try:
                    return context.run_forward(context.slot.original, *args, **context.unconsumed(kwargs))
                except Exception as exc:
                    if not self._failures.freed_memory_for(exc):
                        raise
                # after the handler: the exception keeps what the failed run had allocated
                before.put_back()
            return context.run_forward(context.slot.original, *args, **context.unconsumed(kwargs))


def _stopped(watch: Stopwatch) -> bool:
    watch.stop()
    return True
