"""Prepare, Measure and the answer's `info` in AUTOMATIC1111, through its API."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from .a1111 import HIRES, IMG2IMG, MARKS, PLAIN, TOLERANCE, apart, start
from .webui import encoded

pytestmark = MARKS
SIZES = {"sizes": ["192x128", "128x192"], "images": [1]}


@pytest.fixture(scope="module")
def webui(data, tmp_path_factory):
    # measurements are kept in the cache folder
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SFAST_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        with start(data, "jobs", {"sfast_allow_cpu": True}) as webui:
            webui.first = webui.post("/sdapi/v1/txt2img", PLAIN)
            yield webui


def said(answer: dict[str, Any]) -> dict[str, Any]:
    return json.loads(answer["info"])["extra_generation_params"]["Stable Fast"]


def ended(webui: Any) -> dict[str, Any]:
    until = time.monotonic() + 300
    while time.monotonic() < until:
        job = webui.get("/sfast/v1/job")["job"]
        if job["state"] not in ("waiting", "running"):
            return job
        time.sleep(0.1)
    raise AssertionError(job)


def test_the_answer_says_whether_an_image_was_accelerated(webui):
    assert said(webui.first)["state"] == "accelerated" and said(webui.first)["prepared"] == 1
    assert "Stable Fast" not in json.loads(webui.first["info"])["infotexts"][0]
    off = webui.post("/sdapi/v1/txt2img", {**PLAIN, "override_settings": {"sfast_enabled": False}})
    assert said(off)["state"] == "not accelerated" and "switched off" in said(off)["reason"]
    assert apart(webui.first["images"], off["images"]) < TOLERANCE
    tolerant = webui.post("/sdapi/v1/txt2img", {**PLAIN, "override_settings": {"sfast_tolerance": 0.05}})
    assert "Stable Fast tolerance: 0.05" in json.loads(tolerant["info"])["infotexts"][0]


def chosen(settings: Any) -> dict[str, Any]:
    return {"alwayson_scripts": {"Stable Fast": {"args": [settings]}}}


@pytest.mark.parametrize("request_of", [PLAIN, HIRES, IMG2IMG], ids=["txt2img", "hires fix", "img2img"])
def test_alwayson_scripts_set_what_counts_for_one_request(webui, request_of):
    kind = "img2img" if "init_images" in request_of else "txt2img"
    off = webui.post(f"/sdapi/v1/{kind}", {**request_of, **chosen({"enabled": False})})
    assert said(off)["state"] == "not accelerated" and "switched off" in said(off)["reason"]
    on = webui.post(f"/sdapi/v1/{kind}", request_of)
    assert said(on)["accelerated"] > 0 and "ignored" not in said(on)
    assert apart(on["images"], off["images"]) < TOLERANCE


def test_alwayson_scripts_name_what_they_did_not_take(webui):
    asked = chosen({"tolerance": 0.05, "sfast_max_graphs": "many", "speed": 9})
    answer = webui.post("/sdapi/v1/txt2img", {**PLAIN, **asked})
    assert "Stable Fast tolerance: 0.05" in json.loads(answer["info"])["infotexts"][0]
    assert said(answer)["ignored"] == ["sfast_max_graphs: 'many'", "speed: 9"]
    options = webui.get("/sdapi/v1/options")
    assert options["sfast_tolerance"] != 0.05 and options["sfast_enabled"] is True
    assert [row["name"] for row in webui.get("/sdapi/v1/script-info") if row["name"] == "stable fast"]


def test_a_prepared_size_is_accelerated_from_its_first_step(webui):
    webui.post("/sdapi/v1/txt2img", PLAIN)
    assert webui.post("/sfast/v1/prepare", SIZES)["total"] == 2
    job = ended(webui)
    assert job["state"] == "done" and all(row["ready"] for row in job["rows"]), job
    wide = webui.post("/sdapi/v1/txt2img", {**PLAIN, "width": 192})
    assert said(wide)["prepared"] == 0 and said(wide)["accelerated"] == PLAIN["steps"]
    stock = webui.post("/sdapi/v1/txt2img", {**PLAIN, "width": 192, "override_settings": {"sfast_enabled": False}})
    assert apart(wide["images"], stock["images"]) < TOLERANCE


def test_a_measurement_is_kept(webui):
    webui.post("/sdapi/v1/txt2img", PLAIN)
    webui.post("/sfast/v1/measure", {"sizes": ["128x128"]})
    (row,) = ended(webui)["rows"]
    assert row["ready"] and row["ms_before"] > 0 and row["ms_after"] > 0
    assert webui.get("/sfast/v1/measurements")[-1]["rows"] == [row]


def test_the_webui_s_interrupt_cancels_a_job(webui):
    webui.post("/sdapi/v1/txt2img", PLAIN)
    webui.post("/sfast/v1/prepare", {"sizes": ["256x256", "320x320", "384x384"]})
    while webui.get("/sfast/v1/job")["job"]["state"] == "waiting":
        time.sleep(0.05)
    webui.post("/sdapi/v1/interrupt", {})
    assert ended(webui)["state"] == "cancelled"
    # and images are made as before
    again = webui.post("/sdapi/v1/txt2img", PLAIN)
    assert apart(again["images"], webui.first["images"]) < TOLERANCE
    assert webui.get("/sfast/v1/status")["last_error"] is None


BATCH = {**PLAIN, "batch_size": 2, "n_iter": 2}
CHOSEN = {**PLAIN, "seed": -1, **chosen({"enabled": True})}


@pytest.mark.parametrize(
    "asked",
    [PLAIN, HIRES, IMG2IMG, BATCH, CHOSEN],
    ids=["plain", "hires fix", "img2img", "batch", "chosen"],
)
def test_the_last_image_is_compared_with_the_webui_s_own(webui, asked, data):
    kind = "img2img" if "init_images" in asked else "txt2img"
    last = webui.post(f"/sdapi/v1/{kind}", asked)
    saved = sorted(data.rglob("*.png"))
    assert webui.post("/sfast/v1/compare", {})["kind"] == "compare"
    job = ended(webui)
    assert job["state"] == "done", job
    found = webui.get("/sfast/v1/comparison")["comparison"]
    assert found["same_request"] and found["mean_difference"] < TOLERANCE
    assert found["accelerated"]["steps"]["accelerated"] > 0 and found["accelerated"]["steps"]["prepared"] == 0
    assert found["original"]["steps"]["accelerated"] == 0 and found["accelerated"]["seconds"] > 0
    first = last["images"][0]
    for name in ("accelerated", "original"):
        assert apart([encoded(webui.image(f"/sfast/v1/comparison/{name}.png"))], [first]) < TOLERANCE, name
    assert sorted(data.rglob("*.png")) == saved
    options = webui.get("/sdapi/v1/options")
    assert options["sfast_enabled"] is True and webui.get("/sfast/v1/status")["last_error"] is None
    again = webui.post("/sdapi/v1/txt2img", PLAIN)
    # the run without the extension took the plans of other sizes: one step may prepare this one again
    steps = said(again)
    assert steps["accelerated"] + steps["prepared"] == PLAIN["steps"]
    assert apart(again["images"], webui.first["images"]) < TOLERANCE
