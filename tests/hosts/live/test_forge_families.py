"""SD 2.1, SDXL and IP-Adapters in Forge, reForge, Forge Neo and Forge Classic, with the checkout next to them and
without: the images are compared."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from . import forge
from .a1111 import PLAIN, TOLERANCE, Played, Round, accelerated, apart, bypassed, make_data, told
from .test_forge import checkpoint, controlled
from .webui import add_extension

PROGRAMS = (forge.NEO, forge.CLASSIC, forge.OLD, forge.REFORGE)
WITH_TWO = (forge.OLD,)
"""reForge makes the UNet of SD 2 by a file that fixes its widths: a small one is not for it."""
FIX = """
import sys

import torch
from modules import script_callbacks


def fix(*_):
    module = sys.modules["lib_ipadapter.IPAdapterPlus"]
    before = module.To_KV.__init__

    def init(self, state_dict):
        with torch.inference_mode(False):
            before(self, state_dict)

    module.To_KV.__init__ = init


script_callbacks.on_app_started(fix)
"""
"""An extension's script. An IP-Adapter fails in Forge by itself: its layers are made in inference mode and get
other data then, and torch 2.13 multiplies by no such weight."""
HIRES = {**PLAIN, "enable_hr": True, "hr_scale": 1.5, "hr_upscaler": "None", "denoising_strength": 0.6}


def seen(model: str, **more: Any) -> dict[str, Any]:
    """An image with an IP-Adapter."""
    unit = {"module": "CLIP-ViT-H (IPAdapter)", "model": model, "weight": 0.7, **more}
    return {**PLAIN, "alwayson_scripts": controlled(**unit)}


BOTH = {"hr_cfg_scale": 7.0, "hr_additional_modules": ["Use same choices"]}
ROUND: Round = [
    ("plain", "txt2img", PLAIN),
    ("IP-Adapter", "txt2img", seen("ip-adapter")),
    ("IP-Adapter for a while", "txt2img", seen("ip-adapter", guidance_end=0.4)),
    ("without IP-Adapter", "txt2img", PLAIN),
    checkpoint("xl"),
    ("xl", "txt2img", PLAIN),
    ("xl again", "txt2img", PLAIN),
    told("xl with lora", "<lora:strong-xl:0.3>"),
    ("xl without lora", "txt2img", PLAIN),
    ("xl, two at once", "txt2img", {**PLAIN, "batch_size": 2}),
    ("xl, hires", "txt2img", {**HIRES, **BOTH}),
    ("xl with IP-Adapter", "txt2img", seen("ip-adapter-xl")),
    ("xl without IP-Adapter", "txt2img", PLAIN),
]
OF_TWO: Round = [
    checkpoint("two"),
    ("two", "txt2img", PLAIN),
    ("two again", "txt2img", PLAIN),
    ("two, hires", "txt2img", {**HIRES, **BOTH}),
    ("two, two at once", "txt2img", {**PLAIN, "batch_size": 2}),
]
LAST: Round = [checkpoint("one"), ("plain at the end", "txt2img", PLAIN)]
NAMES = [name for name, route, _ in (*ROUND, *OF_TWO, *LAST) if route != "options"]
BYPASSED = [name for name in NAMES if "IP-Adapter" in name and "without" not in name]
SAME_PLANS = ("without IP-Adapter", "xl again", "xl with lora", "xl without lora", "xl without IP-Adapter", "two again")


@pytest.fixture(scope="module", params=[pytest.param(each, marks=each.marks, id=each.name) for each in PROGRAMS])
def program(request: pytest.FixtureRequest) -> forge.Program:
    return request.param


@pytest.fixture(scope="module")
def steps(program: forge.Program) -> Round:
    return [*ROUND, *(OF_TWO if program in WITH_TWO else ()), *LAST]


@pytest.fixture(scope="module")
def data(program: forge.Program, tmp_path_factory: pytest.TempPathFactory) -> Path:
    models = tmp_path_factory.mktemp("models") / "made"
    forge.make_by("forge_families.py", models, program)
    folder = make_data(tmp_path_factory.mktemp("data"), models)
    add_extension(folder, "ip-adapter-fix", FIX)
    return folder


@pytest.fixture(scope="module")
def stock(program: forge.Program, steps: Round, data: Path) -> dict[str, list[str]]:
    with forge.start(data, "stock", {"disabled_extensions": ["stable-fast"]}, program) as webui:
        return Played(webui).round(forge.named(webui, steps), status=False).images


@pytest.fixture(scope="module")
def played(program: forge.Program, steps: Round, data: Path, stock: dict[str, list[str]]) -> Iterator[Played]:
    with forge.start(data, "extended", {"sfast_allow_cpu": True}, program) as webui:
        yield Played(webui).round(forge.named(webui, steps), status=True)


def made(played: Played, name: str) -> None:
    if name not in played.images:
        pytest.skip("not with a small Stable Diffusion 2")


@pytest.mark.parametrize("name", NAMES)
def test_image_is_the_one_without_the_extension(played: Played, stock: dict[str, list[str]], name: str) -> None:
    made(played, name)
    assert apart(played.images[name], stock[name]) < TOLERANCE


@pytest.mark.parametrize("name", [name for name in NAMES if name not in BYPASSED])
def test_plans_were_run(played: Played, name: str) -> None:
    made(played, name)
    accelerated(played, name)
    assert played.reasons(name) == {}


@pytest.mark.parametrize("name", SAME_PLANS)
def test_no_new_capture_for(played: Played, name: str) -> None:
    made(played, name)
    assert played.gained(name, "captures") == 0


@pytest.mark.parametrize("name", BYPASSED)
def test_an_ip_adapter_is_named_as_what_works_inside_the_unet(played: Played, name: str) -> None:
    bypassed(played, name, "sd_forge_ipadapter works inside the UNet")


def test_the_round_shows_what_it_should(stock: dict[str, list[str]]) -> None:
    for name, other in (("IP-Adapter", "plain"), ("xl with lora", "xl"), ("xl with IP-Adapter", "xl")):
        assert apart(stock[name][:1], stock[other]) > TOLERANCE, name
    for name, other in (("without IP-Adapter", "plain"), ("xl without lora", "xl"), ("plain at the end", "plain")):
        assert apart(stock[name], stock[other]) < TOLERANCE, name


def test_nothing_failed_and_nothing_is_remarked(played: Played, program: forge.Program) -> None:
    status = played.webui.get("/sfast/v1/status")
    assert status["last_error"] is None and status["host"]["name"] == program.name
