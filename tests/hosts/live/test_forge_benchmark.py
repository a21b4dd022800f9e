"""The benchmark of whole images in a real Forge of each kind, with a small model on a CPU."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from benchmarks.webui import images

from . import forge
from .a1111 import TOLERANCE
from .test_a1111_benchmark import TOLD

KINDS = ["txt2img", "hires", "img2img"]


@pytest.mark.parametrize(
    ("host", "program"),
    [
        pytest.param("forge-neo", forge.NEO, marks=forge.NEO.marks),
        pytest.param("forge-classic", forge.CLASSIC, marks=forge.CLASSIC.marks),
        pytest.param("forge", forge.OLD, marks=forge.OLD.marks),
        pytest.param("reforge", forge.REFORGE, marks=forge.REFORGE.marks),
    ],
)
def test_images_of_each_kind_are_timed_and_taken_apart(host: str, program: forge.Program, tmp_path: Path):
    said = {**TOLD, "host": host, "kinds": KINDS, "flags": [program.flags], "breakdown": 1, "images": 1}
    rows = images.measure(argparse.Namespace(**said | {"sizes": [(64, 64)]}), tmp_path)["rows"]
    assert [row["kind"] for row in rows] == KINDS
    for row in rows:
        assert row["plans_ran"] > 0 and row["last_error"] is None and max(row["apart_of_255"]) < TOLERANCE
        for found in row["breakdown"].values():
            phases = found["phases"]
            always = {images.CLIENT, "process_images", "text encoders", "sampler", "guidance", "VAE"}
            assert always | {"weights to the GPU"} <= phases.keys()
            assert all(phases[name]["cpu_ms"] > 0 for name in always)
