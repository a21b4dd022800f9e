"""An ESRGAN in AUTOMATIC1111, loaded by spandrel: on its own, and in hires fix. See `a1111.py`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from . import a1111
from .a1111 import HIRES, INIT, MARKS, PLAIN, TOLERANCE, apart
from .webui import WebUI, add_extension, encoded

pytestmark = MARKS
AT_ONCE = """
import importlib.util
import math

if importlib.util.find_spec("sfast_ext"):
    from sfast_ext.hosts import upscalers

    upscalers.GAIN = math.inf
"""
SETTINGS = {"ESRGAN_tile": 32, "ESRGAN_tile_overlap": 8}
ENLARGED = {"image": INIT, "upscaling_resize": 4, "upscaler_1": "small-a"}


def turned(degrees: int) -> str:
    return encoded(a1111.GRADIENT.rotate(degrees))


STEPS: list[tuple[str, str, dict[str, Any]]] = [
    ("alone", "extra-single-image", ENLARGED),
    # the WebUI keeps what it enlarged, so each image is another
    ("again", "extra-single-image", {**ENLARGED, "image": turned(90)}),
    ("another", "extra-single-image", {**ENLARGED, "upscaler_1": "small-b"}),
    ("the first", "extra-single-image", {**ENLARGED, "image": turned(180)}),
    ("hires", "txt2img", {**HIRES, "hr_upscaler": "small-a"}),
    ("hires again", "txt2img", {**HIRES, "hr_upscaler": "small-a", "seed": 3}),
    ("latent", "txt2img", PLAIN),
]


def weights(seed: int, features: int = 16, blocks: int = 1, growth: int = 32) -> dict[str, torch.Tensor]:
    """A checkpoint of ESRGAN by the names of its later releases."""
    generator, found = torch.Generator().manual_seed(seed), {}

    def layer(name: str, inputs: int, outputs: int) -> None:
        noise = torch.randn((outputs, inputs, 3, 3), generator=generator)
        found[f"{name}.weight"] = noise * (9 * inputs) ** -0.5
        found[f"{name}.bias"] = 0.1 * torch.randn(outputs, generator=generator)

    layer("conv_first", 3, features)
    for block in range(blocks):
        for part in (1, 2, 3):
            for i in range(5):
                outputs = features if i == 4 else growth
                layer(f"body.{block}.rdb{part}.conv{i + 1}", features + i * growth, outputs)
    for name in ("conv_body", "conv_up1", "conv_up2", "conv_hr"):
        layer(name, features, features)
    layer("conv_last", features, 3)
    return found


def play(webui: WebUI) -> dict[str, tuple[list[str], dict[str, int]]]:
    """The images of each step, and what the upscaler's counters gained in it."""
    found, before = {}, counters(webui)
    for name, path, payload in STEPS:
        answer = webui.post(f"/sdapi/v1/{path}", payload)
        after = counters(webui)
        gained = {key: after[key] - before.get(key, 0) for key in after}
        found[name] = (answer.get("images") or [answer["image"]], gained)
        before = after
    return found


def counters(webui: WebUI) -> dict[str, int]:
    time.sleep(a1111.STATUS_KEPT_S)
    try:
        status = webui.get("/sfast/v1/status")
    except OSError:
        return {}
    assert status["last_error"] is None, status["last_error"]
    return {key: value for key, value in status["counters"].items() if key.startswith("upscaler_")}


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory, a1111_models: Path) -> Any:
    """The steps with the extension, and without."""
    folder = a1111.make_data(tmp_path_factory.mktemp("upscalers"), a1111_models)
    add_extension(folder, "upscaler-plans", AT_ONCE)
    (a1111_models / "ESRGAN").mkdir(exist_ok=True)
    for name, seed in (("small-a", 1), ("small-b", 2)):
        # the WebUI refuses what the zip files of later torch contain
        path = a1111_models / "ESRGAN" / f"{name}.pth"
        torch.save(weights(seed), path, _use_new_zipfile_serialization=False)
    with a1111.start(folder, "stock", {**SETTINGS, "disabled_extensions": ["stable-fast"]}) as webui:
        stock = play(webui)
    with a1111.start(folder, "extended", {**SETTINGS, "sfast_allow_cpu": True}) as webui:
        return play(webui), stock


@pytest.mark.parametrize("name", [name for name, *_ in STEPS])
def test_the_image_is_the_one_without_the_extension(played: Any, name: str) -> None:
    ours, stock = played
    assert apart(ours[name][0], stock[name][0]) < TOLERANCE


@pytest.mark.parametrize("name", ["again", "another", "the first", "hires", "hires again"])
def test_tiles_were_upscaled_by_a_plan(played: Any, name: str) -> None:
    assert played[0][name][1].get("upscaler_eager_runs", 0) > 4, played[0][name][1]


def test_an_upscaler_that_is_loaded_anew_and_another_of_its_kind_need_no_new_plan(played: Any) -> None:
    captures = {name: gained.get("upscaler_captures", 0) for name, (_, gained) in played[0].items()}
    assert captures["alone"] == 1 and sum(captures.values()) == 1, captures


def test_an_image_that_is_not_upscaled_calls_none(played: Any) -> None:
    assert not any(played[0]["latent"][1].values())
