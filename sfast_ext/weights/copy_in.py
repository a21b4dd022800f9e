"""Copies parameters that were replaced or moved into the live tensors, and makes the parameters views of those."""

from __future__ import annotations

import torch

from sfast_ext import reasons
from sfast_ext.weights.external_refs import external_reader, give_own_memory, part
from sfast_ext.weights.original_layout import memory_of, set_data
from sfast_ext.weights.staging import Staging
from sfast_ext.weights.tracked import TrackedWeights
from sfast_ext.weights.weight import Weight, WeightsChanged, check_compatible, paths_of, same_place

Arrived = list[tuple[Weight, torch.Tensor]]
"""Weights, each with the tensor that the module holds now."""


def copy_in(
    tracked: TrackedWeights, changed: list[tuple[Weight, torch.Tensor | None]], anywhere: bool = False
) -> int:
    """Copy the values of changed weights into the live tensors. Returns how many.

    Args:
        anywhere: from any device, not only from that of the live tensors.
    """
    arriving: dict[int, Weight] = {}
    for weight, now in changed:
        check_compatible(weight, now, anywhere=anywhere)
        if now is not None and id(weight) not in tracked.vacant:
            tracked.order.check_format(weight, now, tracked.root)
        for container, name in weight.slots:
            if container.get(name) is not now:
                raise WeightsChanged(reasons.WEIGHT_UNTIED(weight.path))
        bound = tracked.weights.get(id(now))
        if bound is None or bound.bound is not now or not bound.plans:
            bound = weight
        other = arriving.setdefault(id(now), bound)
        if other is not weight:
            # one parameter cannot be a view of two live tensors
            raise WeightsChanged(reasons.WEIGHT_TIED(weight.path, other.path))
    arrived = [(weight, now) for weight, now in changed if now is not None]
    # a tied weight is listed once for each of its slots
    new = {id(weight): (weight, now) for weight, now in arrived if not same_place(now, weight.tensor)}
    written = list(new.values())
    occupied = [(weight, now) for weight, now in written if id(weight) not in tracked.vacant]
    if occupied:
        _protect_readers(tracked, arrived, occupied)
    memory = {memory_of(weight.tensor) for weight, _ in occupied}
    # two weights may have swapped their data: a source in memory that is written is cloned first
    sources = {id(w): now.detach().clone() if memory_of(now) in memory else now.detach() for w, now in written}
    try:
        with torch.inference_mode(False), torch.no_grad():
            if written and not anywhere and not tracked.vacant:
                torch._foreach_copy_([weight.tensor for weight, _ in written], list(sources.values()))
                sources.clear()
            _take_in(tracked, arrived, sources)
    finally:
        tracked.copied += len(written) - len(sources)
        tracked.reset_detector()
        tracked.weights = {k: w for k, w in tracked.weights.items() if w.bound is None or id(w.bound) == k}
        tracked.layouts.sweep({id(w.bound) for w in tracked.live})
    return len(written)


def _take_in(tracked: TrackedWeights, arrived: Arrived, sources: dict[int, torch.Tensor]) -> None:
    """Copy the sources, by the ids of their weights, into live tensors; make the parameters views of those.

    One weight at a time, so that there is never a second copy of all weights when blocks are allocated again. What
    comes from another device has its values only once all are sent.
    """
    from_afar: list[tuple[Weight, torch.Tensor]] = []
    with Staging() as copy:
        for weight, now in arrived:
            _occupy(tracked, weight)
            if (source := sources.pop(id(weight), None)) is not None:
                copy(weight.tensor, source)
            if now.device == weight.tensor.device:
                _bind(tracked, weight, now)
            else:
                from_afar.append((weight, now))
    for weight, now in from_afar:
        _bind(tracked, weight, now)


def _occupy(tracked: TrackedWeights, weight: Weight) -> None:
    """Allocate the memory of a live tensor again, if it was freed."""
    if (vacancy := tracked.vacant.get(id(weight))) is not None:
        vacancy.occupy(tracked.layouts)
        for member in vacancy.members:
            del tracked.vacant[id(member.weight)]


def _bind(tracked: TrackedWeights, weight: Weight, now: torch.Tensor) -> None:
    """Make a parameter a view of the live tensor, which has its values."""
    if not same_place(now, weight.tensor):
        # the host's new layout becomes the original one
        paths = paths_of(tracked.root, weight)
        original, was = tracked.layouts.strides_of(now, paths), tracked.layouts.strides_of(weight.tensor)
        original = now.stride() if original is None else original
        set_data(now, weight.tensor)
        if was is not None or original != now.stride():
            tracked.layouts.record(now, original, paths)
    weight.bound = now
    tracked.order.bound(weight)
    tracked.weights[id(weight.bound)] = weight


def _protect_readers(tracked: TrackedWeights, arrived: Arrived, written: Arrived) -> None:
    """Live tensors are about to be written: give other readers of that memory a copy of the current values.

    Raises:
        WeightsChanged: there is a reader that cannot be moved.
    """
    left = part(written, tracked.layouts)
    tracked.forget({id(weight) for weight, *_ in left})
    give_own_memory(left, {id(now) for _, now in arrived}, tracked.layouts)
    tracked.layouts.sweep({id(w.bound) for w in tracked.live})
    other = external_reader([*tracked.known(), *tracked.packs.all()], arrived, [w for w, _ in written])
    if other is not None:
        raise WeightsChanged(reasons.WEIGHT_SHARED(other.path))
