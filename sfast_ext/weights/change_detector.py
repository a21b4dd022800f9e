"""Detects parameters that were replaced or moved since the last sync."""

from __future__ import annotations

import operator
from collections.abc import Container, Iterable
from typing import Any

import torch

from sfast_ext.weights.inner_tensors import InnerTensors, Watch, watch_of
from sfast_ext.weights.weight import Weight


class ChangeDetector:
    """The slots of weights, and their contents when the live tensors last had their values.

    There is one list for each property, so that thousands of slots are checked in a handful of calls.
    """

    def __init__(self, weights: Iterable[Weight], containers: Container[int] | None = None) -> None:
        """Check the slots of `weights`. With `containers`, only slots in dictionaries with these ids.

        Attributes:
            closely: whether the next look is for fewer rows on the same memory as well, which have the same strides.
            always_closely: whether each is. Not if a host tells when a generation begins.
        """
        self.closely = self.always_closely = True
        slots = [(w, c, n) for w in weights for c, n in w.slots if containers is None or id(c) in containers]
        self.weights = [w for w, _, _ in slots]
        self._containers = [container for _, container, _ in slots]
        self._names = [name for _, _, name in slots]
        # a weight that is not bound counts as changed, whatever is in its slots
        self._bound = [w.tensor if w.bound is None else w.bound for w in self.weights]
        self._pointers = [w.pointer for w in self.weights]
        self._strides = [w.tensor.stride() for w in self.weights]
        self._sizes = [w.tensor.numel() for w in self.weights]
        self._inner = list({id(c): c for c in self._containers if type(c) is InnerTensors}.values())
        self._watch: Watch | None = None

    def changed(self) -> list[tuple[Weight, Any]]:
        """The weights that changed, with the current contents of their slots. Microseconds if nothing changed."""
        if self._inner:
            self._follow_outer()
        if (
            all(map(operator.is_, map(dict.get, self._containers, self._names), self._bound))
            and list(map(torch.Tensor.data_ptr, self._bound)) == self._pointers
            and list(map(torch.Tensor.stride, self._bound)) == self._strides
            and (not self.closely or list(map(torch.Tensor.numel, self._bound)) == self._sizes)
        ):
            self.closely = self.always_closely
            return []
        now = list(map(dict.get, self._containers, self._names))
        places = zip(self.weights, now, self._bound, self._pointers, self._strides, self._sizes)
        return [
            (weight, value)
            for weight, value, bound, pointer, stride, size in places
            if value is not bound
            or value.data_ptr() != pointer
            or value.stride() != stride
            or value.numel() != size
        ]

    def _follow_outer(self) -> None:
        """Look at the weights that are made of others, if any was replaced."""
        if self._watch is not None and self._watch.holds():
            return
        for inner in self._inner:
            inner.refresh()
        self._watch = watch_of(self._inner)

    def forget(self, weights: Container[int]) -> None:
        """Drop the references to what was in the slots of these weights. They count as changed from now on."""
        for i, weight in enumerate(self.weights):
            if id(weight) in weights:
                self._bound[i] = weight.tensor
                if isinstance(container := self._containers[i], InnerTensors):
                    container.let_go()
                    self._watch = None
