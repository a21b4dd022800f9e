"""The states of a call, and the backoff of speculation."""

from __future__ import annotations

from typing import Any

import pytest

from sfast_ext.runtime.replay_state import Lookup, ReplayState, Speculation

A_PLAN: Any = object()


def lookup(plan: Any, key_confirmed: bool, weights_confirmed: bool) -> Lookup:
    nothing: Any = None
    return Lookup(nothing, nothing, plan, 0, nothing, key_confirmed, weights_confirmed)


@pytest.mark.parametrize("key_confirmed", [True, False])
@pytest.mark.parametrize("weights_confirmed", [True, False])
def test_a_replay_is_speculative_unless_both_are_confirmed(key_confirmed, weights_confirmed):
    confirmed = key_confirmed and weights_confirmed
    expected = ReplayState.REPLAY_CONFIRMED if confirmed else ReplayState.REPLAY_SPECULATIVE
    assert lookup(A_PLAN, key_confirmed, weights_confirmed).state is expected
    assert lookup(None, key_confirmed, weights_confirmed).state is ReplayState.BUILD


def test_each_call_counts_once_in_the_backoff_of_each_kind():
    speculation = Speculation()
    assert not speculation.key_first() and not speculation.weights_first()
    speculation.key_backoff, speculation.weights_backoff = 2, 1
    assert [speculation.key_first() for _ in range(4)] == [True, True, False, False]
    assert [speculation.weights_first() for _ in range(3)] == [True, False, False]
