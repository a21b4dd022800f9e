"""Results of one call that share memory, such as a tensor that is returned twice. A plan's results share it as well: a
caller may write to one of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from sfast_ext.weights.original_layout import is_plain, memory_of


class View(NamedTuple):
    """A result in the memory of another.

    Args:
        base: the number of the other one.
        stride: None if it is the same object.
        offset: in elements, from the first one of the other.
    """

    base: int
    stride: tuple[int, ...] | None = None
    offset: int = 0


def shared(outputs: Sequence[torch.Tensor], *, alike: bool = True) -> dict[int, View]:
    """Which results of the original lie in the memory of others, by their number.

    Args:
        alike: whether a plan's results have the same strides. If not, only those that are the same object are found.
    """
    first = {id(x): i for i, x in reversed([*enumerate(outputs)])}
    same = {i: View(first[id(x)]) for i, x in enumerate(outputs) if first[id(x)] != i}
    if not alike:
        return same
    found: dict[int, View] = {}
    bases: list[int] = []
    # a larger one is no part of a smaller one
    for i in sorted(set(range(len(outputs))) - same.keys(), key=lambda i: (-outputs[i].numel(), i)):
        view = next((view for j in bases if (view := _view(outputs[i], outputs[j], j)) is not None), None)
        if view is None:
            bases.append(i)
        else:
            found[i] = view
    # these last: they may be the same as a view
    return {**found, **same}


def lent(outputs: Sequence[torch.Tensor], others: Iterable[torch.Tensor]) -> frozenset[int]:
    """Which results of the original lie in the memory of other tensors, by their number."""
    memory = {memory_of(x) for x in others if is_plain(x)}
    return frozenset(i for i, x in enumerate(outputs) if is_plain(x) and memory_of(x) in memory)


def hand_out(own: list[torch.Tensor], shapes: Sequence[torch.Tensor], views: dict[int, View]) -> None:
    """Replace those of a plan's results that are views. `shapes` has tensors of the same shapes."""
    for i, (base, stride, offset) in views.items():
        own[i] = own[base] if stride is None else own[base].as_strided(shapes[i].shape, stride, offset)


def _view(x: torch.Tensor, base: torch.Tensor, number: int) -> View | None:
    plain = x.layout is torch.strided and base.layout is torch.strided and x.dtype == base.dtype and x.numel()
    if not plain or x.device != base.device or _span(base) != base.numel():
        return None
    if x.untyped_storage().data_ptr() != base.untyped_storage().data_ptr():
        return None
    offset = x.storage_offset() - base.storage_offset()
    return View(number, tuple(x.stride()), offset) if 0 <= offset <= _span(base) - _span(x) else None


def _span(x: torch.Tensor) -> int:
    """The elements of memory from the first one to the last one."""
    return 1 + sum((n - 1) * step for n, step in zip(x.shape, x.stride()))
