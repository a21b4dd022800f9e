"""The accelerator stands in for one module's forward: for each call it decides which plan runs, or that the original
does. It knows a callable and tensors; what a WebUI adds comes in through `Hooks`."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from sfast_ext.behaviour.fingerprint import structure
from sfast_ext.behaviour.forward_slot import Slot, foreign_forward
from sfast_ext.behaviour.key import BehaviourKeys
from sfast_ext.call_signature import NotOurs, flatten_call
from sfast_ext.config import Config
from sfast_ext.environment import unserved
from sfast_ext.hooks import Hooks
from sfast_ext.kernels.backend import health
from sfast_ext.kernels.backend.precompile import get_ready
from sfast_ext.report import Report, at, stage, words_of
from sfast_ext.runtime.gc_pause import uncollected
from sfast_ext.runtime.graph_pool import pool_of
from sfast_ext.runtime.plan_builder import WARY, Found, OriginalFailed, Planner
from sfast_ext.runtime.plan_cache import pool_for
from sfast_ext.weights.arena import WeightsAway, WeightsChanged

_READING_KEY = "behaviour key"
_BYPASS, _PREPARE, _KEY = "bypass_reason of the host", "prepare of the host", "key of the host"


class Accelerator(Planner):
    """Runs plans in place of a module's forward.

    Args:
        module: the network, e.g. a UNet. Its tree is not touched.
        config: see `Config`.
        hooks: what a host knows.
        report: where decisions are noted; one of its own where None.
        name: how the report calls the module.
        whole: the accelerator of a network that `module` is a part of, see `accelerate_parts`.
    """

    def __init__(
        self,
        module: nn.Module,
        config: Config | None = None,
        *,
        hooks: Hooks | None = None,
        report: Report | None = None,
        name: str = "unet",
        whole: Accelerator | None = None,
    ) -> None:
        super().__init__(module, config or Config(), hooks or Hooks(), report or Report(), whole)
        self.name = name
        self.calls = 0
        """How often the module was called, but for calls within one of its own or while a plan of the whole is made."""
        self._keys = self._new_keys()
        self._released = False
        self._inside = threading.local()

    def install(self) -> Accelerator:
        """Take the module's forward; under accelerate's hook where there is one. Idempotent."""
        self._released = False
        if self.config.triton:
            get_ready()
        if self._slot.install():
            self._forget_plans("another forward is in the module's place")
        return self

    def installed(self) -> bool:
        """Whether the module's forward is (still) ours."""
        return self._slot.installed()

    def configure(self, config: Config) -> None:
        """Change the settings; effective at the next call. Plans are kept where they would be built alike."""
        with self._lock:
            was, self.config = self.config, config
            self._shelf.size = config.max_plans
            if not config.builds_like(was):
                self._drop_all("the settings changed")
            elif was != config:
                self._shelf.pardon()
                self._backoff.clear()
                for plan in self.plans.values():
                    plan.no_graph_reason = None
                    if not config.cuda_graphs:
                        plan.drop_graph(pool_for(plan))
                self._refuse_what_is_too_far()
            for part in self.parts:
                part.configure(config)

    def new_generation(self) -> None:
        """Tell that a generation begins: the behaviour key is read anew at the next call.

        A host that calls this before each generation spares the calls in between; until it is first called, the key
        is read at every call. The report's reasons are those of the last generations from then on.
        """
        if self.whole is None:
            self.report.new_generation()
        self._shelf.new_generation()
        self._backoff.new_generation()
        self._keys.tick()
        for part in self.parts:
            part.new_generation()

    def accelerate_parts(self, parts: Iterable[tuple[str, nn.Module]]) -> None:
        """Accelerate submodules one by one, for a forward laid over this module's that calls them itself.

        Their plans read the weights where this module's do, and give way to its first. Idempotent.

        Args:
            parts: names for the report, and submodules of which none lies in another.
        """
        with self._lock:
            known = {id(part.module): part for part in self.parts}
            for name, module in parts:
                foreign = foreign_forward(module)
                if foreign is not None:
                    self.report.bypassed(f"{foreign} is in place of the forward of {name}")
                    continue
                part = known.get(id(module))
                if part is None:
                    options: dict[str, Any] = {"hooks": self.hooks, "report": self.report, "whole": self}
                    part = Accelerator(module, self.config, name=f"{self.name}.{name}", **options)
                    self.parts.append(part)
                part.install()

    def move_to(self, module: nn.Module, hooks: Hooks) -> bool:
        """Follow the host to another module that computes alike, whose weights the plans take up in place.

        The module left behind must hold none of the plans' memory any more: its weights are on another device, or
        gone. Returns False, with nothing changed, where that is not so or the modules differ in more than values.
        """
        with self._lock:
            behaviour, _ = self._keys.read()
            if not self.plans or structure(self.module, self.hooks.ignored) != structure(module, hooks.ignored):
                return False
            try:
                if not self.arena.move_to(module):
                    return False
            except WeightsAway:
                return False
            self._release_parts()
            self._slot.release()
            self.module, self.hooks, self._released = module, hooks, False
            self._slot, self._keys = Slot(module, self), self._new_keys(behaviour)
            for key in [key for key, plan in self.plans.items() if plan.behaviour != behaviour]:
                self._shelf.drop(key)
            self._shelf.pardon()
        self.install()
        self.report.event("plans", f"{len(self.plans)} plans are kept for a model of the same architecture")
        return True

    def release(self) -> None:
        """Give back the forward, the parameters and the memory. Idempotent."""
        with self._lock:
            # somebody may hold our forward still, and call it
            self._released = True
            with contextlib.ExitStack() as steps:
                # last in, first out; one that fails keeps none from its turn
                for step in (self._keys.clear, self.arena.release, self._clear, self._slot.release):
                    steps.callback(step)
                self._release_parts()

    def status(self) -> dict[str, Any]:
        """This accelerator's part of the status."""
        with self._lock:
            device = self._device()
            return {
                "name": self.name,
                "module": type(self.module).__qualname__,
                "device": str(device),
                "installed": self.installed(),
                "plans": [plan.status() for plan in list(self.plans.values())],
                "parts": [part._summary() for part in self.parts],
                "weights": self.arena.status(),
                "graph_pool": pool_of(device).status() if device is not None and device.type == "cuda" else None,
                "kernels_put_down": health.all_down(device) if device is not None else {},
            }

    def original(self, *args: Any, **kwargs: Any) -> Any:
        """The forward that was there before, down to its parts: these are accelerated for a forward laid over this one
        that calls them itself, and need no plans for a call that goes to this one."""
        with _building() if self.parts else contextlib.nullcontext():
            return super().original(*args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # a part: within the original of the whole
        aside = self._released or (self.whole is not None and getattr(_thread, "building", False))
        if aside or getattr(self._inside, "busy", False) or not self.config.enabled:
            return self.original(*args, **kwargs)
        self.calls += 1
        self._inside.busy = True
        try:
            return self._decide(args, kwargs)
        finally:
            self._inside.busy = False

    def _decide(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        found: Found | None = None
        try:
            found = self._find(args, kwargs)
            if found.plan is not None and (found.ahead or not found.sure):
                # The replay is on its way while the key and the weights are looked at; where one has changed, its
                # result is thrown away.
                result = self._run(found, args, kwargs)
                launched, found = found, None
                if self._still_so(launched):
                    return self._used(launched, result)
                self.report.count("discarded")
                found = self._find(args, kwargs, ahead=False)
            if found.plan is not None:
                return self._used(found, self._run(found, args, kwargs))
        except (NotOurs, WeightsAway) as exc:
            self.report.bypassed(str(exc))
            found = None
        except WeightsChanged as exc:
            self._weights_changed(exc)
            found = None
        except OriginalFailed as exc:
            raise exc.cause from None
        except Exception as exc:
            if found is None and stage() in (_BYPASS, _PREPARE, _KEY):
                return self._asked_in_vain(exc, args, kwargs)
            self._failed(exc, found, building=False)
            found = None

        if found is None:
            return self.original(*args, **kwargs)
        mine = self._building.acquire(blocking=False)
        if not mine:
            return self._first(found, args, kwargs, build=False)
        try:
            with uncollected():
                return self._first(found, args, kwargs, build=True)
        finally:
            self._building.release()

    def _first(self, found: Found, args: tuple[Any, ...], kwargs: dict[str, Any], build: bool) -> Any:
        """The original's result for a call that no plan is for; and a plan, where one is to be built."""
        started = time.perf_counter()
        watched = self._watched(found) if build else None
        result = self.original(*args, **kwargs) if watched is None else watched.run(self.original, args, kwargs)
        if build:
            self._try_to_build(found, result, args, kwargs, time.perf_counter() - started, watched)
        return result

    def _try_to_build(self, found: Found, *told: Any) -> None:
        try:
            with _building():
                self._build(found, *told)
        except WeightsAway as exc:
            self.report.bypassed(str(exc))
        except WeightsChanged as exc:
            self._weights_changed(exc)
        except Exception as exc:
            self._failed(exc, found, building=True)
        finally:
            self._lay_back()

    def _failed(self, exc: Exception, found: Found | None, *, building: bool) -> None:
        """Note an exception of ours, and put aside what it came from. Nothing is raised: the call goes on."""
        where = stage()
        self.report.error(where, exc)
        if found is None or (found.plan is None and not building) or where == _READING_KEY:
            return
        try:
            plan = None if building else found.plan
            if plan is not None and self._put_down(exc, found.device):
                self._shelf.drop(found.key)
                return
            if not self._made_room(exc, plan):
                what = "no plan could be built" if building else "its plan failed"
                self._shelf.refuse(found.key, f"{what}: {where}: {words_of(exc)}")
        except Exception as again:
            self.report.error("giving up a plan", again)

    def _lay_back(self) -> None:
        """Where no plan came of it, the original forward runs on weights that lie as its host knows them."""
        whole = self.whole or self
        if not any(accelerator.plans for accelerator in (whole, *whole.parts)):
            try:
                whole.arena.lay_back()
            except Exception as exc:
                self.report.error("laying the weights back", exc)

    def _weights_changed(self, exc: WeightsChanged) -> None:
        try:
            # what was captured for nothing stays counted, or weights that change at every call would have no end of it
            self._drop_all(str(exc), at_once=False)
        except Exception as again:
            self.report.error("giving up a plan", again)

    def _read_keys(self) -> tuple[int, str | None]:
        at(_READING_KEY)
        return self._keys.read()

    def _still_so(self, found: Found) -> bool:
        """Whether a replay that was launched computes what is wanted: what was put off is looked at now."""
        if not found.sure:
            at(_READING_KEY)
            behaviour, foreign = self._keys.now()
            if behaviour != found.behaviour or foreign:
                self._wary_of_behaviour = WARY
                return False
        if found.ahead:
            # also where it raises
            self._wary_of_weights = WARY
            if self._synced():
                return False
            self._wary_of_weights = 0
        return True

    def _synced(self) -> int:
        at("weights")
        copied = self.arena.sync()
        if copied:
            self.report.count("weights_copied", copied)
        return copied

    def _find(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, ahead: bool = True) -> Found:
        """The call, its key and its plan, None where one is to be built.

        Raises:
            NotOurs: the original forward is to run.
            WeightsAway, WeightsChanged: see `WeightArena.sync`.
        """
        if torch.is_grad_enabled():
            raise NotOurs("gradients are being recorded")
        at(_BYPASS)
        reason = self.hooks.bypass_reason() if self.hooks.bypass_reason else None
        if reason:
            raise NotOurs(reason)
        device = self._device()
        if device is None or device.type not in ("cuda", "cpu"):
            raise NotOurs(f"the model is on {'no device' if device is None else device}, not on a GPU")
        if device.type == "cpu" and not self.config.allow_cpu:
            raise NotOurs("the model is on the CPU, and running there is switched off in the settings")
        refused = unserved(device)
        if refused is not None:
            raise NotOurs(refused)
        at("arguments")
        call = flatten_call(args, kwargs, device)
        generic = call.signature
        if self._static_numbers and generic in self._static_numbers:
            call = flatten_call(args, kwargs, device, static_numbers=True)
        if self.hooks.prepare is not None:
            # first of all: it may give a layer a bias, which the key is to show
            at(_PREPARE)
            self.hooks.prepare()
        known, due = self._keys.last, self._keys.due
        sure = known is None
        behaviour, foreign = self._read_keys() if known is None else known
        if not sure and (foreign or self._wary_of_behaviour):
            self._wary_of_behaviour = max(self._wary_of_behaviour - 1, 0)
            at(_READING_KEY)
            behaviour, foreign = self._keys.now()
            sure = True
        if foreign:
            raise NotOurs(foreign)
        at(_KEY)
        host = self.hooks.key() if self.hooks.key else None
        key = (call.signature, behaviour, host, device)
        plan = self.plans.get(key)
        # at the beginning of a generation weights are likely to be others
        ahead = ahead and plan is not None and not due and self._runs_ahead(plan)
        sure = sure or (not ahead and self._keys.sure)
        if not sure and (plan is None or self._is_compared(plan)):
            # only a plan may run on the key of the last call: what keeps one away may be gone; and what a plan is
            # compared with must be what it was made for
            now, foreign = self._read_keys()
            if now != behaviour or foreign:
                return self._find(args, kwargs, ahead=ahead)
            sure = True
        refused = self._shelf.refusal(key)
        if refused is not None:
            raise NotOurs(refused)
        if plan is None and self._backoff.waits(generic, key):
            raise NotOurs("what the model computes changes again and again: a plan is made when it stays the same")
        if not ahead:
            self._synced()
        return Found(call, generic, key, plan, behaviour, device, sure, ahead)

    def _drop_all(self, reason: str, *, at_once: bool = True) -> None:
        """Drop the plans of the whole model: they share their weights."""
        whole = self.whole or self
        for accelerator in (whole, *whole.parts):
            accelerator._forget_plans(reason, at_once=at_once)

    def _clear(self) -> None:
        self._forget_plans(None)

    def _summary(self) -> dict[str, Any]:
        plans = list(self.plans.values())
        replays = sum(plan.replays for plan in plans)
        return {"name": self.name, "calls": self.calls, "plans": len(plans), "replays": replays}

    def _release_parts(self) -> None:
        with contextlib.ExitStack() as each:
            for part in self.parts:
                each.callback(part.release)
            self.parts = []

    def _new_keys(self, first: int = 0) -> BehaviourKeys:
        hooks = self.hooks
        kept = self.config.max_plans
        return BehaviourKeys(self.module, hooks.ignored, hooks.recognised, kept, first, hooks.transparent)


_thread = threading.local()


@contextlib.contextmanager
def _building() -> Iterator[None]:
    before = getattr(_thread, "building", False)
    _thread.building = True
    try:
        yield
    finally:
        _thread.building = before


def accelerate(module: nn.Module, config: Config | None = None, **options: Any) -> Accelerator:
    """Put an accelerator in front of a module's forward.

    Args:
        module: the network, e.g. `pipe.unet`.
        config: see `Config`; options are those of `Accelerator`.

    Returns:
        The accelerator; its `release()` gives everything back.
    """
    return Accelerator(module, config, **options).install()
