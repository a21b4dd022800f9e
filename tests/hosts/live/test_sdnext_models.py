"""Models that come and go in the real SD.Next, by all of its routes; and requests that cross each other."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from . import sdnext
from .sdnext import PLAIN, TOLERANCE, Played, call, drawn, options, to_checkpoint, told
from .webui import WebUI

pytestmark = sdnext.MARKS

LONG = {**PLAIN, "steps": 24}
RELOAD = "/sdapi/v1/reload-checkpoint?force=true"
# as on an NVIDIA GPU: under an override, releases since August 2026 put a new function in the place of torch's
# attention each time a model is loaded, and plans are made anew
SETTINGS = {"sdp_overrides": []}


def image(webui: WebUI, payload: dict = LONG) -> list[str]:
    return sdnext.do(webui, "txt2img", payload)


def sampling(webui: WebUI, seconds: float = 60) -> None:
    """Wait until an image is being made."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if webui.get("/sdapi/v1/progress?skip_current_image=true")["state"]["sampling_step"] > 2:
            return
        time.sleep(0.02)
    raise RuntimeError("nothing is being made")


def meanwhile(event: Callable[[WebUI], None]) -> Callable[[WebUI], list[str]]:
    """A long image, and an event in the midst of it."""

    def made(webui: WebUI) -> list[str]:
        with ThreadPoolExecutor(1) as pool:
            images = pool.submit(image, webui)
            sampling(webui)
            event(webui)
            return images.result()

    return made


def and_then(event: Callable[[WebUI], list[str]]) -> Callable[[WebUI], list[str]]:
    """An event whose own images do not count, and an image after it."""

    def made(webui: WebUI) -> list[str]:
        event(webui)
        return image(webui, PLAIN)

    return made


def two_at_once(webui: WebUI) -> list[str]:
    with ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(image, webui, {**PLAIN, "seed": seed, "width": 128 + 64 * seed}) for seed in (1, 2)]
        return [images for one in asked for images in one.result()]


def previewed(webui: WebUI) -> list[str]:
    done = threading.Event()
    seen = []

    def poll() -> None:
        while not done.is_set():
            seen.append(webui.get("/sdapi/v1/progress?skip_current_image=false").get("current_image"))

    with ThreadPoolExecutor(1) as pool:
        polling = pool.submit(poll)
        try:
            images = image(webui)
        finally:
            done.set()
        polling.result()
    assert any(seen)
    return images


def set_options(**values: object) -> Callable[[WebUI], None]:
    return lambda webui: webui.post("/sdapi/v1/options", values)


ROUND: list[sdnext.Step] = [
    drawn("plain"),
    to_checkpoint("to tiny-b", "tiny-b"),
    drawn("tiny-b"),
    told("tiny-b, LoRA", "<lora:strong:0.5>"),
    to_checkpoint("back to tiny-a", "tiny-a"),
    drawn("tiny-a again"),
    to_checkpoint("to tiny-narrow", "tiny-narrow"),
    drawn("another architecture"),
    to_checkpoint("back from tiny-narrow", "tiny-a"),
    drawn("tiny-a after another architecture"),
    drawn("checkpoint of one request", override_settings={"sd_model_checkpoint": "Diffusers/tiny-b"}),
    drawn("after that request"),
    ("unload", "call", "/sdapi/v1/unload-checkpoint"),
    drawn("loaded by a request"),
    ("reload", "call", RELOAD),
    drawn("reloaded"),
    options("to tiny-vae", sd_vae="tiny-vae"),
    drawn("another VAE"),
    options("from tiny-vae", sd_vae="Default"),
    drawn("own VAE"),
    options("to tiny-unet-b", sd_unet="tiny-unet-b"),
    drawn("another UNet"),
    drawn("another UNet, another seed", seed=2),
    options("from tiny-unet-b", sd_unet="Default"),
    ("reload the UNet", "call", RELOAD),
    drawn("own UNet"),
    ("two at once", "do", two_at_once),
    ("two at once, again", "do", two_at_once),
    ("after an interruption", "do", and_then(meanwhile(lambda webui: call(webui, "/sdapi/v1/interrupt")))),
    ("after a skip", "do", and_then(meanwhile(lambda webui: call(webui, "/sdapi/v1/skip")))),
    options("to previews", show_progress_type="Full", show_progress_every_n_steps=1),
    ("previewed", "do", previewed),
    options("from previews", show_progress_type="None"),
    ("settings changed meanwhile", "do", meanwhile(set_options(sfast_check="always"))),
    ("switched off meanwhile", "do", meanwhile(set_options(sfast_enabled=False))),
    ("switched on meanwhile", "do", meanwhile(set_options(sfast_enabled=True, sfast_check="first use"))),
    drawn("plain at last"),
    options("to a refiner", sd_model_refiner="Diffusers/tiny-b"),
    drawn("refined", enable_hr=True, hr_force=True, refiner_start=0.5, refiner_steps=4),
    drawn("refined again", enable_hr=True, hr_force=True, refiner_start=0.5, refiner_steps=4),
    options("from a refiner", sd_model_refiner="None"),
    drawn("refiner unloaded", enable_hr=True, hr_force=True, refiner_start=0.5, refiner_steps=4),
    drawn("plain after the refiner"),
]
IMAGES = sdnext.images_of(ROUND)
# switches to checkpoints of the same architecture; a UNet from a file is left in training mode, which is another
KEPT = ["tiny-b", "tiny-b, LoRA", "tiny-a again", "checkpoint of one request", "after that request"]
OFF = "switched on meanwhile"


played, test_image_equals_the_one_without_the_extension = sdnext.playing(ROUND, SETTINGS)


@pytest.mark.parametrize(
    "name", ["tiny-b", "another architecture", "checkpoint of one request", "another VAE", "another UNet", "refined"]
)
def test_each_model_makes_another_image(played: Played, name: str) -> None:
    assert played.apart(name, "plain") > 2 * TOLERANCE


def test_the_refiner_changes_the_image(played: Played) -> None:
    assert played.apart("refined", "refiner unloaded") > 2 * TOLERANCE


@pytest.mark.parametrize("name", [name for name in IMAGES if name != OFF])
def test_plans_ran(played: Played, name: str) -> None:
    played.accelerated(name)


@pytest.mark.parametrize("name", KEPT)
def test_plans_are_kept_for_a_checkpoint_of_the_same_architecture(played: Played, name: str) -> None:
    assert played.gained(name, "captures") == 0


@pytest.mark.parametrize(
    "name", ["another VAE", "own VAE", "another UNet, another seed", "two at once, again", "after an interruption"]
)
def test_plans_go_on_without_a_new_capture(played: Played, name: str) -> None:
    assert played.gained(name, "captures") == 0


def test_switching_off_takes_effect_with_the_next_image(played: Played) -> None:
    assert played.ran("switched off meanwhile") == LONG["steps"]
    assert played.ran(OFF) == 0 and not played.reasons(OFF)
    assert played.ran("plain at last") > 0
