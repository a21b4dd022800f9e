"""SD.Next with this checkout as an extension, against the same SD.Next without it: the round of every day."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
from png_parts import same_in_bands

from . import sdnext
from .sdnext import HIRES, INIT, PLAIN, TOLERANCE, Played, do
from .webui import difference, of_steps

pytestmark = sdnext.MARKS


def with_lora(multiplier: float) -> dict[str, Any]:
    return {**PLAIN, "prompt": f"{PLAIN['prompt']} <lora:strong:{multiplier}>"}


ROUND: list[sdnext.Step] = [
    ("txt2img", "txt2img", PLAIN),
    ("another seed", "txt2img", {**PLAIN, "seed": 2}),
    ("lora 1", "txt2img", with_lora(1)),
    ("lora 0.5", "txt2img", with_lora(0.5)),
    ("lora gone", "txt2img", PLAIN),
    ("wide", "txt2img", {**PLAIN, "width": 192}),
    ("odd size", "txt2img", {**PLAIN, "height": 136}),
    ("back in size", "txt2img", PLAIN),
    ("batch", "txt2img", {**PLAIN, "batch_size": 2}),
    ("guidance ends", "txt2img", {**PLAIN, "cfg_end": 0.5}),
    ("hires", "txt2img", HIRES),
    # another pipeline object around the same UNet
    ("img2img", "img2img", {**PLAIN, "init_images": [INIT], "denoising_strength": 0.7}),
    ("to balanced", "options", {"diffusers_offload_mode": "balanced"}),
    ("balanced", "txt2img", PLAIN),
    ("balanced, lora", "txt2img", with_lora(1)),
    ("balanced, lora gone", "txt2img", PLAIN),
    ("from balanced", "options", {"diffusers_offload_mode": "none"}),
    ("to hypertile", "options", {"hypertile_unet_enabled": True}),
    ("hypertile", "txt2img", PLAIN),
    ("from hypertile", "options", {"hypertile_unet_enabled": False}),
    ("to inference mode", "options", {"inference_mode": "inference-mode"}),
    ("inference mode", "txt2img", with_lora(1)),
    ("from inference mode", "options", {"inference_mode": "no-grad"}),
    ("to tiny-b", "options", {"sd_model_checkpoint": "Diffusers/tiny-b"}),
    ("another checkpoint", "txt2img", PLAIN),
    ("another checkpoint, lora", "txt2img", with_lora(1)),
    ("to tiny-a", "options", {"sd_model_checkpoint": "Diffusers/tiny-a"}),
    ("back", "txt2img", PLAIN),
]
"""Every image of it is made without the extension and with it."""


IMAGES = sdnext.images_of(ROUND)


played, test_image_equals_the_one_without_the_extension = sdnext.playing(ROUND)


def test_the_round_tells_its_images_apart(played: Played) -> None:
    for name in ("another seed", "lora 1", "lora 0.5", "another checkpoint"):
        assert played.apart(name, "txt2img") > 2 * TOLERANCE, name
    assert played.apart("lora gone", "txt2img") == 0


@pytest.mark.parametrize("name", ["lora gone", "back in size", "balanced, lora gone"])
def test_plans_go_on_without_a_new_capture(played: Played, name: str) -> None:
    played.accelerated(name)
    assert played.gained(name, "captures") == 0


def test_a_new_size_is_a_new_plan(played: Played) -> None:
    assert played.gained("wide", "captures") == 1


def test_hypertile_ran_the_original_and_says_so(played: Played) -> None:
    played.bypassed("hypertile", "HyperTile")


def test_status_tells_what_happened(played: Played) -> None:
    status = played.reports["back"]
    assert status["host"]["name"] == "SD.Next"
    assert status["last_error"] is None
    (accelerator,) = of_steps(status)
    assert any(plan["replays"] > 0 for plan in accelerator["plans"])
    assert "tiny-a" in status["model"]


def ran(status: dict[str, Any]) -> int:
    return sum(status["counters"].get(name, 0) for name in ("replays", "eager_runs"))


def test_unticking_restores_the_hosts_own_forward(played: Played) -> None:
    webui = played.webui
    webui.post("/sdapi/v1/options", {"sfast_enabled": False})
    before = webui.get("/sfast/v1/status")
    (image,) = do(webui, "txt2img", PLAIN)
    assert difference(image, played.stock["txt2img"][0]) == 0
    after = webui.get("/sfast/v1/status")
    assert ran(after) == ran(before) and not after["accelerators"] and not after["enabled"]
    webui.post("/sdapi/v1/options", {"sfast_enabled": True})
    do(webui, "txt2img", PLAIN)
    assert webui.get("/sfast/v1/status")["accelerators"]


def test_one_request_may_switch_it_off(played: Played) -> None:
    webui = played.webui
    (image,) = do(webui, "txt2img", {**PLAIN, "override_settings": {"sfast_enabled": False}})
    assert difference(image, played.stock["txt2img"][0]) == 0
    assert not webui.get("/sfast/v1/status")["accelerators"]
    do(webui, "txt2img", PLAIN)
    assert webui.get("/sfast/v1/status")["accelerators"]


def test_png_files_are_those_of_the_webui(played: Played) -> None:
    webui, outputs = played.webui, played.data / "outputs"
    webui.post("/sdapi/v1/options", {"samples_save": True})
    request = {**PLAIN, "width": 512, "height": 512, "steps": 2, "save_images": True, "prompt": "Grüße, 猫"}
    # in the second one the VAE's plan is made
    for _ in range(2):
        do(webui, "txt2img", request)
    found = []
    for ours in (False, True):
        webui.post("/sdapi/v1/options", {"sfast_png": ours})
        before = set(outputs.rglob("*.png"))
        (answer,) = do(webui, "txt2img", request)
        (written,) = set(outputs.rglob("*.png")) - before
        found.append([base64.b64decode(answer), written.read_bytes()])
    webui.post("/sdapi/v1/options", {"samples_save": False})
    for theirs, ours in zip(*found):
        same_in_bands(ours, theirs)


def test_alwayson_scripts_of_one_request(played: Played) -> None:
    webui = played.webui

    def answered(settings: Any) -> tuple[str, dict[str, Any]]:
        asked = {} if settings is None else {"alwayson_scripts": {"Stable Fast": {"args": [settings]}}}
        answer = webui.post("/sdapi/v1/txt2img", {**PLAIN, **asked})
        return answer["images"][0], json.loads(answer["info"])["extra_generation_params"]["Stable Fast"]

    image, said = answered({"enabled": False, "speed": 9})
    assert said["state"] == "not accelerated" and "switched off" in said["reason"] and said["ignored"] == ["speed: 9"]
    assert difference(image, played.stock["txt2img"][0]) == 0
    for settings in (True, None):
        image, said = answered(settings)
        assert said["accelerated"] > 0 and "ignored" not in said
        assert difference(image, played.stock["txt2img"][0]) < TOLERANCE
