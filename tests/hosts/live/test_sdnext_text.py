"""The text encoders of SD.Next with this checkout beside it and without: what a prompt may have, and networks."""

from __future__ import annotations

import pytest

from . import sdnext
from .sdnext import TOLERANCE, Played, Step, drawn, options, to_checkpoint, told

pytestmark = sdnext.MARKS
SETTINGS = {"lora_apply_te": True, "sd_textencoder_cache": False}
LONG = "a dog on a hill and a ship at sea under an old tree " * 8


def prompts(model: str) -> list[Step]:
    """Images of other prompts: a plan of a text encoder is made with the second."""
    return [
        drawn(f"{model} one", prompt="a dog"),
        drawn(f"{model} two", prompt="a ship at sea"),
        drawn(f"{model} three", prompt="a house by a lake"),
        drawn(f"{model} emphasis", prompt="a (house:1.4) by a [lake]"),
        drawn(f"{model} long", prompt=LONG),
        drawn(f"{model} long again", prompt=LONG[::-1]),
        drawn(f"{model} long once more", prompt=f"{LONG} by day"),
        drawn(f"{model} editing", prompt="a [dog:ship:0.5] on a hill"),
        *(drawn(f"{model} skip {n}", prompt=f"a dog and {n} cats", clip_skip=n) for n in (1, 2, 3)),
        drawn(f"{model} BREAK", prompt="a dog BREAK on a hill"),
        drawn(f"{model} two images", prompt="a boat", batch_size=2),
        drawn(f"{model} last", prompt="a cliff"),
    ]


ROUND: list[Step] = [
    *prompts("tiny-a"),
    told("LoRA", "<lora:dora:te=1:unet=0>"),
    told("LoRA, less", "<lora:dora:te=0.4:unet=0>"),
    drawn("LoRA gone", prompt="a dog by a river"),
    options("to compel", prompt_attention="compel"),
    drawn("compel", prompt="a dog++ on a hill"),
    options("from compel", prompt_attention="native"),
    to_checkpoint("to tiny-b", "tiny-b"),
    drawn("tiny-b", prompt="a dog under a tree"),
    drawn("tiny-b again", prompt="a dog on a tree"),
    to_checkpoint("to tiny-xl", "tiny-xl"),
    *prompts("tiny-xl"),
    options("to balanced", diffusers_offload_mode="balanced"),
    drawn("balanced", prompt="a field"),
    drawn("balanced again", prompt="a field and a wood"),
    options("from balanced", diffusers_offload_mode="none"),
    drawn("no offload", prompt="a wood"),
]
BY_PLANS = ["tiny-a three", "tiny-a last", "LoRA", "LoRA gone", "tiny-b again", "tiny-xl three", "tiny-xl last"]

played, test_image_equals_the_one_without_the_extension = sdnext.playing(ROUND, SETTINGS)


@pytest.mark.parametrize("name", BY_PLANS)
def test_its_prompt_was_read_by_a_plan(played: Played, name: str) -> None:
    assert played.gained(name, "text_eager_runs") > 0, played.reports[name]["events"][-6:]


def test_nothing_of_it_failed(played: Played) -> None:
    assert all(played.reports[name]["last_error"] is None for name in sdnext.images_of(ROUND))


def test_what_is_said_of_the_steps_does_not_count_it(played: Played) -> None:
    last = played.reports["tiny-a three"]
    assert last["last_pass"]["accelerated"] == played.ran("tiny-a three") > 0


@pytest.mark.parametrize(
    ("one", "other"),
    [("LoRA", "LoRA, less"), ("tiny-a one", "tiny-a two"), ("tiny-a three", "tiny-a emphasis"),
     ("tiny-a skip 1", "tiny-a skip 2"), ("tiny-xl one", "tiny-xl two")],
)  # fmt: skip
def test_the_round_tells_its_images_apart(played: Played, one: str, other: str) -> None:
    assert played.apart(one, other) > 2 * TOLERANCE
