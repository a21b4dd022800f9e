"""The accelerator stands in for one module's forward: for each call it decides which plan runs, or that the original
does. It knows a callable and tensors; what a WebUI adds comes in through `Hooks`."""

from __future__ import annotations

import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from sfast_ext.behaviour import Fingerprint, fingerprint
from sfast_ext.capture import CaptureRefused, capture
from sfast_ext.config import Config
from sfast_ext.graph_pool import GraphPool, pool_of
from sfast_ext.plan import Plan, relative_error
from sfast_ext.proof import prove, rewritten, too_far
from sfast_ext.report import Report
from sfast_ext.signature import Call, NotOurs, Signature, flatten_call, flatten_output
from sfast_ext.slot import Slot
from sfast_ext.weights import WeightArena, WeightsAway, WeightsChanged

# captures of one signature that nothing replayed before its behaviour changed again
BARREN = 4
# times that one plan may run out of memory before it is given up
OUT_OF_MEMORY = 3


@dataclass
class Hooks:
    """What a host adds to an accelerator. Each is optional."""

    stand_aside: Callable[[], str | None] | None = None
    """At each call: why the original forward must run, or None. Microseconds."""
    prepare: Callable[[], None] | None = None
    """At each call, before the weights are looked at: bring lazy weights up to date."""
    key: Callable[[], Hashable] | None = None
    """At each call: behaviour that shows in no argument and in no attribute of a module."""
    recognised: Callable[[nn.Module, str, Any], bool] | None = None
    """Vouches for a patch on a submodule: (module, "forward" or "hook", function). Others mean the original forward."""
    ignored: frozenset[str] = frozenset()
    """Module attributes that are bookkeeping of the host's, and change without changing what a forward computes."""


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
    """

    def __init__(
        self,
        module: nn.Module,
        config: Config | None = None,
        *,
        hooks: Hooks | None = None,
        report: Report | None = None,
        name: str = "unet",
    ) -> None:
        self.module = module
        self.config = config or Config()
        self.hooks = hooks or Hooks()
        self.report = report or Report()
        self.name = name
        self.arena = WeightArena(module)
        self.plans: OrderedDict[Hashable, Plan] = OrderedDict()
        self._refused: OrderedDict[Hashable, str] = OrderedDict()
        self._static_numbers: set[Signature] = set()
        self._barren: Counter[Signature] = Counter()
        self._behaviours: OrderedDict[Hashable, tuple[int, Fingerprint]] = OrderedDict()
        self._behaviour_count = 0
        self._behaviour: tuple[int, str | None] | None = None
        self._behaviour_read = False
        self._scene: Fingerprint | None = None
        self._ticks = False
        self._released = False
        self._lock = threading.RLock()
        self._building = threading.Lock()
        self._inside = threading.local()
        self._slot = Slot(module, self)

    def install(self) -> Accelerator:
        """Take the module's forward; under accelerate's hook where there is one. Idempotent."""
        self._released = False
        self._slot.install()
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
            if not config.builds_like(was):
                self._drop_all("the settings changed")
            elif was != config:
                self._refused.clear()
                for plan in self.plans.values():
                    plan.no_graph_reason = None
                    if not config.cuda_graphs:
                        plan.drop_graph(self._pool_of(plan))

    def new_generation(self) -> None:
        """Tell that a generation begins: the behaviour key is read anew at the next call.

        A host that calls this before each generation spares the calls in between; until it is first called, the key
        is read at every call.
        """
        self._ticks = True
        self._behaviour_read = False

    def release(self) -> None:
        """Give back the forward, the parameters and the memory. Idempotent."""
        with self._lock:
            # somebody may hold our forward still, and call it
            self._released = True
            self._slot.release()
            self._drop_all(None)
            self.arena.release()
            self._refused.clear()
            self._behaviours.clear()
            self._behaviour = self._scene = None

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
                "weights": self.arena.status(),
                "graph_pool": pool_of(device).status() if device is not None and device.type == "cuda" else None,
            }

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._released or getattr(self._inside, "busy", False) or not self.config.enabled:
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
                if self._read_behaviour()[0] == found.behaviour:
                    return self._used(found, result)
                self.report.count("discarded")
                found = self._find(args, kwargs)
            if found.plan is not None:
                return self._used(found, self._run(found, args, kwargs))
        except (NotOurs, WeightsAway) as exc:
            self.report.fallback(str(exc))
            found = None
        except WeightsChanged as exc:
            self._drop_all(str(exc))
        except _OriginalFailed as exc:
            raise exc.cause from None
        except Exception as exc:
            self.report.error("replay" if found else "decision", exc)
            if found is not None and found.plan is not None and not self._made_room(exc, found.plan):
                self._refuse(found.key, f"its plan failed: {type(exc).__name__}: {exc}")
            found = None

        started = time.perf_counter()
        result = self.original(*args, **kwargs)
        if found is not None and self._building.acquire(blocking=False):
            try:
                self._build(found, result, args, kwargs, time.perf_counter() - started)
            except WeightsAway as exc:
                self.report.fallback(str(exc))
            except WeightsChanged as exc:
                self._drop_all(str(exc))
            except Exception as exc:
                self.report.error("building a plan", exc)
                self._made_room(exc, None)
                self._refuse(found.key, f"no plan could be built: {type(exc).__name__}: {exc}")
            finally:
                self._building.release()
        return result

    def _find(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Found:
        """The call, its key and its plan, None where one is to be built.

        Raises:
            NotOurs: the original forward is to run.
            WeightsAway, WeightsChanged: see `WeightArena.sync`.
        """
        if torch.is_grad_enabled():
            raise NotOurs("gradients are being recorded")
        reason = self.hooks.stand_aside() if self.hooks.stand_aside else None
        if reason:
            raise NotOurs(reason)
        device = _device(self.module)
        if device is None or device.type not in ("cuda", "cpu"):
            raise NotOurs(f"the model is on {'no device' if device is None else device}, not on a GPU")
        if device.type == "cpu" and not self.config.allow_cpu:
            raise NotOurs("the model is on the CPU, and running there is switched off in the settings")
        call = flatten_call(args, kwargs, device)
        generic = call.signature
        if generic in self._static_numbers:
            call = flatten_call(args, kwargs, device, static_numbers=True)
        if self.hooks.prepare is not None:
            # first of all: it may give a layer a bias, which the key is to show
            self.hooks.prepare()
        known = self._behaviour
        sure = known is None or (self._ticks and self._behaviour_read)
        behaviour, foreign = self._read_behaviour() if known is None else known
        if foreign and not sure:
            behaviour, foreign = self._read_behaviour()
            sure = True
        if foreign:
            raise NotOurs(foreign)
        key = (call.signature, behaviour, self.hooks.key() if self.hooks.key else None, device)
        plan = self.plans.get(key)
        if plan is None and not sure:
            # only a plan may run on the key of the last call: what keeps one away may be gone
            now, foreign = self._read_behaviour()
            if now != behaviour or foreign:
                return self._find(args, kwargs)
            sure = True
        refused = self._refused.get(key)
        if refused is not None:
            raise NotOurs(refused)
        if plan is not None:
            self._barren[generic] = 0
        elif self._barren[generic] >= BARREN:
            raise NotOurs("what the model computes changes at every call, so plans would never be used twice")
        copied = self.arena.sync()
        if copied:
            self.report.count("weights_copied", copied)
        return _Found(call, generic, key, plan, behaviour, device, sure)

    def _read_behaviour(self) -> tuple[int, str | None]:
        """A number for what the module computes now, and the foreign patch that keeps us away, if any."""
        if self._behaviour is not None and self._scene is not None and not self._ticks and self._scene.holds():
            return self._behaviour
        read = fingerprint(self.module, self.hooks.ignored)
        known = self._behaviours.get(read.key)
        if known is None:
            known = self._behaviours[read.key] = (self._behaviour_count, read)
            self._behaviour_count += 1
            while len(self._behaviours) > self.config.max_plans:
                self._behaviours.popitem(last=False)
        self._behaviours.move_to_end(read.key)
        self._scene = read
        vouch = self.hooks.recognised
        foreign = [p for p in read.patches if vouch is None or not vouch(p.module, p.kind, p.function)]
        self._behaviour = (known[0], foreign[0].words() if foreign else None)
        self._behaviour_read = True
        return self._behaviour

    def _run(self, found: _Found, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        plan = found.plan
        assert plan is not None
        with self._guard(plan):
            outputs = self._outputs(plan, found.call)
        if self.config.check == "always":
            try:
                result = self.original(*args, **kwargs)
            except Exception as exc:
                raise _OriginalFailed(exc) from exc
            plan.error = relative_error(outputs, flatten_output(result)[1])
            if not plan.error <= self.config.tolerance:
                self._refuse(found.key, too_far(plan.error, self.config))
            return result
        return plan.output(outputs)

    def _used(self, found: _Found, result: Any) -> Any:
        plan = found.plan
        assert plan is not None
        plan.replays += 1
        self.report.count("replays" if plan.has_graph else "eager_runs")
        if found.key in self.plans:
            self.plans.move_to_end(found.key)
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
        return plan.capture_graph(call.leaves, pool, self.report, config.max_graphs, config.graph_memory_mb)

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
        self.arena.sync()
        try:
            captured = capture(self._slot.original, call, call.tensors(device), self.arena)
        except CaptureRefused as exc:
            has_numbers = any(not isinstance(leaf, torch.Tensor) for leaf in call.leaves)
            if exc.reads_value and has_numbers and found.generic not in self._static_numbers:
                # it may be one of the numbers that it looks at: next time they are part of the signature
                self._static_numbers.add(found.generic)
                self.report.event("capture", f"numbers become part of the signature: {exc}")
                return
            self._refuse(key, str(exc))
            return
        plan = rewritten(captured, call, self.arena, device, self.config)
        with self._lock:
            self.arena.bind(plan.weights)
            self.plans[key] = plan
            while len(self.plans) > self.config.max_plans:
                self._drop(next(iter(self.plans)))
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
            self._drop(key)
            raise
        plan.first_call_s = round(original_s + time.perf_counter() - started, 3)
        if refusal:
            self._refuse(key, refusal)
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

    def _refuse(self, key: Hashable, reason: str) -> None:
        with self._lock:
            self._drop(key)
            self._refused[key] = reason
            while len(self._refused) > 4 * self.config.max_plans:
                self._refused.popitem(last=False)
        self.report.event("refused", reason)

    def _drop(self, key: Hashable) -> None:
        with self._lock:
            plan = self.plans.pop(key, None)
            if plan is None:
                return
            self.arena.unbind(plan.weights)
            plan.close(self._pool_of(plan))

    def _drop_all(self, reason: str | None) -> None:
        with self._lock:
            if reason and self.plans:
                self.report.event("plans", f"all plans are dropped: {reason}")
            for key in list(self.plans):
                self._drop(key)
            self._refused.clear()
            self._barren.clear()

    def _pool_of(self, plan: Plan) -> GraphPool | None:
        return pool_of(plan.device) if plan.device.type == "cuda" else None

    def _guard(self, plan: Plan) -> Any:
        # graphs of one pool share memory; on a CPU only the plan's own state is at stake
        pool = self._pool_of(plan)
        return pool.lock if pool is not None else self._lock


class _OriginalFailed(Exception):
    """The original forward itself raised: the host's error, to be passed on as it is."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(str(cause))
        self.cause = cause


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
