"""The VAE of AUTOMATIC1111 with this checkout beside it and without: decoding, encoding, and what changes them."""

from __future__ import annotations

from typing import Any

import pytest

from .a1111 import (
    HIRES,
    IMG2IMG,
    MARKS,
    PLAIN,
    TOLERANCE,
    Played,
    Round,
    apart,
    count,
    equal_to_stock,
    play,
)

pytestmark = MARKS
SETTINGS = {"sd_vae": "None", "sd_checkpoints_limit": 1, "sd_checkpoints_keep_in_cpu": True}


def again(name: str, kind: str, payload: dict[str, Any], times: int = 3) -> Round:
    """So many images, each of another seed: a plan of the VAE is made with the second."""
    return [(f"{name} {i + 1}", kind, {**payload, "seed": i + 1}) for i in range(times)]


ROUND: Round = [
    *again("plain", "txt2img", PLAIN),
    *again("img2img", "img2img", IMG2IMG),
    ("batch", "txt2img", {**PLAIN, "batch_size": 2}),
    *again("hires", "txt2img", HIRES),
    ("to another VAE", "options", {"sd_vae": "other.safetensors"}),
    ("another VAE", "txt2img", PLAIN),
    ("another VAE, img2img", "img2img", IMG2IMG),
    ("to its own VAE", "options", {"sd_vae": "None"}),
    ("its own VAE", "txt2img", PLAIN),
    ("VAE for one", "txt2img", {**PLAIN, "override_settings": {"sd_vae": "other.safetensors"}}),
    ("VAE for one gone", "txt2img", PLAIN),
    *again("seamless", "txt2img", {**PLAIN, "tiling": True}),
    ("not seamless", "txt2img", PLAIN),
    ("to tiny.ckpt", "options", {"sd_model_checkpoint": "tiny.ckpt"}),
    ("same architecture", "txt2img", PLAIN),
    ("to tiny.safetensors", "options", {"sd_model_checkpoint": "tiny.safetensors"}),
    ("back", "txt2img", PLAIN),
    ("to sdp", "options", {"cross_attention_optimization": "sdp - scaled dot product"}),
    *again("sdp", "txt2img", PLAIN),
    ("to Doggettx", "options", {"cross_attention_optimization": "Doggettx"}),
    *again("Doggettx", "txt2img", PLAIN),
    ("to automatic", "options", {"cross_attention_optimization": "Automatic"}),
    ("automatic", "txt2img", PLAIN),
]
DECODED_BY_PLANS = [
    "plain 3", "img2img 1", "batch", "hires 3", "another VAE", "another VAE, img2img", "its own VAE", "VAE for one",
    "VAE for one gone", "seamless 3", "not seamless", "same architecture", "back", "sdp 3", "Doggettx 3",
]  # fmt: skip

test_image_is_the_one_without_the_extension = equal_to_stock(ROUND)


@pytest.mark.parametrize("name", DECODED_BY_PLANS)
def test_the_image_was_decoded_by_a_plan(played: Played, name: str) -> None:
    report = played.reports[name]
    assert played.gained(name, "vae_eager_runs") > 0, report["events"][-6:]
    assert report["last_error"] is None


@pytest.mark.parametrize("name", ["img2img 3", "another VAE, img2img"])
def test_what_img2img_begins_with_was_encoded_by_a_plan(played: Played, name: str) -> None:
    assert played.gained(name, "vae_eager_runs") == 2


@pytest.mark.parametrize(("first", "last"), [("hires 3", "VAE for one gone"), ("not seamless", "back")])
def test_another_vae_and_another_checkpoint_bring_no_new_plan(played: Played, first: str, last: str) -> None:
    assert count(played.reports[last], "vae_captures") == count(played.reports[first], "vae_captures")


def test_nothing_was_bypassed(played: Played) -> None:
    assert not any(count(report, "vae_fallbacks") for report in played.reports.values())


def test_the_round_tells_its_images_apart(stock: dict[str, list[str]]) -> None:
    for one, other in (("another VAE", "plain 1"), ("seamless 1", "plain 1"), ("same architecture", "plain 1")):
        assert apart(stock[one], stock[other]) > 3 * TOLERANCE, (one, other)


def test_the_status_names_its_plans(played: Played) -> None:
    found = {each["name"]: each for each in played.reports["hires 3"]["accelerators"]}
    labels = {plan["label"] for name in ("VAE decoder", "VAE encoder") for plan in found[name]["plans"]}
    assert {"VAE decoder, 128x128", "VAE decoder, 192x192", "VAE encoder, 128x128"} <= labels


def test_full_previews_while_steps_are_made(played: Played) -> None:
    webui = played.webui
    play(
        webui, "options", {"live_previews_enable": True, "show_progress_type": "Full", "show_progress_every_n_steps": 1}
    )
    expected = play(webui, "txt2img", {**PLAIN, "override_settings": {"sfast_vae": False}})
    errors = count(webui.get("/sfast/v1/status"), "errors")
    assert apart(play(webui, "txt2img", PLAIN), expected) < TOLERANCE
    assert count(webui.get("/sfast/v1/status"), "errors") == errors
    play(webui, "options", {"live_previews_enable": False})


def test_unticking_it_gives_the_vae_back_and_leaves_the_steps_accelerated(played: Played) -> None:
    webui = played.webui
    play(webui, "options", {"sfast_vae": False})
    before = webui.get("/sfast/v1/status")
    play(webui, "txt2img", PLAIN)
    after = webui.get("/sfast/v1/status")
    assert count(after, "vae_eager_runs") == count(before, "vae_eager_runs")
    assert count(after, "plans run") > count(before, "plans run")
    assert not any(each["name"].startswith("VAE") for each in after["accelerators"])
    play(webui, "options", {"sfast_vae": True})
