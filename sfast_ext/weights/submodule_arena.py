"""The weights of a submodule that has a separate accelerator. They are in the weight arena of the model."""

from __future__ import annotations

from torch import nn

from sfast_ext.weights.arena import WeightArena
from sfast_ext.weights.change_detector import ChangeDetector
from sfast_ext.weights.inner_tensors import all_within


class SubmoduleArena(WeightArena):
    """The model's arena for the plans of one submodule: it checks the weights of the submodule alone, and releases
    nothing by itself.

    Args:
        arena: the arena of the model.
        root: the submodule.
    """

    def __init__(self, arena: WeightArena, root: nn.Module) -> None:
        self._tracked = arena._tracked
        self.is_table = lambda tensor: False
        self._root = root
        self._detector = ChangeDetector([])
        self._containers: set[int] = set()
        self._epoch = -1
        self.order = arena.order.of_part(self._own)
        self.resident = arena.resident

    @property
    def root(self) -> nn.Module:
        """The submodule."""
        return self._root

    def sync(self, detector: ChangeDetector | None = None) -> int:
        """See `WeightArena.sync`."""
        # the order asks for them only if it may have changed
        self._own()
        self.order.plan()
        return super().sync(self._detector)

    def _own(self) -> set[int]:
        """The dictionaries of the submodule, by id. Renews the detector as well."""
        if self._epoch != self._tracked.epoch:
            self._epoch = self._tracked.epoch
            self._containers = {id(c) for m in self._root.modules() for c in (m._parameters, m._buffers, m.__dict__)}
            self._containers |= {id(inner) for m in self._root.modules() for inner in all_within(m)}
            self._containers |= {id(c) for table in self._tracked.tables.values() for c, _ in table.slots}
            self._detector = self.detector(self._containers)
        return self._containers

    def move_to(self, root: nn.Module) -> bool:
        """A submodule does not move by itself."""
        return False

    def release(self) -> None:
        """Does nothing: parameters are released with the model."""
