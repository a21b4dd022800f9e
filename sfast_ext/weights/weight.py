"""One weight that plans may read, and what may become of it."""

from __future__ import annotations

import operator
from collections.abc import Container, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from sfast_ext.weights.original_layout import live_tensor, memory_of

Slot = tuple[dict, str]


class WeightsAway(Exception):
    """Weights are not where plans read them for now (offloaded); the original forward runs, plans are kept."""


class WeightsInUse(WeightsAway):
    """Another thread computes with the weights, so they cannot be laid out anew now."""


class WeightsChanged(Exception):
    """Weights changed in a way that no copy can follow (shape, dtype, removed); plans must be built anew."""


@dataclass(eq=False)
class Weight:
    """A parameter, buffer or packed tensor that plans may read.

    `tensor` is the live tensor. `slots` are the dictionaries of modules that hold the parameter (several where it is
    tied); empty for a packed tensor.
    """

    path: str
    tensor: torch.Tensor
    slots: list[Slot] = field(default_factory=list)
    bound: torch.Tensor | None = None
    """The very object that was in the slots when the live tensor was last known to hold its values."""
    pointer: int = 0
    pack: Weight | None = None
    parts: tuple[Weight, ...] = ()
    plans: int = 0
    """How many plans read it; its address must not change while there is one."""

    def is_current(self, value: torch.Tensor) -> bool:
        """Whether the module still holds the tensor that the live one was bound to, where and as it was."""
        if id(self.bound) != id(value):
            return False
        live = self.tensor
        kept = live.data_ptr() == self.pointer
        return kept and value.device == live.device and value.dtype == live.dtype and same_place(value, live)


class Watch:
    """Places of modules, and what was in them when the live tensors were last known to hold its values.

    One list a property, so that looking at thousands of places is a handful of calls.
    """

    def __init__(self, weights: Iterable[Weight], containers: Container[int] | None = None) -> None:
        """The slots of `weights`, or of those only that lie in dictionaries of these ids."""
        slots = [(w, c, n) for w in weights for c, n in w.slots if containers is None or id(c) in containers]
        self.weights = [w for w, _, _ in slots]
        self._containers = [container for _, container, _ in slots]
        self._names = [name for _, _, name in slots]
        # one that is bound to nothing yet is stale whatever is in its slots
        self._bound = [w.tensor if w.bound is None else w.bound for w in self.weights]
        self._pointers = [w.pointer for w in self.weights]
        self._strides = [w.tensor.stride() for w in self.weights]

    def stale(self) -> list[tuple[Weight, Any]]:
        """Each weight of which something changed, with what is in its place now. Microseconds where nothing is."""
        now = list(map(dict.get, self._containers, self._names))
        if (
            all(map(operator.is_, now, self._bound))
            and list(map(torch.Tensor.data_ptr, self._bound)) == self._pointers
            and list(map(torch.Tensor.stride, self._bound)) == self._strides
        ):
            return []
        places = zip(self.weights, now, self._bound, self._pointers, self._strides)
        return [
            (weight, value)
            for weight, value, bound, pointer, stride in places
            if value is not bound or value.data_ptr() != pointer or value.stride() != stride
        ]

    def let_go(self, weights: Container[int]) -> None:
        """Hold no more what was in the places of the weights of these ids: until looked at anew, they are stale."""
        for i, weight in enumerate(self.weights):
            if id(weight) in weights:
                self._bound[i] = weight.tensor


def places_of(root: nn.Module) -> dict[str, Slot]:
    """Where a module holds the tensor of each name."""
    places: dict[str, Slot] = {}
    for prefix, module in root.named_modules():
        for container in (module._parameters, module._buffers, module.__dict__):
            for name, value in container.items():
                if isinstance(value, torch.Tensor):
                    places[f"{prefix}.{name}" if prefix else name] = (container, name)
    return places


def paths_of(root: nn.Module, weight: Weight) -> list[str]:
    # a weight is called after its first slot; tied ones have more
    held = {(id(c), n) for c, n in weight.slots}
    if len(held) == 1:
        return [weight.path]
    found = []
    for prefix, module in root.named_modules(remove_duplicate=False):
        for container in (module._parameters, module._buffers, module.__dict__):
            found += [f"{prefix}.{name}" if prefix else name for name in container if (id(container), name) in held]
    return found


def new_weight(path: str, value: torch.Tensor, slots: list[Slot]) -> Weight:
    return Weight(path, live_tensor(value), slots, value, value.data_ptr())


def same_place(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.data_ptr() == b.data_ptr() and a.stride() == b.stride()


def read_by_others(
    everything: Iterable[Weight], arrived: Iterable[tuple[Weight, torch.Tensor]], written: Iterable[Weight]
) -> Weight | None:
    """One of `written` in whose memory there is a tensor that is none of `everything`, nor has arrived; or None.

    It may be what a host keeps to put back (`weight.data`, a state dict), or what it put in another weight's place.
    """
    first: dict[int, Weight] = {}
    for w in written:
        first.setdefault(memory_of(w.tensor), w)
    known: dict[int, dict[int, torch.Tensor]] = {memory: {} for memory in first}
    spans: dict[int, list[tuple[int, int, bool]]] = {memory: [] for memory in first}

    def note(tensor: torch.Tensor | None) -> None:
        if tensor is not None and (ours := known.get(memory_of(tensor))) is not None:
            ours[id(tensor)] = tensor

    coming = {id(w): now for w, now in arrived}
    writing = {id(w) for w in written}
    for w in everything:
        if type(w.tensor) is not torch.Tensor:
            # no plan reads it, see `must_fit`, and it may have no memory to speak of
            continue
        note(w.tensor)
        note(w.tensor._base)
        bound = w.bound if w.bound is not None and same_place(w.bound, w.tensor) else None
        note(bound)
        note(coming.get(id(w)))
        within = spans.get(memory_of(w.tensor))
        if within is not None and w.slots and w.tensor.numel() and (w.plans or bound is not None):
            last = sum((size - 1) * stride for size, stride in zip(w.tensor.shape, w.tensor.stride()))
            start = w.tensor.storage_offset()
            within.append((start, start + last, id(w) in writing))
    for memory, w in first.items():
        end, was_written = -1, False
        for start, last, is_written in sorted(spans[memory]):
            if start <= end and (is_written or was_written):
                return w
            if last > end:
                end, was_written = last, is_written
        if _uses(w.tensor) - _ALONE >= len(known[memory]):
            return w
    return None


def _uses(tensor: torch.Tensor) -> int:
    # torch before 2.6 counts where it is built for GPUs only
    count = getattr(torch._C, "_storage_Use_Count", None)
    storage = tensor.untyped_storage()
    return 0 if count is None else count(storage._cdata)


# of a tensor that has its memory to itself
_ALONE = _uses(torch.empty(0, device="cpu"))


def must_fit(weight: Weight, now: torch.Tensor | None, *, anywhere: bool = False) -> None:
    """Raise `WeightsAway` or `WeightsChanged` where the live tensor cannot take the values of `now`.

    Args:
        anywhere: it may be on another device.
    """
    live = weight.tensor
    if not isinstance(now, torch.Tensor):
        raise WeightsChanged(f"{weight.path} is gone")
    if type(now) not in (torch.Tensor, nn.Parameter) or now.layout is not torch.strided:
        raise WeightsChanged(f"{weight.path} is now a {type(now).__name__}")
    if now.device != live.device and not (anywhere and now.device.type != "meta"):
        raise WeightsAway(f"the weights are on {now.device}, the plans on {live.device}")
    if live.data_ptr() != weight.pointer:
        # its storage was resized, and CUDA graphs read where it was
        raise WeightsChanged(f"the memory of {weight.path} was exchanged")
    if now.shape != live.shape or now.dtype != live.dtype:
        raise WeightsChanged(
            f"{weight.path} changed from {live.dtype}{list(live.shape)} to {now.dtype}{list(now.shape)}"
        )
