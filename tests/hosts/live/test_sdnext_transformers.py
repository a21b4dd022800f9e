"""Lumina 2 and Z-Image of random weights in the real SD.Next, without the extension and with it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from . import sdnext
from .sdnext import HERE, HOST, PLAIN, TOLERANCE, Played, drawn, python, to_checkpoint, told

pytestmark = sdnext.MARKS
MODELS = ("tiny-lumina-image-2", "tiny-z-image")


def models(data: Path) -> None:
    command = [python(), str(HERE / "sdnext_transformers.py"), str(data / "models")]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    made = subprocess.run(command, cwd=HOST, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert made.returncode == 0, made.stderr


LORAS = {"tiny-lumina-image-2": "lumina", "tiny-z-image": "zimage"}
"""Of Lumina 2 SD.Next has them loaded by diffusers (PEFT), for Z-Image it has a loader, which changes the weights."""


def family(name: str) -> list[sdnext.Step]:
    lora = LORAS[name]
    return [
        to_checkpoint(f"to {name}", name),
        drawn(f"{name}"),
        drawn(f"{name}, another seed", seed=2),
        drawn(f"{name}, wide", width=192),
        drawn(f"{name}, longer prompt", prompt="a dog on a hill and another dog"),
        drawn(f"{name}, without guidance", cfg_scale=1),
        drawn(f"{name}, two images", batch_size=2),
        drawn(f"{name}, as at first"),
        told(f"{name}, LoRA", f"<lora:{lora}-1:0.8>"),
        told(f"{name}, LoRA, another seed", f"<lora:{lora}-1:0.8>", seed=2),
        told(f"{name}, LoRA, another weight", f"<lora:{lora}-1:0.3>"),
        told(f"{name}, LoRA, wide", f"<lora:{lora}-1:0.3>", width=192),
        told(f"{name}, LoRA, without guidance", f"<lora:{lora}-1:0.3>", cfg_scale=1),
        told(f"{name}, another LoRA", f"<lora:{lora}-2:0.7>"),
        told(f"{name}, two LoRAs", f"<lora:{lora}-1:0.4> <lora:{lora}-2:0.5>"),
        drawn(f"{name}, without LoRA"),
    ]


ROUND = [step for name in MODELS for step in family(name)]
# otherwise text encoders are those of the large models, from the network
SETTINGS = {"te_shared_te": False}
played, test_image_equals_the_one_without_the_extension = sdnext.playing(ROUND, SETTINGS, prepare=models)


# layers that diffusers adds are another model, whose plans must pay: images of four steps that follow each other do not
WAITING = [f"{MODELS[0]}, {name}" for name in ("LoRA, another weight", "LoRA, wide", "LoRA, without guidance")]
WAITING += [f"{MODELS[0]}, {name}" for name in ("another LoRA", "two LoRAs", "without LoRA")]


@pytest.mark.parametrize("name", sdnext.images_of(ROUND))
def test_plans_ran(played: Played, name: str) -> None:
    if name in WAITING:
        assert played.ran(name) > 0 or "changes again and again" in str(played.reasons(name)), played.reasons(name)
    else:
        assert played.ran(name) > 0, (played.reasons(name), played.reports[name]["events"][-6:])
    assert played.reports[name]["last_error"] is None


@pytest.mark.parametrize("model", MODELS)
def test_no_new_capture_for_what_is_known(played: Played, model: str) -> None:
    assert played.gained(f"{model}, another seed", "captures") == 0
    assert played.gained(f"{model}, as at first", "captures") == 0


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    "other", ["another seed", "longer prompt", "without guidance", "LoRA", "another LoRA", "two LoRAs"]
)
def test_each_step_makes_another_image(played: Played, model: str, other: str) -> None:
    assert played.apart(f"{model}, {other}", model) > 2 * TOLERANCE


@pytest.mark.parametrize("model", MODELS)
def test_each_change_of_a_lora_changes_the_image(played: Played, model: str) -> None:
    assert played.apart(f"{model}, LoRA, another weight", f"{model}, LoRA") > 2 * TOLERANCE
    assert played.apart(f"{model}, another LoRA", f"{model}, LoRA") > 2 * TOLERANCE
    assert played.apart(f"{model}, without LoRA", model) < TOLERANCE
    assert played.gained(f"{model}, LoRA, another seed", "captures") == 0


@pytest.mark.parametrize("name", ["LoRA", "LoRA, another weight", "another LoRA", "two LoRAs", "without LoRA"])
def test_weights_that_the_host_changes_keep_every_plan(played: Played, name: str) -> None:
    assert played.gained(f"tiny-z-image, {name}", "captures") == 0


def test_the_steps_are_those_that_were_asked_for() -> None:
    assert PLAIN["steps"] == 4
