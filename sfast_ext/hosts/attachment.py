"""Keeps accelerators on the networks that a host has loaded; shared by all adapters."""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections.abc import Callable, Container, Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from sfast_ext.accelerator import Accelerator, accelerator_of
from sfast_ext.behaviour.foreign_code import describe
from sfast_ext.behaviour.forward_slot import foreign_forward, forward_of
from sfast_ext.behaviour.structure import structure
from sfast_ext.config import Config
from sfast_ext.hooks import Hooks
from sfast_ext.hosts import gpu_room, reasons, system_memory
from sfast_ext.reasons import Reason, text
from sfast_ext.report import Report
from sfast_ext.weights.module_walk import modules_of
from sfast_ext.weights.original_layout import set_data

Parts = Callable[[nn.Module], Iterable[tuple[str, nn.Module]]]


class Attachment:
    """Keeps an accelerator on each module that the host is about to use, and on no other module.

    Hosts load, switch and unload models from several threads, and not always with a callback. The adapter therefore
    calls `follow` at every occasion that the host gives, and `follow` acts only if something changed.

    Args:
        hooks_for: makes the hooks of a module's accelerator.
        name: how the report calls the module.
        parts: gives the submodules to accelerate one by one, with their names, if another extension's forward
            replaces the module's and may call them itself.
    """

    def __init__(
        self,
        hooks_for: Callable[[nn.Module], Hooks],
        report: Report,
        name: str = "unet",
        parts: Parts | None = None,
    ) -> None:
        self._hooks_for = hooks_for
        self._report = report
        self._name = name
        self._parts = parts
        self._lock = threading.RLock()
        self._accelerators: list[Accelerator] = []
        self._announced: tuple[int, str] | None = None
        # a module, and the forward of another extension that replaces the module's
        self._laid_over: tuple[nn.Module, Any] | None = None
        # in the last step: that forward, and how many calls the module and its parts had had by then
        self._last_step: tuple[Any, int] | None = None
        self._idle_reason: Reason | None = None
        self._switched_off = False

    def follow(self, module: nn.Module | None, config: Config, *, keep: Iterable[nn.Module] = ()) -> Accelerator | None:
        """Accelerate `module` as `config` says, and release every other module.

        Args:
            keep: modules that the host keeps on their device. Their accelerators stay for when they are used again.

        Returns:
            The accelerator of `module`. None if nothing is loaded, `config` disables acceleration, or another
            extension's forward replaces the module's.
        """
        if module is None:
            self.release()
            return None
        return self.follow_all([module], config, keep=keep)[0]

    def follow_all(
        self, modules: Sequence[nn.Module], config: Config, *, keep: Iterable[nn.Module] = ()
    ) -> list[Accelerator | None]:
        """`follow` for several modules that are used together."""
        with self._lock:
            kept = [*modules, *keep]
            if not kept or not config.enabled:
                self._switched_off = self._switched_off or bool(self._accelerators) and not config.enabled
                self.release()
                return [None for _ in modules]
            left = [a for a in self._accelerators if not any(a.module is m for m in kept)]
            followed = [self._follow_one(module, config, left) for module in modules]
            self._release_all(left)
            self._switched_off = False
            return followed

    def unchanged(self, module: nn.Module | None) -> bool:
        """Whether a module is followed and its forward is the one of the last `follow`. Takes microseconds."""
        with self._lock:
            found = next((a for a in self._accelerators if a.module is module), None)
            if found is None or found.installed():
                return found is not None
            return (
                self._laid_over is not None
                and self._laid_over[0] is module
                and self._laid_over[1] is forward_of(found.module)
            )

    def check_parts(self) -> None:
        """Check whether another extension's forward called the module or any of its parts in the last step. If it
        called none, nothing was accelerated, and the report gets the reason. Call it before each step and before
        `follow`."""
        with self._lock:
            before, self._last_step, self._idle_reason = self._last_step, None, None
            found = self._replaced()
            if found is None or self._parts is None or self._laid_over is None:
                return
            forward, calls = self._laid_over[1], _calls(found)
            if before is not None and before[0] is forward and before[1] == calls:
                self._idle_reason = reasons.RUNS_LAYERS(describe(forward))
                self._report.bypassed(self._idle_reason)
            if forward_of(found.module) is forward:
                self._last_step = forward, calls

    def _replaced(self) -> Accelerator | None:
        """The accelerator of the module whose forward another extension replaced."""
        over = self._laid_over
        return None if over is None else next((a for a in self._accelerators if a.module is over[0]), None)

    def holds(self, module: nn.Module) -> bool:
        """Whether a module has an accelerator, whose plans may read its weights."""
        with self._lock:
            return any(a.module is module for a in self._accelerators)

    def accelerators(self) -> list[Accelerator]:
        """Those of all modules."""
        with self._lock:
            return list(self._accelerators)

    def within(self, module: nn.Module) -> list[Accelerator]:
        """The accelerators of a module and of its submodules."""
        with self._lock:
            if not self._accelerators:
                return []
            return self.among(set(map(id, modules_of(module))))

    def among(self, modules: Container[int]) -> list[Accelerator]:
        """The accelerators of modules, which are given by their ids."""
        with self._lock:
            return [a for a in self._accelerators if id(a.module) in modules]

    def drop_plans(self) -> int:
        """Drop all plans of all modules; new ones may be made at once. Returns how many there were."""
        with self._lock:
            dropped = 0
            for accelerator in self._accelerators:
                for each in (accelerator, *accelerator.parts):
                    dropped += len(each.plans)
                    each.forget_plans("the user has dropped them")
            if dropped:
                system_memory.trim()
            return dropped

    def give_memory_back(self) -> None:
        """Free the memory that plans hold of modules whose weights the host has moved; see `Accelerator`."""
        with self._lock:
            for accelerator in self._accelerators:
                accelerator.give_memory_back()

    def suspend(self, module: nn.Module | None = None) -> None:
        """Prepare for the host to exchange its model. Plans are kept for a model of the same architecture: with their
        memory if there is room for another model next to it, and without it if the weights are on another device.

        Args:
            module: what the host removes; all accelerated modules if None.
        """
        with self._lock:
            planned = False
            for accelerator in list(self._accelerators) if module is None else self.within(module):
                stays = gpu_room.has_room_to_wait(accelerator.module) or accelerator.give_memory_back()
                if not accelerator.plans or not stays:
                    planned = self._release(accelerator) or planned
            if planned:
                system_memory.trim()

    def release(self) -> None:
        """Release every module. May be called at any time, any number of times."""
        with self._lock:
            self._release_all(self._accelerators)
            self._announced = self._laid_over = self._last_step = self._idle_reason = None

    def status(self) -> list[dict[str, Any]]:
        """The status of each accelerator. "idle" is the reason why nothing of it ran in the last step."""
        with self._lock:
            accelerators, replaced, idle = list(self._accelerators), self._replaced(), self._idle_reason
        return [{**each.status(), "idle": text(idle) if each is replaced else None} for each in accelerators]

    def _follow_one(self, module: nn.Module, config: Config, left: list[Accelerator]) -> Accelerator | None:
        found = next((a for a in self._accelerators if a.module is module), None)
        if found is None:
            found = self._attach(module, config, left)
        elif not found.installed():
            self._reinstall(found)
        if found is not None and found.config != config:
            found.configure(config)
        return found

    def _attach(self, module: nn.Module, config: Config, left: list[Accelerator]) -> Accelerator | None:
        left_over = accelerator_of(module)
        if left_over is not None:
            # After our release another extension restored our forward, which it had stored; or the host reloaded its
            # scripts without the unload callback.
            left_over.release()
        hooks, foreign = self._hooks_for(module), foreign_forward(module)
        if foreign is None:
            for accelerator in left:
                if self._move_plans(accelerator, module, hooks):
                    left.remove(accelerator)
                    return accelerator
        elif self._parts is None:
            self._announce(module, _bypassed_by(foreign))
            return None
        accelerator = Accelerator(module, config, hooks=hooks, report=self._report, name=self._name)
        self._accelerators.append(accelerator)
        self._announced = None
        self._reinstall(accelerator)
        if self._switched_off and config.earned:
            # who switches it off and on again compares: the next plan need not be earned
            accelerator.forget_plans(None)
        return accelerator

    def _move_plans(self, accelerator: Accelerator, module: nn.Module, hooks: Hooks) -> bool:
        try:
            _give_own_weights(accelerator, module, hooks)
            return accelerator.move_to(module, hooks)
        except Exception as exc:
            self._report.error("moving plans to another model", exc)
            return False

    def _reinstall(self, accelerator: Accelerator) -> None:
        module = accelerator.module
        foreign = foreign_forward(module)
        self._laid_over = None
        if foreign is None:
            # A new module; or another extension removed its forward and restored the class's own, not ours.
            accelerator.install()
            return
        # That extension may hold our forward as the original and call it: to install over it would make a cycle.
        accelerator.bring_weights_back()
        if not gpu_room.on_gpu(module):
            # its plans are of no use meanwhile
            accelerator.give_memory_back()
        self._laid_over = (module, forward_of(module))
        if self._parts is None:
            self._announce(module, _bypassed_by(foreign))
        else:
            what = f"{foreign} replaces the model's forward"
            self._announce(module, f"{what}; the blocks that it calls are accelerated one by one")
            accelerator.accelerate_parts(self._parts(module))
            self._last_step = forward_of(module), _calls(accelerator)

    def _release_all(self, accelerators: Iterable[Accelerator]) -> None:
        planned = [self._release(each) for each in list(accelerators)]
        if any(planned):
            system_memory.trim()

    def _release(self, accelerator: Accelerator) -> bool:
        """Release one. Returns whether it had plans."""
        planned = any(each.plans for each in (accelerator, *accelerator.parts))
        self._accelerators.remove(accelerator)
        try:
            accelerator.release()
        except Exception as exc:
            self._report.error("release", exc)
        return planned

    def _announce(self, module: nn.Module, message: str) -> None:
        # Checked before each step, reported once.
        if self._announced != (id(module), message):
            self._announced = (id(module), message)
            self._report.event("forward replaced", message)


def _bypassed_by(foreign: str) -> str:
    return f"{foreign} replaces the model's forward: bypassed; turn that extension off to accelerate"


def _calls(accelerator: Accelerator) -> int:
    return accelerator.calls + sum(part.calls for part in accelerator.parts)


def is_host_code(function: Any) -> bool:
    """Whether a function is the host's own code, in its package `modules`. The adapters know what that code does."""
    file = getattr(getattr(function, "__code__", None), "co_filename", "")
    return _is_in(file, sys.modules.get("modules"))


@functools.lru_cache(maxsize=1024)
def _is_in(file: str, package: ModuleType | None) -> bool:
    return any(Path(folder) in Path(file).parents for folder in getattr(package, "__path__", ()))


_wrappers: weakref.WeakSet[Any] = weakref.WeakSet()
"""What `wrap` put in the place of functions."""


def wraps_torchs(function: Any) -> bool:
    """Whether a function is our wrapper around a method of torch's modules, which only makes it quicker."""
    wrapped = getattr(function, "__wrapped__", None)
    return function in _wrappers and wrapped is not None and vars(nn.Module).get(wrapped.__name__) is wrapped


def _give_own_weights(accelerator: Accelerator, module: nn.Module, hooks: Hooks) -> None:
    """Give a module its own weights before its plans, and the memory they read, go to another module of the same
    architecture: somebody may still hold it."""
    left = accelerator.module
    here = {plan.device for plan in list(accelerator.plans.values())}
    tensors = [t for t in (*left.parameters(), *left.buffers()) if t.device in here]
    alike = tensors and structure(left, accelerator.hooks.ignored) == structure(module, hooks.ignored)
    if not alike or not gpu_room.has_room_for_second(left):
        return
    with torch.inference_mode(False), torch.no_grad():
        for tensor in tensors:
            set_data(tensor, tensor.detach().clone())


def wrap(owner: Any, name: str, around: Callable[..., Any]) -> Callable[[], None]:
    """Wrap a function of the host for which the host has no callback.

    Args:
        owner: the module or object that has the function as its attribute `name`.
        around: called instead of it, with the original in front of the arguments.

    Returns:
        A function that removes the wrapper. If another extension has wrapped it in turn, it stays and only calls
        the original.
    """
    original = getattr(owner, name)
    there = True

    @functools.wraps(original)
    def ours(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs) if there else original(*args, **kwargs)

    def unwrap() -> None:
        nonlocal there
        there = False
        if getattr(owner, name) is ours:
            setattr(owner, name, original)

    _wrappers.add(ours)
    setattr(owner, name, ours)
    return unwrap
