"""The benchmark of whole pictures, with tiny models on a CPU."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from benchmarks import webui

from .a1111 import FLAGS, MARKS, TOLERANCE

pytestmark = MARKS


def test_pictures_are_made_in_turns_and_timed(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    flags, sizes = [FLAGS, f"{FLAGS} --opt-sdp-attention"], [(128, 128), (128, 64)]
    told = {"checkpoint": None, "tiny": True, "sizes": sizes, "steps": 2, "pictures": 2, "flags": flags}
    found = webui.measure(argparse.Namespace(**told), tmp_path)
    rows = found["rows"]
    assert [(row["width"], row["height"], row["flags"]) for row in rows] == [
        (*size, f) for size in sizes for f in flags
    ]
    for row in rows:
        assert row["plans_ran"] > 0 and row["last_error"] is None and row["reasons"] == {}
        assert max(row["apart_of_255"]) < TOLERANCE
        assert [len(seconds) for seconds in row["picture_s"].values()] == [2, 2]
        assert all(second > 0 for second in (*row["median_s"].values(), *row["first_picture_s"].values()))
    assert "NO PLAN RAN" not in capsys.readouterr().out


def test_a_row_without_a_plan_is_told():
    row = {
        "width": 64,
        "height": 64,
        "flags": "",
        "median_s": {"stock": 2.0, "extended": 1.0},
        "ratio": 2.0,
        "apart_of_255": [0.1, 0.2],
        "plans_ran": 0,
        "reasons": {"too small": 3},
        "last_error": None,
    }
    other = {**row, "flags": "--opt-sdp-attention", "median_s": {"stock": 1.0, "extended": 0.5}, "plans_ran": 4}
    assert webui.words(row, row).startswith("64x64 no flag: 2.000 s") and "NO PLAN RAN" in webui.words(row, row)
    assert webui.words(other, row).endswith("0.500 of no flag")
