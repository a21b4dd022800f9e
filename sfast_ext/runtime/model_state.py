"""What the objects around a model share: `ModelState` for all of it, `ModuleContext` for one accelerated module."""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import nn

from sfast_ext.behaviour.forward_slot import ForwardSlot
from sfast_ext.config import Config
from sfast_ext.hooks import Hooks
from sfast_ext.report import Report
from sfast_ext.runtime.plan import Plan
from sfast_ext.runtime.plan_cache import pool_for
from sfast_ext.weights.arena import WeightArena
from sfast_ext.weights.submodule_arena import Arena


class HasPlans(Protocol):
    """What a model's state needs of each of its accelerators."""

    @property
    def plans(self) -> OrderedDict[Hashable, Plan]:
        """Its plans by key."""

    def forget_plans(self, reason: str | None, *, at_once: bool = True) -> None:
        """Drop them."""


A = TypeVar("A", bound=HasPlans)


class ModelState(Generic[A]):
    """What the accelerators of a model and of its parts share.

    Attributes:
        whole: the accelerator of the model.
        parts: those of submodules that are accelerated one by one.
        arena: the weights of the model. Parts read them where the whole does.
        lock: held while plans come and go.
        build_lock: held by the thread that builds a plan; one at a time.
    """

    def __init__(self, whole: A, module: nn.Module) -> None:
        self.whole = whole
        self.parts: list[A] = []
        self.arena = WeightArena(module)
        self.lock = threading.RLock()
        self.build_lock = threading.Lock()

    def accelerators(self) -> tuple[A, ...]:
        """The whole's and the parts'."""
        return (self.whole, *self.parts)

    def forget_plans(self, reason: str, *, at_once: bool = True) -> None:
        """Drop the plans of all of it: they share their weights."""
        for accelerator in self.accelerators():
            accelerator.forget_plans(reason, at_once=at_once)

    def restore_layout(self, report: Report) -> None:
        """Where there are no plans, the original forward runs on weights that lie as its host knows them."""
        if not any(accelerator.plans for accelerator in self.accelerators()):
            try:
                self.arena.restore_layout()
            except Exception as exc:
                report.error("laying the weights back", exc)

    def give_memory_back(self) -> bool | None:
        """Give back the GPU memory of all plans, while the host has the weights of the model on another device.

        Returns:
            True where memory was given back, False where plans hold none, and None where the module's own parameters
            lie in it.
        """
        with self.lock, contextlib.ExitStack() as locks:
            plans = [plan for each in self.accelerators() for plan in each.plans.values()]
            for pool in {id(pool): pool for plan in plans if (pool := pool_for(plan)) is not None}.values():
                locks.enter_context(pool.lock)
            given = self.arena.vacancies([weight for plan in plans for weight in plan.weights])
            if not given:
                return None if given is None else False
            for plan in plans:
                plan.drop_graph(pool_for(plan))
            for device in {plan.device for plan in plans if plan.device.type == "cuda"}:
                # what was launched last may read it still
                torch.cuda.synchronize(device)
            self.arena.vacate(given)
        return True


@dataclass
class ModuleContext:
    """One module that is accelerated, for those that look up, run and build its plans.

    Attributes:
        slot: the place of the module's forward.
        arena: the weights of the module.
        model: what is shared with the model that the module is, or is a part of.
        is_part: whether it is a part.
    """

    module: nn.Module
    config: Config
    hooks: Hooks
    report: Report
    slot: ForwardSlot
    arena: Arena
    model: ModelState[Any]
    is_part: bool

    def device(self) -> torch.device | None:
        """That of the module's first parameter."""
        first = _first_parameter(self.module)
        return first.device if first is not None else None

    def original(self, *args: Any, **kwargs: Any) -> Any:
        """The forward that was there before."""
        with self.arena.gate:
            return self.slot.original(*args, **kwargs)


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
