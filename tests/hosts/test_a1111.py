"""AUTOMATIC1111 1.10 with this checkout as an extension, against the same WebUI without it.

SFAST_A1111_DIR      a WebUI that starts (its repositories checked out); nothing is written into it
SFAST_A1111_PYTHON   its interpreter; default: venv/bin/python in it
SFAST_A1111_FLAGS    how it computes; default: on the CPU in fp32

Checkpoints, LoRA files and a text model are made by `a1111_models.py`, tiny and random, and lie with settings and
outputs in a data directory of the test's own.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("PIL")
from PIL import Image

from .webui import WebUI, difference, encoded

HOST = os.environ.get("SFAST_A1111_DIR")
pytestmark = [
    pytest.mark.hosts,
    pytest.mark.skipif(not HOST, reason="SFAST_A1111_DIR names no AUTOMATIC1111 WebUI"),
]
CHECKOUT = Path(__file__).resolve().parents[2]
FLAGS = os.environ.get("SFAST_A1111_FLAGS", "--use-cpu all --no-half --skip-torch-cuda-test")
WITHOUT_NETWORK = (
    "--skip-prepare-environment --skip-version-check --skip-python-version-check --no-download-sd-model"
    " --do-not-download-clip --no-hashing --api"
)
TOLERANCE = 1.0  # of 255, mean over the picture; both sides compute in fp32 and differ by the order of additions only

PLAIN: dict[str, Any] = {
    "prompt": "a dog on a hill",
    "negative_prompt": "a cat",
    "seed": 1,
    "steps": 3,
    "width": 128,
    "height": 128,
    "sampler_name": "Euler",
}
INIT = Image.linear_gradient("L").resize((128, 128)).convert("RGB")
LORA = {**PLAIN, "prompt": PLAIN["prompt"] + " <lora:strong:1>"}
HIRES = {**PLAIN, "enable_hr": True, "hr_scale": 1.5, "hr_upscaler": "Latent", "denoising_strength": 0.6}
# name, what to do: ("txt2img" | "img2img" | "options", payload)
ROUND: list[tuple[str, str, dict[str, Any]]] = [
    ("txt2img", "txt2img", PLAIN),
    ("another seed", "txt2img", {**PLAIN, "seed": 2}),
    ("wide", "txt2img", {**PLAIN, "width": 192}),
    ("odd size", "txt2img", {**PLAIN, "height": 136}),
    ("batch", "txt2img", {**PLAIN, "batch_size": 2}),
    ("long prompt", "txt2img", {**PLAIN, "prompt": "a long line of words " * 6}),
    ("second order", "txt2img", {**PLAIN, "sampler_name": "DPM++ 2M"}),
    ("timesteps", "txt2img", {**PLAIN, "sampler_name": "DDIM"}),
    ("img2img", "img2img", {**PLAIN, "init_images": [encoded(INIT)], "denoising_strength": 0.7}),
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


def play(webui: WebUI, kind: str, payload: dict[str, Any]) -> str:
    """One step of the round; the picture, or nothing."""
    if kind == "options":
        webui.post("/sdapi/v1/options", payload)
        return ""
    return webui.post(f"/sdapi/v1/{kind}", payload)["images"][0]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data directory with tiny models and the checkout among the extensions."""
    assert HOST
    folder = tmp_path_factory.mktemp("a1111")
    models = subprocess.run([python(), str(CHECKOUT / "tests/hosts/a1111_models.py"), str(folder / "models")], cwd=HOST,
                            capture_output=True, text=True, timeout=300, check=False)  # fmt: skip
    assert models.returncode == 0, models.stderr
    (folder / "extensions").mkdir()
    (folder / "extensions" / "stable-fast").symlink_to(CHECKOUT, target_is_directory=True)
    return folder


def python() -> str:
    own = Path(HOST or "") / "venv" / "bin" / "python"
    return os.environ.get("SFAST_A1111_PYTHON") or (str(own) if own.exists() else sys.executable)


def start(data: Path, name: str, settings: dict[str, Any], interface: str = "--nowebui") -> WebUI:
    """The WebUI with these settings, and a log of its own; the API alone unless told otherwise."""
    config = data / f"{name}.json"
    common = {"live_previews_enable": False, "sd_model_checkpoint": "tiny.safetensors", "samples_save": False}
    config.write_text(json.dumps({**common, **settings}), encoding="utf-8")
    flags = [*shlex.split(FLAGS), *shlex.split(WITHOUT_NETWORK), interface]
    flags += ["--data-dir", str(data), "--ui-settings-file", str(config)]
    return WebUI([python(), "launch.py", *flags], Path(HOST or ""), data / f"{name}.log")


@pytest.fixture(scope="module")
def stock(data: Path) -> dict[str, str]:
    """The pictures of the round as the WebUI makes them by itself."""
    with start(data, "stock", {"disabled_extensions": ["stable-fast"]}) as webui:
        return {name: play(webui, kind, payload) for name, kind, payload in ROUND}


@pytest.fixture(scope="module")
def played(data: Path, stock: dict[str, str]) -> Iterator[tuple[WebUI, dict[str, str], dict[str, dict[str, Any]]]]:
    """The WebUI with the extension after the round, its pictures, and the status after each of its steps."""
    with start(data, "extended", {"sfast_allow_cpu": True}) as webui:
        pictures, reports = {}, {}
        for name, kind, payload in ROUND:
            pictures[name] = play(webui, kind, payload)
            reports[name] = webui.get("/sfast/v1/status")
        yield webui, pictures, reports


def started(webui: WebUI, times: int) -> None:
    """Wait for the end of a start: with its page, the WebUI answers before its API is whole."""
    until = time.monotonic() + 120
    while webui.log().count("Startup time") < times:
        assert time.monotonic() < until, webui.tail()
        time.sleep(0.5)


def flat(targets: list[Any]) -> list[int]:
    """Ids of components; gradio 4 puts the event's name beside each."""
    return [target[0] if isinstance(target, list) else target for target in targets]


def count(report: dict[str, Any], counter: str) -> int:
    """A counter; plans run are those replayed as CUDA graphs and those run without, as on a CPU."""
    names = ("replays", "eager_runs") if counter == "plans run" else (counter,)
    return sum(report["counters"].get(name, 0) for name in names)


@pytest.mark.parametrize("name", [name for name, kind, _ in ROUND if kind != "options"])
def test_picture_is_the_one_without_the_extension(played, stock, name):
    assert difference(played[1][name], stock[name]) < TOLERANCE


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
        assert difference(stock[one], stock[other]) > 5 * TOLERANCE, (one, other)
    assert difference(stock["lora gone"], stock["txt2img"]) < TOLERANCE


@pytest.mark.parametrize("name", [name for name, kind, _ in ROUND if kind != "options"])
def test_plans_were_replayed(played, name):
    reports, names = played[2], [name for name, _, _ in ROUND]
    before = reports[names[names.index(name) - 1]] if names.index(name) else {"counters": {}}
    assert count(reports[name], "plans run") > count(before, "plans run"), reports[name]["reasons"]
    assert reports[name]["last_error"] is None


@pytest.mark.parametrize(
    ("first", "last"), [("hires", "lora gone"), ("whole weights gone", "back"), ("refiner", "after the refiner")],
    ids=["a LoRA", "a checkpoint of the same architecture", "the refiner's way back"],
)  # fmt: skip
def test_no_new_capture_for(played, first, last):
    reports = played[2]
    assert count(reports[last], "captures") == count(reports[first], "captures")


def test_unticking_gives_the_forward_back(played, stock):
    webui, *_ = played
    play(webui, "options", {"cross_attention_optimization": "Automatic", "sd_checkpoints_limit": 1})
    play(webui, "options", {"sfast_enabled": False})
    assert play(webui, "txt2img", PLAIN) == stock["txt2img"]
    off = webui.get("/sfast/v1/status")
    assert off["enabled"] is False and off["accelerators"] == []
    assert play(webui, "txt2img", LORA) == stock["lora 1"]
    assert count(webui.get("/sfast/v1/status"), "plans run") == count(off, "plans run")
    play(webui, "options", {"sfast_enabled": True})
    assert difference(play(webui, "txt2img", PLAIN), stock["txt2img"]) < TOLERANCE
    assert count(webui.get("/sfast/v1/status"), "plans run") > count(off, "plans run")


def test_the_old_method_for_lora_goes_to_the_original(played, stock):
    webui, *_ = played
    play(webui, "options", {"lora_functional": True})
    before = webui.get("/sfast/v1/status")
    assert difference(play(webui, "txt2img", LORA), stock["lora 1"]) < 3 * TOLERANCE
    after = webui.get("/sfast/v1/status")
    assert count(after, "plans run") == count(before, "plans run")
    assert any("Lora is computed inside the layers" in reason for reason in after["reasons"])
    play(webui, "options", {"lora_functional": False})


def test_token_merging_goes_to_the_original(played):
    webui, *_ = played
    before = webui.get("/sfast/v1/status")
    play(webui, "options", {"token_merging_ratio": 0.5})
    play(webui, "txt2img", PLAIN)
    after = webui.get("/sfast/v1/status")
    assert count(after, "plans run") == count(before, "plans run")
    assert any("token merging is on" in reason for reason in after["reasons"])
    play(webui, "options", {"token_merging_ratio": 0})
    play(webui, "txt2img", PLAIN)
    assert count(webui.get("/sfast/v1/status"), "plans run") > count(before, "plans run")


def test_settings_page_and_reload_ui(data, stock):
    with start(data, "interface", {"sfast_allow_cpu": True}, "--no-gradio-queue") as webui:
        started(webui, 1)
        assert difference(play(webui, "txt2img", PLAIN), stock["txt2img"]) < TOLERANCE
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
        assert difference(play(webui, "txt2img", PLAIN), stock["txt2img"]) < TOLERANCE
        after = webui.get("/sfast/v1/status")
        assert count(after, "plans run") == count(before, "plans run") > 0 and after["last_error"] is None
        # Hypertile's settings are there with the page only; once on, its patch stays, and passes on while it is off
        play(webui, "options", {"hypertile_enable_unet": True})
        play(webui, "txt2img", PLAIN)
        tiled = webui.get("/sfast/v1/status")
        assert count(tiled, "plans run") == count(after, "plans run")
        assert any("Hypertile is on" in reason for reason in tiled["reasons"])
        play(webui, "options", {"hypertile_enable_unet": False})
        assert difference(play(webui, "txt2img", PLAIN), stock["txt2img"]) < TOLERANCE
        assert count(webui.get("/sfast/v1/status"), "plans run") > count(after, "plans run")
