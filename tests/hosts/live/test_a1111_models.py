"""Models that come and go in AUTOMATIC1111, with this checkout beside it and without."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image, ImageDraw

from .a1111 import (
    HIRES,
    IMG2IMG,
    MARKS,
    ON_CPU,
    PLAIN,
    TOLERANCE,
    Round,
    accelerated,
    apart,
    count,
    equal_to_stock,
    images_of,
    play,
    told,
)
from .a1111_xl import REGISTER
from .webui import add_extension, encoded, of_steps

pytestmark = MARKS
SETTINGS = {"sd_vae": "None", "sd_checkpoints_limit": 1, "sd_checkpoints_keep_in_cpu": True}

MASK = Image.new("L", (128, 128))
ImageDraw.Draw(MASK).rectangle((20, 40, 90, 110), fill=255)
# Without a mask the model is told of a black image. The tiny VAE has norms of one channel, which is then constant, and
# PyTorch's norm of channels-last images on a CPU is wrong by a tenth there.
HALF_MASKED = {**IMG2IMG, "override_settings": {"inpainting_mask_weight": 0.5}}
INPAINT = {**IMG2IMG, "mask": encoded(MASK), "mask_blur": 4, "inpainting_fill": 1}


def prepare(data: Path) -> None:
    """What tells open_clip of the small text model."""
    add_extension(data, "tiny-text", REGISTER)


def to(checkpoint: str, times: str = "") -> tuple[str, str, dict[str, str]]:
    return f"to {checkpoint}{times}", "options", {"sd_model_checkpoint": checkpoint}


def refined(by: str) -> dict:
    return {**PLAIN, "steps": 4, "refiner_checkpoint": by, "refiner_switch_at": 0.5}


def with_lora(model: str, strength: float = 1) -> dict:
    return {**PLAIN, "prompt": f"{PLAIN['prompt']} <lora:for-{model}:{strength}>"}


# on a GPU a request for a model that is unloaded fails in the WebUI itself: it leaves the weights in system memory
LOADED: Round = [] if ON_CPU else [("load it", "reload-checkpoint", {})]
ROUND: Round = [
    ("plain", "txt2img", PLAIN),
    ("hires", "txt2img", HIRES),
    ("unload", "unload-checkpoint", {}),
    ("reload", "reload-checkpoint", {}),
    ("reloaded", "txt2img", PLAIN),
    ("unload again", "unload-checkpoint", {}),
    *LOADED,
    ("loaded by the request", "txt2img", PLAIN),
    ("reload what is loaded", "reload-checkpoint", {}),
    ("still loaded", "txt2img", PLAIN),
    ("to another VAE", "options", {"sd_vae": "other.safetensors"}),
    ("another VAE", "txt2img", PLAIN),
    ("another VAE, img2img", "img2img", IMG2IMG),
    ("to its own VAE", "options", {"sd_vae": "None"}),
    ("its own VAE", "txt2img", PLAIN),
    ("VAE for one", "txt2img", {**PLAIN, "override_settings": {"sd_vae": "other.safetensors"}}),
    ("VAE for one gone", "txt2img", PLAIN),
    ("hires by the sibling", "txt2img", {**HIRES, "hr_checkpoint_name": "tiny.ckpt"}),
    ("hires by the sibling, again", "txt2img", {**HIRES, "hr_checkpoint_name": "tiny.ckpt", "seed": 4}),
    ("hires by another sampler", "txt2img", {**HIRES, "hr_sampler_name": "DPM++ 2M"}),
    ("checkpoint for one", "txt2img", {**PLAIN, "override_settings": {"sd_model_checkpoint": "tiny.ckpt"}}),
    ("checkpoint for one gone", "txt2img", PLAIN),
    ("refined by the sibling", "txt2img", refined("tiny.ckpt")),
    ("after the sibling", "txt2img", PLAIN),
    ("hires by another architecture", "txt2img", {**HIRES, "hr_checkpoint_name": "wide.safetensors"}),
    ("after another architecture", "txt2img", PLAIN),
    ("refined by another architecture", "txt2img", refined("wide.safetensors")),
    ("after being refined", "txt2img", PLAIN),
    ("two in memory", "options", {"sd_checkpoints_limit": 2}),
    to("wide.safetensors"),
    ("the second", "txt2img", PLAIN),
    to("tiny.safetensors"),
    ("the first", "txt2img", PLAIN),
    told("the first with LoRA", "<lora:strong:1>"),
    to("wide.safetensors", " again"),
    ("the second again", "txt2img", PLAIN),
    to("tiny.safetensors", " again"),
    ("the first again", "txt2img", PLAIN),
    ("one in memory", "options", {"sd_checkpoints_limit": 1}),
    to("inpaint.safetensors"),
    ("inpainting model, txt2img", "txt2img", PLAIN),
    ("inpainting model, img2img", "img2img", HALF_MASKED),
    ("inpainting model", "img2img", INPAINT),
    ("inpainting model, LoRA", "img2img", {**INPAINT, "prompt": "a dog <lora:strong:1>"}),
    ("inpainting model, LoRA off", "img2img", INPAINT),
    to("edit.safetensors"),
    ("edit", "img2img", {**IMG2IMG, "image_cfg_scale": 1.5}),
    ("edit, other scale", "img2img", {**IMG2IMG, "image_cfg_scale": 3.0}),
    ("edit, two at once", "img2img", {**IMG2IMG, "image_cfg_scale": 1.5, "batch_size": 2}),
    to("second.safetensors"),
    ("SD 2", "txt2img", PLAIN),
    ("SD 2, LoRA", "txt2img", with_lora("second")),
    ("SD 2, LoRA off", "txt2img", PLAIN),
    ("SD 2, hires", "txt2img", HIRES),
    ("SD 2, img2img", "img2img", IMG2IMG),
    to("xl.safetensors"),
    ("SDXL", "txt2img", PLAIN),
    ("SDXL, LoRA", "txt2img", with_lora("xl")),
    ("SDXL, LoRA at half", "txt2img", with_lora("xl", 0.5)),
    ("SDXL, LoRA off", "txt2img", PLAIN),
    ("SDXL, unequal prompts", "txt2img", {**PLAIN, "prompt": "a dog BREAK on a hill"}),
    ("SDXL, hires", "txt2img", HIRES),
    ("SDXL, img2img", "img2img", IMG2IMG),
    ("SDXL, inpainting", "img2img", INPAINT),
    ("SDXL, refined", "txt2img", refined("xl-refiner.safetensors")),
    ("SDXL, refined again", "txt2img", refined("xl-refiner.safetensors")),
    ("SDXL, not refined", "txt2img", PLAIN),
    to("xl-other.safetensors"),
    ("another SDXL", "txt2img", PLAIN),
    to("xl-refiner.safetensors"),
    ("the refiner alone", "img2img", IMG2IMG),
    to("tiny.safetensors", " at last"),
    ("plain at the end", "txt2img", PLAIN),
]
SAME_PLANS = [
    "still loaded",
    "another VAE",
    "another VAE, img2img",
    "its own VAE",
    "VAE for one",
    "VAE for one gone",
    "hires by the sibling, again",
    "hires by another sampler",
    "checkpoint for one",
    "checkpoint for one gone",
    "refined by the sibling",
    "after the sibling",
    "the first with LoRA",
    "inpainting model",
    "inpainting model, LoRA",
    "inpainting model, LoRA off",
    "edit, other scale",
    "SD 2, LoRA",
    "SD 2, LoRA off",
    "SD 2, img2img",
    "SDXL, LoRA",
    "SDXL, LoRA at half",
    "SDXL, LoRA off",
    "SDXL, img2img",
    "SDXL, inpainting",
    "another SDXL",
]


test_image_is_the_one_without_the_extension = equal_to_stock(ROUND)


@pytest.mark.parametrize("name", images_of(ROUND))
def test_plans_were_replayed(played, name):
    accelerated(played, name)
    assert played.reasons(name) == {}


@pytest.mark.parametrize("name", SAME_PLANS)
def test_no_new_capture_for(played, name):
    assert played.gained(name, "captures") == 0


def test_the_round_shows_what_it_should(stock):
    changes = [
        ("another VAE", "plain"),
        ("VAE for one", "plain"),
        ("hires by the sibling", "hires"),
        ("hires by another architecture", "hires"),
        ("checkpoint for one", "plain"),
        ("refined by the sibling", "refined by another architecture"),
        ("the second", "the first"),
        ("inpainting model, LoRA", "inpainting model"),
        ("edit", "edit, other scale"),
        ("SD 2", "plain"),
        ("SD 2, LoRA", "SD 2"),
        ("SDXL", "plain"),
        ("SDXL, LoRA", "SDXL"),
        ("SDXL, LoRA at half", "SDXL, LoRA"),
        ("SDXL, refined", "SDXL"),
        ("another SDXL", "SDXL"),
        ("the refiner alone", "SDXL, img2img"),
    ]
    assert [pair for pair in changes if apart(stock[pair[0]], stock[pair[1]]) < TOLERANCE] == []
    for name in ("reloaded", "loaded by the request", "its own VAE", "after being refined", "plain at the end"):
        assert apart(stock[name], stock["plain"]) < TOLERANCE
    for name in ("SDXL, LoRA off", "SDXL, not refined"):
        assert apart(stock[name], stock["SDXL"]) < TOLERANCE


def test_a_model_is_unloaded_between_two_requests_again_and_again(played, stock):
    for _ in range(3):
        play(played.webui, "unload-checkpoint", {})
        for _, kind, payload in LOADED:
            play(played.webui, kind, payload)
        before = played.webui.get("/sfast/v1/status")
        assert apart(play(played.webui, "txt2img", PLAIN), stock["plain"]) < TOLERANCE
        after = played.webui.get("/sfast/v1/status")
        assert count(after, "plans run") > count(before, "plans run")
        assert len(of_steps(after)) == 1 and after["last_error"] is None
