"""New in Forge Neo 2.27 to 2.30: guidance in two calls, Spectrum, LoRA in the layers that changes during an image."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from . import forge
from .a1111 import PLAIN, TOLERANCE, Round, apart, told
from .test_forge import low_bits

SPECTRUM = Path(forge.NEO.folder or "", "extensions-builtin", "sd_forge_spectrum")
pytestmark = [
    *forge.NEO.marks,
    pytest.mark.skipif(not SPECTRUM.is_dir(), reason="SFAST_FORGE_DIR names no Forge Neo with Spectrum"),
]

STEPS, WARMUP, LAST = 12, 3, 0.9


def forecast(**more: Any) -> dict[str, Any]:
    """Spectrum calls the model for the first steps, then for every second, and for the last ones."""
    arguments = [True, 0.25, 4, 0.5, 2, 0.0, WARMUP, LAST]
    return {**PLAIN, "steps": STEPS, **more, "alwayson_scripts": {"Spectrum Integrated": {"args": arguments}}}


def batched(on: bool) -> dict[str, Any]:
    return {"batch_cond_uncond": on}


LORA = f"{PLAIN['prompt']} <lora:strong:1>"
ROUND: Round = [
    ("plain", "txt2img", PLAIN),
    ("in two calls from now on", "options", batched(False)),
    ("in two calls", "txt2img", PLAIN),
    told("in two calls with lora", "<lora:strong:1>"),
    ("no guidance", "txt2img", {**PLAIN, "cfg_scale": 1.0}),
    ("two at once in two calls", "txt2img", {**PLAIN, "batch_size": 2}),
    ("forecast in two calls", "txt2img", forecast()),
    ("together from now on", "options", batched(True)),
    ("together again", "txt2img", PLAIN),
    ("all steps", "txt2img", {**PLAIN, "steps": STEPS}),
    ("forecast", "txt2img", forecast()),
    ("forecast again", "txt2img", forecast()),
    ("forecast with lora", "txt2img", forecast(prompt=LORA)),
    ("all steps again", "txt2img", {**PLAIN, "steps": STEPS}),
    low_bits("Automatic (fp16 LoRA)", "other"),
    ("other", "txt2img", PLAIN),
    told("lora in the layers", "<lora:strong:1>"),
    told("weaker in the layers", "<lora:strong:0.4>"),
    told("two in the layers", "<lora:strong:0.3><lora:second:0.5>"),
    told("stronger at each step", "<lora:strong:[0.0@0,1.0@1]>", steps=6),
    told("weaker at each step", "<lora:strong:[1.0@0,0.0@1]>", steps=6),
    ("none in the layers", "txt2img", PLAIN),
    low_bits("Automatic", "one"),
    told("merged", "<lora:strong:1>"),
    told("merged weaker", "<lora:strong:0.4>"),
    ("plain at the end", "txt2img", PLAIN),
]
IN_THE_LAYERS = "LoRA is computed inside the layers"
LAYERS = (
    "lora in the layers", "weaker in the layers", "two in the layers", "stronger at each step", "weaker at each step",
)  # fmt: skip
BYPASSED = dict.fromkeys(LAYERS, IN_THE_LAYERS)
SAME_PLANS = [
    "in two calls with lora",
    "no guidance",
    "forecast in two calls",
    "together again",
    "all steps",
    "forecast",
    "forecast again",
    "forecast with lora",
    "all steps again",
    "none in the layers",
    "merged weaker",
    "plain at the end",
]

globals().update(forge.round_tests(forge.NEO, ROUND, BYPASSED, SAME_PLANS))


def test_the_round_shows_what_it_should(stock):
    for name in ("in two calls with lora", "no guidance", "merged", "merged weaker"):
        assert apart(stock[name], stock["plain"]) > TOLERANCE, name
    for name in ("in two calls", "together again", "plain at the end"):
        assert apart(stock[name], stock["plain"]) < TOLERANCE, name
    for name in LAYERS:
        assert apart(stock[name], stock["none in the layers"]) > TOLERANCE, name
    assert apart(stock["stronger at each step"], stock["weaker at each step"]) > TOLERANCE
    assert apart(stock["forecast"], stock["all steps"]) > 0
    assert apart(stock["forecast in two calls"], stock["forecast"]) < TOLERANCE


def test_steps_that_spectrum_leaves_out_are_no_calls(played):
    calls = {name: played.gained(name, "plans run") for name in ("all steps again", "forecast", "forecast again")}
    assert calls["all steps again"] == STEPS
    assert calls["forecast"] == calls["forecast again"] < STEPS - 2


def test_guidance_in_two_calls_is_two_plans_run_at_each_step(played):
    assert played.gained("in two calls with lora", "plans run") == 2 * PLAIN["steps"]
    assert played.gained("together again", "plans run") == PLAIN["steps"]
