"""What memory there is for plans, and when the half-precision weights of layers in 8 bits leave the GPU and come back.

See `weights.resident`:

    the original forward is about to run ------> bring_back: they are on the GPU, as the host left them
    a plan with resident banks is about to run -> sync: what changed is quantised, what is on the GPU leaves, and banks
                                                  that gave way come back from their copies
    8 bits are turned off, or the plans go ----> give_back: banks are freed, and the weights are on the GPU at once, or
                                                  if it has no room, as soon as it has (`left_aside`)
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from sfast_ext import reasons
from sfast_ext.eight_bits import SMALL
from sfast_ext.kernels.eight_bits import quantise_weights
from sfast_ext.plans.graph_pool import pool_of
from sfast_ext.plans.plan import Plan
from sfast_ext.runtime.model_state import ModuleContext
from sfast_ext.runtime.plan_cache import PlanKey
from sfast_ext.weights.aside import Hidden
from sfast_ext.weights.banks import Bank
from sfast_ext.weights.weight import WeightsAway, WeightsInUse, slots_of

_MIN_ROOM = 0.3
"""Of the bytes of the weights: so much must be free to make a plan. With less the attempt fails, and what it leaves in
other places of the allocator may be what the original lacks (SDXL with --medvram on 6 GB, without a flag on 8 GB)."""


def room(device: torch.device) -> int:
    """Bytes of a GPU that a plan may take: free ones, and those of CUDA graphs, which give way."""
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0] + max(0, cached))


def spare_bytes(context: ModuleContext, device: torch.device) -> int | None:
    """What is left for a second copy of weights; None if that does not matter. Below zero not even a plan is made."""
    return None if device.type != "cuda" else int(room(device) - _MIN_ROOM * bytes_of(context.module))


def is_full(context: ModuleContext, device: torch.device) -> bool:
    """Whether there is too little memory to make a plan."""
    spare = spare_bytes(context, device)
    return spare is not None and spare < 0


def lacks_room(context: ModuleContext, key: PlanKey) -> bool:
    """Whether a call has too little memory for a plan. This is asked before the original runs, too: to read
    the model for a plan takes longer than some steps."""
    return not (key.eight_bits and wanted(context, key.device)) and is_full(context, key.device)


def bytes_of(module: nn.Module) -> int:
    """What the weights of a module take."""
    return sum(p.nbytes for p in module.parameters())


def wanted(context: ModuleContext, device: torch.device) -> bool:
    """Whether a plan with 8 bits that is made now leaves the half-precision weights in system memory."""
    if device.type != "cuda" or context.is_part or context.parts:
        return False
    if context.arena.resident.banks:
        return True
    fits = context.hooks.system_memory
    return is_small(context, device) and (fits is None or fits(bytes_of(context.model.whole.module)))


def is_small(context: ModuleContext, device: torch.device) -> bool:
    """Whether a card is small for the whole model. Then no plan of it makes a second copy of weights."""
    model, asked = context.model, context.config.resident
    if asked is not None or device.type != "cuda":
        return bool(asked)
    if model.small is None or model.small[0] != device:
        total = torch.cuda.get_device_properties(device).total_memory
        model.small = device, total < SMALL * bytes_of(model.whole.module)
    return bool(model.small[1])


def sync(context: ModuleContext, plan: Plan | None, later: bool = False) -> int:
    """`WeightArena.sync` for the plan that is about to run, its resident banks included. Returns how many weights
    changed.

    Args:
        later: whether the plan may run while weights are read for changes that no version tells. The next call without
            `later` tells what was found.

    Raises:
        WeightsAway, WeightsChanged: see `WeightArena.sync`.
    """
    arena = context.arena
    resident = arena.resident
    if plan is None or not resident:
        return arena.sync()
    if not plan.resident:
        with context.own_shortages():
            try:
                context.bring_back()
            except torch.cuda.OutOfMemoryError as exc:
                raise WeightsAway(reasons.NO_ROOM_FOR_WEIGHTS()) from exc
        return arena.sync()
    copied, began, all_of_them = arena.sync(), time.perf_counter(), resident.audit_all
    # to read all takes as long as some steps
    meanwhile = _nothing_to_restore if later and all_of_them else None
    due = None if arena.banks.vacant else resident.due(meanwhile)
    if due is not None and not all_of_them:
        plan.recapture.waits_ms = 1000 * (time.perf_counter() - began)
    if due is None or due:
        _refuse_others(context)
        clear_way(context)
        with context.own_shortages(), arena.exclusively(plan.device):
            copied += fill(context, plan, due)
    return copied


def _nothing_to_restore(banks: list[Bank]) -> None:
    """All banks have memory."""


def fill(context: ModuleContext, plan: Plan, due: list[Bank] | None = None) -> int:
    """Fill the resident banks that are due, after those whose values are in system memory came back, in the order of
    the GPU's work. The caller holds `exclusively`. Returns how many were due.

    Args:
        due: None: not known yet.

    Raises:
        WeightsAway, WeightsChanged: see `Resident.due` and `Resident.fill`.
    """
    pool, resident = plan.pool, context.arena.resident
    assert pool is not None
    stream = pool.begin_use()
    try:
        if due is None:
            due = resident.due(context.arena.banks.restore)
        resident.fill(due, quantise_weights.launch)
    except torch.cuda.OutOfMemoryError as exc:
        raise WeightsAway(reasons.NO_ROOM_FOR_WEIGHTS()) from exc
    finally:
        pool.end_use(stream)
    return len(due)


def settle(context: ModuleContext, plan: Plan) -> None:
    """A plan was made: before its first run what it reads in half precision is on the GPU, and nothing else. Plans that
    need this in system memory are dropped.

    Raises:
        WeightsAway: there is no room, or another thread uses the weights.
    """
    if not context.arena.resident:
        return
    if not plan.resident:
        # it was going to be, and no layer is fit
        context.bring_back()
        context.arena.sync()
        return
    _drop_unlike(context, plan)
    with context.arena.exclusively(plan.device):
        context.arena.fetch()
        context.arena.banks.fits = context.hooks.system_memory
        fill(context, plan)
        # weights were read for changes while values came back: fill what that found
        fill(context, plan, context.arena.resident.due())
        context.arena.resident.keep_used()


def clear_way(context: ModuleContext) -> None:
    """Drop the plans that read half-precision weights: there is no room for both, and they would keep them."""
    _drop(context, lambda plan: not plan.resident)


def drop_others(context: ModuleContext) -> bool:
    """Drop all plans: they read in half precision what the next one could have in 8 bits. Without 8 bits it would need
    all weights on the GPU, and they and it would drop each other in turns. They are made again with the layers that
    are selected now. Returns whether there were any."""
    return _drop(context, lambda plan: True)


def _drop_unlike(context: ModuleContext, plan: Plan) -> None:
    """Drop the plans that have integers of weights which this one reads in half precision, as after layers were
    selected anew. For those plans the weights would have to be in system memory, for this one on the GPU. A plan does
    not take as integers what another reads in half precision, see `with_weights_to_leave`."""
    read = slots_of(plan.weights)

    def is_unlike(other: Plan) -> bool:
        sources = [aside for bank in other.banks for aside, _ in bank.sources] if other.resident else []
        return not read.isdisjoint((id(c), name) for aside in sources for c, name in aside.slots)

    _drop(context, is_unlike)


def _drop(context: ModuleContext, unwanted: Callable[[Plan], bool]) -> bool:
    """Drop these plans of the model. Returns whether there were any."""
    plans = ((each, key, plan) for each in context.model.accelerators() for key, plan in list(each.plans.items()))
    found = [(each, key) for each, key, plan in plans if unwanted(plan)]
    for each, key in found:
        each.drop_plan(key)
    return bool(found)


def _refuse_others(context: ModuleContext) -> None:
    builder = context.model.builds_in
    if builder is not None and builder != threading.get_ident():
        # the plan is made of the weights where they are
        raise WeightsInUse(reasons.WEIGHTS_IN_USE())


def give_back(context: ModuleContext) -> None:
    """Free the resident banks, and move the weights to the GPU if the module is there. Plans stay."""
    resident = context.arena.resident
    if not resident:
        return
    device = resident.device
    assert device is not None
    for plan in context.model.plans():
        if plan.resident:
            plan.drop_graph()
    with pool_of(device).lock:
        torch.cuda.synchronize(device)
        for bank in resident.banks:
            bank.vacate()
            bank.copies = None
    context.bring_back()


def hidden(context: ModuleContext, device: torch.device) -> contextlib.AbstractContextManager[Hidden | None]:
    """See `Resident.hidden`, while the host moves the module to a device. Not if plans read half-precision values of
    these weights: they get them as they get others, else their memory and the host's were there at once."""
    return context.arena.resident.hidden() if stay_aside(context, device) else contextlib.nullcontext()


def stay_aside(context: ModuleContext, device: torch.device) -> bool:
    """Whether plans on a device read 8-bit integers of weights, and none their half-precision values."""
    resident = context.arena.resident
    there = resident.device == device and not resident.in_parts
    return there and bool(resident.banks) and not _halves_are_read(context)


def _halves_are_read(context: ModuleContext) -> bool:
    halves = (plan for plan in context.model.plans() if not plan.resident)
    return any(context.arena.resident.has(w) for plan in halves for w in plan.weights)


def before_saving(context: ModuleContext, restores: bool) -> None:
    """The original layout of the parameters is restored: libraries that save weights refuse other strides.

    Args:
        restores: False: they stay as they lie.
    """
    arena = context.arena
    with arena.resident.standing:
        pass  # weights that stand in have no values: they come back first
    if not restores:
        return
    try:
        # a copy has its weights on one device, as the module would have
        context.bring_back()
        arena.restore_layout_temporarily()
    except torch.cuda.OutOfMemoryError as exc:
        context.report.event("weights", f"they are saved where they are: {exc}")
    except WeightsInUse as exc:
        # the values are right, and some libraries accept any strides
        context.report.event("weights", f"they are saved as they lie: {exc}")


def lent(context: ModuleContext, layer: nn.Module) -> contextlib.AbstractContextManager[None]:
    """See `Resident.lent`."""
    resident = context.arena.resident
    return resident.lent(layer) if resident and resident.out(context.device()) else contextlib.nullcontext()


@contextlib.contextmanager
def building(model: Any) -> Iterator[None]:
    """Within, this thread makes a plan: no other sets weights aside."""
    model.builds_in = threading.get_ident()
    try:
        yield
    finally:
        model.builds_in = None
