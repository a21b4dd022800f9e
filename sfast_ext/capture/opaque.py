"""A call of another library's function as one operation of a graph, torch.ops.sfast_ext.foreign.

The operation has no side effects. A function that writes to its arguments, as SageAttention 1 does to its keys, gets
copies. A plan calls the function itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from sfast_ext import reasons
from sfast_ext.reasons import Declined

Shape = Callable[[Sequence[Tensor]], Sequence[int]]
"""The shape of the result, computed from the tensors among the arguments."""

_PLAIN = (int, float, bool, str, type(None), torch.dtype)
# a fragment, so that the namespace stays open to other operators
_library = torch.library.Library("sfast_ext", "FRAGMENT")
_library.define("foreign(str call, Tensor[] tensors) -> Tensor")
OPERATOR: Any = torch.ops.sfast_ext.foreign.default

_calls: dict[str, _Call] = {}


class NotPlain(Declined):
    """An argument is neither a tensor nor a plain value."""


def call(
    name: str, function: Callable[..., Tensor], shape: Shape, args: Sequence[Any], kwargs: dict[str, Any]
) -> Tensor:
    """Run `function` as one operation, which active modes see as such.

    Args:
        name: a unique name.
        function: returns a tensor that shares no memory with its arguments, with dtype and device of the first one.
        args, kwargs: tensors and plain values, possibly in tuples and lists.

    Raises:
        NotPlain: an argument is neither a tensor nor a plain value.
    """
    leaves, tree = pytree.tree_flatten((tuple(args), kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    for leaf in leaves:
        if not isinstance(leaf, Tensor) and type(leaf) not in _PLAIN:
            kind = f"{type(leaf).__module__}.{type(leaf).__qualname__}"
            raise NotPlain(reasons.ARGUMENT_NOT_RECORDED(name, kind))
    places = iter(range(len(tensors)))
    held = [_Place(next(places)) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    rest, named = pytree.tree_unflatten(held, tree)
    words = [*map(repr, rest), *(f"{key}={value!r}" for key, value in named.items())]
    key = f"{name}({', '.join(words)})"
    _calls[key] = _calls.get(key) or _Call(key, function, shape, held, tree)
    return OPERATOR(key, tensors)


class _Place:
    """Placeholder for a tensor among the arguments."""

    def __init__(self, index: int) -> None:
        self.index = index

    def __repr__(self) -> str:
        return f"#{self.index}"


class _Call:
    def __init__(self, key: str, function: Callable[..., Tensor], shape: Shape, held: list[Any], tree: Any) -> None:
        self.shape = shape
        self._key = key
        self._function = function
        self._held = held
        self._tree = tree
        self._written: frozenset[int] | None = None  # indices of tensors that it writes to; None before the first run

    def run(self, tensors: Sequence[Tensor]) -> Tensor:
        given = [self._given(index, x) for index, x in enumerate(tensors)]
        versions = None if self._written is not None else [x._version for x in given]
        leaves = [given[leaf.index] if isinstance(leaf, _Place) else leaf for leaf in self._held]
        args, kwargs = pytree.tree_unflatten(leaves, self._tree)
        result = self._function(*args, **kwargs)
        if versions is not None:
            self._written = frozenset(i for i, (x, before) in enumerate(zip(given, versions)) if x._version != before)
        expected = tuple(self.shape(tensors))
        if not isinstance(result, Tensor) or result.shape != expected or result.dtype != tensors[0].dtype:
            found = (tuple(result.shape), result.dtype) if isinstance(result, Tensor) else type(result).__name__
            raise RuntimeError(f"{self._key} gave {found}, not a tensor {expected} of {tensors[0].dtype}")
        return result.contiguous()

    def _given(self, index: int, x: Tensor) -> Tensor:
        if x.dim() and x.stride(-1) != 1:
            # required by the functions; a plan may have changed the layout
            x = x.contiguous()
        return x.clone() if self._written is None or index in self._written else x


def _run(key: str, tensors: Sequence[Tensor]) -> Tensor:
    return _calls[key].run(tensors)


def _meta(key: str, tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0].new_empty(_calls[key].shape(tensors))


_library.impl("foreign", _run, "CompositeExplicitAutograd")
_library.impl("foreign", _meta, "Meta")
