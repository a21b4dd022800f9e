"""One weight that plans may read, and what may become of it."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import nn

Slot = tuple[dict, str]
Watched = tuple[dict, str, torch.Tensor, int, tuple[int, ...], "Weight"]


class WeightsAway(Exception):
    """Weights are not where plans read them for now (offloaded); the original forward runs, plans are kept."""


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
    home: tuple[int, ...] = ()
    """Strides the module's parameter had before the arena touched it."""
    pack: Weight | None = None
    parts: tuple[Weight, ...] = ()
    placed: bool = False
    """Whether the arena changed where or how the parameter lies."""
    plans: int = 0
    """How many plans read it; its address must not change while there is one."""

    @property
    def owner(self) -> dict:
        """The dictionary of the module that holds it."""
        return self.slots[0][0]

    @property
    def name(self) -> str:
        """Its name in that module."""
        return self.slots[0][1]

    def is_current(self, value: torch.Tensor) -> bool:
        """Whether the module still holds the tensor that the live one was bound to, where and as it was."""
        if id(self.bound) != id(value):
            return False
        live = self.tensor
        return value.device == live.device and value.dtype == live.dtype and same_place(value, live)

    def go_home(self, now: torch.Tensor) -> None:
        """Give the module's parameter the strides it had before the arena, in memory of its own."""
        as_placed = now.stride() == self.tensor.stride() and now.shape == self.tensor.shape
        # other strides are the host's choice
        strides = self.home if as_placed else tuple(now.stride())
        with torch.inference_mode(False), torch.no_grad():
            own = torch.empty_strided(now.shape, strides, dtype=now.dtype, device=now.device)
            own.copy_(now.detach())
            now.data = own


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
    return Weight(path, value.detach(), slots, value, value.data_ptr(), tuple(value.stride()))


def same_place(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.data_ptr() == b.data_ptr() and a.stride() == b.stride()


def must_fit(weight: Weight, now: torch.Tensor | None) -> None:
    live = weight.tensor
    if not isinstance(now, torch.Tensor):
        raise WeightsChanged(f"{weight.path} is gone")
    if type(now) not in (torch.Tensor, nn.Parameter) or now.layout is not torch.strided:
        raise WeightsChanged(f"{weight.path} is now a {type(now).__name__}")
    if now.device != live.device:
        raise WeightsAway(f"the weights are on {now.device}, the plans on {live.device}")
    if now.shape != live.shape or now.dtype != live.dtype:
        raise WeightsChanged(
            f"{weight.path} changed from {live.dtype}{list(live.shape)} to {now.dtype}{list(now.shape)}"
        )
