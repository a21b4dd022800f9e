"""InstantID by the real sd-webui-controlnet in AUTOMATIC1111, with this checkout beside it and without.

It is two units: an IP-Adapter of a face, and after it a ControlNet of the face's points, which is told of the face in
place of the prompt. What a model of faces would find in an image is given in the request, as the extension's API takes
it. See `test_a1111_controlnet.py` for what is needed.
"""

from __future__ import annotations

import base64
import io
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image, ImageDraw

from .a1111 import (
    HIRES,
    HOST,
    IMG2IMG,
    MARKS,
    PLAIN,
    TOLERANCE,
    Round,
    accelerated,
    apart,
    equal_to_stock,
    python,
)
from .a1111_xl import FACE, REGISTER, TIMES, WIDTH
from .test_a1111_controlnet import CONTROLNET, controlled, networks, unit
from .webui import add_extension, encoded

pytestmark = [*MARKS, pytest.mark.skipif(not CONTROLNET, reason="SFAST_CONTROLNET_DIR names no sd-webui-controlnet")]
SETTINGS = {"sd_model_checkpoint": "xl-deep.safetensors", "control_net_model_cache_size": 3}
# ControlNets of SDXL are built with its channels whatever their file says
SMALL = f"""
import sys

from modules import script_callbacks


def shrink(*_):
    guess = sys.modules["scripts.controlnet_model_guess"]
    small = dict(model_channels=32, num_head_channels=16, adm_in_channels={WIDTH + 6 * TIMES})
    guess.controlnet_sdxl_config.update(small, context_dim={FACE})
    guess.controlnet_sdxl_mid_config.update(small, context_dim={2 * WIDTH})


script_callbacks.on_app_started(shrink)
"""

POINTS = Image.new("RGB", (128, 128))
for place, colour in zip([(44, 50), (84, 50), (64, 70), (50, 90), (78, 90)], ["red", "lime", "blue", "yellow", "cyan"]):
    ImageDraw.Draw(POINTS).line([(64, 70), place], fill=colour, width=6)
    ImageDraw.Draw(POINTS).ellipse([place[0] - 6, place[1] - 6, place[0] + 6, place[1] + 6], fill=colour)
LEFT = Image.new("RGB", (128, 128))
ImageDraw.Draw(LEFT).rectangle((0, 0, 63, 127), fill="white")


def prepare(data: Path) -> None:
    """ControlNet and InstantID's networks, and what makes them and the text model small."""
    script = Path(__file__).with_name("a1111_xl.py")
    command = [python(), str(script), str(data / "models")]
    made = subprocess.run(command, cwd=HOST, capture_output=True, text=True, timeout=300, check=False)
    assert made.returncode == 0, made.stderr
    (data / "extensions" / "sd-webui-controlnet").symlink_to(CONTROLNET or "", target_is_directory=True)
    add_extension(data, "small-controlnet", SMALL)
    add_extension(data, "tiny-text", REGISTER)


def face(*seeds: int, **more: Any) -> dict[str, Any]:
    """InstantID's first unit, of these faces."""
    told = []
    for seed in seeds or (1,):
        stream = io.BytesIO()
        embedding = torch.randn(512, generator=torch.Generator().manual_seed(seed))
        torch.save(embedding, stream, _use_new_zipfile_serialization=False)
        told.append(base64.b64encode(stream.getvalue()).decode())
    return unit("ip-adapter_instant_id_sdxl", "instant_id_face_embedding", ipadapter_input=told, **more)


def points(**more: Any) -> dict[str, Any]:
    """InstantID's second unit, with the points of a face found before."""
    return unit("control_instant_id_sdxl", image=encoded(POINTS), **more)


def with_lora(strength: float) -> dict[str, Any]:
    return controlled(face(), points(), prompt=f"{PLAIN['prompt']} <lora:for-xl:{strength}>")


BOTH = controlled(face(), points())
IN_THE_LEFT = {"effective_region_mask": encoded(LEFT)}
ROUND: Round = [
    ("plain", "txt2img", PLAIN),
    ("InstantID", "txt2img", BOTH),
    ("InstantID, again", "txt2img", BOTH),
    ("other face", "txt2img", controlled(face(2), points())),
    ("two faces", "txt2img", controlled(face(1, 2), points())),
    ("less of the face", "txt2img", controlled(face(weight=0.4), points())),
    ("less of the points", "txt2img", controlled(face(), points(weight=0.4))),
    ("face in the first half", "txt2img", controlled(face(guidance_end=0.5), points(), steps=5)),
    ("points in the second half", "txt2img", controlled(face(), points(guidance_start=0.5), steps=5)),
    ("both in the second half", "txt2img", controlled(*(u(guidance_start=0.5) for u in (face, points)), steps=5)),
    ("face for the points alone", "txt2img", controlled(face(weight=0.0), points())),
    ("other face for the points alone", "txt2img", controlled(face(2, weight=0.0), points())),
    ("my control", "txt2img", controlled(face(), points(control_mode="ControlNet is more important"))),
    ("in the left", "txt2img", controlled(face(**IN_THE_LEFT), points(**IN_THE_LEFT))),
    ("LoRA", "txt2img", with_lora(1)),
    ("LoRA at half", "txt2img", with_lora(0.5)),
    ("LoRA off", "txt2img", BOTH),
    ("plain between", "txt2img", PLAIN),
    ("after the plain", "txt2img", BOTH),
    ("face alone", "txt2img", controlled(face())),
    ("points alone", "txt2img", controlled(points())),
    ("points first", "txt2img", controlled(points(), face())),
    ("plain after the refused", "txt2img", PLAIN),
    ("a ControlNet", "txt2img", controlled(unit("tiny-control-xl"))),
    ("a ControlNet, less", "txt2img", controlled(unit("tiny-control-xl", weight=0.4))),
    ("a ControlNet beside", "txt2img", controlled(face(), points(), unit("tiny-control-xl"))),
    ("unequal prompts", "txt2img", {**BOTH, "prompt": "a dog BREAK on a hill"}),
    ("two images", "txt2img", {**BOTH, "batch_size": 2}),
    ("hires", "txt2img", controlled(face(), points(), of=HIRES)),
    ("img2img", "img2img", controlled(face(), points(), of=IMG2IMG)),
    ("low VRAM", "txt2img", controlled(face(low_vram=True), points(low_vram=True))),
    ("plain at the end", "txt2img", PLAIN),
]

BLOCKS = 16  # of the UNet of SDXL, less the three that are a lone convolution
FACED = 11  # of them have cross attention, which the extension lays a forward of its own over
UNITS = {name: p["alwayson_scripts"]["ControlNet"]["args"] for name, _, p in ROUND if "alwayson_scripts" in p}
# without the embedding of a face before the points, the extension gives up, says so in its log, and changes nothing
REFUSED = ["points alone", "points first"]
WITH_FACE = [name for name, units in UNITS.items() if "ipadapter_input" in units[0]]
PLAINS = [*REFUSED, *(name for name, _, payload in ROUND if payload is PLAIN)]
WITHOUT_FACE = ["a ControlNet", "a ControlNet, less"]
# one call of the UNet a step, and each ControlNet in each
STEADY = [
    "InstantID, again",
    "other face",
    "two faces",
    "less of the face",
    "less of the points",
    "face in the first half",
    "face for the points alone",
    "other face for the points alone",
    "my control",
    "in the left",
    "LoRA",
    "LoRA at half",
    "LoRA off",
    "after the plain",
    "face alone",
    "a ControlNet beside",
    "img2img",
]
SAME_PLANS = [
    *STEADY,
    *REFUSED,
    "points in the second half",
    "both in the second half",
    "plain after the refused",
    "a ControlNet, less",
    "low VRAM",
    "plain at the end",
]


test_image_is_the_one_without_the_extension = equal_to_stock(ROUND)


def test_the_round_shows_what_it_should(stock):
    changes = [
        ("InstantID", "plain"),
        ("other face", "InstantID"),
        ("two faces", "InstantID"),
        ("two faces", "other face"),
        ("less of the face", "InstantID"),
        ("less of the points", "InstantID"),
        ("face in the first half", "points in the second half"),
        ("both in the second half", "points in the second half"),
        ("other face for the points alone", "face for the points alone"),
        ("my control", "InstantID"),
        ("in the left", "InstantID"),
        ("LoRA", "InstantID"),
        ("LoRA at half", "LoRA"),
        ("face alone", "plain"),
        ("face alone", "InstantID"),
        ("a ControlNet", "plain"),
        ("a ControlNet, less", "a ControlNet"),
        ("a ControlNet beside", "InstantID"),
    ]
    assert [pair for pair in changes if apart(stock[pair[0]][:1], stock[pair[1]][:1]) < TOLERANCE] == []
    for one, other in [("LoRA off", "InstantID"), ("low VRAM", "InstantID"), *((name, "plain") for name in PLAINS)]:
        assert apart(stock[one], stock[other]) < TOLERANCE, (one, other)


@pytest.mark.parametrize("name", WITH_FACE)
def test_blocks_with_its_attention_run_as_they_did_and_the_others_are_accelerated(played, name):
    accelerated(played, name)
    reasons = played.reasons(name)
    assert reasons and all("attn_forward_hacked of the extension sd-webui-controlnet" in reason for reason in reasons)
    assert sum(reasons.values()) % FACED == 0


@pytest.mark.parametrize("name", STEADY)
def test_every_other_block_and_every_control_net_ran_in_every_step(played, name):
    calls = sum(played.reasons(name).values()) // FACED
    nets = sum("ipadapter_input" not in u for u in UNITS[name])
    assert calls > 0 and played.gained(name, "plans run") == calls * (BLOCKS - FACED + nets)


def test_the_control_net_runs_only_in_its_steps(played):
    for name in ("points in the second half", "both in the second half"):
        steps = sum(played.reasons(name).values()) // FACED
        assert 0 < played.gained(name, "plans run") - steps * (BLOCKS - FACED) < steps


def test_with_low_vram_the_network_runs_as_it_did(played):
    assert networks(played, "low VRAM") == []
    assert played.gained("low VRAM", "plans run") == PLAIN["steps"] * (BLOCKS - FACED)


@pytest.mark.parametrize("name", WITHOUT_FACE)
def test_after_it_the_blocks_are_accelerated_beside_another_control_net(played, name):
    accelerated(played, name)
    assert played.reasons(name) == {}
    unet = played.reports[name]["accelerators"][0]
    assert [bool(part["plans"]) for part in unet["parts"]] == [True] * BLOCKS


@pytest.mark.parametrize("name", PLAINS)
def test_without_it_the_whole_model_is_accelerated(played, name):
    accelerated(played, name)
    assert played.reasons(name) == {}
    assert played.gained(name, "plans run") <= PLAIN["steps"]


@pytest.mark.parametrize("name", SAME_PLANS)
def test_no_new_capture_for(played, name):
    assert played.gained(name, "captures") == 0


def test_what_the_extension_refuses_is_in_its_log(played):
    words = "AssertionError: InstantID control model should follow ipadapter model"
    assert played.webui.log().count(words) == len(REFUSED)
