"""What the adapters share: accelerators that follow the model their host has loaded."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sfast_ext.accelerator import Accelerator
from sfast_ext.behaviour.fingerprint import structure
from sfast_ext.behaviour.foreign_code import described
from sfast_ext.behaviour.forward_slot import accelerator_of, foreign_forward, forward_of
from sfast_ext.config import Config
from sfast_ext.hooks import Hooks
from sfast_ext.hosts import gpu_room
from sfast_ext.report import Report
from sfast_ext.weights.original_layout import set_data

Parts = Callable[[nn.Module], Iterable[tuple[str, nn.Module]]]


class Attachment:
    """Keeps an accelerator on whatever modules the host is about to use, and on no other.

    Hosts load, switch and unload models from several threads and not always with a callback: `follow` is told what is
    about to be used as often as the host gives an occasion, and acts only on a difference.

    Args:
        parts: what to accelerate one by one where another's forward lies over a module and may call them itself.
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
        self._laid_over: tuple[nn.Module, Any] | None = None
        # of the step before: the forward that lay over the module, and the calls that its parts had had
        self._last_step: tuple[Any, int] | None = None
        self._idle_reason: str | None = None

    def follow(self, module: nn.Module | None, config: Config, *, keep: Iterable[nn.Module] = ()) -> Accelerator | None:
        """See to it that `module` is accelerated as `config` says, and that every other module is given back.

        Args:
            keep: modules that the host still holds where they are, whose accelerators stay for their next turn.

        Returns:
            The accelerator of `module`; None where there is none: nothing is loaded, `config` says no, or another
            extension's forward is in the place.
        """
        if module is None:
            self.release()
            return None
        return self.follow_all([module], config, keep=keep)[0]

    def follow_all(
        self, modules: Sequence[nn.Module], config: Config, *, keep: Iterable[nn.Module] = ()
    ) -> list[Accelerator | None]:
        """`follow`, for several modules that are used side by side."""
        with self._lock:
            kept = [*modules, *keep]
            if not kept or not config.enabled:
                self.release()
                return [None for _ in modules]
            left = [a for a in self._accelerators if not any(a.module is m for m in kept)]
            followed = [self._follow_one(module, config, left) for module in modules]
            for accelerator in left:
                self._release(accelerator)
            return followed

    def unchanged(self, module: nn.Module | None) -> bool:
        """Whether nothing changed about the forward of a module since it was followed. Microseconds."""
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
        """Before each step, and before `follow`: whether the forward that lay over the module in the last one called
        it, or any of the parts that are accelerated one by one. Where it called none, that is a reason."""
        with self._lock:
            before, self._last_step, self._idle_reason = self._last_step, None, None
            found = self._replaced()
            if found is None or self._parts is None or self._laid_over is None:
                return
            forward, calls = self._laid_over[1], _calls(found)
            if before is not None and before[0] is forward and before[1] == calls:
                what = f"{described(forward)} replaces the model's forward and calls none of its blocks"
                self._idle_reason = f"{what}; turn that extension off to accelerate"
                self._report.bypassed(self._idle_reason)
            if forward_of(found.module) is forward:
                self._last_step = forward, calls

    def _replaced(self) -> Accelerator | None:
        """The accelerator of the module that another's forward was found over."""
        over = self._laid_over
        return None if over is None else next((a for a in self._accelerators if a.module is over[0]), None)

    def holds(self, module: nn.Module) -> bool:
        """Whether plans may read the weights of a module."""
        with self._lock:
            return any(a.module is module for a in self._accelerators)

    def within(self, module: nn.Module) -> list[Accelerator]:
        """The accelerators of a module and of those in it."""
        with self._lock:
            if not self._accelerators:
                return []
            inner = {id(m) for m in module.modules()}
            return [a for a in self._accelerators if id(a.module) in inner]

    def give_memory_back(self) -> None:
        """Give back what plans hold of modules whose weights the host has elsewhere, see the accelerator's."""
        with self._lock:
            for accelerator in self._accelerators:
                accelerator.give_memory_back()

    def suspend(self, module: nn.Module | None = None) -> None:
        """The host exchanges its model: plans stay for one of the same architecture, with their memory where there is
        room for another, and without it where the weights are elsewhere.

        Args:
            module: what leaves; by default all that is accelerated.
        """
        with self._lock:
            for accelerator in list(self._accelerators) if module is None else self.within(module):
                stays = gpu_room.has_room_to_wait(accelerator.module) or accelerator.give_memory_back()
                if not accelerator.plans or not stays:
                    self._release(accelerator)

    def release(self) -> None:
        """Give back every module; may be called at any time, any number of times."""
        with self._lock:
            for accelerator in list(self._accelerators):
                self._release(accelerator)
            self._announced = self._laid_over = self._last_step = self._idle_reason = None

    def status(self) -> list[dict[str, Any]]:
        """The accelerators' parts of the status."""
        with self._lock:
            accelerators, replaced, idle = list(self._accelerators), self._replaced(), self._idle_reason
        reasons = [idle if accelerator is replaced else None for accelerator in accelerators]
        return [{**accelerator.status(), "idle": why} for accelerator, why in zip(accelerators, reasons)]

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
            # Another extension that had stored our forward put it back after our release, or scripts were loaded anew
            # without the unload callback.
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
            # New, or whoever was over us put the class's own forward back, not ours.
            accelerator.install()
            return
        # It may hold our forward as its original and restore it: to install over it would make a ring.
        self._laid_over = (module, forward_of(module))
        if self._parts is None:
            self._announce(module, _bypassed_by(foreign))
        else:
            what = f"{foreign} replaces the model's forward"
            self._announce(module, f"{what}; the blocks that it calls are accelerated one by one")
            accelerator.accelerate_parts(self._parts(module))
            self._last_step = forward_of(module), _calls(accelerator)

    def _release(self, accelerator: Accelerator) -> None:
        self._accelerators.remove(accelerator)
        try:
            accelerator.release()
        except Exception as exc:
            self._report.error("release", exc)

    def _announce(self, module: nn.Module, message: str) -> None:
        # Asked before each step; said once.
        if self._announced != (id(module), message):
            self._announced = (id(module), message)
            self._report.event("forward replaced", message)


def _bypassed_by(foreign: str) -> str:
    return f"{foreign} replaces the model's forward: bypassed; turn that extension off to accelerate"


def _calls(accelerator: Accelerator) -> int:
    return accelerator.calls + sum(part.calls for part in accelerator.parts)


def is_host_code(function: Any) -> bool:
    """Whether a function is the WebUI's own code, of its package `modules`: what it does is known to the adapters."""
    file = getattr(getattr(function, "__code__", None), "co_filename", "")
    folders = getattr(sys.modules.get("modules"), "__path__", ())
    return any(Path(folder) in Path(file).parents for folder in folders)


def _give_own_weights(accelerator: Accelerator, module: nn.Module, hooks: Hooks) -> None:
    """Give the module that plans may leave for another of its kind weights of its own: somebody may hold it still."""
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
    """Lay a function around one of the host's, for which it has no callback.

    Args:
        owner: the module or object whose attribute `name` it is.
        around: called in its place, with the original before the arguments.

    Returns:
        What takes it away again. Where another extension wrapped ours in turn, it stays there and only passes on.
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

    setattr(owner, name, ours)
    return unwrap
