"""The VAE of SD.Next with this checkout beside it and without: decoding, encoding, and what changes them."""

from __future__ import annotations

import pytest

from . import sdnext
from .sdnext import HIRES, Played, Step, drawn, options, redrawn, to_checkpoint

pytestmark = sdnext.MARKS


def again(name: str, **more: object) -> list[Step]:
    """Three images, each of another seed: a plan of the VAE is made with the second."""
    return [drawn(f"{name} {i}", seed=i, **more) for i in (1, 2, 3)]


ROUND: list[Step] = [
    *again("plain"),
    drawn("batch", batch_size=2),
    drawn("batch again", batch_size=2),
    *[redrawn(f"img2img {i}", seed=i) for i in (1, 2, 3)],
    *[(f"hires {i}", "txt2img", {**HIRES, "seed": i}) for i in (1, 2, 3)],
    options("to tiny-vae", sd_vae="tiny-vae"),
    drawn("another VAE"),
    options("from tiny-vae", sd_vae="Default"),
    drawn("own VAE"),
    to_checkpoint("to tiny-b", "tiny-b"),
    drawn("tiny-b"),
    to_checkpoint("to tiny-a", "tiny-a"),
    *again("tiny-a"),
    *again("seamless", tiling=True),
    drawn("not seamless"),
    options("to tiles", diffusers_vae_tiling=True, diffusers_vae_tile_size=64, diffusers_vae_tile_overlap=0.25),
    *again("tiles"),
    options("from tiles", diffusers_vae_tiling=False),
    *again("whole"),
    options("to balanced", diffusers_offload_mode="balanced"),
    *again("balanced"),
    options("from balanced", diffusers_offload_mode="none"),
    *again("no offload"),
]
# latents of img2img are channels last, as the image that they are of: a plan for this layout is made with the second
DECODED_BY_PLANS = ["plain 3", "img2img 3", "hires 3", "tiny-a 3", "whole 3", "no offload 3"]

played, test_image_equals_the_one_without_the_extension = sdnext.playing(ROUND)


@pytest.mark.parametrize("name", DECODED_BY_PLANS)
def test_the_image_was_decoded_by_a_plan(played: Played, name: str) -> None:
    assert played.gained(name, "vae_eager_runs") > 0, played.reports[name]["events"][-6:]
    assert played.reports[name]["last_error"] is None


def test_what_img2img_begins_with_was_encoded_by_a_plan(played: Played) -> None:
    encoder = next(each for each in played.reports["img2img 3"]["accelerators"] if each["name"] == "VAE encoder")
    # on a CPU torch's group norm loses digits in this layout (findings/torch_group_norm_channels_last_cancels.sh)
    refused = sdnext.ON_CPU and "more than rounding explains" in (encoder["idle"] or "")
    assert played.gained("img2img 3", "vae_eager_runs") == 2 - refused


def test_nothing_of_it_failed_and_few_plans_were_made(played: Played) -> None:
    images = sdnext.images_of(ROUND)
    assert all(played.reports[name]["last_error"] is None for name in images)
    # at most one of the decoder and one of the encoder in each
    assert all(played.gained(name, "vae_captures") <= 2 for name in images)


def test_what_is_said_of_the_steps_does_not_count_it(played: Played) -> None:
    last = played.reports["plain 3"]
    assert last["last_pass"]["accelerated"] == played.ran("plain 3") > 0
