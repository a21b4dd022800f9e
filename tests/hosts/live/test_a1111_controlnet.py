"""The real sd-webui-controlnet in AUTOMATIC1111, with this checkout beside it and without.

SFAST_CONTROLNET_DIR   a checkout of sd-webui-controlnet, on a branch; see `a1111.py` for the others
"""

from __future__ import annotations

import base64
import io
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from .a1111 import (
    HIRES,
    IMG2IMG,
    INIT,
    MARKS,
    PLAIN,
    TOLERANCE,
    Played,
    Round,
    accelerated,
    apart,
    equal_to_stock,
)
from .a1111_models import IMAGE
from .webui import add_extension

CONTROLNET = os.environ.get("SFAST_CONTROLNET_DIR")
pytestmark = [*MARKS, pytest.mark.skipif(not CONTROLNET, reason="SFAST_CONTROLNET_DIR names no sd-webui-controlnet")]

IP_ADAPTER = "ip-adapter_clip_h"
# ControlNets of SD 1.5 are built with 320 channels whatever their file says; the tiny one has 32
SMALL = """
import sys

from modules import script_callbacks


def shrink(*_):
    sys.modules["scripts.controlnet_model_guess"].controlnet_default_config["model_channels"] = 32


script_callbacks.on_app_started(shrink)
"""


def prepare(data: Path) -> None:
    """ControlNet, and tiny networks for it."""
    (data / "extensions" / "sd-webui-controlnet").symlink_to(CONTROLNET or "", target_is_directory=True)
    add_extension(data, "small-controlnet", SMALL)


def unit(model: str = "tiny-control", module: str = "none", **more: Any) -> dict[str, Any]:
    """One unit of the extension."""
    return {"enabled": True, "module": module, "model": model, "image": INIT, "weight": 1.0, **more}


def controlled(*units: dict[str, Any], of: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    """A payload with these units."""
    return {**(of or PLAIN), "alwayson_scripts": {"ControlNet": {"args": list(units)}}, **more}


def told_of(image: int, **more: Any) -> dict[str, Any]:
    """A unit of IP-Adapter with what a model of vision would tell of an image, as the extension's API takes it."""
    embedding = torch.randn((1, IMAGE), generator=torch.Generator().manual_seed(image))
    stream = io.BytesIO()
    torch.save({"image_embeds": embedding}, stream, _use_new_zipfile_serialization=False)
    told = base64.b64encode(stream.getvalue()).decode()
    return unit("tiny-ip-adapter", IP_ADAPTER, ipadapter_input=[told], **more)


def with_lora(prompt: str) -> dict[str, Any]:
    return controlled(unit(), prompt=f"{PLAIN['prompt']} {prompt}")


FIRST = controlled(unit())
BOTH = (unit(), unit("tiny-t2i"))
ROUND: Round = [
    ("plain", "txt2img", PLAIN),
    ("one unit", "txt2img", FIRST),
    ("less weight", "txt2img", controlled(unit(weight=0.5))),
    ("more weight", "txt2img", controlled(unit(weight=1.5))),
    ("one unit, LoRA", "txt2img", with_lora("<lora:strong:1>")),
    ("one unit, LoRA at half", "txt2img", with_lora("<lora:strong:0.5>")),
    ("one unit, LoRA off", "txt2img", FIRST),
    ("plain between", "txt2img", PLAIN),
    ("one unit again", "txt2img", FIRST),
    ("to tiny.ckpt", "options", {"sd_model_checkpoint": "tiny.ckpt"}),
    ("other checkpoint", "txt2img", FIRST),
    ("to tiny.safetensors", "options", {"sd_model_checkpoint": "tiny.safetensors"}),
    ("first checkpoint", "txt2img", FIRST),
    ("two units", "txt2img", controlled(*BOTH)),
    ("two units, other weights", "txt2img", controlled(unit(weight=0.7), unit("tiny-t2i", weight=0.4))),
    ("from the third to the sixth tenth", "txt2img", controlled(unit(guidance_start=0.3, guidance_end=0.6), steps=6)),
    ("my prompt", "txt2img", controlled(unit(control_mode="My prompt is more important", pixel_perfect=True))),
    ("my control", "txt2img", controlled(unit(control_mode="ControlNet is more important", pixel_perfect=True))),
    ("wide", "txt2img", controlled(unit(), width=192)),
    ("plain after the wide", "txt2img", PLAIN),
    ("hires", "txt2img", controlled(unit(), of=HIRES)),
    ("img2img", "img2img", controlled(unit(), of=IMG2IMG)),
    ("img2img, two units", "img2img", controlled(*BOTH, of=IMG2IMG)),
    ("low VRAM", "txt2img", controlled(unit(low_vram=True))),
    ("after low VRAM", "txt2img", FIRST),
    ("reference", "txt2img", controlled(unit("None", "reference_only"))),
    ("plain after the reference", "txt2img", PLAIN),
    ("one unit after the reference", "txt2img", FIRST),
    ("plain at the end", "txt2img", PLAIN),
    ("reference and a unit", "txt2img", controlled(unit(), unit("None", "reference_only"))),
    ("the very end", "txt2img", FIRST),
    ("IP-Adapter", "txt2img", controlled(told_of(1))),
    ("IP-Adapter, again", "txt2img", controlled(told_of(1))),
    ("IP-Adapter, less weight", "txt2img", controlled(told_of(1, weight=0.4))),
    ("IP-Adapter, other image", "txt2img", controlled(told_of(2))),
    ("IP-Adapter in the second half", "txt2img", controlled(told_of(1, guidance_start=0.5), steps=6)),
    ("IP-Adapter and a unit", "txt2img", controlled(unit(), told_of(1))),
    ("IP-Adapter, img2img", "img2img", controlled(told_of(1), of=IMG2IMG)),
    ("plain after IP-Adapter", "txt2img", PLAIN),
    ("one unit after IP-Adapter", "txt2img", FIRST),
]


BLOCKS = 21  # of the UNet of SD 1.5, less the four that are a lone convolution
WITH = {name: payload["alwayson_scripts"] for name, _, payload in ROUND if "alwayson_scripts" in payload}
UNITS = {name: scripts["ControlNet"]["args"] for name, scripts in WITH.items()}
PATCHED = [name for name, units in UNITS.items() if {"reference_only", IP_ADAPTER} & {u["module"] for u in units}]
CONTROLLED = [name for name in UNITS if name not in PATCHED]
SAME_PLANS = [
    "less weight",
    "more weight",
    "one unit, LoRA",
    "one unit, LoRA at half",
    "one unit, LoRA off",
    "one unit again",
    "other checkpoint",
    "first checkpoint",
    "two units",
    "two units, other weights",
    "from the third to the sixth tenth",
    "my prompt",
    "my control",
    "plain after the wide",
    "img2img, two units",
    "low VRAM",
    "plain at the end",
    "the very end",
    "IP-Adapter, again",
]


def networks(played: Played, name: str) -> list[dict[str, Any]]:
    """The ControlNets with an accelerator after a step."""
    return [a for a in played.reports[name]["accelerators"] if a["name"] == "controlnet"]


test_image_is_the_one_without_the_extension = equal_to_stock(ROUND)


def test_the_round_shows_what_it_should(stock):
    changes = [
        ("one unit", "plain"),
        ("less weight", "one unit"),
        ("more weight", "one unit"),
        ("one unit, LoRA", "one unit"),
        ("one unit, LoRA at half", "one unit, LoRA"),
        ("other checkpoint", "one unit"),
        ("two units", "one unit"),
        ("two units, other weights", "two units"),
        ("from the third to the sixth tenth", "one unit"),
        ("my prompt", "one unit"),
        ("my control", "one unit"),
        ("img2img, two units", "img2img"),
        ("reference", "plain"),
        ("reference and a unit", "one unit"),
        ("IP-Adapter", "plain"),
        ("IP-Adapter, less weight", "IP-Adapter"),
        ("IP-Adapter, other image", "IP-Adapter"),
        ("IP-Adapter in the second half", "IP-Adapter"),
        ("IP-Adapter and a unit", "one unit"),
    ]
    for one, other in changes:
        assert apart(stock[one][:1], stock[other][:1]) > TOLERANCE, (one, other)
    for one, other in [("one unit, LoRA off", "one unit"), ("plain at the end", "plain"), ("low VRAM", "one unit")]:
        assert apart(stock[one], stock[other]) < TOLERANCE, (one, other)


@pytest.mark.parametrize("name", CONTROLLED)
def test_blocks_and_the_network_beside_them_are_accelerated(played, name):
    accelerated(played, name)
    assert played.reasons(name) == {}
    unet = played.reports[name]["accelerators"][0]
    assert [bool(part["plans"]) for part in unet["parts"]] == [True] * BLOCKS
    if name != "low VRAM":
        assert sum(plan["replays"] for network in networks(played, name) for plan in network["plans"]) > 0


@pytest.mark.parametrize("name", [name for name, _, payload in ROUND if payload is PLAIN])
def test_without_it_the_whole_model_is_accelerated(played, name):
    accelerated(played, name)
    assert played.reasons(name) == {}
    assert played.reports[name]["accelerators"][0]["installed"]


@pytest.mark.parametrize("name", SAME_PLANS)
def test_no_new_capture_for(played, name):
    assert played.gained(name, "captures") == 0


@pytest.mark.parametrize("name", ["plain after the reference", "plain after IP-Adapter"])
def test_a_plain_image_makes_no_plans_for_blocks(played, name):
    assert played.gained(name, "captures") <= 1


def test_with_low_vram_the_network_runs_as_it_did(played):
    # it goes to the CPU after each step; a plan would hold its weights on the GPU
    assert networks(played, "low VRAM") == []
    assert played.gained("low VRAM", "plans run") == PLAIN["steps"] * BLOCKS
    assert networks(played, "after low VRAM") != []


@pytest.mark.parametrize("name", PATCHED)
def test_blocks_that_it_patches_run_as_they_did(played, name):
    accelerated(played, name)
    reasons = played.reasons(name)
    assert reasons and all("of the extension sd-webui-controlnet" in reason for reason in reasons)
