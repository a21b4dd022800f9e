"""The weight arena: all weights that plans read.

A plan reads a *live* tensor, whose address is fixed while a plan is bound to it. Most live tensors are the module's own
parameters. Packed weights (Q, K, V; all prompt keys and values; all time projections) are single tensors. The module's
parameters become views of them, so there is no second copy, and an in-place update reaches the packed tensor by itself.
`sync()` detects parameters that were replaced or moved, copies their values into the live tensors, and makes the
parameters views of those.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from sfast_ext import reasons
from sfast_ext.weights.change_detector import ChangeDetector
from sfast_ext.weights.external_refs import external_reader, give_own_memory, part
from sfast_ext.weights.gate import Gate, gate_of
from sfast_ext.weights.host_order import HostOrder, ModuleOrder, Turn
from sfast_ext.weights.original_layout import OriginalLayouts, Strides, memory_of, set_data
from sfast_ext.weights.packs import Packs
from sfast_ext.weights.staging import Staging
from sfast_ext.weights.vacancy import Vacancy, vacancies, vacant_bytes
from sfast_ext.weights.weight import (
    Weight,
    WeightsAway,
    WeightsChanged,
    WeightSlot,
    check_compatible,
    new_weight,
    paths_of,
    places_of,
    same_place,
    slots_at,
    tensors_of,
)

__all__ = ["Weight", "WeightArena", "WeightsAway", "WeightsChanged"]

RESTORE_WAIT_S = 10.0
"""How long `state_dict()` waits for other threads that use the weights."""


class WeightArena:
    """Tracks the weights of one module.

    Layouts are only changed while no other thread runs the original forward, see `gate`.

    Args:
        root: the module whose parameters, buffers and tensor attributes plans may read.
        turn: the lock under which plans on a device run.
    """

    def __init__(self, root: nn.Module, turn: Turn | None = None) -> None:
        self.root = root
        self._lock = threading.RLock()
        self._weights: dict[int, Weight] = {}
        self._packs = Packs()
        self._live: list[Weight] = []
        self._detector = ChangeDetector([])
        self._detectors: weakref.WeakSet[ChangeDetector] = weakref.WeakSet()
        self.epoch = 0
        """Incremented whenever the set of live tensors may have changed."""
        self._bound = 0  # plans bound so far
        self._indexed_times = 0
        self._layouts = OriginalLayouts()
        self._order = HostOrder(self._layouts, self._lock, turn)
        self.order = ModuleOrder(self._order, lambda: self.gate)
        self._memo: dict[str, bool] = {}
        self._vacant: dict[int, Vacancy] = {}  # by id of the weight
        self.copied = 0

    @property
    def gate(self) -> Gate:
        """The lock to hold around each run of the original forward."""
        return gate_of(self.root)

    def index(self) -> None:
        """Index the module's tensors by identity, before a capture. O(parameters)."""
        with self._lock:
            self._indexed_times += 1
            self._layouts.sweep()
            known = {(id(container), name): w for w in self._weights.values() for container, name in w.slots}
            fresh = {key: self._indexed(*held, known) for key, held in tensors_of(self.root).items()}
            # what plans read stays indexed even if the module dropped it: sync() reports that
            for w in self._live:
                if w.bound is not None:
                    fresh.setdefault(id(w.bound), w)
            self._weights = fresh
            self._order.keep(self._known_weights())

    def _indexed(
        self, value: torch.Tensor, paths: list[str], slots: list[WeightSlot], known: dict[tuple[int, str], Weight]
    ) -> Weight:
        """The weight in these slots: the known one if it still is that tensor, else a new one."""
        were = [w for container, name in slots if (w := known.get((id(container), name))) is not None]
        for w in were:
            if w.plans or w.is_current(value) or self._order.is_current(w, value):
                # its ties may have changed; slots that a plan reads stay until sync() reports that
                here = {(id(container), name) for container, name in slots}
                w.slots = slots + [s for s in w.slots if w.plans and (id(s[0]), s[1]) not in here]
                return w
        for w in were:
            if w.pack is not None:
                self._packs.dissolve(w.pack)
        original = self._layouts.strides_of(value, paths)
        if original is not None and original != value.stride():
            self._layouts.record(value, original, paths)
        return new_weight(paths[0], value, slots)

    def locate(self, tensor: torch.Tensor) -> Weight | None:
        """The weight of this tensor object, or None. `index()` must have run since it was assigned."""
        weight = self._weights.get(id(tensor))
        return weight if weight is not None and weight.bound is tensor else None

    def pack(self, weights: Sequence[Weight]) -> Weight | None:
        """One tensor with the rows (dim 0) of all `weights`, which become views of it.

        The result may be part of a larger pack in which they are neighbours. Returns None and changes nothing if they
        are incompatible, if a plan already reads one elsewhere, or if the GPU has no memory for a second copy.

        Raises:
            WeightsInUse: another thread uses them.
        """
        with self.gate.exclusive(), self._lock:
            return None if any(w in self._order for w in weights) else self._packs.make(weights, self._move_to)

    def channels_last(self, weight: Weight) -> bool:
        """Change the layout of a 4-D weight to channels-last. False if a plan reads it in another layout.

        Raises:
            WeightsInUse: another thread uses it.
        """
        with self.gate.exclusive(), self._lock:
            if weight.tensor.dim() != 4 or not weight.slots:
                return False
            if weight.tensor.is_contiguous(memory_format=torch.channels_last):
                return True
            if weight.plans or weight.pack is not None:
                return False
            with torch.inference_mode(False):
                place = weight.tensor.contiguous(memory_format=torch.channels_last)
            self._move_to(weight, place)
            self._order.add(weight, paths_of(self.root, weight))
            return True

    def memoize(self, name: str, find: Callable[[], bool]) -> bool:
        """The result of `find`, computed once for all plans of these weights."""
        if name not in self._memo:
            self._memo[name] = find()
        return self._memo[name]

    def bind(self, weights: Sequence[Weight]) -> None:
        """A plan reads these from now on: their addresses are fixed.

        Raises:
            WeightsChanged: the layout was restored since `index()`, so these are not the module's weights any more.
        """
        with self._lock:
            known = {id(w) for w in [*self._known_weights(), *self._packs.all()]}
            if any(id(w) not in known for w in weights):
                raise WeightsChanged(reasons.WEIGHTS_RESTORED())
            self._bound += 1
            for weight in weights:
                for w in weight.parts or (weight,):
                    w.plans += 1
            self._refresh_live()
            # what no plan reads must not be kept alive; it may be a host's backup
            self._weights = {
                k: w for k, w in self._weights.items() if w.plans or self._layouts.strides_of(w.tensor) is not None
            }

    def unbind(self, weights: Sequence[Weight]) -> None:
        """The plan that reads these is dropped."""
        with self._lock:
            for weight in weights:
                for w in weight.parts or (weight,):
                    w.plans -= 1
            self._refresh_live()

    def sync(self, detector: ChangeDetector | None = None) -> int:
        """Update the live tensors from the module's parameters. Returns the number of weights copied.

        Args:
            detector: checks a subset of the parameters, see `detector()`. All by default.

        Raises:
            WeightsAway: a parameter is on another device or on none, or another thread uses the weights.
            WeightsChanged: the shape or dtype of a parameter changed, or it is not a plain tensor.
        """
        if detector is None:
            self.order.plan()
        changed = (self._detector if detector is None else detector).changed()
        if not changed:
            return 0
        with self.gate.exclusive(), self._lock:
            return self._copy_in(changed)

    def detector(self, containers: set[int]) -> ChangeDetector:
        """A detector for the slots in the dictionaries with these ids. It is outdated once `epoch` changes."""
        return self._new_detector(self._live, containers)

    @property
    def vacant(self) -> bool:
        """Whether any live tensor has no memory. Then no plan may run before the next successful `sync`."""
        return bool(self._vacant)

    @property
    def vacant_bytes(self) -> int:
        """What the live tensors that have no memory are going to take."""
        return vacant_bytes(list(self._vacant.values()))

    def fetch(self) -> int:
        """Copy the parameters from their device into the live tensors, and make them views of those.

        For a module that the host is about to move to the GPU. There is no second copy of its weights at any time.

        Raises:
            WeightsAway, WeightsChanged: see `sync`.
        """
        with self.gate.exclusive(), self._lock:
            changed = self._detector.changed()
            return self._copy_in(changed, anywhere=True) if changed else 0

    def vacancies(self, weights: Sequence[Weight]) -> tuple[list[Vacancy], bool]:
        """The blocks of memory of `weights` that could be freed, and whether parameters of the module use others.

        Args:
            weights: all weights that plans read.
        """
        with self._lock:
            live = [w for w in weights if id(w) not in self._vacant]
            return vacancies(live, [*self._known_weights(), *self._packs.all()], self._layouts)

    def vacate(self, given: Sequence[Vacancy]) -> None:
        """Free the memory of live tensors. The next `sync` with weights on the GPU allocates it again.

        No plan may be running.
        """
        with self._lock:
            for vacancy in given:
                vacancy.vacate()
                self._vacant.update((id(member.weight), vacancy) for member in vacancy.members)
            self._reset_detector()
            for detector in list(self._detectors):
                detector.forget(self._vacant)
            self._layouts.give_up()

    def move_to(self, root: nn.Module) -> bool:
        """Track another module with parameters of the same names, shapes and dtypes. The next `sync` copies its values.

        Returns False and changes nothing if the parameters differ, or if the previous module still uses live tensors:
        it may be in use.

        Raises:
            WeightsInUse: another thread uses the weights of the previous module.
        """
        with self.gate.exclusive(), self._lock:
            places = places_of(root)
            slots: dict[int, list[WeightSlot]] = {}
            for w in self._live:
                there = slots_at(paths_of(self.root, w), places)
                if not there:
                    return False
                container, name = there[0]
                new = container[name]
                if new.shape != w.tensor.shape or new.dtype != w.tensor.dtype or self.locate(new) is not None:
                    return False
                if any(c[n].data_ptr() == w.tensor.data_ptr() for c, n in w.slots if c.get(n) is not None):
                    return False
                slots[id(w)] = there
            self.restore_layout_temporarily()
            for w in self._live:
                w.slots, w.bound = slots[id(w)], None
            self.root = root
            # what no plan reads belongs to the previous module
            self._weights = {id(w): w for w in self._live}
            self._packs.drop_unread()
            self._reset_detector()
            return True

    def restore_layout_temporarily(self) -> None:
        """Restore the original strides of all parameters, for code that checks strides. The next `sync` undoes it.

        Raises:
            WeightsInUse: another thread used them for longer than `RESTORE_WAIT_S`.
        """
        with self.gate.exclusive(RESTORE_WAIT_S), self._lock:
            in_place = self._order.in_place()
            for tensor, original in self._relaid():
                if tensor.stride() != original or id(tensor) in in_place:
                    self._layouts.restore(tensor, original)

    def release(self) -> None:
        """Restore the original strides of all parameters, in memory of their own, with their current values.

        If another thread uses them, it happens when that thread is done.
        """
        bound = self._bound
        # skipped if plans were bound since it was deferred
        self.gate.when_exclusive(lambda: self._restore_layout(forget=True) if self._bound == bound else None)

    def restore_layout(self) -> None:
        """Like `release`, but original layouts stay recorded: plans may follow."""
        uses = self._bound, self._indexed_times
        # skipped if a plan is made since it was deferred: it reads the weights where they are now
        self.gate.when_exclusive(lambda: self._restore_layout() if (self._bound, self._indexed_times) == uses else None)

    def _restore_layout(self, *, forget: bool = False) -> None:
        with self._lock:
            laid = self._relaid()
            # no reference may keep the old memory alive
            self._weights, self._live, self._vacant = {}, [], {}
            self._packs.clear()
            self._order.keep(())
            self._memo.clear()
            self._reset_detector()
            for tensor, original in laid:
                if not self._layouts.is_original(tensor, original):
                    self._layouts.restore(tensor, original)
            if forget:
                self._layouts.forget()

    def status(self) -> dict[str, Any]:
        """For the report."""
        with self._lock:
            return {
                "away": self.vacant,
                "tracked": len(self._live),
                "packed_tensors": len(self._packs),
                "packed_parameters": sum(len(p.parts) for p in self._packs.all()),
                "copied": self.copied,
            }

    def _relaid(self) -> list[tuple[torch.Tensor, Strides]]:
        """All tensors in memory or layout of the arena, with their original strides."""
        found = {id(tensor): (tensor, self._layouts.strides_of(tensor)) for tensor in self._layouts.moved()}
        held = tensors_of(self.root)
        found |= {key: (value, self._layouts.strides_of(value, paths)) for key, (value, paths, _) in held.items()}
        return [(tensor, original) for tensor, original in found.values() if original is not None]

    def _known_weights(self) -> list[Weight]:
        parts = [p for pack in self._packs.all() for p in pack.parts]
        return list({id(w): w for w in [*self._weights.values(), *self._live, *parts]}.values())

    def _refresh_live(self) -> None:
        self._live = [w for w in self._known_weights() if w.plans]
        if self._vacant:
            wanted = {id(vacancy) for w in self._live if (vacancy := self._vacant.get(id(w))) is not None}
            self._vacant = {key: vacancy for key, vacancy in self._vacant.items() if id(vacancy) in wanted}
        self._reset_detector()

    def _reset_detector(self) -> None:
        self._detector = self._new_detector(self._live)
        self.epoch += 1

    def _new_detector(self, weights: list[Weight], containers: set[int] | None = None) -> ChangeDetector:
        detector = ChangeDetector(weights, containers)
        self._detectors.add(detector)
        return detector

    def _move_to(self, weight: Weight, place: torch.Tensor) -> None:
        # `place` has the same values already: callers build it from weight.tensor
        assert weight.bound is not None
        # the tensor object stays the same, so that the host's references to it stay valid
        original = self._layouts.strides_of(weight.tensor)
        set_data(weight.bound, place)
        original = weight.tensor.stride() if original is None else original
        self._layouts.record(weight.bound, original, paths_of(self.root, weight))
        weight.tensor, weight.pointer = place, place.data_ptr()

    def _copy_in(self, changed: list[tuple[Weight, torch.Tensor | None]], anywhere: bool = False) -> int:
        """Copy the values of changed weights into the live tensors. Returns how many.

        Args:
            anywhere: from any device, not only from that of the live tensors.
        """
        arriving: dict[int, Weight] = {}
        for weight, now in changed:
            check_compatible(weight, now, anywhere=anywhere)
            if now is not None and id(weight) not in self._vacant:
                self._order.check_format(weight, now, self.root)
            if any(c.get(n) is not now for c, n in weight.slots):
                raise WeightsChanged(reasons.WEIGHT_UNTIED(weight.path))
            bound = self._weights.get(id(now))
            if bound is None or bound.bound is not now or not bound.plans:
                bound = weight
            other = arriving.setdefault(id(now), bound)
            if other is not weight:
                # one parameter cannot be a view of two live tensors
                raise WeightsChanged(reasons.WEIGHT_TIED(weight.path, other.path))
        arrived = [(weight, now) for weight, now in changed if now is not None]
        # a tied weight is listed once for each of its slots
        new = {id(weight): (weight, now) for weight, now in arrived if not same_place(now, weight.tensor)}
        written = list(new.values())
        occupied = [(weight, now) for weight, now in written if id(weight) not in self._vacant]
        if occupied:
            self._protect_readers(arrived, occupied)
        memory = {memory_of(weight.tensor) for weight, _ in occupied}
        # two weights may have swapped their data: a source in memory that is written is cloned first
        sources = {id(w): now.detach().clone() if memory_of(now) in memory else now.detach() for w, now in written}
        try:
            with torch.inference_mode(False), torch.no_grad():
                if written and not anywhere and not self._vacant:
                    torch._foreach_copy_([weight.tensor for weight, _ in written], list(sources.values()))
                    sources.clear()
                self._take_in(arrived, sources)
        finally:
            self.copied += len(written) - len(sources)
            self._reset_detector()
            self._weights = {k: w for k, w in self._weights.items() if w.bound is None or id(w.bound) == k}
            self._layouts.sweep({id(w.bound) for w in self._live})
        return len(written)

    def _take_in(self, arrived: list[tuple[Weight, torch.Tensor]], sources: dict[int, torch.Tensor]) -> None:
        """Copy the sources, by the ids of their weights, into live tensors; make the parameters views of those.

        One weight at a time, so that there is never a second copy of all weights when blocks are allocated again. What
        comes from another device has its values only once all are sent.
        """
        from_afar: list[tuple[Weight, torch.Tensor]] = []
        with Staging() as copy:
            for weight, now in arrived:
                self._occupy(weight)
                if (source := sources.pop(id(weight), None)) is not None:
                    copy(weight.tensor, source)
                if now.device == weight.tensor.device:
                    self._bind(weight, now)
                else:
                    from_afar.append((weight, now))
        for weight, now in from_afar:
            self._bind(weight, now)

    def _occupy(self, weight: Weight) -> None:
        """Allocate the memory of a live tensor again, if it was freed."""
        if (vacancy := self._vacant.get(id(weight))) is not None:
            vacancy.occupy(self._layouts)
            for member in vacancy.members:
                del self._vacant[id(member.weight)]

    def _bind(self, weight: Weight, now: torch.Tensor) -> None:
        """Make a parameter a view of the live tensor, which has its values."""
        if not same_place(now, weight.tensor):
            # the host's new layout becomes the original one
            paths = paths_of(self.root, weight)
            original, was = self._layouts.strides_of(now, paths), self._layouts.strides_of(weight.tensor)
            original = now.stride() if original is None else original
            set_data(now, weight.tensor)
            if was is not None or original != now.stride():
                self._layouts.record(now, original, paths)
        weight.bound = now
        self._order.bound(weight)
        self._weights[id(weight.bound)] = weight

    def _protect_readers(
        self, arrived: list[tuple[Weight, torch.Tensor]], written: list[tuple[Weight, torch.Tensor]]
    ) -> None:
        """Live tensors are about to be written: give other readers of that memory a copy of the current values.

        Raises:
            WeightsChanged: there is a reader that cannot be moved.
        """
        left = part(written, self._layouts)
        for detector in list(self._detectors):
            detector.forget({id(weight) for weight, *_ in left})
        give_own_memory(left, {id(now) for _, now in arrived}, self._layouts)
        self._layouts.sweep({id(w.bound) for w in self._live})
        other = external_reader([*self._known_weights(), *self._packs.all()], arrived, [w for w, _ in written])
        if other is not None:
            raise WeightsChanged(reasons.WEIGHT_SHARED(other.path))
