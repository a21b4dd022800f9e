"""The weight arena: the one place where the weights that plans read live.

A plan reads a *live* tensor, whose address never changes while a plan is bound to it. Most live tensors are simply
the module's own parameters. Packed weights (Q, K, V; all prompt keys and values; all time projections) are single
tensors of which the module's parameters become views, so there is no second copy and an update in place reaches the
packed tensor by itself. `sync()` sees parameters that were replaced or moved, copies their values into the live
tensors and re-binds the parameters.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from sfast_ext.weights.change_detector import ChangeDetector
from sfast_ext.weights.external_refs import external_reader
from sfast_ext.weights.gate import Gate, gate_of
from sfast_ext.weights.original_layout import OriginalLayouts, Strides, memory_of, set_data
from sfast_ext.weights.packs import Packs
from sfast_ext.weights.vacancy import Vacancy, vacancies
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
"""How long `state_dict()` waits for other threads that compute with the weights."""


class WeightArena:
    """Tracks the weights of one module.

    They are laid out only while no other thread runs the original forward, see `gate`.

    Args:
        root: the module whose parameters, buffers and tensor attributes plans may read.
    """

    def __init__(self, root: nn.Module) -> None:
        self.root = root
        self._lock = threading.RLock()
        self._weights: dict[int, Weight] = {}
        self._packs = Packs()
        self._live: list[Weight] = []
        self._detector = ChangeDetector([])
        self._detectors: weakref.WeakSet[ChangeDetector] = weakref.WeakSet()
        self.epoch = 0
        """Counts how often the live tensors may have become others."""
        self._bound = 0  # how many plans there were
        self._layouts = OriginalLayouts()
        self._memo: dict[str, bool] = {}
        self._vacant: dict[int, Vacancy] = {}  # by the ids of their weights
        self.copied = 0

    @property
    def gate(self) -> Gate:
        """Where each run of the original forward is told of."""
        return gate_of(self.root)

    def index(self) -> None:
        """Learn the module's tensors by identity, before a capture. O(parameters)."""
        with self._lock:
            self._layouts.sweep()
            known = {(id(container), name): w for w in self._weights.values() for container, name in w.slots}
            fresh = {key: self._indexed(*held, known) for key, held in tensors_of(self.root).items()}
            # what plans read stays tracked even where the module let go of it: sync() reports that
            for w in self._live:
                if w.bound is not None:
                    fresh.setdefault(id(w.bound), w)
            self._weights = fresh

    def _indexed(
        self, value: torch.Tensor, paths: list[str], slots: list[WeightSlot], known: dict[tuple[int, str], Weight]
    ) -> Weight:
        """The weight that these slots hold: one that is known where it still is that tensor, else a new one."""
        were = [w for container, name in slots if (w := known.get((id(container), name))) is not None]
        for w in were:
            if w.plans or w.is_current(value):
                # what it was tied to may have changed since, but what a plan reads is watched until sync() says so
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
        """The weight that this very tensor object is, or None. `index()` must have run since it was assigned."""
        weight = self._weights.get(id(tensor))
        return weight if weight is not None and weight.bound is tensor else None

    def pack(self, weights: Sequence[Weight]) -> Weight | None:
        """One tensor with the rows (dim 0) of all `weights`, which become views of it or are neighbours in a larger.

        Returns None, and changes nothing, where they do not fit together, or a plan already reads one elsewhere.

        Raises:
            WeightsInUse: another thread computes with them.
        """
        with self.gate.exclusive(), self._lock:
            return self._packs.make(weights, self._move_to)

    def channels_last(self, weight: Weight) -> bool:
        """Lay a 4-D weight out as channels-last; the same logical values. False where a plan holds it otherwise.

        Raises:
            WeightsInUse: another thread computes with it.
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
            return True

    def memoize(self, name: str, find: Callable[[], bool]) -> bool:
        """What holds for all plans of these weights, found when it is first asked for."""
        if name not in self._memo:
            self._memo[name] = find()
        return self._memo[name]

    def bind(self, weights: Sequence[Weight]) -> None:
        """A plan reads these from now on: their addresses stay."""
        with self._lock:
            self._bound += 1
            for weight in weights:
                for w in weight.parts or (weight,):
                    w.plans += 1
            self._refresh_live()
            # what no plan reads is not ours to keep alive (a host's backups among it)
            self._weights = {
                k: w for k, w in self._weights.items() if w.plans or self._layouts.strides_of(w.tensor) is not None
            }

    def unbind(self, weights: Sequence[Weight]) -> None:
        """The plan that read these is gone."""
        with self._lock:
            for weight in weights:
                for w in weight.parts or (weight,):
                    w.plans -= 1
            self._refresh_live()

    def sync(self, detector: ChangeDetector | None = None) -> int:
        """Bring the live tensors up to date with the module's parameters; returns how many were copied.

        Args:
            detector: of `detector`, to look at some of the parameters only.

        Raises:
            WeightsAway: a parameter is on another device, or on none; or another thread computes with them.
            WeightsChanged: a parameter changed its shape or dtype, or is no plain tensor any more.
        """
        changed = (self._detector if detector is None else detector).changed()
        if not changed:
            return 0
        with self.gate.exclusive(), self._lock:
            return self._copy_in(changed)

    def detector(self, containers: set[int]) -> ChangeDetector:
        """For `sync`: the places in the dictionaries of these ids. To be made anew when `epoch` is another."""
        return self._new_detector(self._live, containers)

    @property
    def vacant(self) -> bool:
        """Whether live tensors have no memory: until `sync` has returned, no plan may run."""
        return bool(self._vacant)

    def fetch(self) -> int:
        """Copy the parameters into the live tensors from the device they are on, and let them be views of those.

        For a module that the host is about to bring: there is no second copy of its weights at any time.

        Raises:
            WeightsAway, WeightsChanged: see `sync`.
        """
        with self.gate.exclusive(), self._lock:
            changed = self._detector.changed()
            return self._copy_in(changed, anywhere=True) if changed else 0

    def vacancies(self, weights: Sequence[Weight]) -> list[Vacancy] | None:
        """The memory of `weights` that could be given back; None where a parameter of the module lies in it.

        Args:
            weights: all that plans read.
        """
        with self._lock:
            live = [w for w in weights if id(w) not in self._vacant]
            return vacancies(live, [*self._known_weights(), *self._packs.all()], self._layouts)

    def vacate(self, given: Sequence[Vacancy]) -> None:
        """Give the memory of live tensors back. The next `sync` for which the weights are there takes it again.

        No plan may be running.
        """
        with self._lock:
            for vacancy in given:
                vacancy.vacate()
                self._vacant.update((id(member.weight), vacancy) for member in vacancy.members)
            self._layouts.sweep()
            self._reset_detector()

    def move_to(self, root: nn.Module) -> bool:
        """Follow the host to a module with parameters of the same names, shapes and dtypes, whose values `sync` takes.

        False, and nothing is changed, where it has others, or where the module left behind still holds live tensors:
        it may be in use by somebody.

        Raises:
            WeightsInUse: another thread computes with those of the module left behind.
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
            # what no plan reads belongs to the module left behind
            self._weights = {id(w): w for w in self._live}
            self._packs.drop_unread()
            self._reset_detector()
            return True

    def restore_layout_temporarily(self) -> None:
        """Lay every parameter out as before, for somebody who looks at strides; the next `sync` takes them back.

        Raises:
            WeightsInUse: another thread computes with them, for longer than `RESTORE_WAIT_S`.
        """
        with self.gate.exclusive(RESTORE_WAIT_S), self._lock:
            for tensor, original in self._relaid():
                if tensor.stride() != original:
                    self._layouts.restore(tensor, original)

    def release(self) -> None:
        """Give every parameter back with the strides it had, in memory of its own, with the values it has now.

        Where another thread computes with them, that is done when it has ended.
        """
        self._when_exclusive(lambda: self._restore_layout(forget=True))

    def restore_layout(self) -> None:
        """As `release`, for the time in which there are no plans."""
        self._when_exclusive(self._restore_layout)

    def _when_exclusive(self, restore_layout: Callable[[], None]) -> None:
        bound = self._bound
        # of no use where plans were made since it was put off
        self.gate.when_exclusive(lambda: restore_layout() if self._bound == bound else None)

    def _restore_layout(self, *, forget: bool = False) -> None:
        with self._lock:
            laid = self._relaid()
            # nothing of it is to keep the memory that is left behind
            self._weights, self._live, self._vacant = {}, [], {}
            self._packs.clear()
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
        """Each tensor that lies where or as the arena laid one, with the strides that its host knows it by."""
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
        # values are in `place` already, or about to be the same: callers build it from weight.tensor
        assert weight.bound is not None
        # the module's own tensor object stays, so that the host's references to it stay good
        original = self._layouts.strides_of(weight.tensor)
        set_data(weight.bound, place)
        original = weight.tensor.stride() if original is None else original
        self._layouts.record(weight.bound, original, paths_of(self.root, weight))
        weight.tensor, weight.pointer = place, place.data_ptr()

    def _copy_in(self, changed: list[tuple[Weight, torch.Tensor | None]], *, anywhere: bool = False) -> int:
        arriving: dict[int, Weight] = {}
        for weight, now in changed:
            check_compatible(weight, now, anywhere=anywhere)
            if any(c.get(n) is not now for c, n in weight.slots):
                raise WeightsChanged(f"{weight.path} is no longer shared between modules")
            bound = self._weights.get(id(now))
            if bound is None or bound.bound is not now or not bound.plans:
                bound = weight
            other = arriving.setdefault(id(now), bound)
            if other is not weight:
                # each has a live tensor of its own, and one parameter cannot be a view of both
                raise WeightsChanged(f"{weight.path} is now the tensor of {other.path}")
        arrived = [(weight, now) for weight, now in changed if now is not None]
        # a tied weight is there once for each of its places
        new = {id(weight): (weight, now) for weight, now in arrived if not same_place(now, weight.tensor)}
        written = list(new.values())
        occupied = [(weight, now) for weight, now in written if id(weight) not in self._vacant]
        if occupied:
            self._protect_readers(arrived, occupied)
        memory = {memory_of(weight.tensor) for weight, _ in occupied}
        # two may have changed places by their data: one is read where the other is about to be written
        sources = {id(w): now.detach().clone() if memory_of(now) in memory else now.detach() for w, now in written}
        try:
            with torch.inference_mode(False), torch.no_grad():
                if written and not anywhere and not self._vacant:
                    torch._foreach_copy_([weight.tensor for weight, _ in written], list(sources.values()))
                    sources.clear()
                for weight, now in arrived:
                    self._copy_one_in(weight, now, sources.pop(id(weight), None))
        finally:
            self.copied += len(written) - len(sources)
            self._reset_detector()
        return len(written)

    def _copy_one_in(self, weight: Weight, now: torch.Tensor, source: torch.Tensor | None) -> None:
        """Let the parameter be the live tensor, which takes its values from `source` where there is one.

        One after the other: where a block is taken again there is never a second copy of all weights.
        """
        if (vacancy := self._vacant.get(id(weight))) is not None:
            vacancy.occupy(self._layouts)
            for member in vacancy.members:
                del self._vacant[id(member.weight)]
        if source is not None:
            weight.tensor.copy_(source)
        if not same_place(now, weight.tensor):
            # laid out anew by the host: that is what it gets back
            paths = paths_of(self.root, weight)
            original, was = self._layouts.strides_of(now, paths), self._layouts.strides_of(weight.tensor)
            original = now.stride() if original is None else original
            set_data(now, weight.tensor)
            if was is not None or original != now.stride():
                self._layouts.record(now, original, paths)
        weight.bound = now
        self._weights[id(weight.bound)] = weight

    def _protect_readers(
        self, arrived: list[tuple[Weight, torch.Tensor]], written: list[tuple[Weight, torch.Tensor]]
    ) -> None:
        """Live tensors are about to be written to: who else reads that memory is to keep the values that he has.

        Raises:
            WeightsChanged: somebody does who cannot be given memory of his own.
        """
        left: list[tuple[Weight, weakref.ref[torch.Tensor]]] = []
        for weight, now in written:
            if weight.bound is not None and weight.bound is not now:
                left.append((weight, weakref.ref(weight.bound)))
                weight.bound = None
        for detector in list(self._detectors):
            detector.forget({id(weight) for weight, _ in left})
        coming = {id(now) for _, now in arrived}
        for weight, reference in left:
            old = reference()
            # in another place of the module, or with somebody who will put it back; where nobody has it, it is gone
            if old is not None and id(old) not in coming and memory_of(old) == memory_of(weight.tensor):
                original = self._layouts.strides_of(old)
                self._layouts.restore(old, old.stride() if original is None else original)
            old = None
        other = external_reader([*self._known_weights(), *self._packs.all()], arrived, [w for w, _ in written])
        if other is not None:
            raise WeightsChanged(f"the memory of {other.path} is still in use by others")
