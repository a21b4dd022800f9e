"""The benchmark of whole images in the real SD.Next, with a tiny model on a CPU."""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.webui import images

from .sdnext import MARKS, TOLERANCE
from .test_a1111_benchmark import TOLD, grown, unloaded

pytestmark = MARKS
SAID = {**TOLD, "host": "sdnext", "kinds": ["txt2img", "hires", "img2img"], "flags": [""], "breakdown": 1}


def test_images_of_each_kind_are_timed_and_taken_apart(tmp_path: Path):
    rows = images.measure(argparse.Namespace(**{**SAID, "images": 1}), tmp_path)["rows"]
    assert [row["kind"] for row in rows] == SAID["kinds"]
    for row in rows:
        assert row["plans_ran"] > 0 and row["last_error"] is None and max(row["apart_of_255"]) < TOLERANCE
        for found in row["breakdown"].values():
            phases = found["phases"]
            always = {images.CLIENT, "process_images", "text encoders", "UNet, guidance, sampler", "VAE"}
            assert always <= phases.keys()
            assert all(phases[name]["cpu_ms"] > 0 for name in always)


def test_system_memory_is_read_after_each_round(tmp_path: Path):
    (row,) = unloaded(tmp_path, host="sdnext", flags="", ways=["eight"])
    assert "failed" not in row and len(row["memory"]) == 3
    assert max(grown(row)) < 64 and grown(row)[1] - grown(row)[0] < 16
    assert row["counters"]["eager_runs"] > 0 and row["last_error"] is None
