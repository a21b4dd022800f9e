"""The state of one call, and when a replay is launched before it is known to be valid.

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

A call that was looked up again is not validated a second time: its key was read a moment ago.
"""

from __future__ import annotations

import enum
from collections.abc import Hashable
from dataclasses import dataclass

import torch

from sfast_ext.call_signature import Call, Signature
from sfast_ext.runtime.plan import Plan

SPECULATION_BACKOFF = 200
"""Calls that confirm the weights, or the behaviour key, before their replay, after one was discarded: few are wasted
where these change in the middle of generations."""


class ReplayState(enum.Enum):
    """What becomes of a call; see the diagram."""

    BYPASS = "the original forward runs"
    REPLAY_CONFIRMED = "replay of a valid plan"
    REPLAY_SPECULATIVE = "replay, validated while it runs"
    BUILD = "the original forward runs, a plan is built"


@dataclass
class Lookup:
    """A call that was looked up: its key and its plan, None where one is to be built."""

    call: Call
    shape_signature: Signature
    """The signature before numbers became constants."""
    key: Hashable
    plan: Plan | None
    behaviour: int
    device: torch.device
    key_confirmed: bool
    """Whether the behaviour key is known to hold. Otherwise it is that of the last reading."""
    weights_confirmed: bool
    """Whether the weights that the plan reads are those of the module."""

    @property
    def state(self) -> ReplayState:
        """Never BYPASS: for a call that is bypassed nothing was found."""
        if self.plan is None:
            return ReplayState.BUILD
        confirmed = self.key_confirmed and self.weights_confirmed
        return ReplayState.REPLAY_CONFIRMED if confirmed else ReplayState.REPLAY_SPECULATIVE


class Speculation:
    """Counts the calls that have to look before their replay, since the last replay that was discarded."""

    def __init__(self) -> None:
        self.key_backoff = 0
        self.weights_backoff = 0

    def key_first(self) -> bool:
        """Whether a call confirms the behaviour key before its replay; asked once for each call."""
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
