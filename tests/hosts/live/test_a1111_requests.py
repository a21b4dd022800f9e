"""What users ask of AUTOMATIC1111 in one request, with this checkout beside it and without."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from PIL import Image, ImageDraw

from .a1111 import (
    HIRES,
    IMG2IMG,
    MARKS,
    PLAIN,
    TOLERANCE,
    Round,
    accelerated,
    apart,
    bypassed,
    count,
    equal_to_stock,
    images_of,
    play,
    told,
)
from .webui import encoded

pytestmark = MARKS
# the WebUI takes back an override only of what its settings file names
SETTINGS = {"batch_cond_uncond": True, "pad_cond_uncond": False, "skip_early_cond": 0.0, "CLIP_stop_at_last_layers": 1}

LONG = "a line of words that has no end, of many and many words, " * 5
MASK = Image.new("L", (128, 128))
ImageDraw.Draw(MASK).ellipse((30, 30, 100, 90), fill=255)
INPAINT = {**IMG2IMG, "mask": encoded(MASK), "mask_blur": 4, "inpainting_fill": 1}
# enabled, and the script's own defaults
SOFT = {"Soft Inpainting": {"args": [True, 1, 0.5, 4, 0, 0.5, 2]}}


def prompted(name: str, prompt: str, **more: Any) -> tuple[str, str, dict[str, Any]]:
    return name, "txt2img", {**PLAIN, "prompt": prompt, **more}


def set_for_one(name: str, **settings: Any) -> tuple[str, str, dict[str, Any]]:
    return name, "txt2img", {**PLAIN, "override_settings": settings}


ROUND: Round = [
    ("plain", "txt2img", PLAIN),
    ("long negative prompt", "txt2img", {**PLAIN, "negative_prompt": LONG}),
    ("padded", "txt2img", {**PLAIN, "negative_prompt": LONG, "override_settings": {"pad_cond_uncond": True}}),
    ("both long", "txt2img", {**PLAIN, "prompt": LONG + "end", "negative_prompt": LONG}),
    set_for_one("cond and uncond one after the other", batch_cond_uncond=False),
    ("uncond dropped in mid-run", "txt2img", {**PLAIN, "steps": 6, "s_min_uncond": 4.0}),
    ("uncond dropped, again", "txt2img", {**PLAIN, "steps": 6, "s_min_uncond": 4.0, "seed": 5}),
    ("no guidance", "txt2img", {**PLAIN, "cfg_scale": 1.0}),
    set_for_one("uncond left out at the start", skip_early_cond=0.5),
    ("three at once", "txt2img", {**PLAIN, "batch_size": 3}),
    ("three times two", "txt2img", {**PLAIN, "batch_size": 2, "n_iter": 3}),
    ("136 by 200", "txt2img", {**PLAIN, "width": 136, "height": 200}),
    ("200 by 136", "txt2img", {**PLAIN, "width": 200, "height": 136}),
    ("odd and hires", "txt2img", {**HIRES, "width": 136, "hr_scale": 1.25}),
    prompted("edited prompt", "[a dog:a ship:0.5] on a hill", steps=4),
    prompted("alternating words", "a [dog|ship] on a hill", steps=4),
    prompted("long, then short", f"[{LONG}:a dog:0.5]", steps=4),
    prompted("two prompts", "a dog AND a ship:0.6 AND a hill:1.2"),
    prompted("two prompts of unequal length", f"a dog AND {LONG}"),
    prompted("break", "a dog BREAK on a hill"),
    prompted("weights", "a (dog:1.4) on a [hill] ((high))"),
    prompted("embedding", "tinyword on a hill"),
    prompted("empty prompt", "", negative_prompt=""),
    set_for_one("CLIP skip", CLIP_stop_at_last_layers=2),
    ("tiled", "txt2img", {**PLAIN, "tiling": True}),
    ("not tiled", "txt2img", PLAIN),
    ("img2img", "img2img", IMG2IMG),
    ("little denoising", "img2img", {**IMG2IMG, "denoising_strength": 0.2, "steps": 10}),
    ("inpainting", "img2img", INPAINT),
    ("inpainting, noise in the mask", "img2img", {**INPAINT, "inpainting_fill": 2}),
    ("only the masked part", "img2img", {**INPAINT, "inpaint_full_res": True, "inpaint_full_res_padding": 8}),
    ("soft inpainting", "img2img", {**INPAINT, "alwayson_scripts": SOFT}),
    ("variation", "txt2img", {**PLAIN, "subseed": 3, "subseed_strength": 0.4}),
    ("second order", "txt2img", {**PLAIN, "sampler_name": "Heun"}),
    ("ancestral", "txt2img", {**PLAIN, "sampler_name": "Euler a"}),
    ("UniPC", "txt2img", {**PLAIN, "sampler_name": "UniPC"}),
    ("restart", "txt2img", {**PLAIN, "sampler_name": "Restart", "steps": 8}),
    told("hypernetwork", "<hypernet:hyper:1>"),
    ("hypernetwork gone", "txt2img", PLAIN),
    ("hires", "txt2img", HIRES),
    ("plain at the end", "txt2img", PLAIN),
]
BYPASSED = {"hypernetwork": "a hypernetwork is active: hyper"}
SAME_PLANS = [
    "edited prompt",
    "alternating words",
    "weights",
    "embedding",
    "empty prompt",
    "CLIP skip",
    "not tiled",
    "img2img",
    "little denoising",
    "inpainting",
    "inpainting, noise in the mask",
    "soft inpainting",
    "variation",
    "second order",
    "ancestral",
    "UniPC",
    "restart",
    "hypernetwork gone",
    "uncond dropped, again",
    "plain at the end",
]


test_image_is_the_one_without_the_extension = equal_to_stock(ROUND)


@pytest.mark.parametrize("name", [name for name in images_of(ROUND) if name not in BYPASSED])
def test_plans_were_replayed(played, name):
    accelerated(played, name)
    assert played.reasons(name) == {}


@pytest.mark.parametrize("name", SAME_PLANS)
def test_no_new_capture_for(played, name):
    assert played.gained(name, "captures") == 0


@pytest.mark.parametrize("name", BYPASSED)
def test_the_original_forward_runs_and_the_report_says_why(played, name):
    bypassed(played, name, BYPASSED[name])


def test_the_round_shows_what_it_should(stock):
    changes = [
        "long negative prompt",
        "padded",
        "both long",
        "uncond dropped in mid-run",
        "no guidance",
        "uncond left out at the start",
        "edited prompt",
        "alternating words",
        "two prompts",
        "break",
        "weights",
        "embedding",
        "empty prompt",
        "CLIP skip",
        "tiled",
        "inpainting",
        "variation",
        "hypernetwork",
    ]
    small = [name for name in changes if apart(stock[name], stock["plain"]) < TOLERANCE]
    assert small == []
    for name in ("cond and uncond one after the other", "not tiled", "hypernetwork gone", "plain at the end"):
        assert apart(stock[name], stock["plain"]) < TOLERANCE
    assert apart(stock["inpainting"], stock["soft inpainting"]) > TOLERANCE


def rightly_plain(played, stock) -> None:
    """Check that the plain image is right, and accelerated."""
    before = played.webui.get("/sfast/v1/status")
    assert apart(play(played.webui, "txt2img", PLAIN), stock["plain"]) < TOLERANCE
    after = played.webui.get("/sfast/v1/status")
    assert count(after, "plans run") > count(before, "plans run")
    assert after["last_error"] is None


def while_sampling(played, payload: dict[str, Any], action) -> list[str]:
    """The images of a request, in the midst of whose steps `action` is done once."""
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(play, played.webui, "txt2img", payload)
        until = time.monotonic() + 600
        while not asked.done() and time.monotonic() < until:
            if played.webui.get("/sdapi/v1/progress?skip_current_image=true")["state"]["sampling_step"] > 3:
                action()
                break
        return asked.result()


@pytest.mark.parametrize("how", ["interrupt", "skip"])
def test_after_an_interruption_the_next_image_is_right(played, stock, how):
    before = played.webui.get("/sfast/v1/status")
    many = {**PLAIN, "steps": 150}
    while_sampling(played, many, lambda: played.webui.post(f"/sdapi/v1/{how}", {}))
    after = played.webui.get("/sfast/v1/status")
    assert 0 < count(after, "plans run") - count(before, "plans run") < many["steps"]
    rightly_plain(played, stock)


def test_two_requests_at_once_give_both_images(played, stock):
    with ThreadPoolExecutor(3) as pool:
        wanted = ["plain", "136 by 200", "plain at the end"]
        payloads = [PLAIN, {**PLAIN, "width": 136, "height": 200}, PLAIN]
        asked = [pool.submit(play, played.webui, "txt2img", payload) for payload in payloads]
        for name, future in zip(wanted, asked):
            assert apart(future.result(), stock[name]) < TOLERANCE
    assert played.webui.get("/sfast/v1/status")["last_error"] is None


@pytest.mark.parametrize("kind", ["Approx cheap", "Full"])
def test_a_live_preview_in_another_thread_changes_nothing(played, stock, kind):
    preview = {"live_previews_enable": True, "show_progress_every_n_steps": 1, "show_progress_type": kind}
    play(played.webui, "options", preview)
    seen: set[str] = set()
    done = threading.Event()

    def watch() -> None:
        while not done.is_set():
            image = played.webui.get("/sdapi/v1/progress")["current_image"]
            if image:
                seen.add(image)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        for _ in range(3):
            rightly_plain(played, stock)
        play(played.webui, "txt2img", {**PLAIN, "steps": 20})
    finally:
        done.set()
        watcher.join()
        play(played.webui, "options", {"live_previews_enable": False})
    assert seen


@pytest.mark.parametrize(
    "settings",
    [{"sfast_enabled": False}, {"sfast_check": "always"}, {"sfast_triton": False}, {"sfast_max_graphs": 1}],
    ids=lambda settings: "".join(settings),
)
def test_settings_may_change_while_it_generates(played, stock, settings):
    was = played.webui.get("/sdapi/v1/options")
    many = {**PLAIN, "steps": 60}
    undisturbed = play(played.webui, "txt2img", many)
    disturbed = while_sampling(played, many, lambda: play(played.webui, "options", settings))
    assert apart(disturbed, undisturbed) < TOLERANCE
    play(played.webui, "options", {name: was[name] for name in settings})
    rightly_plain(played, stock)


def test_attention_may_change_while_it_generates(played, stock):
    many = {**PLAIN, "steps": 60}
    undisturbed = play(played.webui, "txt2img", many)
    other = {"cross_attention_optimization": "sdp-no-mem - scaled dot product without memory efficient attention"}
    disturbed = while_sampling(played, many, lambda: play(played.webui, "options", other))
    assert apart(disturbed, undisturbed) < TOLERANCE
    rightly_plain(played, stock)
    play(played.webui, "options", {"cross_attention_optimization": "Automatic"})
    rightly_plain(played, stock)
