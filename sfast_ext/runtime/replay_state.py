"""The state of one call, and when a replay may be launched before it is validated.

    call -> PlanFinder.find
      |
      +-- not ours: NotOurs, WeightsAway, WeightsChanged, an error ---------> BYPASS
      |                                                        the original forward, the reason in the report
      +-- no plan ----------------------------------------------------------> BUILD
      |                                                        the original forward, then a plan for the next call
      +-- a plan; key and weights confirmed --------------------------------> REPLAY_CONFIRMED
      |                                                        replay; the result is used
      +-- a plan; the key, the weights or both not looked at yet -----------> REPLAY_SPECULATIVE
             replay; validate while the GPU works
               |-- unchanged: the result is used
               |-- changed: the result is discarded, the backoff is set, and the call is looked up again:
               |            REPLAY_CONFIRMED or BUILD
               '-- NotOurs, WeightsAway, WeightsChanged, an error: BYPASS

The second lookup of a call confirms the weights. The key is not validated again: it was read a moment ago.
"""

from __future__ import annotations

import enum
from collections.abc import Hashable
from dataclasses import dataclass

import torch

from sfast_ext.call_signature import Call, Signature, tensors_alone
from sfast_ext.runtime.plan import Plan

SPECULATION_BACKOFF = 200
"""After a replay was discarded, this many calls confirm the weights, or the behaviour key, before the launch. So few
replays are wasted if these change in the middle of generations."""


class ReplayState(enum.Enum):
    """How a call is served; see the diagram."""

    BYPASS = "the original forward runs"
    REPLAY_CONFIRMED = "replay of a valid plan"
    REPLAY_SPECULATIVE = "replay, validated while it runs"
    BUILD = "the original forward runs, a plan is built"


@dataclass
class Lookup:
    """The result of looking up a call: its key and its plan, None if one is to be built."""

    call: Call
    key: Hashable
    plan: Plan | None
    behaviour: int
    device: torch.device
    key_confirmed: bool
    """Whether the behaviour key is known to be current. Otherwise it is that of the last reading."""
    weights_confirmed: bool
    """Whether the plan reads the current weights of the module."""

    @property
    def shape_signature(self) -> Signature:
        """What it has in common with calls that differ in constants."""
        return tensors_alone(self.call.signature)

    @property
    def state(self) -> ReplayState:
        """Never BYPASS: a call that is bypassed has no lookup."""
        if self.plan is None:
            return ReplayState.BUILD
        confirmed = self.key_confirmed and self.weights_confirmed
        return ReplayState.REPLAY_CONFIRMED if confirmed else ReplayState.REPLAY_SPECULATIVE


class Speculation:
    """Backoff counters: the calls that still have to confirm before the launch."""

    def __init__(self) -> None:
        self.key_backoff = 0
        self.weights_backoff = 0

    def key_first(self) -> bool:
        """Whether this call confirms the behaviour key before its replay. Counts down: call it once for each call."""
        if not self.key_backoff:
            return False
        self.key_backoff -= 1
        return True

    def weights_first(self) -> bool:
        """The same for the weights."""
        if not self.weights_backoff:
            return False
        self.weights_backoff -= 1
        return True
