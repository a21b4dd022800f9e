"""What costs is done once going without it has cost as much."""

from __future__ import annotations

import pytest

from sfast_ext.plans.payback import (
    REJECTED_CALLS,
    REJECTED_FOR,
    Payback,
    Rejection,
    Speculation,
    doubled,
)
from sfast_ext.plans.recapture import FEW_RUNS, RECORDING, Recapture


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


def again(stays=(), without=None, with_ms=1.0, price=10.0, runs=0, waits=0.0):
    """Whether a graph is captured at once after stays of so many runs."""
    recapture = Recapture()
    recapture.captured(price, launch_ms=100.0)
    recapture.without_ms, recapture.waits_ms = without, waits
    for stay in stays:
        recapture.evicted(stay)
    return recapture.pays_at_once(with_ms, runs)


@pytest.mark.parametrize(
    ("given", "at_once"),
    [
        ({}, False),  # nothing is known
        ({"stays": [20]}, True),
        ({"stays": [7]}, False),  # too few for what is not known
        ({"stays": [20], "with_ms": 150.0}, False),  # the GPU hides the CPU's time
        ({"stays": [20], "with_ms": None}, False),
        ({"stays": [20], "without": 2.0}, True),
        ({"stays": [20], "without": 1.4}, False),
        ({"stays": [20], "without": 0.5}, False),  # a graph would be slower
        ({"stays": [20], "without": 1.4, "waits": 0.2}, True),
        ({"stays": [20], "without": 2.0, "runs": 9}, True),
        ({"stays": [20], "without": 2.0, "runs": 11}, False),
        ({"stays": [20], "without": 2.0, "runs": 30}, False),
        ({"stays": [20, 1], "without": 2.0}, False),  # evicted for each preview
        ({"stays": [1, 20, 20], "without": 2.0}, True),
        ({"stays": [20, 0], "without": 2.0}, True),  # evicted while it was not used
        ({"stays": [6], "without": 61.0, "price": 300.0}, True),
        ({"stays": [4], "without": 61.0, "price": 300.0}, False),
    ],
)
def test_a_graph_comes_back_at_once_if_the_stay_is_expected_to_give_it_back(given, at_once):
    assert again(**given) == at_once


def runs(recapture, with_graph, step_ms, count=FEW_RUNS + 1, began=0.0):
    """Of an image, and then a pause."""
    for i in range(count):
        recapture.ran(with_graph, began + 0.001 * step_ms * i)
    return began + 0.001 * step_ms * count + 60.0


@pytest.mark.parametrize(
    ("without", "with_graph", "gain"),
    [
        (36.0, 20.0, 16.0),  # the host's own time and the launches come one after the other
        (36.0, 5.0, 17.0),  # launches of a graph are ahead of the GPU, which takes 19
        (12.0, 5.0, 0.0),  # launches are ahead in both ways
        (20.0, 21.0, 0.0),
    ],
)
def test_how_far_runs_are_apart_tells_what_a_graph_saves(without, with_graph, gain):
    recapture = Recapture()
    recapture.captured(150.0, launch_ms=100.0)
    # a run alone takes hardly longer without
    recapture.without_ms = 20.0
    recapture.evicted(20)
    assert not recapture.pays_at_once(19.0, 0)
    then = runs(recapture, True, with_graph)
    # of the pause between two images nothing is told
    then = runs(recapture, False, without, began=then)
    runs(recapture, True, with_graph, began=then)
    assert recapture.pays_at_once(19.0, 0) == (gain * 20 >= 150)
    recapture.ran_without(19.0)
    assert recapture.capture.paid == pytest.approx(gain)


def test_a_few_runs_tell_nothing_of_how_far_they_are_apart():
    recapture = Recapture()
    recapture.captured(150.0, launch_ms=100.0)
    recapture.without_ms = 20.0
    then = runs(recapture, True, 20.0)
    runs(recapture, False, 36.0, FEW_RUNS, then)
    recapture.ran_without(19.0)
    assert recapture.capture.paid == pytest.approx(1.0)


def test_the_price_is_that_of_the_quickest_capture():
    recapture = Recapture()
    for taken, price in ((5000.0, 5000.0), (200.0, 200.0), (900.0, 200.0)):
        recapture.captured(taken, launch_ms=100.0)
        assert recapture.capture.price == price and recapture.capture.paid == 0
        recapture.capture.pay(7.0)


def test_a_recording_lowers_the_price_of_a_capture():
    recapture = Recapture()
    recapture.captured(300.0, launch_ms=100.0)
    for saved, price in ((250.0, 50.0), (100.0, 0.0)):
        recapture.recorded(saved)
        assert recapture.capture.price == price


@pytest.mark.parametrize(("before", "saved"), [(None, -0.3), (300.0, 290.0), (300.0, -50.0)])
def test_what_a_recording_is_expected_to_save_is_forgotten_once_a_capture_was_timed(before, saved):
    recapture = Recapture()
    if before is not None:
        recapture.captured(before, launch_ms=100.0)
    recapture.recorded(saved)
    recapture.captured(200.0, launch_ms=100.0)
    assert recapture.capture.price == 200.0
    recapture.captured(250.0, launch_ms=90.0)
    assert recapture.capture.price == 200.0 and recapture.launch_s == 0.09


def test_captures_recur_once_there_were_a_few():
    recapture = Recapture()
    for n in range(RECORDING + 2):
        assert recapture.recurs == (n >= RECORDING)
        recapture.captured(300.0, launch_ms=100.0)
