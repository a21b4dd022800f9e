"""Lumina 2 and Z-Image of random weights in the real SD.Next, without the extension and with it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from . import sdnext
from .sdnext import HERE, HOST, PLAIN, TOLERANCE, Played, drawn, python, to_checkpoint

pytestmark = sdnext.MARKS
MODELS = ("tiny-lumina-image-2", "tiny-z-image")


def models(data: Path) -> None:
    command = [python(), str(HERE / "sdnext_transformers.py"), str(data / "models")]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    made = subprocess.run(command, cwd=HOST, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert made.returncode == 0, made.stderr


def family(name: str) -> list[sdnext.Step]:
    return [
        to_checkpoint(f"to {name}", name),
        drawn(f"{name}"),
        drawn(f"{name}, another seed", seed=2),
        drawn(f"{name}, wide", width=192),
        drawn(f"{name}, longer prompt", prompt="a dog on a hill and another dog"),
        drawn(f"{name}, without guidance", cfg_scale=1),
        drawn(f"{name}, two images", batch_size=2),
        drawn(f"{name}, as at first"),
    ]


ROUND = [step for name in MODELS for step in family(name)]
# otherwise text encoders are those of the large models, from the network
SETTINGS = {"te_shared_te": False}
played, test_image_equals_the_one_without_the_extension = sdnext.playing(ROUND, SETTINGS, prepare=models)


@pytest.mark.parametrize("name", sdnext.pictured(ROUND))
def test_plans_ran(played: Played, name: str) -> None:
    assert played.ran(name) > 0, (played.reasons(name), played.reports[name]["events"][-6:])
    assert played.reports[name]["last_error"] is None


@pytest.mark.parametrize("model", MODELS)
def test_no_new_capture_for_what_is_known(played: Played, model: str) -> None:
    assert played.gained(f"{model}, another seed", "captures") == 0
    assert played.gained(f"{model}, as at first", "captures") == 0


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("other", ["another seed", "longer prompt", "without guidance"])
def test_each_step_makes_another_image(played: Played, model: str, other: str) -> None:
    assert played.apart(f"{model}, {other}", model) > 2 * TOLERANCE


def test_the_steps_are_those_that_were_asked_for() -> None:
    assert PLAIN["steps"] == 4
