"""Which parameters of a module were replaced or moved since the live tensors last held their values."""

from __future__ import annotations

import operator
from collections.abc import Container, Iterable
from typing import Any

import torch

from sfast_ext.weights.weight import Weight


class ChangeDetector:
    """Places of modules, and what was in them when the live tensors were last known to hold its values.

    One list a property, so that looking at thousands of places is a handful of calls.
    """

    def __init__(self, weights: Iterable[Weight], containers: Container[int] | None = None) -> None:
        """The slots of `weights`, or of those only that lie in dictionaries of these ids."""
        slots = [(w, c, n) for w in weights for c, n in w.slots if containers is None or id(c) in containers]
        self.weights = [w for w, _, _ in slots]
        self._containers = [container for _, container, _ in slots]
        self._names = [name for _, _, name in slots]
        # one that is bound to nothing yet is changed whatever is in its slots
        self._bound = [w.tensor if w.bound is None else w.bound for w in self.weights]
        self._pointers = [w.pointer for w in self.weights]
        self._strides = [w.tensor.stride() for w in self.weights]

    def changed(self) -> list[tuple[Weight, Any]]:
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

    def forget(self, weights: Container[int]) -> None:
        """Hold no more what was in the places of the weights of these ids: until looked at anew, they are changed."""
        for i, weight in enumerate(self.weights):
            if id(weight) in weights:
                self._bound[i] = weight.tensor
