"""Stable Diffusion 2, SDXL, its refiner and instruct-pix2pix in the real SD.Next, without the extension and with it."""

from __future__ import annotations

import pytest

from . import sdnext
from .sdnext import HIRES, PLAIN, TOLERANCE, Played, drawn, options, redrawn, to_checkpoint, told
from .webui import of_steps

pytestmark = sdnext.MARKS

REFINED = {**PLAIN, "enable_hr": True, "hr_force": True, "refiner_start": 0.5, "refiner_steps": 4}


def family(checkpoint: str) -> list[sdnext.Step]:
    return [
        to_checkpoint(f"to {checkpoint}", checkpoint),
        drawn(checkpoint),
        drawn(f"{checkpoint}, another seed", seed=2),
        drawn(f"{checkpoint}, wide", width=192),
        redrawn(f"{checkpoint}, img2img"),
        (f"{checkpoint}, hires fix", "txt2img", HIRES),
    ]


ROUND: list[sdnext.Step] = [
    drawn("plain"),
    *family("tiny-2"),
    told("tiny-2, LoRA", "<lora:strong:0.5>"),
    *family("tiny-xl"),
    told("tiny-xl, LoRA", "<lora:strong-xl:1>"),
    told("tiny-xl, weaker LoRA", "<lora:strong-xl:0.5>"),
    drawn("tiny-xl, LoRA gone"),
    drawn("tiny-xl, long prompt", prompt="a dog on a hill and another dog " * 12),
    to_checkpoint("to tiny-xl-b", "tiny-xl-b"),
    drawn("tiny-xl-b"),
    options("to the refiner", sd_model_refiner="Diffusers/tiny-xl-refiner"),
    ("refined", "txt2img", REFINED),
    ("refined again", "txt2img", {**REFINED, "seed": 2}),
    drawn("not refined"),
    options("from the refiner", sd_model_refiner="None"),
    ("refiner unloaded", "txt2img", REFINED),
    to_checkpoint("to tiny-pix2pix", "tiny-pix2pix"),
    redrawn("tiny-pix2pix"),
    redrawn("tiny-pix2pix, another seed", seed=2),
    redrawn("tiny-pix2pix, less guidance", cfg_scale=3),
    to_checkpoint("to tiny-a", "tiny-a"),
    drawn("plain at last"),
]
IMAGES = sdnext.images_of(ROUND)
KEPT = [
    "tiny-2, another seed", "tiny-2, img2img", "tiny-2, LoRA", "tiny-xl, another seed", "tiny-xl, img2img",
    "tiny-xl, LoRA", "tiny-xl, weaker LoRA", "tiny-xl, LoRA gone", "tiny-xl-b", "refined again", "not refined",
    "tiny-pix2pix, another seed", "tiny-pix2pix, less guidance",
]  # fmt: skip

played, test_image_equals_the_one_without_the_extension = sdnext.playing(ROUND)


@pytest.mark.parametrize(
    ("name", "other"),
    [
        *((name, "plain") for name in ("tiny-2", "tiny-xl", "tiny-pix2pix")),
        ("tiny-2, another seed", "tiny-2"),
        ("tiny-2, LoRA", "tiny-2"),
        ("tiny-xl, another seed", "tiny-xl"),
        ("tiny-xl, img2img", "tiny-xl"),
        ("tiny-xl, LoRA", "tiny-xl"),
        ("tiny-xl, weaker LoRA", "tiny-xl, LoRA"),
        ("tiny-xl-b", "tiny-xl"),
        ("refined", "refiner unloaded"),
        ("tiny-pix2pix, another seed", "tiny-pix2pix"),
    ],
)
def test_each_step_makes_another_image(played: Played, name: str, other: str) -> None:
    assert played.apart(name, other) > 2 * TOLERANCE


@pytest.mark.parametrize("name", IMAGES)
def test_plans_ran(played: Played, name: str) -> None:
    played.accelerated(name)


@pytest.mark.parametrize("name", KEPT)
def test_plans_go_on_without_a_new_capture(played: Played, name: str) -> None:
    assert played.gained(name, "captures") == 0


def test_the_refiner_has_plans_of_its_own(played: Played) -> None:
    accelerators = of_steps(played.reports["refined again"])
    assert [a["name"] for a in accelerators if any(p["replays"] for p in a["plans"])] == ["unet", "refiner"]
    assert [a["name"] for a in of_steps(played.reports["refiner unloaded"])] == ["unet"]
