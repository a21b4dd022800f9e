"""What costs is done once going without it has cost as much."""

from __future__ import annotations

import pytest

from sfast_ext.plans.payback import (
    REJECTED_CALLS,
    REJECTED_FOR,
    Payback,
    Recapture,
    Rejection,
    Speculation,
    doubled,
)


def test_it_is_due_once_as_much_was_paid():
    payback = Payback(3.0)
    assert not payback.due and not payback.pay(1.0) and not payback.pay(1.5) and payback.pay(0.5) and payback.due
    payback.restart(1.0)
    assert not payback.due and payback.pay()


def test_what_costs_nothing_is_due_at_once():
    assert Payback().due and not Payback().waits()


def test_each_call_counts_once_in_the_backoff_of_each_kind():
    speculation = Speculation()
    assert not speculation.key.waits() and not speculation.weights.waits()
    speculation.key.restart(2)
    speculation.weights.restart(1)
    assert [speculation.key.waits() for _ in range(4)] == [True, True, False, False]
    assert [speculation.weights.waits() for _ in range(3)] == [True, False, False]
    assert not speculation.key.price and not speculation.weights.price


@pytest.mark.parametrize("times", [0, 1, 5])
def test_a_rejection_lasts_twice_as_long_each_time(times):
    rejection = Rejection("a reason", times)
    assert rejection.generations.price == REJECTED_FOR * 2**times and rejection.calls.price == REJECTED_CALLS * 2**times
    assert doubled(3, times) == 3 * 2**times


def test_a_graph_comes_back_once_runs_without_it_have_cost_a_capture():
    recapture = Recapture()
    recapture.capture.restart(3.0)
    assert recapture.is_due(None) and recapture.is_due(1.0)  # times that are not known
    recapture.without_ms = 2.0
    for due in (False, False, True):
        recapture.ran_without(1.0)
        assert recapture.is_due(1.0) == due
    recapture.capture.restart(3.0)
    recapture.ran_without(2.5)  # a graph would be slower
    recapture.ran_without(None)
    assert not recapture.is_due(2.5) and recapture.capture.paid == 0
