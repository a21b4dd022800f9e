"""What a request may ask of the real SD.Next: every image without the extension and with it."""

from __future__ import annotations

import pytest
from PIL import Image

from . import sdnext
from .sdnext import HIRES, TOLERANCE, Played, drawn, options, redrawn
from .webui import encoded

pytestmark = sdnext.MARKS

WEIGHTED = "a (dog:1.5) on a [hill]"
LONG = "a dog on a hill and another dog " * 12
MASK = encoded(Image.radial_gradient("L").resize((128, 128)).point(lambda v: 255 * (v < 128)))
SAMPLERS = ["Euler", "Euler a", "DPM++ 2M", "UniPC", "LCM"]
PARSERS = ["native", "compel", "a1111", "fixed"]
ROUND: list[sdnext.Step] = [
    drawn("plain"),
    drawn("long prompt", prompt=LONG),
    drawn("long negative prompt", negative_prompt=LONG),
    drawn("both long", prompt=LONG, negative_prompt=LONG),
    drawn("no guidance", cfg_scale=1),
    drawn("guidance ends", cfg_end=0.5, steps=8),
    drawn("odd size", width=136, height=120),
    drawn("batch", batch_size=3),
    drawn("two batches", batch_size=2, n_iter=2),
    *(drawn(f"prompts parsed by {name}", prompt=WEIGHTED, prompt_attention=name) for name in PARSERS),
    drawn("plain after parsers"),
    drawn("scheduled prompt", prompt="a [dog:cat:0.5] on a hill"),
    drawn("alternating prompt", prompt="a [dog|cat] on a hill"),
    drawn("BREAK", prompt="a dog BREAK a cat"),
    drawn("AND", prompt="a dog AND a cat"),
    drawn("CLIP skip", clip_skip=2),
    drawn("textual inversion", prompt="a tinyword on a hill"),
    redrawn("img2img"),
    redrawn("img2img, weaker", denoising_strength=0.4),
    redrawn("inpainting", mask=MASK),
    drawn("seamless", tiling=True),
    drawn("plain after seamless"),
    ("hires fix", "txt2img", HIRES),
    ("hires fix with another prompt", "txt2img", {**HIRES, "refiner_prompt": "a cat in a valley"}),
    options("to tiny-inpainting", sd_model_checkpoint="Diffusers/tiny-inpainting"),
    redrawn("inpainting checkpoint", mask=MASK),
    redrawn("inpainting checkpoint, another strength", mask=MASK, denoising_strength=1.0),
    options("to tiny-narrow", sd_model_checkpoint="Diffusers/tiny-narrow"),
    drawn("tiny-narrow"),
    *(drawn(f"sampled by {name}", sampler_name=name) for name in SAMPLERS),
    ("hires fix with another sampler", "txt2img", {**HIRES, "sampler_name": "Euler", "hr_sampler_name": "UniPC"}),
    options("from tiny-narrow", sd_model_checkpoint="Diffusers/tiny-a"),
    drawn("plain at last"),
]
IMAGES = sdnext.images_of(ROUND)
KEPT = [
    "long negative prompt", "both long", "guidance ends", "plain after parsers", "scheduled prompt", "CLIP skip",
    "textual inversion", "img2img", "inpainting", "plain after seamless", "hires fix with another prompt",
    "inpainting checkpoint, another strength",
]  # fmt: skip
TELLING = [
    "long prompt", "long negative prompt", "no guidance", "guidance ends", "prompts parsed by fixed", "BREAK", "AND",
    "CLIP skip", "textual inversion", "img2img", "inpainting", "seamless", "inpainting checkpoint",
]  # fmt: skip


played, test_image_equals_the_one_without_the_extension = sdnext.playing(ROUND)


@pytest.mark.parametrize("name", TELLING)
def test_each_request_changes_the_image(played: Played, name: str) -> None:
    assert played.apart(name, "plain") > 2 * TOLERANCE


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_each_sampler_makes_another_image(played: Played, sampler: str) -> None:
    assert played.apart(f"sampled by {sampler}", "tiny-narrow") > 2 * TOLERANCE


@pytest.mark.parametrize("name", IMAGES)
def test_plans_ran(played: Played, name: str) -> None:
    played.accelerated(name)


@pytest.mark.parametrize("name", KEPT)
def test_plans_go_on_without_a_new_capture(played: Played, name: str) -> None:
    assert played.gained(name, "captures") == 0
