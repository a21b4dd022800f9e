"""What is known of the weights of a model; its arena and those of its parts share it."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Container, Hashable, Iterable, Sequence

import torch
from torch import nn

from sfast_ext import reasons
from sfast_ext.weights.banks import Banks
from sfast_ext.weights.change_detector import ChangeDetector
from sfast_ext.weights.gate import Gate, gate_of
from sfast_ext.weights.host_order import HostOrder, Turn
from sfast_ext.weights.original_layout import OriginalLayouts, Strides, set_data
from sfast_ext.weights.packs import Packs
from sfast_ext.weights.vacancy import Vacancy, vacate
from sfast_ext.weights.weight import (
    Weight,
    WeightsChanged,
    WeightsInUse,
    WeightSlot,
    new_weight,
    paths_of,
    slots_of,
    tensors_of,
)


class TrackedWeights:
    """The weights of one model.

    Args:
        root: the model.
        turn: the lock under which plans on a device run.

    Attributes:
        lock: held while anything here is read or written.
        weights: by the id of the tensor in the module. Those of the last index, and all that plans read.
        tables: see `tables`, by the id of the tensor; copies on another device by that as well.
        live: the weights that plans read.
        vacant: live weights without memory, by the id of the weight.
        banks: those of its weights, see `Banks`.
        epoch: incremented whenever the set of live tensors may have changed.
        bound: how many plans were bound so far.
        indexed_times: how often the module was indexed.
        copied: how many weights were copied so far.
    """

    def __init__(self, root: nn.Module, turn: Turn | None = None) -> None:
        self.root = root
        self.lock = threading.RLock()
        self.weights: dict[int, Weight] = {}
        self.packs = Packs()
        self.tables: dict[Hashable, Weight] = {}
        self.live: list[Weight] = []
        self.vacant: dict[int, Vacancy] = {}
        self.banks = Banks()
        self.detector = ChangeDetector([])
        self._detectors: weakref.WeakSet[ChangeDetector] = weakref.WeakSet()
        self._announced = False
        self.layouts = OriginalLayouts()
        self.order = HostOrder(self.layouts, self.lock, turn)
        self.memo: dict[str, bool] = {}
        self.epoch = self.bound = self.indexed_times = self.copied = 0

    @property
    def gate(self) -> Gate:
        """The lock to hold around each run of the original forward."""
        return gate_of(self.root)

    def index(self) -> None:
        """See `WeightArena.index`."""
        with self.lock:
            self.indexed_times += 1
            self.layouts.sweep()
            known = {(id(container), name): w for w in self.weights.values() for container, name in w.slots}
            fresh = {key: self._indexed(*held, known) for key, held in tensors_of(self.root).items()}
            # what plans read stays indexed even if the module dropped it: sync() reports that
            for w in self.live:
                if w.bound is not None:
                    fresh.setdefault(id(w.bound), w)
            self.weights = fresh
            self.tables = {key: w for key, w in self.tables.items() if w.plans}
            self.order.keep(self.known())

    def _indexed(
        self, value: torch.Tensor, paths: list[str], slots: list[WeightSlot], known: dict[tuple[int, str], Weight]
    ) -> Weight:
        """The weight in these slots: the known one if it still is that tensor, else a new one."""
        were = [w for container, name in slots if (w := known.get((id(container), name))) is not None]
        for w in were:
            if w.plans or w.is_current(value) or self.order.is_current(w, value):
                # its ties may have changed; slots that a plan reads stay until sync() reports that
                here = {(id(container), name) for container, name in slots}
                w.slots = slots + [s for s in w.slots if w.plans and (id(s[0]), s[1]) not in here]
                return w
        for w in were:
            if w.pack is not None:
                self.packs.dissolve(w.pack)
        original = self.layouts.strides_of(value, paths)
        if original is not None and original != value.stride():
            self.layouts.record(value, original, paths)
        return new_weight(paths[0], value, slots)

    def relaid(self) -> list[tuple[torch.Tensor, Strides]]:
        """All tensors in memory or layout of the arena, with their original strides."""
        found = {id(tensor): (tensor, self.layouts.strides_of(tensor)) for tensor in self.layouts.moved()}
        held = tensors_of(self.root)
        found |= {key: (value, self.layouts.strides_of(value, paths)) for key, (value, paths, _) in held.items()}
        return [(tensor, original) for tensor, original in found.values() if original is not None]

    def forget(self, weights: Container[int]) -> None:
        """Let no detector hold what is in the slots of these weights, see `ChangeDetector.forget`."""
        for detector in list(self._detectors) if weights else ():
            detector.forget(weights)

    def known(self) -> list[Weight]:
        """All weights, those in packs included."""
        parts = [p for pack in self.packs.all() for p in pack.parts]
        every = [*self.weights.values(), *self.tables.values(), *self.live, *parts]
        return list({id(w): w for w in every}.values())

    def vacate(self, given: Sequence[Vacancy]) -> None:
        """Free the memory of these blocks. The caller resets the detector."""
        vacate(given)
        self.note_vacant(given)

    def note_vacant(self, given: Iterable[Vacancy]) -> None:
        """These blocks have no memory."""
        for vacancy in given:
            self.vacant.update((id(member.weight), vacancy) for member in vacancy.members)

    def refuse_unknown(self, weights: Iterable[Weight]) -> None:
        """See that a plan may read these.

        Raises:
            WeightsChanged: the layout was restored since `index()`, so these are not the module's weights any more.
            WeightsInUse: another thread has moved them since they were set aside.
        """
        weights, known = list(weights), {id(w) for w in [*self.known(), *self.packs.all()]}
        if any(id(w) not in known for w in weights):
            raise WeightsChanged(reasons.WEIGHTS_RESTORED())
        if any((w.slots or w.parts) and w.is_bare and id(w) not in self.vacant for w in weights):
            raise WeightsInUse(reasons.WEIGHTS_IN_USE())

    def drop_left(self) -> None:
        """Let go of memory that no plan reads, and that the module has left."""
        gone = {key for key, w in self.weights.items() if not w.plans and not _is_there(w)}
        if gone:
            self.weights = {key: w for key, w in self.weights.items() if key not in gone}
            self.packs.drop_left(_is_there)
            self.order.keep(self.known())

    def refresh_live(self) -> None:
        """Plans were bound or dropped."""
        self.live = [w for w in self.known() if w.plans]
        if self.vacant:
            wanted = {id(vacancy) for w in self.live if (vacancy := self.vacant.get(id(w))) is not None}
            self.vacant = {key: vacancy for key, vacancy in self.vacant.items() if id(vacancy) in wanted}
        self.reset_detector()

    def slots_kept(self) -> set[tuple[int, str]]:
        """The slots of weights that cannot be set aside, see `slots_of`: of those that plans read, and of the first
        parameter, which hosts ask for the device of the module."""
        slots = ((id(m._parameters), name) for m in self.root.modules() for name, p in m._parameters.items()
                 if p is not None)  # fmt: skip
        return {*slots_of(self.live), *itertools.islice(slots, 1)}

    def reset_detector(self) -> None:
        """The live tensors, or what is in their slots, are others."""
        self.detector = self.new_detector(self.live)
        self.epoch += 1

    def new_detector(self, weights: list[Weight], containers: set[int] | None = None) -> ChangeDetector:
        """See `ChangeDetector`."""
        detector = ChangeDetector(weights, containers)
        detector.always_closely = not self._announced
        self._detectors.add(detector)
        return detector

    def new_generation(self) -> None:
        """A generation begins. Without such calls each look at the weights is a close one."""
        self._announced = True
        for detector in list(self._detectors):
            detector.closely, detector.always_closely = True, False

    def move_to(self, weight: Weight, place: torch.Tensor) -> None:
        """Make a weight the tensor `place`, which has its values already."""
        assert weight.bound is not None
        # the tensor object stays the same, so that the host's references to it stay valid
        original = self.layouts.strides_of(weight.tensor)
        set_data(weight.bound, place)
        original = weight.tensor.stride() if original is None else original
        self.layouts.record(weight.bound, original, paths_of(self.root, weight))
        weight.tensor, weight.pointer = place, place.data_ptr()


def _is_there(weight: Weight) -> bool:
    """Whether the module holds the tensor of a weight on the device of its memory."""
    held = [container.get(name) for container, name in weight.slots]
    return any(isinstance(x, torch.Tensor) and x.device == weight.tensor.device for x in held)
