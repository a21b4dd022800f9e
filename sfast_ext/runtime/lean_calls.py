"""Calls whose plan is made while the half-precision weights of layers in 8 bits stay in system memory.

All of them on the GPU take as much as the rest of the model in 8 bits, so such a call would need most memory of all:

    the original forward -> weights of a layer are on the GPU while it is called, see `StreamedByLayer`
    the recording        -> parameters stand in there, see `StandIns`
    the passes           -> read one weight at a time, see `Resident.values`
    the binding          -> what the plan reads in half precision comes, see `residency.settle`

If anything of it fails, the weights come back for this call, and for each such call of the model from then on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from sfast_ext import reasons
from sfast_ext.capture.capture import CaptureRefused
from sfast_ext.capture.state import State
from sfast_ext.kernels.backend import health
from sfast_ext.preparation import Interrupted
from sfast_ext.reasons import Declined, Detail, Reason, one_line
from sfast_ext.report import stage, words_of
from sfast_ext.runtime import residency
from sfast_ext.runtime.eight_bits import unsupported
from sfast_ext.runtime.model_state import ModuleContext
from sfast_ext.runtime.plan_cache import PlanKey
from sfast_ext.runtime.plan_runner import out_of_memory
from sfast_ext.runtime.run_again import Before
from sfast_ext.weights.aside import Hidden
from sfast_ext.weights.expected import expected
from sfast_ext.weights.streamed import is_theirs, tensors
from sfast_ext.weights.weight import WeightsAway, WeightsInUse


def may_be(context: ModuleContext, key: PlanKey) -> bool:
    """Whether a call whose plan is made now leaves weights in system memory that are there. Without room for the plan
    it does as if they were to come back."""
    if not key.eight_bits or not _is_possible(context):
        return False
    resident, banks = context.arena.resident, context.arena.banks
    if not resident.out(context.device()) or key.device != resident.device:
        return False
    # as integers they take half as much
    missing = resident.bytes // 2 - banks.held
    return residency.wanted(context, key.device) and residency.room(key.device) > missing


def hidden(context: ModuleContext, device: torch.device) -> contextlib.AbstractContextManager[Hidden | None]:
    """See `residency.hidden`. If the module has no plans, and its first is expected to be one with 8 bits, weights that
    may be in 8 bits stay in system memory for it."""
    if context.arena.resident.in_parts or not _expects(context, device):
        return residency.hidden(context, device)
    context.arena.resident.expect(device)
    return context.arena.resident.hidden()


def leave_early(context: ModuleContext) -> bool:
    """The host has moved the whole module to the GPU: weights of which plans read 8-bit integers leave it before the
    next call, and if the module has no plans, those that `hidden` leaves in system memory. Not if another thread uses
    them. Whether any has left. Raises nothing."""
    resident, device = context.arena.resident, context.device()
    if device is None or device.type != "cuda" or resident.in_parts:
        return False
    first = _expects(context, device)
    if not first and not residency.stay_aside(context, device):
        return False
    try:
        with context.arena.exclusively(device):
            before = len(resident.elsewhere())
            if first:
                resident.expect(device, there=True)
            resident.leave()
            left = len(resident.elsewhere()) > before
        torch.cuda.empty_cache()
        return left
    except WeightsInUse:
        pass
    except Exception as exc:
        # the next call finds the weights wherever they are
        context.model.lean_failed = True
        context.report.error("weights that leave the GPU", exc)
    return False


def expected_bytes(context: ModuleContext, device: torch.device) -> int:
    """What the weights take that `hidden` would leave in system memory before there is a plan, if they were there that
    are on the device, too; 0: it leaves none."""
    found = expected(context.module, device) if _expects(context, device) else {}
    return sum(aside.bytes for aside in found.values())


def _expects(context: ModuleContext, device: torch.device) -> bool:
    """Whether the module has no plans, and its first is expected to be one with 8 bits if all of it is on a device."""
    model = context.model
    first = not (context.arena.resident.banks or model.eight_bits.reason or model.plans())
    if not (first and _is_possible(context) and residency.wanted(context, device)):
        return False
    return unsupported(device, {p.dtype for p in context.module.parameters()}) is None


def _is_possible(context: ModuleContext) -> bool:
    model = context.model
    return not (model.lean_failed or model.streams or context.config.rare_calls)


def run(
    context: ModuleContext, state: State | None, args: tuple[Any, ...], kwargs: dict[str, Any],
    otherwise: Callable[..., Any],
) -> Any:
    """The result of the original forward, with one layer's weights on the GPU at a time.

    Args:
        state: what the forward can reach, as it was before.
        otherwise: runs it with all of them there, if this fails.
    """
    device = context.arena.resident.device
    before = Before(args, kwargs, device)
    try:
        result = context.run_by_layer(context.slot.original, *args, **context.unconsumed(kwargs))
        if all(x.device == device for x in tensors(result)):
            return result
        # the forward may have moved it to the device of a weight
        why: Reason | None = reasons.NOT_LEAN("original forward", Detail("a result is not on the GPU"))
    except Exception as exc:
        if is_theirs(exc):
            raise
        why = None if out_of_memory(exc) else because(exc, "original forward")
    # after the handler: the exception keeps what the failed run had allocated
    before.put_back()
    if state is not None:
        state.put_back()
    result = otherwise(*args, **kwargs)
    # an error of the model has been raised again
    if why is not None:
        give_up(context, why)
    return result


def prepare(context: ModuleContext, device: torch.device) -> None:
    """Before the recording: what plans read in half precision is on the GPU.

    Raises:
        WeightsAway, WeightsChanged: see `WeightArena.sync`.
    """
    residency.clear_way(context)
    with context.arena.exclusively(device):
        context.arena.fetch()


def elsewhere(context: ModuleContext, device: torch.device, lean: bool) -> torch.device | None:
    """The device of a weight that is on another one than the plan; None if there is none.

    Args:
        lean: whether those count that were set aside.
    """
    aside = set(map(id, context.arena.resident.elsewhere())) if lean else set()
    parameters = context.module.parameters()
    return next((p.device for p in parameters if p.device != device and id(p) not in aside), None)


@contextlib.contextmanager
def standing_in(context: ModuleContext) -> Iterator[None]:
    """See `StandIns`. Other threads' original forwards wait.

    Raises:
        WeightsInUse: one of them runs.
    """
    arena = context.arena
    with arena.gate.exclusive(), arena.resident.standing, arena.resident.standing_in():
        yield


def with_all(context: ModuleContext, exc: Exception) -> bool:
    """Whether a plan is made with all weights on the GPU, after this was raised as one was made without.

    Raises:
        WeightsAway: the GPU has no memory left.
    """
    if out_of_memory(exc):
        # it has less for all of them; until they have come, calls do as they do without room
        context.tell_short()
        raise WeightsAway(reasons.NO_ROOM()) from exc
    if not is_why(exc):
        return False
    give_up(context, because(exc))
    return True


def is_why(exc: Exception) -> bool:
    """Whether what was raised as a plan was made may be due to weights in system memory."""
    if isinstance(exc, CaptureRefused):
        own = exc.reads_value or exc.reason.code != reasons.NOT_RECORDED.code
        return not own and exc.__cause__ is not None and not isinstance(exc.__cause__, Declined)
    return not isinstance(exc, (Declined, Interrupted)) and not health.culprits(exc)


def because(exc: Exception, where: str | None = None) -> Reason:
    """What went wrong, by default at the current stage."""
    return reasons.NOT_LEAN(where or stage(), Detail(one_line(words_of(exc))))


def give_up(context: ModuleContext, why: Reason) -> None:
    """The weights come back for such calls of the model from now on."""
    context.model.lean_failed = True
    context.report.event("8 bits", why)
