"""The text encoders of the programs called Forge, with this checkout beside them and without. SFAST_TEXT_PROGRAM names
one of them; by default the first that is there."""

from __future__ import annotations

import os

import pytest

from . import forge
from .a1111 import PLAIN, TOLERANCE, Played, Round, apart, told

PROGRAMS = (forge.OLD, forge.CLASSIC, forge.REFORGE, forge.NEO)
CHOSEN = os.environ.get("SFAST_TEXT_PROGRAM")
PROGRAM = next((each for each in PROGRAMS if each.folder and CHOSEN in (None, each.name)), forge.OLD)
pytestmark = PROGRAM.marks
LONG = "a dog on a hill and a ship at sea under an old tree " * 12


def say(name: str, prompt: str, **more: object) -> tuple[str, str, dict[str, object]]:
    return name, "txt2img", {**PLAIN, "prompt": prompt, **more}


ROUND: Round = [
    say("one", "a dog"),
    say("two", "a ship at sea"),
    say("three", "a house by a lake"),
    say("emphasis", "a (house:1.4) by a [lake]"),
    say("long", LONG),
    say("long again", LONG[::-1]),
    say("editing", "a [dog:ship:2] on a hill"),
    told("LoRA", "<lora:strong:1>"),
    told("LoRA, less", "<lora:strong:0.4>"),
    say("LoRA gone", "a dog by a river"),
    ("to skip 2", "options", {"CLIP_stop_at_last_layers": 2}),
    say("skip 2", "a dog by a house"),
    say("skip 2 again", "a cat by a house"),
    ("to skip 1", "options", {"CLIP_stop_at_last_layers": 1}),
    ("to other", "options", {"sd_model_checkpoint": "other.safetensors"}),
    say("other", "a dog by a tree"),
    say("other again", "a cat by a tree"),
    ("to one", "options", {"sd_model_checkpoint": "one.safetensors"}),
    say("last", "a cliff"),
]

globals().update(forge.round_tests(PROGRAM, ROUND, {}, []))


@pytest.mark.parametrize("name", ["three", "emphasis", "long again", "LoRA gone", "skip 2 again", "last"])
def test_its_prompt_was_read_by_a_plan(played: Played, name: str) -> None:
    assert played.gained(name, "text_eager_runs") > 0, played.reports[name]["events"][-8:]
    assert played.reports[name]["last_error"] is None


def test_the_round_tells_its_images_apart(stock: dict[str, list[str]]) -> None:
    for one, other in (("one", "two"), ("three", "emphasis")):
        assert apart(stock[one], stock[other]) > TOLERANCE, (one, other)
