"""The chart's bars; the image itself if matplotlib is there."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from sfast_ext.ui import chart


def measured(when="2026-11-24T21:05:00", driver="580", model="UNet", **sizes):
    rows = [{"label": label, "ms_before": 30.0, "ms_after": after} for label, after in sizes.items()]
    return {"when": when, "driver": driver, "torch": "2.7", "model": model, "gpu": "a card", "rows": rows}


def test_the_last_measurement_beside_the_one_before_of_the_same_model_and_sizes():
    older = measured("2026-10-01T10:00:00", "570", a=16.0, b=20.0)
    between = measured("2026-10-02T10:00:00", model="other", a=1.0, b=2.0)
    fewer = measured("2026-10-03T10:00:00", a=1.0)
    found = chart.bars([measured("2026-09-01", a=9.0, b=9.0), older, between, fewer, measured(a=15.0, b=19.0)])
    assert found == {
        "original": {"a": 30.0, "b": 30.0},
        "Stable Fast, 2026-11-24 21:05, torch 2.7, driver 580": {"a": 15.0, "b": 19.0},
        "Stable Fast, 2026-10-01 10:00, torch 2.7, driver 570": {"a": 16.0, "b": 20.0},
    }


def test_what_was_not_measured_has_no_bar():
    assert chart.bars([]) == {} and chart.bars([measured()]) == {}
    failed = {**measured(a=15.0), "rows": [{"label": "a", "ready": False, "reason": "too large"}]}
    assert chart.bars([failed]) == {}


def test_without_matplotlib_there_is_no_image(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert chart.figure([measured(a=15.0)]) is None


def test_the_image_has_a_bar_for_each_value():
    matplotlib = pytest.importorskip("matplotlib")
    assert chart.figure([]) is None
    picture = chart.figure([measured(a=15.0, b=19.0)])
    (axes,) = picture.axes
    assert [bar.get_width() for bar in axes.patches] == [30.0, 30.0, 15.0, 19.0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["a", "b"]
    # with how many times faster it is, which the original has not
    assert [text.get_text() for text in axes.texts] == ["30.0", "30.0", "15.0   2.0x", "19.0   1.6x"]
    assert axes.patches[2].get_facecolor() == matplotlib.colors.to_rgba(chart.COLOURS[1])
    picture.canvas.draw()


def test_stable_fast_has_one_colour_on_the_page_and_in_the_chart():
    style = (Path(__file__).parents[2] / "style.css").read_text(encoding="utf-8")
    assert f"--sfast-colour: {chart.COLOURS[1]};" in style
