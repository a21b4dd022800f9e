"""The weight arena: all weights that plans read.

A plan reads a *live* tensor, whose address is fixed while a plan is bound to it. Most live tensors are the module's own
parameters. Packed weights (Q, K, V; all prompt keys and values; all time projections) are single tensors. The module's
parameters become views of them, so there is no second copy, and an in-place update reaches the packed tensor by itself.
`sync()` detects parameters that were replaced or moved, copies their values into the live tensors, and makes the
parameters views of those.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from sfast_ext.weights import host_order, stand_ins
from sfast_ext.weights.banks import Banks
from sfast_ext.weights.change_detector import ChangeDetector
from sfast_ext.weights.copy_in import copy_in
from sfast_ext.weights.gate import Gate
from sfast_ext.weights.host_order import ModuleOrder, Turn, unrecorded
from sfast_ext.weights.inner_tensors import form_of
from sfast_ext.weights.original_layout import Strides
from sfast_ext.weights.resident import Resident
from sfast_ext.weights.tables import copied_table, table_of
from sfast_ext.weights.tracked import TrackedWeights
from sfast_ext.weights.vacancy import Vacancy, vacancies, vacant_bytes
from sfast_ext.weights.weight import Weight, WeightsAway, WeightsChanged, WeightSlot, paths_of, places_of, slots_at

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
        self._tracked = TrackedWeights(root, turn)
        self.is_table: Callable[[torch.Tensor], bool] = lambda tensor: False
        """Whether a tensor that is in no slot is in the current behaviour key."""
        self.order = ModuleOrder(self._tracked.order, lambda: self.gate)
        self.resident = Resident(self._tracked)
        """The weights whose half-precision values are not on the GPU."""

    @property
    def root(self) -> nn.Module:
        """The module."""
        return self._tracked.root

    @property
    def copied(self) -> int:
        """How many weights were copied or quantised so far."""
        return self._tracked.copied

    @property
    def gate(self) -> Gate:
        """The lock to hold around each run of the original forward."""
        return self._tracked.gate

    @property
    def banks(self) -> Banks:
        """The weights of linear layers as 8-bit integers."""
        return self._tracked.banks

    def new_generation(self) -> None:
        """A generation begins: the next look at the weights is a close one."""
        self.resident.audit_all = True
        self._tracked.new_generation()

    def index(self) -> None:
        """Index the module's tensors by identity, before a capture. O(parameters)."""
        self._tracked.index()

    def locate(self, tensor: torch.Tensor) -> Weight | None:
        """The weight of this tensor object, or None. `index()` must have run since it was assigned."""
        weight = self._tracked.weights.get(id(tensor)) or self._tracked.tables.get(id(tensor))
        if weight is not None and weight.bound is tensor:
            return weight
        if not self.is_table(tensor) or (table := table_of(tensor)) is None:
            return None
        return self._tracked.tables.setdefault(id(tensor), table)

    def holds_table(self, weight: Weight) -> bool:
        """Whether a weight is a table, which is in no slot of the module."""
        return weight.bound is not None and self._tracked.tables.get(id(weight.bound)) is weight

    def table_on(self, table: Weight, device: torch.device) -> Weight | None:
        """A copy of a table on another device, which plans update; None if it is too large."""
        tables = self._tracked.tables
        place = id(table), device
        copy = tables.get(place) or copied_table(table, device)
        return copy and tables.setdefault(place, copy)

    def pack(self, weights: Sequence[Weight]) -> Weight | None:
        """One tensor with the rows (dim 0) of all `weights`, which become views of it.

        The result may be part of a larger pack in which they are neighbours. Returns None and changes nothing if they
        are incompatible, if a plan already reads one elsewhere, or if the GPU has no memory for a second copy.

        Raises:
            WeightsInUse: another thread uses them.
        """
        tracked = self._tracked
        with self.gate.exclusive(), tracked.lock:
            if any(weight.is_bare for weight in weights):
                return stand_ins.pack(tracked, weights)
            laid = any(weight in tracked.order for weight in weights)
            return None if laid else tracked.packs.make(weights, tracked.move_to)

    def channels_last(self, weight: Weight) -> bool:
        """Change the layout of a 4-D weight to channels-last. False if a plan reads it in another layout.

        Raises:
            WeightsInUse: another thread uses it.
        """
        tracked = self._tracked
        with self.gate.exclusive(), tracked.lock:
            if weight.tensor.dim() != 4 or not weight.slots:
                return False
            if weight.tensor.is_contiguous(memory_format=torch.channels_last):
                return True
            if weight.plans or weight.pack is not None or weight.bound is None:
                # the last: it was set aside, and comes back as the host laid it
                return False
            with torch.inference_mode(False):
                place = weight.tensor.contiguous(memory_format=torch.channels_last)
            tracked.move_to(weight, place)
            tracked.order.add(weight, paths_of(tracked.root, weight))
            return True

    def memoize(self, name: str, find: Callable[[], bool]) -> bool:
        """The result of `find`, computed once for all plans of these weights."""
        tracked = self._tracked
        if name not in tracked.memo:
            tracked.memo[name] = find()
        return tracked.memo[name]

    def bind(self, weights: Sequence[Weight]) -> None:
        """A plan reads these from now on: their addresses are fixed.

        Raises:
            WeightsChanged, WeightsInUse: see `TrackedWeights.refuse_unknown`.
        """
        tracked = self._tracked
        with tracked.lock:
            tracked.refuse_unknown(weights)
            tracked.bound += 1
            for weight in weights:
                for w in weight.parts or (weight,):
                    w.plans += 1
            tracked.refresh_live()
            # what no plan reads must not be kept alive; it may be a host's backup
            strides_of = tracked.layouts.strides_of
            tracked.weights = {k: w for k, w in tracked.weights.items() if w.plans or strides_of(w.tensor) is not None}
            tracked.tables = {k: w for k, w in tracked.tables.items() if w.plans}

    def unbind(self, weights: Sequence[Weight]) -> None:
        """The plan that reads these is dropped."""
        with self._tracked.lock:
            for weight in weights:
                for w in weight.parts or (weight,):
                    w.plans -= 1
            self._tracked.refresh_live()

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
        changed = (self._tracked.detector if detector is None else detector).changed()
        if not changed:
            return 0
        with self.gate.exclusive(), self._tracked.lock:
            return copy_in(self._tracked, changed)

    @contextlib.contextmanager
    def exclusively(self, device: torch.device, wait_s: float = 0.0) -> Iterator[None]:
        """Within, no plan on a device and no original forward of the module runs in another thread.

        Raises:
            WeightsInUse: one does, for longer than `wait_s`.
        """
        tracked = self._tracked
        with tracked.order.turn(device), self.gate.exclusive(wait_s), tracked.lock:
            yield

    def read(self, weight: Weight) -> torch.Tensor:
        """The values of a weight: its live tensor, or if it is set aside, a copy on the GPU."""
        return self.resident.values(weight) if weight.is_bare and self.resident.has(weight) else weight.tensor

    def slots_kept(self) -> set[tuple[int, str]]:
        """See `TrackedWeights.slots_kept`."""
        with self._tracked.lock:
            return self._tracked.slots_kept()

    def set_aside(self, weights: Iterable[Weight], device: torch.device) -> None:
        """Move weights, which no plan reads, to system memory; see `Resident`.

        Raises:
            WeightsInUse: another thread uses them.
        """
        with self.exclusively(device):
            self.resident.set_aside(weights, device)

    def detector(self, containers: set[int]) -> ChangeDetector:
        """A detector for the slots in the dictionaries with these ids. It is outdated once `epoch` changes."""
        return self._tracked.new_detector(self._tracked.live, containers)

    @property
    def vacant(self) -> bool:
        """Whether any live tensor has no memory."""
        return bool(self._tracked.vacant)

    def lacks(self, weights: Sequence[Weight]) -> bool:
        """Whether any of these has no memory. Then no plan that reads them may run before the next `sync`."""
        vacant = self._tracked.vacant
        return bool(vacant) and any(id(weight) in vacant for weight in weights)

    @property
    def vacant_bytes(self) -> int:
        """What the live tensors and the banks that have no memory are going to take."""
        banks = self.banks.bytes - self.banks.held
        return vacant_bytes(list(self._tracked.vacant.values())) + banks

    @property
    def held_bytes(self) -> int:
        """What `vacate` can free: live tensors of which no parameter of the module uses the memory, and banks."""
        return vacant_bytes(self.vacancies(self._tracked.live)[0]) + self.banks.held

    def fetch(self) -> int:
        """Copy the parameters from their device into the live tensors, and make them views of those.

        For a module that the host is about to move to the GPU. There is no second copy of its weights at any time.

        Raises:
            WeightsAway, WeightsChanged: see `sync`.
        """
        with self.gate.exclusive(), self._tracked.lock:
            changed = self._tracked.detector.changed()
            return copy_in(self._tracked, changed, anywhere=True) if changed else 0

    def vacancies(self, weights: Sequence[Weight]) -> tuple[list[Vacancy], bool]:
        """The blocks of memory of `weights` that could be freed, and whether parameters of the module use others.

        Args:
            weights: all weights that plans read.
        """
        tracked = self._tracked
        with tracked.lock:
            tracked.drop_left()
            apart = {*tracked.vacant, *map(id, tracked.tables.values())}
            live = [w for w in weights if id(w) not in apart]
            return vacancies(live, [*tracked.known(), *tracked.packs.all()], self._tracked.layouts)

    def vacate(self, given: Sequence[Vacancy]) -> None:
        """Free the memory of live tensors, and that of banks. The next `sync` with weights on the GPU allocates the
        former again; for the latter see `Banks.occupy`.

        No plan may be running.
        """
        tracked = self._tracked
        with tracked.lock:
            tracked.vacate(given)
            if given:
                self.banks.vacate()
            tracked.reset_detector()
            tracked.forget(tracked.vacant)
            self._tracked.layouts.give_up()

    def move_to(self, root: nn.Module) -> bool:
        """Track another module with parameters of the same names, shapes and dtypes. The next `sync` copies its values.

        Returns False and changes nothing if the parameters differ, or if the previous module still uses live tensors:
        it may be in use.

        Raises:
            WeightsInUse: another thread uses the weights of the previous module.
        """
        tracked = self._tracked
        with self.gate.exclusive(), tracked.lock:
            places = places_of(root)
            slots: dict[int, list[WeightSlot]] = {}
            for w in tracked.live:
                there = slots_at(paths_of(tracked.root, w), places)
                if not there:
                    return False
                container, name = there[0]
                new = container[name]
                if new.shape != w.tensor.shape or new.dtype != w.tensor.dtype or self.locate(new) is not None:
                    return False
                if form_of(container) != form_of(w.slots[0][0]):
                    return False
                if any(c[n].data_ptr() == w.tensor.data_ptr() for c, n in w.slots if c.get(n) is not None):
                    return False
                slots[id(w)] = there
            resident = self.resident.places_in(root)
            if resident is None:
                return False
            self.restore_layout_temporarily()
            self.resident.follow(resident)
            for w in tracked.live:
                w.slots, w.bound = slots[id(w)], None
            tracked.root = root
            # what no plan reads belongs to the previous module
            tracked.weights = {id(w): w for w in tracked.live}
            tracked.packs.drop_unread()
            tracked.reset_detector()
            return True

    def restore_layout_temporarily(self) -> None:
        """Restore the original strides of all parameters, for code that checks strides. The next `sync` undoes it.

        Raises:
            WeightsInUse: another thread used them for longer than `RESTORE_WAIT_S`.
        """
        tracked = self._tracked
        with self.gate.exclusive(RESTORE_WAIT_S), tracked.lock:
            in_place = tracked.order.in_place()
            laid = tracked.relaid()
            self._restore([each for each in laid if each[0].stride() != each[1] or id(each[0]) in in_place])

    def release(self) -> None:
        """Restore the original strides of all parameters, in separate memory, with their current values.

        If another thread uses them, it happens when that thread is done.
        """
        bound = self._tracked.bound
        # skipped if plans were bound since it was deferred
        self.gate.when_exclusive(lambda: self._restore_layout(forget=True) if self._tracked.bound == bound else None)

    def restore_layout(self) -> None:
        """Like `release`, but original layouts stay recorded: plans may follow."""
        tracked = self._tracked
        uses = tracked.bound, tracked.indexed_times
        # skipped if a plan is made since it was deferred: it reads the weights where they are now
        self.gate.when_exclusive(
            lambda: self._restore_layout() if (tracked.bound, tracked.indexed_times) == uses else None
        )

    def _restore_layout(self, *, forget: bool = False) -> None:
        tracked = self._tracked
        with tracked.lock:
            laid = tracked.relaid()
            # no reference may keep the old memory alive: graphs are cycles, which wait for a collection of garbage
            for weight in (*tracked.known(), *tracked.packs.all()):
                weight.let_go()
            tracked.weights, tracked.tables, tracked.live, tracked.vacant = {}, {}, [], {}
            tracked.packs.clear()
            tracked.order.keep(())
            tracked.memo.clear()
            tracked.reset_detector()
            self._restore([each for each in laid if not self._tracked.layouts.is_original(*each)])
            if forget:
                self._tracked.layouts.forget()

    def _restore(self, laid: Sequence[tuple[torch.Tensor, Strides]]) -> None:
        """Give tensors their original strides. No mode or transform of the caller, such as FakeTensorMode, sees it: it
        would decide what the parameters are from now on."""

        def restore() -> None:
            with host_order.undisturbed():
                for tensor, original in laid:
                    self._tracked.layouts.restore(tensor, original)

        if laid:
            unrecorded(restore)

    def status(self) -> dict[str, Any]:
        """For the report."""
        tracked = self._tracked
        with tracked.lock:
            return {
                "away": self.vacant,
                "tracked": len(tracked.live),
                "packed_tensors": len(tracked.packs),
                "packed_parameters": sum(len(p.parts) for p in tracked.packs.all()),
                "copied": tracked.copied,
                "eight_bits_bytes": self.banks.held,
            }
