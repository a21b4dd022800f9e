"""External references to the memory of live tensors, such as a host's backups."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Iterable

import torch

from sfast_ext.weights.original_layout import OriginalLayouts, memory_of
from sfast_ext.weights.weight import Weight, same_place

Left = tuple[Weight, "weakref.ref[torch.Tensor]", Callable[[torch.Tensor], None]]
"""A weight, its parameter from before, and what records that in the layouts again."""


def part(written: Iterable[tuple[Weight, torch.Tensor]], layouts: OriginalLayouts) -> list[Left]:
    """Drop the references to the parameters that others replaced."""
    left: list[Left] = []
    for weight, now in written:
        if weight.bound is not None and weight.bound is not now:
            left.append((weight, weakref.ref(weight.bound), layouts.release(weight.bound)))
            weight.bound = None
    return left


def give_own_memory(left: Iterable[Left], coming: Container[int], layouts: OriginalLayouts) -> None:
    """Give replaced parameters that are still referenced separate memory: they are in another slot, or a host keeps
    them to put them back.

    Args:
        coming: ids of those that are going to be views of live tensors again.
    """
    for weight, reference, record_again in left:
        old = reference()
        if old is None:
            continue
        record_again(old)
        if id(old) not in coming and memory_of(old) == memory_of(weight.tensor):
            original = layouts.strides_of(old)
            layouts.restore(old, old.stride() if original is None else original)


def external_reader(
    everything: Iterable[Weight], arrived: Iterable[tuple[Weight, torch.Tensor]], written: Iterable[Weight]
) -> Weight | None:
    """One of `written` whose memory is shared with a tensor that is neither in `everything` nor in `arrived`, or None.

    Such a tensor may be one that a host keeps to put back (`weight.data`, a state dict), or one that it put in the slot
    of another weight.
    """
    first: dict[int, Weight] = {}
    for w in written:
        first.setdefault(memory_of(w.tensor), w)
    known: dict[int, dict[int, torch.Tensor]] = {memory: {} for memory in first}
    spans: dict[int, list[tuple[int, int, bool]]] = {memory: [] for memory in first}

    def record(tensor: torch.Tensor | None) -> None:
        if tensor is not None and (ours := known.get(memory_of(tensor))) is not None:
            ours[id(tensor)] = tensor

    coming = {id(w): now for w, now in arrived}
    writing = {id(w) for w in written}
    for w in everything:
        if type(w.tensor) is not torch.Tensor:
            # no plan reads it, see `check_compatible`, and it may have no storage
            continue
        memory = memory_of(w.tensor)
        if memory in known:
            # a view lies in the memory of its base
            record(w.tensor)
            record(w.tensor._base)
        bound = w.bound if w.bound is not None and same_place(w.bound, w.tensor) else None
        record(bound)
        record(coming.get(id(w)))
        within = spans.get(memory)
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
        if uses(w.tensor) - ALONE >= len(known[memory]):
            return w
    return None


def uses(tensor: torch.Tensor) -> int:
    """The use count of a tensor's memory; `ALONE` if no other tensor uses it."""
    # before torch 2.8 it exists in GPU builds only
    count = getattr(torch._C, "_storage_Use_Count", None)
    storage = tensor.untyped_storage()
    return 0 if count is None else count(storage._cdata)


# the use count of memory with a single tensor
ALONE = uses(torch.empty(0, device="cpu"))
