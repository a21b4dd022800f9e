"""The states of a call."""

from __future__ import annotations

from typing import Any

import pytest

from sfast_ext.runtime.plan_finder import ReplayState, state_of

A_PLAN: Any = object()


@pytest.mark.parametrize("key_confirmed", [True, False])
@pytest.mark.parametrize("weights_confirmed", [True, False])
def test_a_replay_is_speculative_unless_both_are_confirmed(key_confirmed, weights_confirmed):
    confirmed = key_confirmed and weights_confirmed
    expected = ReplayState.REPLAY_CONFIRMED if confirmed else ReplayState.REPLAY_SPECULATIVE
    assert state_of(A_PLAN, key_confirmed, weights_confirmed) is expected
    assert state_of(None, key_confirmed, weights_confirmed) is ReplayState.BUILD
