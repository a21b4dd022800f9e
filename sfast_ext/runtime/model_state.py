"""Shared state: `ModelState` of a model and its parts, `ModuleContext` of one accelerated module."""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import nn

from sfast_ext import reasons
from sfast_ext.behaviour.forward_slot import ForwardSlot
from sfast_ext.call_signature import copied
from sfast_ext.config import Config
from sfast_ext.hooks import Hooks
from sfast_ext.plans.graph_pool import pool_of
from sfast_ext.plans.plan import Plan
from sfast_ext.report import Report
from sfast_ext.runtime import shortages
from sfast_ext.runtime.eight_bits import EightBits
from sfast_ext.runtime.plan_cache import PlanKey
from sfast_ext.runtime.run_again import Before
from sfast_ext.weights.arena import WeightArena
from sfast_ext.weights.streamed import NotStreamed, is_theirs, tensors
from sfast_ext.weights.weight import WeightsInUse


class HasPlans(Protocol):
    """What `ModelState` needs of an accelerator."""

    @property
    def plans(self) -> OrderedDict[PlanKey, Plan]:
        """All plans by key."""

    @property
    def module(self) -> nn.Module:
        """What it accelerates."""

    def forget_plans(self, reason: str | None, *, at_once: bool = True) -> None:
        """Drop all plans."""

    def drop_plan(self, key: PlanKey) -> None:
        """Drop one plan."""


_ROOM = 1.5
"""What is to be free before half-precision weights come back, in terms of their bytes."""
_WAIT_S = 10.0
"""How long the original forward waits for other threads that use the weights."""

A = TypeVar("A", bound=HasPlans)
_BUILDING = threading.Lock()


class ModelState(Generic[A]):
    """State shared by the accelerators of a model and of its parts.

    Attributes:
        whole: the accelerator of the model.
        parts: the accelerators of submodules.
        arena: the weights of the model, used by parts as well.
        eight_bits: what its plans with 8-bit integers have in common.
        lock: held while plans are added or removed.
        small: a device, and whether it is small for the model, see `residency.is_small`; None: not known yet.
        streams: whether forwards read weights from system memory for which the GPU has no room.
        crowded: whether all weights found no room in this generation, or a forward none next to them, see
            `ModuleContext.make_way`.
        lean_failed: whether a plan could not be made while weights stayed in system memory, see `lean_calls`.
        builds_in: the thread that builds a plan of this model; None: none does.
        build_lock: held by the thread that builds a plan. One plan is built at a time, of all models: torch's modes for
            recording are one stack for all threads, and builds are timed.
    """

    def __init__(self, whole: A, module: nn.Module) -> None:
        self.whole = whole
        self.parts: list[A] = []
        self.lock = threading.RLock()
        self.arena = WeightArena(module, self.turn)
        self.eight_bits = EightBits()
        self.streams = self.crowded = self.lean_failed = False
        self.builds_in: int | None = None
        self.small: tuple[torch.device, bool] | None = None
        self.build_lock = _BUILDING

    def turn(self, device: torch.device) -> contextlib.AbstractContextManager[Any]:
        """The lock to hold while a plan on a device runs. Graphs of one pool share memory; on a CPU only the plan is
        protected."""
        return pool_of(device).lock if device.type == "cuda" else self.lock

    def new_generation(self) -> None:
        """A generation begins."""
        self.eight_bits.new_generation()
        self.arena.new_generation()
        self.crowded = False

    def accelerators(self) -> tuple[A, ...]:
        """That of the whole and those of the parts."""
        return (self.whole, *self.parts)

    def plans(self) -> list[Plan]:
        """Those of all accelerators, as they are now."""
        return [plan for each in self.accelerators() for plan in list(each.plans.values())]

    def forget_plans(self, reason: str, *, at_once: bool = True) -> None:
        """Drop the plans of all accelerators: they share their weights."""
        for accelerator in self.accelerators():
            accelerator.forget_plans(reason, at_once=at_once)

    def restore_layout(self, report: Report) -> None:
        """Restore the original layout of the weights if there are no plans."""
        if not self.plans():
            try:
                self.arena.restore_layout()
            except Exception as exc:
                report.error("laying the weights back", exc)

    def give_memory_back(self) -> tuple[bool, bool]:
        """Free the GPU memory of all plans that the module's own parameters do not use, while the host has the weights
        of the model, or some of them, on another device.

        Returns:
            Whether memory was freed, and whether parameters use the rest.
        """
        with self.lock, contextlib.ExitStack() as locks:
            plans = self.plans()
            for pool in {id(plan.pool): plan.pool for plan in plans if plan.pool is not None}.values():
                locks.enter_context(pool.lock)
            given, used = self.arena.vacancies([weight for plan in plans for weight in plan.weights])
            if not given:
                return False, used
            for plan in plans:
                plan.drop_graph()
            for device in {plan.device for plan in plans if plan.device.type == "cuda"}:
                # the last launch may still read it
                torch.cuda.synchronize(device)
            self.arena.vacate(given)
        return True, used


@dataclass
class ModuleContext:
    """One accelerated module: read by the finder, the runner and the builder of its plans.

    Attributes:
        slot: where the forward of the module is replaced.
        arena: the weights of the module.
        model: shared with the other accelerators of the model.
        is_part: whether the module is a part of the model.
    """

    module: nn.Module
    config: Config
    hooks: Hooks
    report: Report
    slot: ForwardSlot
    arena: WeightArena
    model: ModelState[Any]
    is_part: bool

    @property
    def parts(self) -> list[Any]:
        """The accelerators of the module's parts; none of a part's."""
        return [] if self.is_part else self.model.parts

    def bypassed(self) -> bool:
        """Whether the host wants calls to be bypassed by now. The report gets the reason."""
        why = None if self.hooks.bypass_reason is None else self.hooks.bypass_reason()
        if why:
            self.report.bypassed(reasons.given(why))
        return bool(why)

    def device(self) -> torch.device | None:
        """The device of the first parameter, of those that are not set aside. None if there is none."""
        first, resident = _first_parameter(self.module), self.arena.resident
        if first is not None and resident and resident.is_aside(first):
            first = next((p for p in self.module.parameters() if not resident.is_aside(p)), first)
        return first.device if first is not None else None

    def unconsumed(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Keyword arguments of which a run of the original takes nothing away, see `Hooks.consumed`."""
        consumed = self.hooks.consumed
        return {k: copied(v) if k in consumed else v for k, v in kwargs.items()} if consumed else kwargs

    def run_forward(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a forward that reads the module's parameters, and is no plan."""
        resident = self.arena.resident
        if not resident or resident.is_streamed:
            with self.arena.order.host():
                return forward(*args, **kwargs)
        before = Before(args, kwargs, self.device())
        for last in (False, False, True):
            by_layer = self._must_read_by_layer(last)
            if by_layer is None:
                continue
            try:
                if not by_layer:
                    with self.arena.order.host():
                        # another thread may have set them aside again
                        if last or not resident.out(self.device()):
                            return forward(*args, **kwargs)
                    continue
                result = self._run_without_room(forward, args, kwargs)
                # the forward may have moved it to the device of a weight
                if last or all(x.device == resident.device for x in tensors(result)) or not self.make_way():
                    return result
            except Exception as exc:
                if is_theirs(exc):
                    raise
                # who catches this may run it again
                before.put_back()
                if not by_layer or last or not self.make_way():
                    raise
            # after the handler: the exception keeps what the failed run had allocated
            self.model.crowded = False
            before.put_back()
        raise AssertionError

    def _must_read_by_layer(self, last: bool) -> bool | None:
        """Whether a forward is to read weights by layer, as the GPU has no room for all of them; else they have come.
        None: ask again, as another thread uses them, or there may be room now.

        Args:
            last: whether it is not asked again.

        Raises:
            WeightsInUse: the last time.
        """
        if self.model.crowded and self.arena.resident.out(self.device()):
            return True
        with self.own_shortages():
            try:
                self.bring_back()
                return False
            except WeightsInUse:
                # the host knows no such error
                if last:
                    raise
                return None
            except torch.cuda.OutOfMemoryError:
                pass
        # after the handler: the exception keeps what had come
        return None if not last and self.make_way(for_weights=True) else True

    def run_streamed(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """`run_forward`, while weights that were set aside stay in system memory. Raises whatever an operation raises
        that cannot be run so."""
        return self._streamed(forward, args, kwargs)

    def run_by_layer(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """`run_streamed` for a forward that asks where weights of a layer are, or writes to them. In one thread at a
        time."""
        # before the gate, which another thread may wait for
        with self.arena.resident.alone:
            return self._streamed(forward, args, kwargs, by_layer=True)

    def _streamed(self, forward: Callable[..., Any], args: Any, kwargs: Any, by_layer: bool = False) -> Any:
        with self.arena.order.host():
            if not self.arena.resident.out(self.device()):
                return forward(*args, **kwargs)
            with self.arena.resident.streamed(by_layer):
                return forward(*args, **kwargs)

    def _run_without_room(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a forward while weights stay in system memory, for all of which the GPU has no room."""
        self.tell_short()
        try:
            return self.run_by_layer(forward, *args, **kwargs)
        except NotStreamed as exc:
            raise torch.cuda.OutOfMemoryError(f"CUDA out of memory: {reasons.STREAMS()} ({exc})") from exc

    def own_shortages(self) -> contextlib.AbstractContextManager[None]:
        """See `shortages.counted`."""
        return shortages.counted(self.report, self.device())

    def tell_short(self) -> None:
        """Tell the user that weights stay in system memory, once until they have come."""
        # of a crowded model the user knows already
        if not self.model.streams and not self.model.crowded:
            self.model.streams = True
            self.report.event("8 bits", reasons.STREAMS())

    def _are_in_eight_bits(self, device: torch.device) -> bool:
        """Whether there are plans, and all of them have in 8 bits what was set aside. Without one, weights come for
        good."""
        resident, plans = self.arena.resident, self.model.plans()
        aside = bool(resident) and not resident.in_parts and resident.device == device
        return aside and bool(plans) and all(plan.resident for plan in plans)

    def _read_by_layer(self) -> None:
        """In this generation forwards read half-precision weights by layer. The next one brings them, if it has no
        plan: its images may be smaller."""
        self.model.crowded = True
        self.report.event("8 bits", reasons.CROWDED())

    def _leave_again(self, device: torch.device) -> bool:
        """A forward is short of memory next to half-precision weights that came back: whether they left again."""
        resident = self.arena.resident
        if not self._are_in_eight_bits(device) or resident.out(device):
            return False
        try:
            with self.arena.exclusively(device, _WAIT_S):
                resident.leave()
        except Exception as exc:
            # the host gives way instead
            self.report.error("weights that leave the GPU", exc)
            return False
        if not resident.out(device):
            return False
        torch.cuda.empty_cache()
        self._read_by_layer()
        return True

    def make_way(self, for_weights: bool = False) -> bool:
        """A forward that is no plan is short of memory: whether CUDA graphs and banks were freed for it,
        half-precision weights left, or the host gave way.

        Args:
            for_weights: whether it is the weights that find no room. If plans have them in 8 bits, the forward can do
                without, and the host is not asked: it gives way for good, and has no plans from then on.
        """
        device = self.device()
        if device is None or device.type != "cuda":
            return False
        if not pool_of(device).holds_memory:
            if for_weights and self.config.enabled and self.config.eight_bits and self._are_in_eight_bits(device):
                self._read_by_layer()
                return False
            if self._leave_again(device):
                return True
            short = self.hooks.short_of_memory
            try:
                return short is not None and short()
            except Exception as again:
                # the host knows what its forward raised, and nothing of this
                self.report.error("short_of_memory", again)
                return False
        self.report.count("out_of_memory")
        pool_of(device).make_room(self.report)
        return True

    def bring_back(self) -> None:
        """Move weights that were set aside to the GPU, if the module is there; see `weights.resident`. What plans can
        make again is freed if there is no room.

        Raises:
            WeightsInUse: another thread uses the weights.
            torch.cuda.OutOfMemoryError: there is no room.
        """
        resident, device = self.arena.resident, self.device()
        if device is None or not resident.out(device):
            return
        with self.arena.exclusively(device, _WAIT_S):
            cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
            if torch.cuda.mem_get_info(device)[0] + max(0, cached) < _ROOM * resident.bytes:
                # the forward needs memory as well
                pool_of(device).make_room(self.report, "the half-precision weights come back")
            try:
                moved = resident.bring_back()
            except torch.cuda.OutOfMemoryError:
                raise
            except Exception as exc:
                # the original forward needs them, in whatever way they come
                self.report.error("weights that come back", exc)
                try:
                    moved = resident.bring_back_plainly()
                except torch.cuda.OutOfMemoryError:
                    # those that came would keep the memory that a forward needs without them
                    resident.leave()
                    raise
        self.model.streams = False
        if moved:
            self.report.count("weights_brought_back")
            self.report.event("8 bits", reasons.BROUGHT_BACK(moved))


def _first_parameter(module: nn.Module) -> torch.Tensor | None:
    """The first of `module.parameters()`, without the overhead of that generator."""
    for parameter in module._parameters.values():
        if parameter is not None:
            return parameter
    for child in module._modules.values():
        found = _first_parameter(child) if child is not None else None
        if found is not None:
            return found
    return None
