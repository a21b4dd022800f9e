"""Flags of AUTOMATIC1111 that change how its UNet computes: an image under each, with this checkout and without."""

from __future__ import annotations

from pathlib import Path

import pytest

from .a1111 import FLAGS, MARKS, PLAIN, TOLERANCE, Played, accelerated, apart, bypassed, start

pytestmark = MARKS

# the flags, and why the original forward runs under them; nothing if plans do
BYPASSED = {
    "--opt-sdp-no-mem-attention": "",
    "--opt-split-attention-v1": "",
    "--opt-sub-quad-attention": "",
    "--upcast-sampling": "",
    "--medvram": "",
    "--lowvram": "--lowvram moves the weights to the GPU block by block",
}


@pytest.mark.parametrize("flag", BYPASSED)
def test_image_under_a_flag_is_the_one_without_the_extension(data: Path, flag: str):
    flags = f"{FLAGS} {flag}"
    lora = {**PLAIN, "prompt": PLAIN["prompt"] + " <lora:strong:1>"}
    steps = [
        ("plain", "txt2img", PLAIN),
        ("again", "txt2img", {**PLAIN, "seed": 2}),
        ("lora", "txt2img", lora),
        ("without", "txt2img", PLAIN),
    ]
    with start(data, f"stock{flag}", {"disabled_extensions": ["stable-fast"]}, flags=flags) as webui:
        stock = Played(webui).round(steps, status=False).images
    with start(data, f"extended{flag}", {"sfast_allow_cpu": True}, flags=flags) as webui:
        played = Played(webui).round(steps, status=True)
    for name, *_ in steps:
        if BYPASSED[flag]:
            bypassed(played, name, BYPASSED[flag])
        else:
            accelerated(played, name)
        assert apart(played.images[name], stock[name]) < TOLERANCE
    assert apart(played.images["lora"], stock["plain"]) > 4
