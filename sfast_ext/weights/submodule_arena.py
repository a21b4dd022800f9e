"""The weights of a submodule that has an accelerator of its own. They are in the weight arena of the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from sfast_ext.weights.arena import WeightArena
from sfast_ext.weights.change_detector import ChangeDetector
from sfast_ext.weights.gate import Gate
from sfast_ext.weights.weight import Weight


class SubmoduleArena:
    """A view of the model's arena for the plans of one submodule. It releases nothing by itself.

    Args:
        arena: the arena of the model.
        root: the submodule.
    """

    def __init__(self, arena: WeightArena, root: nn.Module) -> None:
        self.root = root
        self._arena = arena
        self._detector = ChangeDetector([])
        self._containers: set[int] = set()
        self._epoch = -1
        self.order = arena.order.of_part(self._own)

    @property
    def gate(self) -> Gate:
        """The gate of the model."""
        return self._arena.gate

    def index(self) -> None:
        """See `WeightArena.index`."""
        self._arena.index()

    def locate(self, tensor: torch.Tensor) -> Weight | None:
        """See `WeightArena.locate`."""
        return self._arena.locate(tensor)

    def pack(self, weights: Sequence[Weight]) -> Weight | None:
        """See `WeightArena.pack`."""
        return self._arena.pack(weights)

    def channels_last(self, weight: Weight) -> bool:
        """See `WeightArena.channels_last`."""
        return self._arena.channels_last(weight)

    def memoize(self, name: str, find: Callable[[], bool]) -> bool:
        """See `WeightArena.memoize`."""
        return self._arena.memoize(name, find)

    def bind(self, weights: Sequence[Weight]) -> None:
        """See `WeightArena.bind`."""
        self._arena.bind(weights)

    def unbind(self, weights: Sequence[Weight]) -> None:
        """See `WeightArena.unbind`."""
        self._arena.unbind(weights)

    def sync(self) -> int:
        """See `WeightArena.sync`. Checks the weights of the submodule only."""
        # the order asks for them only if it may have changed
        self._own()
        self.order.plan()
        return self._arena.sync(self._detector)

    def _own(self) -> set[int]:
        """The dictionaries of the submodule, by id. Renews the detector as well."""
        if self._epoch != self._arena.epoch:
            self._epoch = self._arena.epoch
            self._containers = {id(c) for m in self.root.modules() for c in (m._parameters, m._buffers, m.__dict__)}
            self._detector = self._arena.detector(self._containers)
        return self._containers

    @property
    def vacant(self) -> bool:
        """See `WeightArena.vacant`."""
        return self._arena.vacant

    def move_to(self, root: nn.Module) -> bool:
        """A submodule does not move by itself."""
        return False

    def restore_layout_temporarily(self) -> None:
        """See `WeightArena.restore_layout_temporarily`."""
        self._arena.restore_layout_temporarily()

    def release(self) -> None:
        """Does nothing: parameters are released with the model."""

    def status(self) -> dict[str, Any]:
        """See `WeightArena.status`."""
        return self._arena.status()


Arena = WeightArena | SubmoduleArena
