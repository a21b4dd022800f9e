"""Every kind of network that AUTOMATIC1111's Lora extension knows, with this checkout beside it and without."""

from __future__ import annotations

import pytest

from .a1111 import HIRES, MARKS, PLAIN, TOLERANCE, Round, accelerated, apart, equal_to_stock, images_of, told

pytestmark = MARKS

KINDS = ["strong", "loha", "lokr", "whole", "ia3", "oft", "glora", "dora", "norms"]
BASE = PLAIN["prompt"]
TWO_LINES = {
    "script_name": "prompts from file or textbox",
    "script_args": [False, False, "start", "one <lora:strong:1>\nother <lora:loha:0.8>"],
}
STRONG_FIRST = {**HIRES, "prompt": f"{BASE} <lora:strong:0.7>"}
EDITED = {**HIRES, "n_iter": 2, "prompt": "[a dog:a ship:0.5] on a hill <lora:strong:0.7>"}
ROUND: Round = [
    ("plain", "txt2img", PLAIN),
    ("hires", "txt2img", HIRES),
    *(told(f"{kind} {weight}", f"<lora:{kind}:{weight}>") for kind in KINDS for weight in ("1", "-0.4")),
    ("plain again", "txt2img", PLAIN),
    told("two", "<lora:strong:0.6><lora:loha:0.7>"),
    told("all", "".join(f"<lora:{kind}:0.3>" for kind in KINDS)),
    told("all in another order", "".join(f"<lora:{kind}:0.3>" for kind in reversed(KINDS))),
    told("text model alone", "<lora:whole:1:0>"),
    told("UNet alone", "<lora:whole:0:1>"),
    told("both by name", "<lora:whole:te=0.5:unet=1.2>"),
    told("rank cut", "<lora:strong:1:1:2>"),
    ("another for the hires pass", "txt2img", {**STRONG_FIRST, "hr_prompt": f"{BASE} <lora:dora:0.8>"}),
    ("none for the hires pass", "txt2img", {**STRONG_FIRST, "hr_prompt": BASE}),
    ("two batches with both", "txt2img", {**EDITED, "hr_prompt": f"{BASE} <lora:lokr:0.8>"}),
    ("two lines, two networks", "txt2img", {**PLAIN, **TWO_LINES}),
    ("plain at the end", "txt2img", PLAIN),
]
NETWORKS = [name for name in images_of(ROUND) if name not in ("plain", "hires")]


test_image_is_the_one_without_the_extension = equal_to_stock(ROUND)


@pytest.mark.parametrize("name", images_of(ROUND))
def test_plans_were_replayed(played, name):
    accelerated(played, name)


@pytest.mark.parametrize("name", NETWORKS)
def test_no_new_capture_for(played, name):
    assert played.gained(name, "captures") == 0
    assert played.reasons(name) == {}


@pytest.mark.parametrize("kind", KINDS)
def test_the_network_changes_the_image(stock, kind):
    assert apart(stock[f"{kind} 1"], stock["plain"]) > 2 * TOLERANCE
    assert apart(stock[f"{kind} 1"], stock[f"{kind} -0.4"]) > 2 * TOLERANCE
