"""The accelerator replaces the forward of one module. For each call it decides between a plan and the original forward.
It knows a callable and tensors, nothing of Stable Diffusion or of a WebUI. A host adds knowledge through `Hooks`."""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, cast

import torch
from torch import nn

from sfast_ext import environment, reasons
from sfast_ext.behaviour.forward_slot import ForwardSlot, foreign_forward, owner_of
from sfast_ext.behaviour.structure import structure
from sfast_ext.config import Config
from sfast_ext.hooks import Hooks
from sfast_ext.kernels.backend.precompile import get_ready
from sfast_ext.plans.payback import CaptureBackoff
from sfast_ext.plans.plan import Plan
from sfast_ext.report import Report
from sfast_ext.runtime import lean_calls, left_aside, residency
from sfast_ext.runtime.building import building
from sfast_ext.runtime.call_server import CallServer
from sfast_ext.runtime.model_state import ModelState, ModuleContext
from sfast_ext.runtime.plan_builder import PlanBuilder
from sfast_ext.runtime.plan_cache import PlanCache, PlanKey, Waiting
from sfast_ext.runtime.plan_finder import PlanFinder
from sfast_ext.runtime.plan_runner import Failures, PlanRunner
from sfast_ext.runtime.status import status
from sfast_ext.torch_state import compiles
from sfast_ext.weights.arena import WeightArena
from sfast_ext.weights.aside import Hidden
from sfast_ext.weights.submodule_arena import SubmoduleArena
from sfast_ext.weights.weight import WeightsAway


class Accelerator:
    """Runs plans in place of a module's forward.

    Args:
        module: the network, e.g. a UNet. Its tree is not touched.
        config: see `Config`.
        hooks: callbacks of the host.
        report: records decisions and errors. A new one if None.
        name: the name of the module in the report.
        whole: the accelerator of the network that `module` is a part of, see `accelerate_parts`. The part shares its
            weights and locks.
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
        self.name = name
        self.whole = whole
        self.report = report or Report()
        self._model: ModelState[Accelerator] = ModelState(self, module) if whole is None else whole._model
        self.arena: WeightArena = self._model.arena if whole is None else SubmoduleArena(self._model.arena, module)
        self.arena.is_table = lambda tensor: self._finder.keys.has(tensor)
        self.restores_for_saving = True
        """Whether `state_dict()` of the module restores the original layout of the weights."""
        self.calls = 0
        """Calls of the module. Nested calls, and calls while a plan of the whole is built, are not counted."""
        self._released = False
        self._inside = threading.local()

        config = config or Config()
        self._context = context = ModuleContext(
            module,
            config,
            hooks or Hooks(),
            self.report,
            ForwardSlot(module, self, saving=whole is None),
            self.arena,
            self._model,
            is_part=whole is not None,
        )
        self._cache = cache = PlanCache(self.arena, self.report, self._model.lock, config.max_plans)
        self._backoff = backoff = CaptureBackoff()
        self._runner = runner = PlanRunner(context, cache)
        failures = Failures(context, cache)
        self._builder = builder = PlanBuilder(context, cache, runner, failures, backoff)
        self._finder = finder = PlanFinder(context, cache, builder.roles, backoff, builder.changes)
        self._server = CallServer(context, cache, finder, runner, builder, failures, backoff)

    @property
    def module(self) -> nn.Module:
        """The module whose forward is accelerated."""
        return self._context.module

    @property
    def config(self) -> Config:
        """The settings, see `configure`."""
        return self._context.config

    @property
    def hooks(self) -> Hooks:
        """Callbacks of the host."""
        return self._context.hooks

    @property
    def plans(self) -> OrderedDict[PlanKey, Plan]:
        """All plans, least recently used first."""
        return self._cache.plans

    @property
    def waiting(self) -> Waiting | None:
        """The last call that got no plan because none was earned."""
        return self._cache.waiting

    @property
    def parts(self) -> list[Accelerator]:
        """The accelerators of submodules, see `accelerate_parts`."""
        return self._context.parts

    def install(self) -> Accelerator:
        """Replace the forward of the module, below accelerate's hook if there is one. Idempotent."""
        self._released = False
        if self.config.triton:
            get_ready(environment.triton_runs_on)
        if left_aside.install(self._context):
            self.forget_plans("another forward is in the module's place")
        return self

    def installed(self) -> bool:
        """Whether our forward is in the module."""
        return self._context.slot.installed()

    def configure(self, config: Config) -> None:
        """Change the settings, from the next call on. Plans are kept if the new settings would build the same ones."""
        with self._model.lock:
            was, self._context.config = self.config, config
            self._cache.size = config.max_plans
            # plans with and without 8 bits are kept next to each other, as requests switch that
            was = replace(was, eight_bits=config.eight_bits)
            if not config.builds_like(was):
                self._model.forget_plans("the settings changed")
            elif was != config:
                self._cache.clear_rejected()
                self._backoff.clear()
                for plan in self.plans.values():
                    plan.no_graph_reason = None
                    if not config.cuda_graphs:
                        plan.drop_graph()
                self._runner.reject_inaccurate()
            for part in self.parts:
                part.configure(config)
            if not (config.enabled and config.eight_bits):
                left_aside.give_back(self._context)
            if self.whole is None and (was.tolerance, was.check) != (config.tolerance, config.check):
                self._model.eight_bits.reconsider(selected=any(plan.banks for plan in self._model.plans()))

    def new_generation(self) -> None:
        """A generation begins: the next call reads the behaviour key.

        After that, calls within the generation only do a quick check. If a host never calls this, every call reads the
        key. From the first call of this method on, the report lists the reasons of the last generations only.
        """
        if self.whole is None:
            self.report.new_generation()
            self._model.new_generation()
        self._server.new_generation()
        self._cache.new_generation()
        self._backoff.new_generation()
        self._finder.keys.begin_generation()
        for part in self.parts:
            part.new_generation()

    def accelerate_parts(self, parts: Iterable[tuple[str, nn.Module]]) -> None:
        """Accelerate submodules one by one. For a third party's forward on this module that calls them itself.

        The parts share the weight arena of this accelerator. Their plans are dropped when it builds its first one.
        Idempotent.

        Args:
            parts: (name for the report, submodule). No submodule may contain another.
        """
        self.bring_weights_back()
        with self._model.lock:
            known = {id(part.module): part for part in self.parts}
            for name, module in parts:
                foreign = foreign_forward(module)
                if foreign is not None:
                    self.report.bypassed(reasons.FORWARD_OF_PART(foreign, name))
                    continue
                part = known.get(id(module))
                if part is None:
                    options: dict[str, Any] = {"hooks": self.hooks, "report": self.report, "whole": self}
                    part = Accelerator(module, self.config, name=f"{self.name}.{name}", **options)
                    self._model.parts.append(part)
                part.install()

    def move_to(self, module: nn.Module, hooks: Hooks) -> bool:
        """Move to another module of the same structure. The plans stay; the next call copies its weights in.

        Precondition: the current module does not use the memory of the plans any more, because its weights are on
        another device or deleted. Returns False and changes nothing if that does not hold, or if the modules differ in
        more than the values of their weights.
        """
        with self._model.lock:
            behaviour, _ = self._finder.keys.read()
            if structure(self.module, self.hooks.ignored) != structure(module, hooks.ignored):
                return False
            try:
                if not self.arena.move_to(module):
                    return False
            except WeightsAway:
                return False
            self._release_parts()
            context = self._context
            context.slot.release()
            context.module, context.hooks, self._released = module, hooks, False
            context.slot = ForwardSlot(module, self, saving=self.whole is None)
            self._finder.follow(behaviour)
            for key in [key for key in self.plans if key.behaviour != behaviour]:
                self._cache.drop(key)
            for plan in self.plans.values():
                plan.weights_due = True
            self._cache.clear_rejected()
        self.install()
        if self.plans:
            self.report.event("plans", f"{len(self.plans)} plans are kept for a model of the same architecture")
        return True

    def release(self) -> None:
        """Restore the forward and the parameters, at once or as `left_aside` does, and free the memory. Idempotent."""
        with self._model.lock:
            # a third party may still hold our forward, and call it
            self._released = True
            with contextlib.ExitStack() as steps:
                # runs them in reverse order, all of them even if one raises
                steps.callback(self._finder.keys.clear)
                steps.callback(self.arena.release)
                steps.callback(left_aside.let_go, self._context)
                steps.callback(self.forget_plans, None)
                self._release_parts()

    def give_memory_back(self) -> bool:
        """Free the GPU memory of the plans, while the host has the weights of the module on another device.

        The plans stay. The next call for which the weights are back allocates new memory and copies them there. CUDA
        graphs are captured again, as they hold the old addresses.

        Returns:
            False if the module's own parameters use some of that memory, which is not freed.
        """
        given, used = self._model.give_memory_back()
        if given:
            self.report.count("memory_given_back")
        return not used

    @property
    def vacant_bytes(self) -> int:
        """GPU memory that the weights of plans are going to take again, after `give_memory_back`."""
        return self._model.arena.vacant_bytes

    def planned_bytes(self, *args: Any) -> int | None:
        """Bytes that the values of a call with these arguments take at one time; None if no plan may serve it alone."""
        return self._finder.planned_bytes(args)

    def fetch_weights(self) -> int:
        """Copy the weights of the module from another device into the memory of the plans; see `WeightArena.fetch`.

        Returns:
            The number of weights copied.

        Raises:
            WeightsAway, WeightsChanged: see `WeightArena.sync`. Some weights may have been copied.
        """
        with self._model.lock:
            return self._model.arena.fetch()

    def keeping_aside(
        self, device: torch.device, early: bool = False
    ) -> contextlib.AbstractContextManager[Hidden | None]:
        """While the host moves the module to the GPU: weights of which plans read 8-bit integers alone stay in system
        memory. If another forward is in the module's place, it may read them, and they come.

        Args:
            early: whether those that the first plan may read so stay as well.
        """
        found = (lean_calls if early else residency).hidden
        return found(self._context, device) if self._sets_aside() else contextlib.nullcontext()

    def leave_early(self) -> bool:
        """After the host has moved the module to the GPU: what `keeping_aside` with `early` would have left in system
        memory goes there now. Whether any has. Raises nothing."""
        return self._sets_aside() and lean_calls.leave_early(self._context)

    def expected_aside(self, device: torch.device) -> int:
        """Bytes of weights that stay in system memory for the first plan, if all of the module comes from there within
        `keeping_aside` with `early`; 0: none do, or there are plans."""
        return lean_calls.expected_bytes(self._context, device) if self._sets_aside() else 0

    def _sets_aside(self) -> bool:
        return self.installed() and not self.parts and self.config.enabled and self.config.eight_bits

    def on_gpu(self, layer: nn.Module) -> contextlib.AbstractContextManager[None]:
        """Within, the weights of a layer that are set aside are on the GPU, if the rest of the module is. For a host
        that changes them, which takes too long in system memory."""
        return residency.lent(self._context, layer)

    def forget_plans(self, reason: str | None, *, at_once: bool = True) -> None:
        """Drop all plans.

        Args:
            reason: reported if there were any plans.
            at_once: whether new plans may be built without backoff.
        """
        with self._model.lock:
            (self._backoff.clear if at_once else self._backoff.restart_counts)()
            if at_once:
                self._server.forget_earnings()
            if self.whole is None:
                self._model.eight_bits.clear()
            self._builder.forget()
            self._cache.clear(reason)

    def drop_plan(self, key: PlanKey) -> None:
        """Drop one plan. Its call builds another."""
        self._cache.drop(key)

    def before_saving(self) -> None:
        """Restore the original layout of the parameters: libraries that save weights refuse other strides."""
        residency.before_saving(self._context, self.restores_for_saving)

    def before_forward(self) -> None:
        """If another forward is in the module's place, it reads the weights that are set aside."""
        if not self.installed():
            (left_aside.let_go if self._released else left_aside.give_back)(self._context)

    def bring_weights_back(self) -> None:
        """Free weights in 8 bits whose half-precision values are in system memory, and move those to the GPU, if the
        module is there and the GPU has room for them. Raises nothing."""
        left_aside.give_back(self._context)

    def status(self) -> dict[str, Any]:
        """The state of this accelerator, for the status page."""
        with self._model.lock:
            plans = list(self.plans.values())
            return status(self.name, self._context, plans, self._server.pace.per_second())

    def run_original(self, *args: Any, **kwargs: Any) -> Any:
        """Run the original forward, see `CallServer.run_original`."""
        return self._server.run_original(*args, **kwargs)

    def run_forward(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the forward of a module that may share parameters with this one, as a shallow copy of it does."""
        return self._context.run_forward(forward, *args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if compiles():
            return self._context.slot.run(args, kwargs)
        if self._released:
            return left_aside.run(self._context, self.run_original, args, kwargs)
        # a part is bypassed inside the original forward of the whole
        bypass = self.whole is not None and building()
        if bypass or getattr(self._inside, "busy", False) or not self.config.enabled:
            return self.run_original(*args, **kwargs)
        self.calls += 1
        self._inside.busy = True
        try:
            return self._server.serve(args, kwargs)
        finally:
            self._inside.busy = False

    def _release_parts(self) -> None:
        with contextlib.ExitStack() as each:
            for part in self.parts:
                each.callback(part.release)
            self.parts.clear()


def accelerate(module: nn.Module, config: Config | None = None, **options: Any) -> Accelerator:
    """Put an accelerator in front of a module's forward.

    Args:
        module: the network, e.g. `pipe.unet`.
        config: see `Config`. Further options are those of `Accelerator`.

    Returns:
        The accelerator. `release()` undoes everything.
    """
    return Accelerator(module, config, **options).install()


def accelerator_of(module: nn.Module) -> Accelerator | None:
    """The accelerator installed on a module, or None."""
    return cast("Accelerator | None", owner_of(module))
