"""Control units and IP-Adapters in the real SD.Next: every image without the extension and with it."""

from __future__ import annotations

from typing import Any

import pytest

from . import sdnext
from .sdnext import INIT, Played, controlled, drawn, told
from .webui import of_steps

pytestmark = sdnext.MARKS


def unit(model: str = "tiny-control", **more: Any) -> dict[str, Any]:
    return {"model": model, **more}


def by_image(name: str, scale: float, seed: int = 1, **more: Any) -> sdnext.Step:
    return drawn(name, seed=seed, ip_adapter=[{"adapter": "Base", "images": [INIT], "scale": scale, **more}])


ROUND: list[sdnext.Step] = [
    drawn("plain"),
    controlled("no unit", "controlnet"),
    controlled("one unit", "controlnet", unit()),
    controlled("one unit, another strength", "controlnet", unit(strength=0.5)),
    controlled("one unit, strength back", "controlnet", unit()),
    controlled("one unit, another seed", "controlnet", unit(), seed=2),
    controlled("one unit, ends early", "controlnet", unit(end=0.5)),
    controlled("one unit, starts late", "controlnet", unit(start=0.5)),
    controlled("guess mode", "controlnet", unit(guess=True)),
    controlled("another network", "controlnet", unit("tiny-control-2")),
    controlled("two units", "controlnet", unit(), unit("tiny-control-2", strength=0.3)),
    controlled("two units, other strengths", "controlnet", unit(strength=0.2), unit("tiny-control-2")),
    controlled("unit and LoRA", "controlnet", unit(), prompt="a dog <lora:strong:0.5>"),
    drawn("plain after units"),
    controlled("T2I-Adapter", "t2i adapter", unit("tiny")),
    controlled("T2I-Adapter, weaker", "t2i adapter", unit("tiny", strength=0.4, factor=0.4)),
    drawn("plain after T2I-Adapter"),
    by_image("IP-Adapter", 0.8),
    by_image("IP-Adapter, weaker", 0.3),
    by_image("IP-Adapter, back", 0.8),
    by_image("IP-Adapter, another seed", 0.8, seed=2),
    by_image("IP-Adapter, weaker, another seed", 0.3, seed=2),
    by_image("IP-Adapter, part of the steps", 0.8, start=0.3, end=0.7),
    by_image("IP-Adapter, part of the steps, another seed", 0.8, seed=2, start=0.3, end=0.7),
    drawn("plain after IP-Adapter"),
    told("LoRA after IP-Adapter", "<lora:strong:0.5>"),
    by_image("IP-Adapter, once more", 0.8, seed=3),
    drawn("plain, IP-Adapter unloaded", extra={"ip_adapter_unload": True}),
]
IMAGES = sdnext.images_of(ROUND)


played, test_image_equals_the_one_without_the_extension = sdnext.playing(ROUND)


@pytest.mark.parametrize("name", IMAGES)
def test_plans_ran(played: Played, name: str) -> None:
    played.accelerated(name)


def test_the_networks_of_the_units_are_accelerated_too(played: Played) -> None:
    accelerators = of_steps(played.reports["one unit, another seed"])
    assert [a["name"] for a in accelerators if any(p["replays"] for p in a["plans"])] == ["unet", "controlnet"]


# the second image with an IP-Adapter, and the first after one, have other processors of self-attention: the host
# resets them to those of its diffusers, which are not those that the model came with
@pytest.mark.parametrize(
    "name",
    [
        "one unit, another strength", "one unit, another seed", "another network", "plain after units",
        "IP-Adapter, another seed", "IP-Adapter, weaker, another seed", "IP-Adapter, part of the steps, another seed",
        "LoRA after IP-Adapter", "IP-Adapter, once more", "plain, IP-Adapter unloaded",
    ],
)  # fmt: skip
def test_plans_go_on_without_a_new_capture(played: Played, name: str) -> None:
    assert played.gained(name, "captures") == 0


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("one unit", "no unit"),
        ("one unit, another strength", "one unit"),
        ("two units", "one unit"),
        ("T2I-Adapter", "plain"),
        ("IP-Adapter, weaker", "IP-Adapter"),
        ("IP-Adapter, part of the steps", "IP-Adapter"),
    ],
)
def test_units_and_their_strengths_change_the_image(played: Played, name: str, other: str) -> None:
    assert played.apart(name, other) > 2 * sdnext.TOLERANCE
