"""AUTOMATIC1111 1.10 with this checkout as an extension, against the same WebUI without it: see `a1111.py`."""

from __future__ import annotations

import base64
import time
from typing import Any

import pytest
from png_parts import same_in_bands

from .a1111 import (
    HIRES,
    IMG2IMG,
    MARKS,
    PLAIN,
    TOLERANCE,
    Round,
    accelerated,
    apart,
    count,
    equal_to_stock,
    images_of,
    play,
    start,
)
from .webui import WebUI

pytestmark = MARKS
LORA = {**PLAIN, "prompt": PLAIN["prompt"] + " <lora:strong:1>"}
ROUND: Round = [
    ("txt2img", "txt2img", PLAIN),
    ("another seed", "txt2img", {**PLAIN, "seed": 2}),
    ("wide", "txt2img", {**PLAIN, "width": 192}),
    ("odd size", "txt2img", {**PLAIN, "height": 136}),
    ("batch", "txt2img", {**PLAIN, "batch_size": 2}),
    ("long prompt", "txt2img", {**PLAIN, "prompt": "a long line of words " * 6}),
    ("second order", "txt2img", {**PLAIN, "sampler_name": "DPM++ 2M"}),
    ("timesteps", "txt2img", {**PLAIN, "sampler_name": "DDIM"}),
    ("img2img", "img2img", IMG2IMG),
    ("hires", "txt2img", HIRES),
    ("lora 1", "txt2img", LORA),
    ("lora 0.5", "txt2img", {**PLAIN, "prompt": PLAIN["prompt"] + " <lora:strong:0.5>"}),
    ("lora gone", "txt2img", PLAIN),
    ("lora of whole weights", "txt2img", {**PLAIN, "prompt": PLAIN["prompt"] + " <lora:full:1>"}),
    ("whole weights gone", "txt2img", PLAIN),
    ("to tiny.ckpt", "options", {"sd_model_checkpoint": "tiny.ckpt"}),
    ("same architecture", "txt2img", PLAIN),
    ("same architecture, lora", "txt2img", LORA),
    ("to tiny.safetensors", "options", {"sd_model_checkpoint": "tiny.safetensors"}),
    ("back", "txt2img", PLAIN),
    ("refiner", "txt2img", {**PLAIN, "steps": 4, "refiner_checkpoint": "tiny.ckpt", "refiner_switch_at": 0.5}),
    ("after the refiner", "txt2img", PLAIN),
    ("to wide", "options", {"sd_model_checkpoint": "wide.safetensors"}),
    ("another architecture", "txt2img", PLAIN),
    ("from wide", "options", {"sd_model_checkpoint": "tiny.safetensors"}),
    ("back again", "txt2img", PLAIN),
    ("two models", "options", {"sd_checkpoints_limit": 2, "sd_checkpoints_keep_in_cpu": False}),
    ("load the second", "options", {"sd_model_checkpoint": "wide.safetensors"}),
    ("the second", "txt2img", PLAIN),
    ("no callback", "options", {"sd_model_checkpoint": "tiny.safetensors"}),
    ("already loaded", "txt2img", LORA),
    ("other attention", "options", {"cross_attention_optimization": "sdp - scaled dot product"}),
    ("sdp", "txt2img", PLAIN),
]


def started(webui: WebUI, times: int) -> None:
    """Wait for the end of a start: with its page, the WebUI answers before its API is whole."""
    until = time.monotonic() + 120
    while webui.log().count("Startup time") < times:
        assert time.monotonic() < until, webui.tail()
        time.sleep(0.5)


def flat(targets: list[Any]) -> list[int]:
    """Ids of components; gradio 4 puts the event's name beside each."""
    return [target[0] if isinstance(target, list) else target for target in targets]


test_image_is_the_one_without_the_extension = equal_to_stock(ROUND)


def test_the_round_shows_what_it_should(stock):
    changes = [
        ("lora 1", "txt2img"),
        ("lora 0.5", "lora 1"),
        ("lora of whole weights", "txt2img"),
        ("same architecture", "txt2img"),
        ("same architecture, lora", "same architecture"),
        ("another architecture", "txt2img"),
        ("another seed", "txt2img"),
    ]
    for one, other in changes:
        assert apart(stock[one], stock[other]) > 5 * TOLERANCE, (one, other)
    assert apart(stock["lora gone"], stock["txt2img"]) < TOLERANCE


@pytest.mark.parametrize("name", images_of(ROUND))
def test_plans_were_replayed(played, name):
    accelerated(played, name)


@pytest.mark.parametrize(
    ("first", "last"), [("hires", "lora gone"), ("whole weights gone", "back"), ("refiner", "after the refiner")],
    ids=["a LoRA", "a checkpoint of the same architecture", "the refiner's way back"],
)  # fmt: skip
def test_no_new_capture_for(played, first, last):
    reports = played.reports
    assert count(reports[last], "captures") == count(reports[first], "captures")


def test_unticking_gives_the_forward_back(played, stock):
    webui = played.webui
    play(webui, "options", {"cross_attention_optimization": "Automatic", "sd_checkpoints_limit": 1})
    play(webui, "options", {"sfast_enabled": False})
    assert play(webui, "txt2img", PLAIN) == stock["txt2img"]
    off = webui.get("/sfast/v1/status")
    assert off["enabled"] is False and off["accelerators"] == []
    assert play(webui, "txt2img", LORA) == stock["lora 1"]
    assert count(webui.get("/sfast/v1/status"), "plans run") == count(off, "plans run")
    play(webui, "options", {"sfast_enabled": True})
    assert apart(play(webui, "txt2img", PLAIN), stock["txt2img"]) < TOLERANCE
    assert count(webui.get("/sfast/v1/status"), "plans run") > count(off, "plans run")


def test_the_old_method_for_lora_goes_to_the_original(played, stock):
    webui = played.webui
    play(webui, "options", {"lora_functional": True})
    before = webui.get("/sfast/v1/status")
    assert apart(play(webui, "txt2img", LORA), stock["lora 1"]) < 3 * TOLERANCE
    after = webui.get("/sfast/v1/status")
    assert count(after, "plans run") == count(before, "plans run")
    assert any("LoRA is computed inside the layers" in reason for reason in after["reasons"])
    play(webui, "options", {"lora_functional": False})


def test_token_merging_goes_to_the_original(played):
    webui = played.webui
    before = webui.get("/sfast/v1/status")
    play(webui, "options", {"token_merging_ratio": 0.5})
    play(webui, "txt2img", PLAIN)
    after = webui.get("/sfast/v1/status")
    assert count(after, "plans run") == count(before, "plans run")
    assert any("token merging is on" in reason for reason in after["reasons"])
    play(webui, "options", {"token_merging_ratio": 0})
    play(webui, "txt2img", PLAIN)
    assert count(webui.get("/sfast/v1/status"), "plans run") > count(before, "plans run")


def test_png_files_are_those_of_the_webui(played, data):
    webui = played.webui
    play(webui, "options", {"samples_save": True})
    request = {**PLAIN, "width": 320, "height": 320, "batch_size": 2, "save_images": True, "prompt": "Grüße, 猫"}
    # the first one shows a plan beside the original
    play(webui, "txt2img", request)
    found = []
    for ours in (False, True):
        play(webui, "options", {"sfast_png": ours})
        before = set((data / "outputs").rglob("*.png"))
        answer = [base64.b64decode(image) for image in play(webui, "txt2img", request)]
        # two images and their grid
        written = sorted(set((data / "outputs").rglob("*.png")) - before)
        assert len(answer) == len(written) == 3
        found.append([*answer, *(file.read_bytes() for file in written)])
    play(webui, "options", {"samples_save": False})
    for theirs, ours in zip(*found):
        same_in_bands(ours, theirs)


def test_settings_page_and_reload_ui(data, stock):
    with start(data, "interface", {"sfast_allow_cpu": True}, "--no-gradio-queue") as webui:
        started(webui, 1)
        assert apart(play(webui, "txt2img", PLAIN), stock["txt2img"]) < TOLERANCE
        before = webui.get("/sfast/v1/status")
        interface = webui.get("/config")
        names = {part["props"].get("elem_id"): part["id"] for part in interface["components"]}
        assert {"setting_sfast_enabled", "setting_sfast_check", "setting_sfast_graph_memory_mb"} <= set(names)
        button = names["settings_restart_gradio"]
        reload = [i for i, event in enumerate(interface["dependencies"]) if button in flat(event["targets"])]
        webui.post("/run/predict", {"fn_index": reload[0], "data": [], "session_hash": "test"})
        started(webui, 2)
        assert webui.get("/sfast/v1/status")["accelerators"] == []
        # no callback tells the new scripts of the model that is there
        assert apart(play(webui, "txt2img", PLAIN), stock["txt2img"]) < TOLERANCE
        after = webui.get("/sfast/v1/status")
        assert count(after, "plans run") == count(before, "plans run") > 0 and after["last_error"] is None
        # Hypertile's settings are there with the page only; once on, its patch stays, and passes on while it is off
        play(webui, "options", {"hypertile_enable_unet": True})
        play(webui, "txt2img", PLAIN)
        tiled = webui.get("/sfast/v1/status")
        assert count(tiled, "plans run") == count(after, "plans run")
        assert any("Hypertile is on" in reason for reason in tiled["reasons"])
        play(webui, "options", {"hypertile_enable_unet": False})
        assert apart(play(webui, "txt2img", PLAIN), stock["txt2img"]) < TOLERANCE
        assert count(webui.get("/sfast/v1/status"), "plans run") > count(after, "plans run")
