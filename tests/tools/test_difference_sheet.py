"""The sheet of the demonstration: its scale, its colours and its labels; and how long a run on a CPU takes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sfast_ext.tools.lib import difference_sheet, pace
from sfast_ext.tools.lib.difference_sheet import Compared, figure


def compared(apart: float, height: int = 64, width: int = 64) -> Compared:
    original = np.full((height, width, 3), 0.25)
    other = original.copy()
    other[: height // 2, :, 1] += apart / 255
    return Compared("an image", original, other)


@pytest.mark.parametrize(
    ("apart", "scale"), [(0, 1), (0.0002, 1), (1, 1), (1.5, 2), (3, 5), (9, 10), (60, 100), (150, 255)]
)
def test_white_stands_for_no_less_than_the_smallest_step_of_a_file(apart, scale):
    assert difference_sheet.scale_of([compared(apart)]) == scale
    assert difference_sheet.scale_of([compared(0), compared(apart)]) == scale


def test_a_value_that_is_not_finite_is_as_far_as_can_be():
    for value in (np.nan, np.inf):
        row = compared(0)
        row.accelerated[0, 0, 0] = value
        assert row.apart.max() == 255 and difference_sheet.scale_of([row]) == 255


def test_colours():
    black, red, white = difference_sheet.coloured(np.array([0, 1 / 3, 1]))
    assert black.tolist() == [0, 0, 0] and red.tolist() == pytest.approx([1, 0, 0]) and white.tolist() == [1, 1, 1]


def pixels(rows: list[Compared]) -> np.ndarray:
    return np.asarray(difference_sheet.sheet("a title", rows, "a verdict"))


def test_a_difference_that_nobody_can_see_is_black_and_one_that_can_be_seen_is_not():
    left = slice(570, 780)  # of the third column
    top, below = slice(100, 160), slice(220, 300)
    small, large = pixels([compared(0.01)]), pixels([compared(2)])
    assert small[top, left].max() < 20 and small[below, left].max() < 20
    assert large[top, left].min() > 200 and large[below, left].max() < 20


@pytest.mark.parametrize(("height", "width"), [(64, 64), (64, 128), (128, 64), (8, 512), (1024, 768)])
def test_images_of_any_shape_fit(height, width):
    made = pixels([compared(0.01, height, width), compared(0.02)])
    assert made.shape[1] == pixels([compared(0)]).shape[1] and made.shape[2] == 3
    # the titles, the labels and the verdict are there
    assert (made[:60] < 100).any() and (made[-30:] < 100).any()


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.00024, "0.00024"), (3.14, "3.1"), (123.4, "120"), (99, "99"), (1e-9, "0.000000001"), (1, "1")],
)
def test_figures(value, text):
    assert figure(value) == text


def test_a_figure_of_what_is_not_finite():
    assert figure(float("inf")) == figure(float("nan")) == "infinite"


@pytest.mark.parametrize(
    ("seconds", "calls", "said"),
    [(0.1, 100, None), (0.59, 100, None), (10, 42, "about 7 min"), (8.34, 30, "about 4 min"), (60, 300, "about 5.0 h")],
)
def test_a_run_that_takes_long_is_told(seconds, calls, said):
    told = pace.remark(seconds, calls)
    assert (told is None) == (said is None)
    assert told is None or (said in told and f"takes {seconds:.1f} s" in told and "\n" not in told)


@pytest.mark.parametrize(("device", "calls", "told"), [("cpu", 10**9, True), ("cpu", 1, False), ("cuda", 10**9, False)])
def test_it_is_told_on_a_cpu_alone(device, calls, told, capsys):
    with pace.said(torch.device(device), calls):
        sum(range(1000))
    assert ("no NVIDIA GPU" in capsys.readouterr().err) == told


@pytest.mark.parametrize(("weights", "threads"), [(10, 1), (pace.SMALL, 2)])
def test_a_small_model_runs_in_one_thread(monkeypatch, weights, threads):
    told = [2]
    monkeypatch.setattr(torch, "set_num_threads", told.append)
    model = torch.nn.Module()
    model.weight = torch.nn.Parameter(torch.empty(weights, device="meta"))
    pace.few_threads(model)
    assert told[-1] == threads
