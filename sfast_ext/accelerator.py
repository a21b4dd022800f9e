"""The accelerator stands in for one module's forward: for each call it decides which plan runs, or that the original
does. It knows a callable and tensors; what a WebUI adds comes in through `Hooks`."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from sfast_ext.behaviour import BehaviourKeys, structure
from sfast_ext.capture import CaptureRefused, capture, uncollected
from sfast_ext.config import Config
from sfast_ext.graph_pool import GraphPool, pool_of
from sfast_ext.hooks import Hooks
from sfast_ext.plan import Plan, comparable, relative_error
from sfast_ext.proof import prove, rewritten, too_far
from sfast_ext.report import Report, at, stage, words_of
from sfast_ext.shelf import Shelf, pool_for
from sfast_ext.signature import Call, NotOurs, Signature, flatten_call, flatten_output
from sfast_ext.slot import Slot, foreign_forward
from sfast_ext.weights import WeightArena, WeightsAway, WeightsChanged

# captures of one signature that nothing replayed before its behaviour changed again
BARREN = 4
# times that one plan may run out of memory before it is given up
OUT_OF_MEMORY = 3


_READING_KEY = "behaviour key"


@dataclass
class _Found:
    """A call on its way: `sure` where its behaviour key was read since the generation began."""

    call: Call
    generic: Signature
    key: Hashable
    plan: Plan | None
    behaviour: int
    device: torch.device
    sure: bool


class Accelerator:
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
        self.module = module
        self.config = config or Config()
        self.hooks = hooks or Hooks()
        self.report = report or Report()
        self.name = name
        self.whole = whole
        self.parts: list[Accelerator] = []
        self.arena: WeightArena = WeightArena(module) if whole is None else whole.arena.part(module)
        self._lock: threading.RLock = threading.RLock() if whole is None else whole._lock
        self._building: threading.Lock = threading.Lock() if whole is None else whole._building
        self._shelf = Shelf(self.arena, self.report, self._lock, self.config.max_plans)
        self._static_numbers: set[Signature] = set()
        self._barren: Counter[Signature] = Counter()
        self._keys = self._new_keys()
        self._released = False
        self._inside = threading.local()
        self._slot = Slot(module, self)

    @property
    def plans(self) -> OrderedDict[Hashable, Plan]:
        """The plans there are, least recently used first."""
        return self._shelf.plans

    def install(self) -> Accelerator:
        """Take the module's forward; under accelerate's hook where there is one. Idempotent."""
        self._released = False
        if self._slot.install():
            self._forget_plans("another forward is in the module's place")
        return self

    def installed(self) -> bool:
        """Whether the module's forward is (still) ours."""
        return self._slot.installed()

    def original(self, *args: Any, **kwargs: Any) -> Any:
        """The forward that was there before."""
        return self._slot.original(*args, **kwargs)

    def configure(self, config: Config) -> None:
        """Change the settings; effective at the next call. Plans are kept where they would be built alike."""
        with self._lock:
            was, self.config = self.config, config
            self._shelf.size = config.max_plans
            if not config.builds_like(was):
                self._drop_all("the settings changed")
            elif was != config:
                self._shelf.pardon()
                self._barren.clear()
                for plan in self.plans.values():
                    plan.no_graph_reason = None
                    if not config.cuda_graphs:
                        plan.drop_graph(pool_for(plan))
            for part in self.parts:
                part.configure(config)

    def new_generation(self) -> None:
        """Tell that a generation begins: the behaviour key is read anew at the next call.

        A host that calls this before each generation spares the calls in between; until it is first called, the key
        is read at every call.
        """
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
                    self.report.fallback(f"{foreign} is in place of the forward of {name}")
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
            if not self.arena.move_to(module):
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
            device = _device(self.module)
            return {
                "name": self.name,
                "module": type(self.module).__qualname__,
                "device": str(device),
                "installed": self.installed(),
                "plans": [plan.status() for plan in list(self.plans.values())],
                "parts": [part._summary() for part in self.parts],
                "weights": self.arena.status(),
                "graph_pool": pool_of(device).status() if device is not None and device.type == "cuda" else None,
            }

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # what the whole captures or is compared with is the original down to its parts
        aside = self._released or (self.whole is not None and getattr(_thread, "building", False))
        if aside or getattr(self._inside, "busy", False) or not self.config.enabled:
            return self.original(*args, **kwargs)
        self._inside.busy = True
        try:
            return self._decide(args, kwargs)
        finally:
            self._inside.busy = False

    def _decide(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        found: _Found | None = None
        try:
            found = self._find(args, kwargs)
            if found.plan is not None and not found.sure:
                # The replay is on its way while the key is read; where it has changed, its result is thrown away.
                result = self._run(found, args, kwargs)
                if self._read_keys()[0] == found.behaviour:
                    return self._used(found, result)
                self.report.count("discarded")
                found = self._find(args, kwargs)
            if found.plan is not None:
                return self._used(found, self._run(found, args, kwargs))
        except (NotOurs, WeightsAway) as exc:
            self.report.fallback(str(exc))
            found = None
        except WeightsChanged as exc:
            self._weights_changed(exc)
        except _OriginalFailed as exc:
            raise exc.cause from None
        except Exception as exc:
            self._failed(exc, found, building=False)
            found = None

        started = time.perf_counter()
        result = self.original(*args, **kwargs)
        if found is not None and self._building.acquire(blocking=False):
            try:
                with _building():
                    self._build(found, result, args, kwargs, time.perf_counter() - started)
            except WeightsAway as exc:
                self.report.fallback(str(exc))
            except WeightsChanged as exc:
                self._weights_changed(exc)
            except Exception as exc:
                self._failed(exc, found, building=True)
            finally:
                self._lay_back()
                self._building.release()
        return result

    def _failed(self, exc: Exception, found: _Found | None, *, building: bool) -> None:
        """Note an exception of ours, and put aside what it came from. Nothing is raised: the call goes on."""
        where = stage()
        self.report.error(where, exc)
        if found is None or (found.plan is None and not building) or where == _READING_KEY:
            return
        try:
            plan = None if building else found.plan
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
                whole.arena.release()
            except Exception as exc:
                self.report.error("laying the weights back", exc)

    def _weights_changed(self, exc: WeightsChanged) -> None:
        try:
            # what was captured for nothing stays counted, or weights that change at every call would have no end of it
            self._drop_all(str(exc), barren=False)
        except Exception as again:
            self.report.error("giving up a plan", again)

    def _read_keys(self) -> tuple[int, str | None]:
        at(_READING_KEY)
        return self._keys.read()

    def _find(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Found:
        """The call, its key and its plan, None where one is to be built.

        Raises:
            NotOurs: the original forward is to run.
            WeightsAway, WeightsChanged: see `WeightArena.sync`.
        """
        if torch.is_grad_enabled():
            raise NotOurs("gradients are being recorded")
        at("stand_aside of the host")
        reason = self.hooks.stand_aside() if self.hooks.stand_aside else None
        if reason:
            raise NotOurs(reason)
        device = _device(self.module)
        if device is None or device.type not in ("cuda", "cpu"):
            raise NotOurs(f"the model is on {'no device' if device is None else device}, not on a GPU")
        if device.type == "cpu" and not self.config.allow_cpu:
            raise NotOurs("the model is on the CPU, and running there is switched off in the settings")
        at("arguments")
        call = flatten_call(args, kwargs, device)
        generic = call.signature
        if generic in self._static_numbers:
            call = flatten_call(args, kwargs, device, static_numbers=True)
        if self.hooks.prepare is not None:
            # first of all: it may give a layer a bias, which the key is to show
            at("prepare of the host")
            self.hooks.prepare()
        known = self._keys.last
        sure = known is None or self._keys.sure
        behaviour, foreign = self._read_keys() if known is None else known
        if foreign and not sure:
            behaviour, foreign = self._read_keys()
            sure = True
        if foreign:
            raise NotOurs(foreign)
        at("key of the host")
        key = (call.signature, behaviour, self.hooks.key() if self.hooks.key else None, device)
        plan = self.plans.get(key)
        if plan is None and not sure:
            # only a plan may run on the key of the last call: what keeps one away may be gone
            now, foreign = self._read_keys()
            if now != behaviour or foreign:
                return self._find(args, kwargs)
            sure = True
        refused = self._shelf.refusal(key)
        if refused is not None:
            raise NotOurs(refused)
        if plan is not None:
            self._barren[generic] = 0
        elif self._barren[generic] >= BARREN:
            raise NotOurs("what the model computes changes at every call, so plans would never be used twice")
        at("weights")
        copied = self.arena.sync()
        if copied:
            self.report.count("weights_copied", copied)
        return _Found(call, generic, key, plan, behaviour, device, sure)

    def _run(self, found: _Found, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        plan = found.plan
        assert plan is not None
        at("replay")
        with self._guard(plan):
            outputs = self._outputs(plan, found.call)
        if self.config.check == "always" or (self.config.check == "first" and plan.error is None):
            try:
                result = self.original(*args, **kwargs)
            except Exception as exc:
                raise _OriginalFailed(exc) from exc
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

    def _used(self, found: _Found, result: Any) -> Any:
        plan = found.plan
        assert plan is not None
        at("keeping the plan")
        self._shelf.touch(found.key)
        plan.replays += 1
        self.report.count("replays" if plan.has_graph else "eager_runs")
        return result

    def _outputs(self, plan: Plan, call: Call) -> list[torch.Tensor]:
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

    def _build(
        self, found: _Found, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any], original_s: float
    ) -> None:
        started = time.perf_counter()
        call, key, device = found.call, found.key, found.device
        away = next((p.device for p in self.module.parameters() if p.device != device), None)
        if away is not None:
            # not refused: they may be back at the next call
            self.report.fallback(f"some weights are on {away}, others on {device}")
            return
        self._barren[found.generic] += 1
        if not self.plans:
            # theirs would keep the weights from being packed for all of it
            for part in self.parts:
                part._forget_plans("the model is captured as a whole")
        at("weights")
        self.arena.sync()
        at("capture")
        try:
            with uncollected():
                inputs = call.tensors(device)
                captured = capture(self._slot.original, call, inputs, self.arena, self.hooks.ignored)
                plan = rewritten(captured, call, self.arena, device, self.config)
        except CaptureRefused as exc:
            has_numbers = any(not isinstance(leaf, torch.Tensor) for leaf in call.leaves)
            if exc.reads_value and has_numbers and found.generic not in self._static_numbers:
                # it may be one of the numbers that it looks at: next time they are part of the signature
                self._static_numbers.add(found.generic)
                self.report.event("capture", f"numbers become part of the signature: {exc}")
                return
            self._shelf.refuse(key, str(exc))
            return
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
        plan.first_call_s = round(original_s + time.perf_counter() - started, 3)
        if refusal:
            self._shelf.refuse(key, refusal)
        else:
            self.report.event("plan", f"{plan.state}: {plan.signature.words()}, built in {plan.first_call_s} s")

    def _made_room(self, exc: Exception, plan: Plan | None) -> bool:
        """Out of memory: the graphs' memory goes to the original's run. True where `plan` may be used again."""
        if not isinstance(exc, torch.cuda.OutOfMemoryError):
            return False
        device = _device(self.module)
        if device is not None and device.type == "cuda":
            pool_of(device).make_room(self.report)
        if plan is None:
            return False
        plan.out_of_memory += 1
        return plan.out_of_memory < OUT_OF_MEMORY

    def _drop_all(self, reason: str, *, barren: bool = True) -> None:
        """Drop the plans of the whole model: they share their weights."""
        whole = self.whole or self
        for accelerator in (whole, *whole.parts):
            accelerator._forget_plans(reason, barren=barren)

    def _forget_plans(self, reason: str | None, *, barren: bool = True) -> None:
        with self._lock:
            if barren:
                self._barren.clear()
            self._shelf.clear(reason)

    def _clear(self) -> None:
        self._forget_plans(None)

    def _summary(self) -> dict[str, Any]:
        plans = list(self.plans.values())
        return {"name": self.name, "plans": len(plans), "replays": sum(plan.replays for plan in plans)}

    def _release_parts(self) -> None:
        with contextlib.ExitStack() as each:
            for part in self.parts:
                each.callback(part.release)
            self.parts = []

    def _new_keys(self, first: int = 0) -> BehaviourKeys:
        hooks = self.hooks
        return BehaviourKeys(self.module, hooks.ignored, hooks.recognised, self.config.max_plans, first)

    def _guard(self, plan: Plan) -> Any:
        # graphs of one pool share memory; on a CPU only the plan's own state is at stake
        pool = pool_for(plan)
        return pool.lock if pool is not None else self._lock


class _OriginalFailed(Exception):
    """The original forward itself raised: the host's error, to be passed on as it is."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(str(cause))
        self.cause = cause


_thread = threading.local()


@contextlib.contextmanager
def _building() -> Iterator[None]:
    _thread.building = True
    try:
        yield
    finally:
        _thread.building = False


def _device(module: nn.Module) -> torch.device | None:
    for parameter in module.parameters():
        return parameter.device
    return None


def accelerate(module: nn.Module, config: Config | None = None, **options: Any) -> Accelerator:
    """Put an accelerator in front of a module's forward.

    Args:
        module: the network, e.g. `pipe.unet`.
        config: see `Config`; options are those of `Accelerator`.

    Returns:
        The accelerator; its `release()` gives everything back.
    """
    return Accelerator(module, config, **options).install()
