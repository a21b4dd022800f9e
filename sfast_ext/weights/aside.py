"""A parameter whose half-precision values are not on the GPU while plans run, see `Resident`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from sfast_ext import reasons
from sfast_ext.weights.module_walk import parameters_of
from sfast_ext.weights.original_layout import is_plain, live_tensor, set_data
from sfast_ext.weights.staging import Staging, to_system_memory
from sfast_ext.weights.weight import (
    Weight,
    WeightsAway,
    WeightsChanged,
    WeightSlot,
    paths_of,
    places_of,
    slots_at,
)


@dataclass(eq=False)
class Aside:
    """A parameter whose half-precision values are not on the GPU while plans run.

    Attributes:
        slots: the places in modules that hold it.
        seen: what it was when banks were last made of it, see `state_of`; None: nothing yet.
        digest: that of its values then, see `digest`.
        number: the id of what the module last held there.
    """

    path: str
    slots: list[WeightSlot]
    shape: torch.Size
    dtype: torch.dtype
    seen: tuple[Any, ...] | None = None
    digest: torch.Tensor | None = field(default=None, repr=False)
    number: int = 0

    @property
    def bytes(self) -> int:
        """What it takes in half precision."""
        return self.shape.numel() * self.dtype.itemsize

    @property
    def now(self) -> Any:
        """What the module holds."""
        container, name = self.slots[0]
        return container.get(name)

    def changed(self) -> bool:
        """Whether banks are to be made of it again, as far as its state tells. Raises what `checked` does."""
        seen, now = self.seen, self.now
        same = seen is not None and isinstance(now, torch.Tensor) and state_of(now) == seen
        if same and all(container.get(name) is now for container, name in self.slots[1:]):
            # as when it was checked
            return False
        return seen != state_of(self.checked())

    def checked(self) -> torch.Tensor:
        """What the module holds.

        Raises:
            WeightsChanged: it is none that banks can be made of.
        """
        now = self.now
        if not isinstance(now, torch.Tensor):
            raise WeightsChanged(reasons.WEIGHT_GONE(self.path))
        if not is_plain(now):
            raise WeightsChanged(reasons.WEIGHT_CLASS(self.path, type(now).__name__))
        if any(container.get(name) is not now for container, name in self.slots):
            raise WeightsChanged(reasons.WEIGHT_UNTIED(self.path))
        if now.shape != self.shape or now.dtype != self.dtype:
            forms = (f"{dtype}{list(shape)}" for dtype, shape in ((self.dtype, self.shape), (now.dtype, now.shape)))
            raise WeightsChanged(reasons.WEIGHT_FORM(self.path, *forms))
        if now.device.type == "meta":
            raise WeightsAway(reasons.WEIGHTS_ON(now.device, "the GPU"))
        return now


class Asides:
    """Those of one model, each by its first place in a module. A host may put another layer at the path of one, and the
    one before back later: their weights are two."""

    def __init__(self) -> None:
        self._found: dict[tuple[int, str], Aside] = {}

    def __iter__(self) -> Iterator[Aside]:
        return iter(list(self._found.values()))

    def __bool__(self) -> bool:
        return bool(self._found)

    def include(self, asides: Iterable[Aside]) -> None:
        """Those whose places have none yet."""
        for aside in asides:
            aside.number = aside.number or id(aside.now)
            self._found.setdefault(_place(aside.slots), aside)

    def keep(self, asides: Iterable[Aside]) -> None:
        """No others."""
        self._found = {_place(aside.slots): aside for aside in asides}

    def of(self, weight: Weight) -> Aside | None:
        """That of a parameter of the arena; none of a table, which no place holds. It is a new one if the parameter has
        other places or another form by now, of which the banks before cannot be made."""
        if not weight.slots:
            return None
        place = _place(weight.slots)
        found = self._found.get(place)
        if found is not None and not _is_of(found, weight):
            found = self._found[place] = Aside(weight.path, weight.slots, weight.tensor.shape, weight.tensor.dtype)
        return found

    def made_of(self, weight: Weight) -> list[Aside]:
        """`of` for each parameter of a weight, which is made if need be."""
        parts = weight.parts or (weight,)
        # the object is what plans of the model have in common, whatever its slots hold
        self.include(Aside(p.path, p.slots, p.tensor.shape, p.tensor.dtype) for p in parts if self.of(p) is None)
        return [self._found[_place(part.slots)] for part in parts]

    def elsewhere(self, root: nn.Module) -> list[torch.Tensor]:
        """The parameters in system memory, each once. A host may have moved one to another place of the module."""
        asides, lost = list(self), set[int]()
        for aside in asides:
            now = aside.now
            if isinstance(now, torch.Tensor):
                aside.number = id(now)
            else:
                lost.add(aside.number)
        found = in_system_memory(asides)
        return [*found, *(p for p in parameters_of(root) if id(p) in lost and is_there(p))] if lost else found


def _place(slots: Sequence[WeightSlot]) -> tuple[int, str]:
    container, name = slots[0]
    return id(container), name


def _is_of(aside: Aside, weight: Weight) -> bool:
    same = [(id(c), n) for c, n in aside.slots] == [(id(c), n) for c, n in weight.slots]
    return same and aside.shape == weight.tensor.shape and aside.dtype == weight.tensor.dtype


def state_of(value: torch.Tensor) -> tuple[Any, ...]:
    """What tells a tensor from one that was replaced, moved or written to."""
    # an inference tensor has none, and to catch its error takes 20 microseconds: only its digest tells
    version = -1 if value.is_inference() else value._version
    return id(value), type(value), value.data_ptr(), version, value.stride(), value.shape, value.dtype


def differing(asides: Iterable[Aside], digests: Callable[[], Iterable[torch.Tensor]]) -> set[int]:
    """Those whose digests now are not those of before, by id. They are due until they are quantised."""
    found = set()
    for aside, now in zip(asides, digests()):
        was = aside.digest
        if was is None or now.shape != was.shape or not torch.equal(now, was):
            aside.seen = None
            found.add(id(aside))
    return found


def in_system_memory(asides: Iterable[Aside]) -> list[torch.Tensor]:
    """Those parameters that are there, each once."""
    held = {id(now): now for aside in asides if isinstance(now := aside.now, torch.Tensor)}
    return [now for now in held.values() if is_there(now)]


def joined(parts: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    """A tensor on the GPU with the rows of all parts."""
    with torch.inference_mode(False), torch.no_grad(), Staging() as copy:
        size = sum(len(part) for part in parts), *parts[0].shape[1:]
        whole, first = torch.empty(size, dtype=parts[0].dtype, device=device), 0
        for part in parts:
            copy(whole[first : first + len(part)], live_tensor(part))
            first += len(part)
    return whole


def is_there(now: torch.Tensor) -> bool:
    """Whether a parameter is in system memory."""
    return now.device.type == "cpu" and is_plain(now)


class Hidden:
    """Within, the parameters in system memory are empty ones on a GPU."""

    def __init__(self, asides: Iterable[Aside], device: torch.device) -> None:
        self._asides, self._device = list(asides), device
        # by the number of the parameter
        self._taken: dict[int, tuple[Aside, torch.Tensor, torch.Tensor]] = {}

    def __enter__(self) -> Hidden:
        try:
            with torch.inference_mode(False), torch.no_grad():
                for aside in self._asides:
                    now = aside.now
                    if isinstance(now, torch.Tensor) and is_there(now):
                        self._hide(aside, now)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for aside, source, value in self._taken.values():
            # the host may have put another object there
            now = aside.now
            for each in (value,) if now is value else (now, value):
                if isinstance(each, torch.Tensor) and not each.numel():
                    # the host may have asked for another dtype as well
                    set_data(each, source.to(each.dtype))
        self._taken = {}

    @contextlib.contextmanager
    def shown(self, layer: nn.Module, name: str) -> Iterator[None]:
        """Within, a parameter of a layer has its values, for a host that puts another in its place. What is there
        afterwards is in system memory, and an empty one as well."""
        value = layer._parameters.get(name)
        aside, source, _ = self._taken.pop(id(value), (None, None, None))
        if aside is None or source is None or value is None:
            yield
            return
        set_data(value, source)
        try:
            yield
        finally:
            now = aside.now
            if now is not value:
                # a new object may have the number and the memory of the one before
                aside.seen = None
            if isinstance(now, torch.Tensor) and is_plain(now):
                with torch.inference_mode(False), torch.no_grad():
                    if now.is_cuda:
                        set_data(now, to_system_memory([live_tensor(now)])[0])
                    self._hide(aside, now)

    def _hide(self, aside: Aside, value: torch.Tensor) -> None:
        if id(value) not in self._taken:
            self._taken[id(value)] = aside, live_tensor(value), value
            set_data(value, torch.empty(0, dtype=value.dtype, device=self._device))


@contextlib.contextmanager
def lent(
    values: Iterable[torch.Tensor], module: nn.Module, on_gpu: Callable[[list[torch.Tensor]], list[torch.Tensor]]
) -> Iterator[None]:
    """See `Resident.lent`.

    Args:
        values: the parameters in system memory.
        on_gpu: copies tensors.
    """
    mine = set(map(id, module._parameters.values()))
    lent = [(value, live_tensor(value)) for value in values if id(value) in mine]
    with torch.inference_mode(False), torch.no_grad():
        for value, there in zip([value for value, _ in lent], on_gpu([source for _, source in lent])):
            set_data(value, there)
    try:
        yield
    finally:
        with torch.inference_mode(False), torch.no_grad():
            for value, source in lent:
                if value.is_cuda and value.shape == source.shape and value.dtype == source.dtype:
                    # what the host wrote counts as a change of the parameter, which its version shows
                    source.copy_(live_tensor(value))
                    set_data(value, source)


def places_in(
    asides: Iterable[Aside], root: nn.Module, other: nn.Module
) -> list[tuple[Aside, list[WeightSlot]]] | None:
    """Where another module has parameters of the same paths, shapes and dtypes; None if it has not all of them."""
    places, found = places_of(other), list[tuple[Aside, list[WeightSlot]]]()
    for aside in asides:
        paths = paths_of(root, Weight(aside.path, torch.empty(0), aside.slots))
        slots = slots_at(paths, places)
        if not slots:
            return None
        value = slots[0][0][slots[0][1]]
        if value.shape != aside.shape or value.dtype != aside.dtype:
            return None
        found.append((aside, slots))
    return found
