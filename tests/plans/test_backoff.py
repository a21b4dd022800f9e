"""Captures are put off if what the model computes changes before its plans pay."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn

from sfast_ext import Config, accelerate
from sfast_ext.plans.payback import PAID_AFTER, CaptureBackoff

CPU = Config(allow_cpu=True)
STEPS = 30


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


def captures(backoff, behaviours):
    """At which of these calls a plan is made, each kept for good."""
    made, replays = [], {}
    for i, behaviour in enumerate(behaviours):
        if behaviour in replays:
            replays[behaviour] += 1
            backoff.record_replay("s", replays[behaviour])
        elif not backoff.must_wait("s", behaviour):
            backoff.record_capture("s")
            made.append(i)
            replays[behaviour] = 0
    return made


def test_a_behaviour_that_changes_at_every_call_is_captured_twice():
    assert captures(CaptureBackoff(), range(1000)) == [0, 1]


def test_one_that_lasts_a_few_calls_is_captured_less_and_less():
    assert captures(CaptureBackoff(), [i // 3 for i in range(300)]) == [0, 3, 7]
    assert captures(CaptureBackoff(), [i // 9 for i in range(900)]) == [0, 9, 19, 30, 43]


def test_one_that_stays_gets_its_plan_whatever_was_before():
    assert captures(CaptureBackoff(), [*range(500), *[500] * 20]) == [0, 1, 501]


def test_those_that_pay_are_captured_at_once():
    images = [i // (PAID_AFTER + 1) for i in range(20 * (PAID_AFTER + 1))]
    assert captures(CaptureBackoff(), images) == list(range(0, len(images), PAID_AFTER + 1))


def test_a_plan_that_paid_long_ago_excuses_no_captures():
    paid = [0] * (PAID_AFTER + 1)
    assert captures(CaptureBackoff(), [*paid, *(each for i in range(1, 500) for each in (0, i))]) == [0, 12, 14]
    # images that are alike but for some steps
    assert len(captures(CaptureBackoff(), [0 if i % 20 < 15 else i for i in range(2000)])) == 3


def test_behaviours_that_come_back_get_their_plans_in_the_end():
    image = [0] * 8 + [behaviour for behaviour in range(1, 7) for _ in range(3)]
    made = captures(CaptureBackoff(), image * 40)
    assert len(made) == 7 and made[-1] < 20 * len(image)


def test_signatures_are_counted_by_themselves():
    backoff = CaptureBackoff()
    assert captures(backoff, range(50)) == [0, 1]
    assert not backoff.must_wait("another", 1000)


def test_calls_in_a_row_are_counted_anew_after_an_interruption():
    backoff = CaptureBackoff()
    captures(backoff, range(50))
    assert backoff.must_wait("s", "last")
    backoff.restart_counts()
    assert backoff.must_wait("s", "last") and not backoff.must_wait("s", "last")
    backoff.clear()
    assert captures(backoff, range(50)) == [0, 1]


def test_one_capture_in_each_generation_is_for_nothing():
    backoff, made = CaptureBackoff(), []
    for setting in range(20):
        backoff.new_generation()
        made.append(len(captures(backoff, [setting] * 3)))
    assert made == [1] * 20


def test_several_in_one_generation_count_in_the_next():
    backoff, made = CaptureBackoff(), []
    for _ in range(20):
        backoff.new_generation()
        made.append(len(captures(backoff, range(30))))
    assert made == [2] + [0] * 19


step = 0
"""What a forward reads among the names of its module."""


class Stepped(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.linear = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x):
        return x + self.linear(self.norm(x)) * (1 + step / 100)


@pytest.fixture
def images(monkeypatch):
    """Makes an image: gives what both models computed, and the counters of what it took."""
    module, twin = Stepped().eval(), Stepped().eval()
    acc = accelerate(module, CPU)

    def image(numbers):
        before = Counter(acc.report.as_dict()["counters"])
        acc.new_generation()
        for number in numbers:
            monkeypatch.setitem(globals(), "step", number)
            x = torch.randn(2, 4, 8)
            torch.testing.assert_close(module(x), twin(x), rtol=1e-4, atol=1e-4)
        return Counter(acc.report.as_dict()["counters"]) - before

    image.report = acc.report
    yield image
    acc.release()


def test_a_number_that_changes_at_each_step_costs_two_captures(images):
    first, second = images(range(STEPS)), images(range(STEPS))
    assert first["captures"] == 2 and second["captures"] <= 1
    # one replay in vain tells that the next have to look first
    assert first["misspeculated"] + second["misspeculated"] <= 2
    assert any("changes again and again" in reason for reason in images.report.as_dict()["reasons"])


def test_a_number_that_comes_to_rest_gets_a_plan(images):
    images(range(STEPS))
    at_rest = images([STEPS] * STEPS)
    assert at_rest["captures"] == 1 and at_rest["eager_runs"] == STEPS - 2
    assert images([STEPS] * STEPS) == {"eager_runs": STEPS}


def test_numbers_that_alternate_waste_few_replays(images):
    images([0] * (PAID_AFTER + 2) + [1] * (PAID_AFTER + 2))
    again = images([0, 1] * STEPS)
    assert again["captures"] == 0 and again["eager_runs"] >= 2 * STEPS and again["misspeculated"] <= 2
