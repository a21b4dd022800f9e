"""Networks of every kind that SD.Next loads: every image without the extension and with it, and plans that stay."""

from __future__ import annotations

import pytest

from . import sdnext
from .sdnext import HIRES, TOLERANCE, Played, drawn, options, told

pytestmark = sdnext.MARKS

KINDS = ["linear-conv", "loha", "lokr", "full", "whole", "dora", "ia3", "oft", "glora", "norms"]

SETTINGS = {"lora_apply_te": True}
ROUND: list[sdnext.Step] = [
    drawn("plain"),
    *(told(kind, f"<lora:{kind}:1>") for kind in KINDS),
    drawn("plain again"),
    told("two at once", "<lora:strong:0.4> <lora:lokr:0.6>"),
    told("two at once, other weights", "<lora:strong:0.6> <lora:lokr:0.2>"),
    told("three of other kinds", "<lora:loha:0.5> <lora:full:0.3> <lora:linear-conv:0.2>"),
    told("UNet's and text model's weights", "<lora:dora:te=0.2:unet=0.7>"),
    told("text model alone", "<lora:dora:te=1:unet=0>"),
    told("weights of parts of the UNet", "<lora:linear-conv:te=0.5:in=0.9:mid=0.1:out=0.3>"),
    told("negative weight", "<lora:strong:-0.5>"),
    told("weight scheduled by the step", "<lora:strong:1.0@0~0.2@0.5~0.7@1>"),
    told("in a scheduled prompt", "[under clouds:by night:0.5] <lora:strong:0.5>"),
    told("batch", "<lora:strong:0.5>", batch_size=2),
    ("hires fix", "txt2img", {**HIRES, "prompt": "a dog <lora:strong:0.5>"}),
    ("hires fix with another", "txt2img", {**HIRES, "refiner_prompt": "a dog <lora:lokr:0.8>"}),
    drawn("plain at last"),
    options("to PEFT", lora_force_diffusers=True),
    told("PEFT", "<lora:strong:1>"),
    told("PEFT, another seed", "<lora:strong:1>", seed=2),
    told("PEFT, another weight", "<lora:strong:0.5>"),
    drawn("PEFT, gone"),
    options("from PEFT", lora_force_diffusers=False),
    ("reloaded", "call", "/sdapi/v1/reload-checkpoint?force=true"),
    drawn("plain after PEFT"),
    told("native after PEFT", "<lora:strong:1>"),
]
IMAGES = sdnext.images_of(ROUND)
BY_PEFT = ["PEFT", "PEFT, another seed", "PEFT, another weight", "PEFT, gone"]
# other sizes and batches, and a model loaded anew
NEW_PLANS = ["plain", "batch", "hires fix", "plain after PEFT"]


played, test_image_equals_the_one_without_the_extension = sdnext.playing(ROUND, SETTINGS)


@pytest.mark.parametrize("name", [*KINDS, "text model alone", "negative weight", "PEFT"])
def test_each_network_changes_the_image(played: Played, name: str) -> None:
    assert played.apart(name, "plain") > 2 * TOLERANCE


@pytest.mark.parametrize("name", [name for name in IMAGES if name not in BY_PEFT])
def test_native_networks_are_accelerated(played: Played, name: str) -> None:
    played.accelerated(name)
    if name not in NEW_PLANS:
        assert played.gained(name, "captures") == 0


@pytest.mark.parametrize("name", BY_PEFT)
def test_networks_loaded_by_diffusers_are_accelerated_once_they_stay(played: Played, name: str) -> None:
    assert played.ran(name) > 0 or "changes again and again" in str(played.reasons(name)), played.reasons(name)
    assert played.reports[name]["last_error"] is None


def test_an_image_with_a_network_loaded_by_diffusers_is_accelerated(played: Played) -> None:
    assert played.ran("PEFT, another seed") > 0, played.reasons("PEFT, another seed")
