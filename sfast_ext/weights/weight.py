"""A weight that plans may read, and lookups of tensors in a module."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from sfast_ext import reasons
from sfast_ext.reasons import Declined
from sfast_ext.weights.inner_tensors import InnerTensors, all_within, inner_tensors
from sfast_ext.weights.original_layout import is_plain, live_tensor

WeightSlot = tuple[dict, str]
"""A place in a module that holds a tensor: a dictionary of a submodule, or the parts of a weight, and a name in it."""


class WeightsAway(Declined):
    """Weights are temporarily not where plans read them (offloaded). The call is bypassed, plans are kept."""


class WeightsInUse(WeightsAway):
    """Another thread uses the weights, so their layout cannot be changed now."""


class WeightsChanged(Declined):
    """Weights changed in a way that no copy can follow (shape, dtype, removed). Plans must be built again."""


@dataclass(eq=False)
class Weight:
    """A parameter, buffer or packed tensor that plans may read.

    `tensor` is the live tensor. `slots` are the places in modules that hold the parameter: several if it is tied, none
    for a packed tensor.
    """

    path: str
    tensor: torch.Tensor
    slots: list[WeightSlot] = field(default_factory=list)
    bound: torch.Tensor | None = None
    """The object in the slots when the live tensor was last known to have its values."""
    pointer: int = 0
    pack: Weight | None = None
    parts: tuple[Weight, ...] = ()
    plans: int = 0
    """The number of plans that read it. Its address is fixed while there is one."""
    source: torch.Tensor | None = None
    """For a table on another device: the tensor whose values each run of a plan copies into the live one."""

    @property
    def is_bare(self) -> bool:
        """Whether nothing in the module is bound to it, as after it was set aside."""
        return all(part.bound is None for part in self.parts or (self,))

    def let_go(self) -> None:
        """No plan reads it any more: what still refers to it keeps no memory."""
        tensor = self.tensor
        self.tensor = torch.empty((1,) * tensor.dim(), dtype=tensor.dtype, device="meta").expand(tensor.shape)
        self.bound = self.source = None
        for container, _ in self.slots:
            if isinstance(container, InnerTensors):
                container.let_go()

    def is_current(self, value: torch.Tensor) -> bool:
        """Whether the module still holds the bound tensor, with unchanged memory, strides, device and dtype."""
        if id(self.bound) != id(value):
            return False
        live = self.tensor
        kept = live.data_ptr() == self.pointer
        return kept and value.device == live.device and value.dtype == live.dtype and same_place(value, live)


def places_of(root: nn.Module) -> dict[str, WeightSlot]:
    """The slot of each tensor of a module, by path."""
    places: dict[str, WeightSlot] = {}
    for prefix, module in root.named_modules():
        for container in (module._parameters, module._buffers, module.__dict__):
            for name, value in container.items():
                if isinstance(value, torch.Tensor):
                    path = f"{prefix}.{name}" if prefix else name
                    inner = None if is_plain(value) else inner_tensors(module, container, name)
                    if inner is None:
                        places[path] = (container, name)
                    else:
                        places.update((f"{path}.{part}", (inner, part)) for part in inner)
    return places


def slots_at(paths: Sequence[str], places: Mapping[str, WeightSlot]) -> list[WeightSlot]:
    """The slots of these paths. Empty if one is missing, or if they do not all hold the same tensor."""
    found = [places[path] for path in paths if path in places]
    same = len({id(container[name]) for container, name in found}) == 1
    return found if same and len(found) == len(paths) else []


def tensors_held(root: nn.Module) -> list[torch.Tensor]:
    """All tensors of a module."""
    return [container[name] for container, name in places_of(root).values()]


def tensors_of(root: nn.Module) -> dict[int, tuple[torch.Tensor, list[str], list[WeightSlot]]]:
    """Each tensor of a module by its id: (tensor, paths, slots)."""
    held: dict[int, tuple[torch.Tensor, list[str], list[WeightSlot]]] = {}
    for path, slot in places_of(root).items():
        value = slot[0][slot[1]]
        _, paths, slots = held.setdefault(id(value), (value, [], []))
        paths.append(path)
        slots.append(slot)
    return held


def paths_of(root: nn.Module, weight: Weight) -> list[str]:
    # weight.path is that of its first slot; a tied weight has more
    held = {(id(c), n) for c, n in weight.slots}
    if len(held) == 1:
        return [weight.path]
    found = []
    for prefix, module in root.named_modules(remove_duplicate=False):
        for container in (module._parameters, module._buffers, module.__dict__):
            found += [f"{prefix}.{name}" if prefix else name for name in container if (id(container), name) in held]
        for inner in all_within(module):
            of = f"{prefix}.{inner.name}" if prefix else inner.name
            found += [f"{of}.{part}" for part in inner if (id(inner), part) in held]
    return found


def slots_of(weights: Iterable[Weight]) -> set[tuple[int, str]]:
    """The slots of weights, or of their parts, by the ids of the containers."""
    parts = (part for weight in weights for part in weight.parts or (weight,))
    return {(id(container), name) for part in parts for container, name in part.slots}


def new_weight(path: str, value: torch.Tensor, slots: list[WeightSlot]) -> Weight:
    # one of a class whose operations run code of a library is none that a plan reads
    live = live_tensor(value) if type(value).__torch_dispatch__ is torch.Tensor.__torch_dispatch__ else value
    return Weight(path, live, slots, value, value.data_ptr())


def same_place(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.data_ptr() == b.data_ptr() and a.stride() == b.stride() and a.shape == b.shape


def check_compatible(weight: Weight, now: torch.Tensor | None, *, anywhere: bool = False) -> None:
    """Raise `WeightsAway` or `WeightsChanged` if the live tensor cannot take the values of `now`.

    Args:
        anywhere: `now` may be on another device.
    """
    live = weight.tensor
    if not isinstance(now, torch.Tensor):
        raise WeightsChanged(reasons.WEIGHT_GONE(weight.path))
    if not is_plain(now):
        raise WeightsChanged(reasons.WEIGHT_CLASS(weight.path, type(now).__name__))
    if now.device != live.device and not (anywhere and now.device.type != "meta"):
        raise WeightsAway(reasons.WEIGHTS_ON(now.device, live.device))
    if live.data_ptr() != weight.pointer:
        # its storage was resized; CUDA graphs read the old address
        raise WeightsChanged(reasons.WEIGHT_EXCHANGED(weight.path))
    if now.shape != live.shape or now.dtype != live.dtype:
        before, after = (f"{tensor.dtype}{list(tensor.shape)}" for tensor in (live, now))
        raise WeightsChanged(reasons.WEIGHT_FORM(weight.path, before, after))
