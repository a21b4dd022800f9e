"""Whether the plans of a model use 8-bit integers, for which layers, and why not."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import Any

import torch

from sfast_ext import reasons
from sfast_ext.eight_bits import refusal_of
from sfast_ext.kernels.backend import triton_runtime
from sfast_ext.passes.eight_bits_selection import Selection
from sfast_ext.plans.plan import Plan
from sfast_ext.reasons import Declined, Reason
from sfast_ext.report import Report
from sfast_ext.runtime.plan_cache import PlanCache, PlanKey
from sfast_ext.weights.banks import Banks

_MIN_BFLOAT16 = 8, 0
_MAX_SELECTIONS = 8
"""Kinds of behaviour whose selections are remembered."""
ATTEMPTS = 3
"""Plans of one call that are made with 8 bits, each with more layers in half precision, before one is made without."""
_FIRST_PAUSE, _MAX_PAUSE = 4, 64
"""Generations until 8 bits are tried again, after the first time that it did not work and at most."""
SECOND_LOOK = 10
"""The call of a plan that is compared again: the noise of its input is less than that of an image's first step."""
CALLS_BETWEEN_CHECKS = 32
"""After so many calls of a plan, and with the first of a generation, it is asked whether quantised weights changed."""


class EightBitsFailed(Declined):
    """A plan with 8 bits is not to be kept.

    Attributes:
        again: whether another is made, with more layers in half precision.
        here: whether it is for calls of this size alone.
    """

    def __init__(self, reason: Reason, *, again: bool = False, here: bool = False) -> None:
        super().__init__(reason)
        self.again, self.here = again, here


def because(refusal: Reason) -> Reason:
    """Why a plan with 8 bits is not kept, if a plan without is refused for this reason."""
    if refusal.code == reasons.INACCURATE.code:
        return reasons.EIGHT_BITS_INACCURATE(*refusal.values)
    if refusal.code == reasons.SLOWER.code:
        return reasons.EIGHT_BITS_SLOWER_THAN_ORIGINAL(*refusal.values)
    return reasons.EIGHT_BITS_REFUSED(refusal)


def slower(plan: Plan, exact: Plan | None) -> Reason | None:
    """Why a plan with 8 bits is not worth what it changes: the exact plan of the same call is faster. None if it is
    not, or if one of the two was not timed. On a CPU there are only references."""
    took, other = plan.ms_after, None if exact is None else exact.ms_after
    if plan.device.type != "cuda" or took is None or other is None or took <= other:
        return None
    return reasons.EIGHT_BITS_SLOWER(took, other)


class EightBits:
    """What one model's plans with 8 bits have in common.

    Attributes:
        reason: why 8 bits are not used at present; None if they are.
    """

    def __init__(self) -> None:
        self.reason: Reason | None = None
        self._generations = 0
        """Until `reason` expires. 0: it does not."""
        self._pause = _FIRST_PAUSE
        self._selections: OrderedDict[Hashable, Selection] = OrderedDict()
        self._exceeded = 0

    def selection(self, model: Hashable) -> Selection:
        """That of a model's behaviour, see `PlanKey.model`."""
        found = self._selections.pop(model, None) or Selection()
        self._selections[model] = found
        while len(self._selections) > _MAX_SELECTIONS:
            self._selections.popitem(last=False)
        return found

    def stop(self, reason: Reason, report: Report, *, for_good: bool = False) -> None:
        """Make further plans without 8 bits, for some generations or for good."""
        report.event("8 bits", reason)
        self.reason = reason
        self._generations = 0 if for_good else self._pause
        self._pause = min(2 * self._pause, _MAX_PAUSE)

    def succeeded(self) -> None:
        """A plan with 8 bits was compared and kept, so what ended the last one is over."""
        self._pause = _FIRST_PAUSE

    def exceeded(self, model: Hashable, reason: Reason, report: Report) -> None:
        """A plan that was kept is too far from the original now: its weights are others. The layers are selected anew,
        unless that was of no use before."""
        self._selections.pop(model, None)
        self._exceeded += 1
        if self._exceeded >= ATTEMPTS:
            self._exceeded = 0
            self.stop(because(reason), report)

    def clear(self) -> None:
        """Forget all: settings changed, or the model is another one."""
        self.__init__()  # type: ignore[misc]

    def reconsider(self, *, selected: bool) -> None:
        """The limit is another one: what was refused may be tried again.

        Args:
            selected: whether there are plans with the layers of the present selections, which then stay.
        """
        if not selected:
            self._selections.clear()
        self.reason, self._generations, self._pause, self._exceeded = None, 0, _FIRST_PAUSE, 0

    def new_generation(self) -> None:
        """A generation begins. What did not work may be tried again."""
        if self._generations:
            self._generations -= 1
            if not self._generations:
                self.reason = None

    def status(self, networks: Sequence[Sequence[Plan]], banks: Banks) -> dict[str, Any]:
        """For the report.

        Args:
            networks: the plans of the model, and of each of its parts that is accelerated by itself.

        Returns:
            layers: products and convolutions that the largest plan of each computes in 8 bits; kept: [name, error] of
            those that stay in half precision because of their error, the worst first; bytes: memory of the second
            copies; reason: why no plan uses 8 bits, or None.
        """
        latest = next(reversed(self._selections.values()), None)
        used = [max((in_8_bits(p) for p in plans if p.banks), default=0) for plans in networks]
        reason = self.reason
        if reason is None and latest is not None and not any(used):
            reason = latest.obstacle
        return {
            "layers": sum(used),
            "kept": [list(each) for each in latest.listed()] if latest is not None else [],
            "bytes": banks.held,
            "reason": None if reason is None else reason.as_dict(),
        }


def keep_faster(
    cache: PlanCache, key: PlanKey, plan: Plan, eight_bits: EightBits, report: Report, drops: bool
) -> None:
    """Of the plans of a call with 8 bits and without, of which one was just made, drop that with 8 bits if it is
    slower.

    Args:
        drops: whether slower plans are dropped, see `Config.drop_slower`.

    Raises:
        EightBitsFailed: it is the one that was just made.
    """
    other_key = key._replace(eight_bits=not key.eight_bits)
    other = cache.plans.get(other_key)
    # one whose half-precision weights are in system memory is there for its memory
    drops = drops and not any(bank.sources for each in (plan, other) if each is not None for bank in each.banks)
    if plan.banks:
        why = slower(plan, other) if drops else None
        if why is not None:
            cache.drop(key)
            report.count("captures", -1)
            raise EightBitsFailed(why, here=True)
        eight_bits.succeeded()
    elif drops and other is not None and other.banks and (why := slower(other, plan)) is not None:
        report.event("8 bits", why)
        cache.drop(other_key)


def unsupported(device: torch.device, dtypes: set[torch.dtype]) -> Reason | None:
    """Why no plan on a device can use 8 bits; None if one can. On a CPU kernels say so themselves.

    Args:
        dtypes: of the values of a graph.
    """
    if device.type != "cuda":
        return None
    missing = refusal_of(device)
    if missing is not None:
        return missing.of("8 bits are not used")
    capability = triton_runtime.capability(device)
    if torch.bfloat16 in dtypes and capability < _MIN_BFLOAT16:
        return reasons.EIGHT_BITS_BFLOAT16("{}.{}".format(*capability))
    return None


def look(plan: Plan) -> None:
    """See whether a plan, which has just run on the current stream, is to be compared again. Does not wait for the
    device; `is_due` says what was found."""
    if plan.replays == SECOND_LOOK:
        plan.compare_again = True
    elif plan.weights_due or plan.replays % CALLS_BETWEEN_CHECKS == CALLS_BETWEEN_CHECKS - 1:
        plan.weights_state = state_of_weights(plan)


def is_due(plan: Plan) -> bool:
    """Whether the result of a plan's run is not to be used before a comparison: its quantised weights are others than
    those of comparisons that went well, or it is to be compared once more. Waits for the device if `look` asked."""
    if plan.weights_state is not None:
        state, plan.weights_state, plan.weights_due = int(plan.weights_state), None, False
        if state not in plan.compared_weights:
            plan.compare_again = True
    return plan.compare_again


def state_of_weights(plan: Plan) -> torch.Tensor:
    """A number for the values of all quantised weights of a plan that has just run on the current stream."""
    return torch.cat([bank.digests for bank in plan.banks]).sum()


def in_8_bits(plan: Plan) -> int:
    """How many products and convolutions a plan computes in 8 bits."""
    return sum(plan.fused.get(name, 0) for name in ("eight_bits", "eight_bits_conv"))
