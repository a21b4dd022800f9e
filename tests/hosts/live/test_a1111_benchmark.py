"""The benchmark of whole images, with tiny models on a CPU."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from benchmarks.webui import images, unloading

from .a1111 import FLAGS, MARKS, TOLERANCE

pytestmark = MARKS
TOLD = {
    "host": "a1111",
    "checkpoint": None,
    "tiny": True,
    "model": "sd15",
    "kinds": ["txt2img"],
    "batch": 1,
    "card": None,
    "ways": ["stock", "extended"],
    "breakdown": 0,
    "vae_plans_at_once": False,
    "json": None,
    "stock": None,
    "turn": None,
    "warm": False,
    "another_prompt": False,
    "sizes": [(128, 128)],
    "steps": 2,
    "images": 2,
    "flags": [FLAGS],
}


def measured(folder: Path, **more: object) -> list[dict]:
    return images.measure(argparse.Namespace(**{**TOLD, **more}), folder)["rows"]


def test_images_are_made_in_turns_and_timed(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    flags, sizes = [FLAGS, f"{FLAGS} --opt-sdp-attention"], [(128, 128), (128, 64)]
    rows = measured(tmp_path, sizes=sizes, flags=flags)
    assert [(row["width"], row["height"], row["flags"]) for row in rows] == [
        (*size, f) for size in sizes for f in flags
    ]
    for row in rows:
        assert row["plans_ran"] > 0 and row["last_error"] is None and row["reasons"] == {}
        assert row["vae_plans_ran"] == 0
        assert max(row["apart_of_255"]) < TOLERANCE
        assert [len(seconds) for seconds in row["images_s"].values()] == [2, 2]
        assert all(second > 0 for second in (*row["median_s"].values(), *row["first_image_s"].values()))
    assert "NO PLAN RAN" not in capsys.readouterr().out


def test_images_of_each_kind_are_taken_apart(tmp_path: Path):
    ways = ["stock", "unet", "extended"]
    kinds = ["hires", "img2img"]
    rows = measured(tmp_path, kinds=kinds, ways=ways, breakdown=1, images=2, batch=2, vae_plans_at_once=True)
    assert [row["kind"] for row in rows] == ["hires", "img2img"]
    for row in rows:
        assert list(row["breakdown"]) == list(row["median_s"]) == ways
        assert row["plans_ran"] > 0 and row["last_error"] is None and max(row["apart_of_255"]) < TOLERANCE
        assert row["vae_plans_ran"] > 0
        for found in row["breakdown"].values():
            phases = found["phases"]
            always = {images.CLIENT, "process_images", "text encoders", "sampler", "guidance", "UNet", "VAE"}
            assert always | {"PNG and base64", "live preview", "torch_gc"} <= phases.keys()
            assert sum(phase["cpu_ms"] for phase in phases.values()) == pytest.approx(found["request_ms"], abs=0.1)
            assert all(phase["cpu_ms"] > 0 for name, phase in phases.items() if name in always)


def unloaded(folder: Path, **more: object) -> list[dict]:
    """Rows of `benchmarks.webui.unloading`, in two rounds."""
    told = {"host": "a1111", "flags": FLAGS, "card": 8, "ways": ["eight", "stock"], "size": (64, 64), "rounds": 2}
    return unloading.measure(argparse.Namespace(**{**TOLD, **told, **more}), folder)["rows"]


def grown(row: dict) -> list[int]:
    """By how many MB system memory is above the start after each round."""
    first, *later = (held["system"] >> 20 for held in row["memory"])
    return [each - first for each in later]


def test_system_memory_is_read_after_each_round(tmp_path: Path):
    eight, stock = unloaded(tmp_path)
    assert [row["way"] for row in (eight, stock)] == ["eight", "stock"]
    for row in (eight, stock):
        assert "failed" not in row and len(row["memory"]) == 3 and len(row["images_s"]) == 5
        # the second round adds nothing
        assert max(grown(row)) < 64 and grown(row)[1] - grown(row)[0] < 16
    assert eight["counters"]["eager_runs"] > 0 and eight["last_error"] is None


def test_a_row_without_a_plan_is_told():
    row = {
        "kind": "txt2img",
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
    other = {**row, "flags": "--opt-sdp-attention", "median_s": {"stock": 1.0, "unet": 0.7, "extended": 0.5}}
    other["plans_ran"] = 4
    assert images.words(row, row).startswith("txt2img 64x64 no flag: 2.000 s")
    assert "NO PLAN RAN" in images.words(row, row)
    assert images.words(other, row).endswith("0.700 s unet; 0.500 of no flag")
