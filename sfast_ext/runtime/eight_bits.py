"""Whether the plans of a model use 8-bit integers, for which layers, and why not."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import Any

import torch

from sfast_ext import reasons
from sfast_ext.eight_bits import MIN_CAPABILITY
from sfast_ext.kernels.backend import nvrtc, triton_runtime
from sfast_ext.passes.eight_bits_selection import Selection
from sfast_ext.plans.plan import Plan
from sfast_ext.reasons import Declined, Detail, Reason
from sfast_ext.report import Report
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
    """

    def __init__(self, reason: Reason, *, again: bool) -> None:
        super().__init__(reason)
        self.again = again


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

    def exceeded(self, model: Hashable, reason: Reason, report: Report) -> None:
        """A plan that was kept is too far from the original now: its weights are others. The layers are selected anew,
        unless that was of no use before."""
        self._selections.pop(model, None)
        self._exceeded += 1
        if self._exceeded >= ATTEMPTS:
            self._exceeded = 0
            self.stop(reasons.EIGHT_BITS_REFUSED(reason), report)

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

    def status(self, plans: Sequence[Plan], banks: Banks) -> dict[str, Any]:
        """For the report.

        Returns:
            layers: products that the largest plan computes in 8 bits; kept: [name, error] of those that stay in half
            precision because of their error, the worst first; bytes: memory of the second copies; reason: why no plan
            uses 8 bits, or None.
        """
        latest = next(reversed(self._selections.values()), None)
        used = [plan.fused.get("eight_bits", 0) for plan in plans if plan.banks]
        reason = self.reason
        if reason is None and latest is not None and not used:
            reason = latest.obstacle
        return {
            "layers": max(used, default=0),
            "kept": [list(each) for each in latest.listed()] if latest is not None else [],
            "bytes": banks.held,
            "reason": None if reason is None else reason.as_dict(),
        }


def unsupported(device: torch.device, dtypes: set[torch.dtype]) -> Reason | None:
    """Why no plan on a device can use 8 bits; None if one can. On a CPU kernels say so themselves.

    Args:
        dtypes: of the values of a graph.
    """
    if device.type != "cuda":
        return None
    capability = triton_runtime.capability(device)
    if capability < MIN_CAPABILITY:
        return reasons.EIGHT_BITS_CARD("{}.{}".format(*capability))
    if torch.bfloat16 in dtypes and capability < _MIN_BFLOAT16:
        return reasons.EIGHT_BITS_BFLOAT16("{}.{}".format(*capability))
    if not nvrtc.supported(device):
        return reasons.EIGHT_BITS_NVRTC(Detail(nvrtc.unsupported(device) or "it is not there"))
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
