"""SD.Next with this checkout as an extension, against the same SD.Next without it.

SFAST_SDNEXT_DIR      an SD.Next that starts without a network
SFAST_SDNEXT_PYTHON   its interpreter; default: venv/bin/python in it
SFAST_SDNEXT_FLAGS    how it computes; default: on the CPU (in fp32)

Two models and a LoRA are made by `sdnext_models.py`, tiny and random, and lie with settings and extensions in
a data directory of the test's own.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import time
import urllib.error
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("PIL")
from PIL import Image

from .webui import WebUI, difference, encoded

HOST = os.environ.get("SFAST_SDNEXT_DIR")
pytestmark = [
    pytest.mark.hosts,
    pytest.mark.skipif(not HOST, reason="SFAST_SDNEXT_DIR names no SD.Next"),
]
CHECKOUT = Path(__file__).resolve().parents[2]
FLAGS = os.environ.get("SFAST_SDNEXT_FLAGS", "--use-cpu all")
WITHOUT_NETWORK = "--skip-all --skip-git --skip-requirements"
# of 255, mean over the picture; both sides compute in fp32 and differ by the order of additions only
TOLERANCE = 1.0

SETTINGS: dict[str, Any] = {
    "offline_mode": True,
    "sdnq_dequantize_compile": False,
    "sd_model_checkpoint": "Diffusers/tiny-a",
    "sd_checkpoint_autoload": True,
    # its default mode leaves a residue of the last LoRA behind, with or without us
    "lora_fuse_native": False,
    "diffusers_offload_mode": "none",
    "cuda_dtype": "FP32",
    "show_progress_type": "None",
    "samples_save": False,
    "samples_format": "png",
    "sfast_allow_cpu": True,
}
PLAIN: dict[str, Any] = {
    "prompt": "a dog on a hill", "negative_prompt": "a cat", "seed": 1, "steps": 4, "cfg_scale": 6,
    "width": 128, "height": 128, "save_images": False, "send_images": True,
}  # fmt: skip
INIT = Image.linear_gradient("L").resize((128, 128)).convert("RGB")
HIRES = {
    **PLAIN,
    "enable_hr": True,
    "hr_scale": 1.5,
    "hr_upscaler": "Latent Bilinear",
    "hr_force": True,
    "hr_resize_mode": 1,
}


def with_lora(multiplier: float) -> dict[str, Any]:
    return {**PLAIN, "prompt": f"{PLAIN['prompt']} <lora:strong:{multiplier}>"}


# name, what to do: ("txt2img" | "options", payload)
ROUND: list[tuple[str, str, dict[str, Any]]] = [
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
    ("img2img", "img2img", {**PLAIN, "init_images": [encoded(INIT)], "denoising_strength": 0.7}),
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
"""Every picture of it is made without the extension and with it."""


@pytest.fixture(scope="module")
def python() -> str:
    return os.environ.get("SFAST_SDNEXT_PYTHON") or str(Path(str(HOST)) / "venv" / "bin" / "python")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory, python: str) -> Path:
    folder = tmp_path_factory.mktemp("sdnext")
    script = Path(__file__).with_name("sdnext_models.py")
    offline = {**os.environ, "HF_HUB_OFFLINE": "1"}
    subprocess.run([python, str(script), str(folder / "models")], check=True, env=offline)
    (folder / "extensions").mkdir()
    return folder


def started(data: Path, python: str, *, extension: bool) -> WebUI:
    (data / "config.json").write_text(json.dumps(SETTINGS))
    link = data / "extensions" / "stable-fast"
    if extension and not link.exists():
        link.symlink_to(CHECKOUT, target_is_directory=True)
    places = [
        "--data-dir",
        str(data),
        "--models-dir",
        str(data / "models"),
        "--log",
        str(data / "host.log"),
    ]
    command = [python, "launch.py", *shlex.split(WITHOUT_NETWORK), *places, *shlex.split(FLAGS)]
    log = data / ("with.log" if extension else "without.log")
    return WebUI(command, Path(str(HOST)), log, ready="/sdapi/v1/status")


def model_loaded(webui: WebUI, seconds: float = 120) -> None:
    """Wait for the model: the server answers before it is there, and before all of its routes are."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            if webui.get("/sdapi/v1/checkpoint").get("type"):
                return
        except urllib.error.HTTPError:
            pass
        time.sleep(0.5)
    raise RuntimeError(f"no model was loaded:\n{webui.tail()}")


def do(webui: WebUI, kind: str, payload: dict[str, Any]) -> list[str]:
    """The pictures that a request makes; none where it changes options."""
    if kind == "options":
        webui.post("/sdapi/v1/options", payload)
        if "sd_model_checkpoint" in payload:
            model_loaded(webui)
        return []
    return list(webui.post(f"/sdapi/v1/{kind}", payload)["images"])


@pytest.fixture(scope="module")
def stock(data: Path, python: str) -> dict[str, list[str]]:
    """The pictures without the extension."""
    with started(data, python, extension=False) as webui:
        model_loaded(webui)
        return {name: do(webui, kind, payload) for name, kind, payload in ROUND}


@pytest.fixture(scope="module")
def webui(data: Path, python: str, stock: dict[str, list[str]]) -> Iterator[WebUI]:
    with started(data, python, extension=True) as found:
        model_loaded(found)
        yield found


@pytest.fixture(scope="module")
def made(webui: WebUI) -> dict[str, tuple[list[str], dict[str, Any]]]:
    """The pictures with the extension, and the status after each."""
    return {name: (do(webui, kind, payload), webui.get("/sfast/v1/status")) for name, kind, payload in ROUND}


PICTURES = [name for name, kind, _ in ROUND if kind != "options"]


@pytest.mark.parametrize("name", PICTURES)
def test_picture_equals_the_one_without_the_extension(
    made: dict[str, tuple[list[str], dict[str, Any]]], stock: dict[str, list[str]], name: str
) -> None:
    pictures = made[name][0]
    assert len(pictures) == len(stock[name]) >= 1
    for picture, other in zip(pictures, stock[name]):
        assert difference(picture, other) < TOLERANCE


def test_the_round_tells_its_pictures_apart(stock: dict[str, list[str]]) -> None:
    plain = stock["txt2img"][0]
    for name in ("another seed", "lora 1", "lora 0.5", "another checkpoint"):
        assert difference(stock[name][0], plain) > 2 * TOLERANCE, name
    assert difference(stock["lora gone"][0], plain) == 0


def counted(status: dict[str, Any], name: str) -> int:
    return int(status["counters"].get(name, 0))


def ran(status: dict[str, Any]) -> int:
    return counted(status, "replays") + counted(status, "eager_runs")


@pytest.mark.parametrize(
    ("before", "after"),
    [("another seed", "lora gone"), ("odd size", "back in size"), ("balanced", "balanced, lora gone")],
)
def test_plans_go_on_without_a_new_capture(
    made: dict[str, tuple[list[str], dict[str, Any]]], before: str, after: str
) -> None:
    first, last = made[before][1], made[after][1]
    assert counted(last, "captures") == counted(first, "captures") > 0
    assert ran(last) > ran(first)


def test_a_new_size_is_a_new_plan(made: dict[str, tuple[list[str], dict[str, Any]]]) -> None:
    assert counted(made["wide"][1], "captures") == counted(made["lora gone"][1], "captures") + 1


def test_hypertile_ran_the_original_and_says_so(made: dict[str, tuple[list[str], dict[str, Any]]]) -> None:
    assert ran(made["hypertile"][1]) == ran(made["balanced, lora gone"][1])
    assert any("HyperTile" in reason for reason in made["hypertile"][1]["reasons"])


def test_status_tells_what_happened(webui: WebUI, made: dict[str, tuple[list[str], dict[str, Any]]]) -> None:
    status = made["back"][1]
    assert status["host"]["name"] == "SD.Next"
    assert status["last_error"] is None
    (accelerator,) = status["accelerators"]
    assert any(plan["replays"] > 0 for plan in accelerator["plans"])
    assert "tiny-a" in status["model"]


def test_unticking_restores_the_hosts_own_forward(
    webui: WebUI, made: dict[str, tuple[list[str], dict[str, Any]]], stock: dict[str, list[str]]
) -> None:
    webui.post("/sdapi/v1/options", {"sfast_enabled": False})
    before = webui.get("/sfast/v1/status")
    assert do(webui, "txt2img", PLAIN) == stock["txt2img"]
    after = webui.get("/sfast/v1/status")
    assert ran(after) == ran(before) and not after["accelerators"] and not after["enabled"]
    webui.post("/sdapi/v1/options", {"sfast_enabled": True})
    do(webui, "txt2img", PLAIN)
    assert webui.get("/sfast/v1/status")["accelerators"]


def test_one_request_may_switch_it_off(webui: WebUI, stock: dict[str, list[str]]) -> None:
    off = {**PLAIN, "override_settings": {"sfast_enabled": False}}
    assert do(webui, "txt2img", off) == stock["txt2img"]
    assert not webui.get("/sfast/v1/status")["accelerators"]
    do(webui, "txt2img", PLAIN)
    assert webui.get("/sfast/v1/status")["accelerators"]
