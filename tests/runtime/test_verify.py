from __future__ import annotations

import math

import pytest
import torch

from sfast_ext.runtime import verify
from sfast_ext.runtime.verify import relative_error

NAN, INF = float("nan"), float("inf")


def error(ours, theirs, dtype=torch.float32):
    return relative_error([torch.tensor(ours, dtype=dtype)], [torch.tensor(theirs, dtype=dtype)])


def test_the_error_is_relative_and_in_fp32():
    assert error([3.0, 4.0], [3.0, 4.0]) == 0
    assert math.isclose(error([3.0, 5.0], [3.0, 4.0]), 0.2, rel_tol=1e-6)
    # in fp16 the squares of these would overflow
    assert math.isclose(error([3e4, 5e4], [3e4, 4e4], torch.float16), 0.2, rel_tol=1e-2)


def test_a_zero_reference_gives_the_absolute_error():
    assert error([0.0, 2.0], [0.0, 0.0]) == 2


def test_nan_or_inf_if_the_original_has_none_is_infinitely_wrong():
    assert error([NAN, 1.0], [1.0, 1.0]) == INF
    assert error([INF, 1.0], [1.0, 1.0]) == INF
    assert error([1.0, INF], [NAN, 1.0]) == INF


def test_what_the_original_itself_has_not_finite_does_not_count():
    assert error([7.0, 1.0], [NAN, 1.0]) == 0
    assert error([NAN, 1.0], [NAN, 1.0]) == 0


def test_other_shapes_dtypes_or_counts_are_infinitely_wrong():
    assert error([1.0], [[1.0]]) == INF
    assert relative_error([torch.ones(1)], [torch.ones(1).half()]) == INF
    assert relative_error([], [torch.ones(1)]) == INF
    assert relative_error([torch.tensor(1)], [torch.tensor(2)]) == INF


def test_the_worst_of_several_counts():
    good, bad = torch.ones(2), torch.tensor([1.0, 2.0])
    assert relative_error([good, bad], [good, good]) > 0.5


def test_values_whose_squares_overflow_are_compared():
    assert math.isclose(error([4e30, 5e30], [4e30, 3e30]), 0.4, rel_tol=1e-6)
    assert error([3e38, 3e38], [-3e38, 3e38]) == INF
    assert math.isclose(error([1e18], [1.9e19]), 18 / 19, rel_tol=1e-6)


@pytest.mark.parametrize(
    ("taken", "told"),
    [
        ([69.6, 29.9, 31.0, 1.0], 29.9),  # the first run after a plan was built, and three at most
        ([69.6, 33.0, 1.0], 33.0),  # 100 ms are over
        ([240.0, 1.0], 240.0),  # one run that takes long is enough
    ],
)
def test_the_time_of_a_call_is_not_that_of_a_run_that_was_held_up(taken, told, monkeypatch):
    taken = list(taken)
    monkeypatch.setattr(verify, "milliseconds", lambda run, device, times: taken.pop(0))
    assert verify.quickest(lambda: None, torch.device("cuda")) == told
    assert taken[-1:] == [1.0]
