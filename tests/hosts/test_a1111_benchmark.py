"""The benchmark of whole pictures, with tiny models on a CPU."""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks import webui

from .a1111 import FLAGS, MARKS, TOLERANCE

pytestmark = MARKS


def test_pictures_are_made_in_turns_and_timed(tmp_path: Path):
    told = {"checkpoint": None, "tiny": True, "size": (128, 128), "steps": 2, "pictures": 2, "flags": FLAGS}
    found = webui.measure(argparse.Namespace(**told), tmp_path)
    assert found["plans_ran"] > 0 and found["last_error"] is None and found["reasons"] == {}
    assert max(found["apart_of_255"]) < TOLERANCE
    assert [len(seconds) for seconds in found["picture_s"].values()] == [2, 2]
    assert all(second > 0 for second in (*found["median_s"].values(), *found["first_picture_s"].values()))
