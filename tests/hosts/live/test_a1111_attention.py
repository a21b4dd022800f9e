"""Each attention of AUTOMATIC1111: the images are those without the extension, the plan that of sdp."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from . import a1111
from .a1111 import MARKS, PLAIN, TOLERANCE, Played, Round, accelerated, apart, start
from .webui import XFORMERS, add_extension, last_plan, same_plan

pytestmark = MARKS

# in half precision, where upcasting is a cast; the image is small, for the VAE is in half precision too
HALF = "--use-cpu all --precision half --skip-torch-cuda-test"
SMALL = {**PLAIN, "width": 64, "height": 64, "steps": 2}

XFORMERS_FLAGS = "--xformers --force-enable-xformers"  # its own check asks for a GPU
# flags of a start, and what the WebUI applies then
STARTS = {
    "no flag": ("", "InvokeAI"),  # without CUDA; on a GPU it is Doggettx
    "xformers": (XFORMERS_FLAGS, "xformers"),
    "sdp": ("--opt-sdp-attention", "sdp"),
    "sdp-no-mem": ("--opt-sdp-no-mem-attention", "sdp-no-mem"),
    "sub-quadratic": ("--opt-sub-quad-attention", "sub-quadratic"),
    "sub-quadratic, 16 queries at a time": ("--opt-sub-quad-attention --sub-quad-q-chunk-size 16", "sub-quadratic"),
    "Doggettx": ("--opt-split-attention", "Doggettx"),
    "V1": ("--opt-split-attention-v1", "V1"),
    "InvokeAI": ("--opt-split-attention-invokeai", "InvokeAI"),
    "none": ("--disable-opt-split-attention", ""),
}
# what the settings call it
TITLES = {
    "xformers": "xformers",
    "sdp": "sdp - scaled dot product",
    "sdp-no-mem": "sdp-no-mem - scaled dot product without memory efficient attention",
    "sub-quadratic": "sub-quadratic",
    "Doggettx": "Doggettx",
    "V1": "V1 - original v1",
    "InvokeAI": "InvokeAI",
    "": "None",
}
UPCAST: Round = [
    ("plain", "txt2img", SMALL),
    ("again", "txt2img", {**SMALL, "seed": 2}),
    ("to upcast", "options", {"upcast_attn": True}),
    ("upcast", "txt2img", SMALL),
    ("from upcast", "options", {"upcast_attn": False}),
    ("back", "txt2img", SMALL),
]


def applied(played: Played) -> str:
    """The attention that the WebUI says it applied last; empty if it disabled all."""
    lines = [line for line in played.webui.log().splitlines() if "attention optimization" in line]
    return lines[-1].partition("attention optimization: ")[2].partition("...")[0]


@pytest.fixture(scope="module")
def stock_half(data: Path) -> dict[str, dict[str, list[str]]]:
    """By attention, the images of `UPCAST` that the WebUI makes by itself."""
    settings = {"disabled_extensions": ["stable-fast"]}
    images = {}
    with start(data, "stock-half", settings, flags=f"{HALF} {XFORMERS_FLAGS}", packages=XFORMERS) as webui:
        for name, title in TITLES.items():
            a1111.play(webui, "options", {"cross_attention_optimization": title})
            played = Played(webui)
            assert applied(played) == name
            images[name] = played.round(UPCAST, status=False).images
    return images


@pytest.fixture(scope="module")
def started(data: Path) -> Callable[[str], Played]:
    """`started(name)`: the WebUI with the extension, started once with these flags of `STARTS`, after `UPCAST`."""
    found: dict[str, Played] = {}

    def get(name: str) -> Played:
        if name not in found:
            flags, attention = STARTS[name]
            settings = {"sfast_allow_cpu": True}
            with start(data, f"start-{name}", settings, flags=f"{HALF} {flags}", packages=XFORMERS) as webui:
                found[name] = Played(webui).round(UPCAST, status=True)
                assert applied(found[name]) == attention
        return found[name]

    return get


@pytest.mark.parametrize("name", STARTS)
def test_a_start_with_it_gives_the_images_without_the_extension(started, stock_half, name: str) -> None:
    played, stock = started(name), stock_half[STARTS[name][1]]
    for step in a1111.images_of(UPCAST):
        accelerated(played, step)
        assert played.reasons(step) == {}
        assert apart(played.images[step], stock[step]) < TOLERANCE, step


@pytest.mark.parametrize("name", STARTS)
def test_its_plan_is_that_of_sdp(started, name: str) -> None:
    same_plan(last_plan(started(name).reports["plain"]), last_plan(started("sdp").reports["plain"]))


@pytest.mark.parametrize("name", STARTS)
def test_upcast_its_plan_is_that_of_sdp_upcast(started, name: str) -> None:
    # without an optimisation the WebUI does not read the option
    other = "plain" if name == "none" else "upcast"
    same_plan(last_plan(started(name).reports["upcast"]), last_plan(started("sdp").reports[other]))


@pytest.mark.parametrize("name", STARTS)
def test_upcast_is_a_plan_of_its_own_and_the_other_one_is_kept(started, name: str) -> None:
    assert [started(name).gained(step, "captures") for step in a1111.images_of(UPCAST)] == [1, 0, 1, 0]


def test_upcast_is_kept_as_what_it_says(started) -> None:
    plain, upcast = (last_plan(started("sdp").reports[step])["operations"] for step in ("plain", "upcast"))
    assert upcast["aten.to.dtype"] > plain.get("aten.to.dtype", 0)


def test_chunks_of_keys_go_to_the_original(data: Path, stock_half) -> None:
    flags = f"{HALF} --opt-sub-quad-attention --sub-quad-kv-chunk-size 16 --sub-quad-chunk-threshold 0"
    with start(data, "chunks", {"sfast_allow_cpu": True}, flags=flags) as webui:
        played = Played(webui).round(UPCAST[:1], status=True)
    # the WebUI counts chunks on a tensor
    a1111.bypassed(played, "plain", "reads a value")
    assert apart(played.images["plain"], stock_half["sub-quadratic"]["plain"]) < TOLERANCE


# --- one session, in which the settings change ---

SLICED = {**PLAIN, "width": 320, "height": 256}  # scores of 50 MB, of which InvokeAI makes slices
SCARCE = 2_000_000  # bytes: a quarter of what the scores take at the size of PLAIN


def method(name: str, title: str) -> Round:
    return [
        (f"to {name}", "options", {"cross_attention_optimization": title}),
        (name, "txt2img", PLAIN),
        (f"{name}, sliced", "txt2img", SLICED),
    ]


SWITCHES: Round = [
    *method("sdp", TITLES["sdp"]),
    *(step for name, title in TITLES.items() if name != "sdp" for step in method(name or "none", title)),
    *method("sdp again", TITLES["sdp"]),
    *method("Doggettx again", TITLES["Doggettx"]),
]
IMAGES = a1111.images_of(SWITCHES)

# stands for a GPU whose memory is nearly full: Doggettx slices then
MEMORY = """
from pathlib import Path
import psutil
free = Path(__file__).resolve().parent / "free"
original = psutil.virtual_memory

def virtual_memory():
    found = original()
    return found._replace(available=int(free.read_text())) if free.exists() else found

psutil.virtual_memory = virtual_memory
"""


def prepare(data: Path) -> None:
    add_extension(data, "memory", MEMORY)


def free_memory(data: Path, size: int | None) -> None:
    """Let the WebUI believe that so many bytes of memory are free; what is so, with None."""
    file = data / "extensions" / "memory" / "scripts" / "free"
    if size is None:
        file.unlink(missing_ok=True)
    else:
        file.write_text(str(size))


FLAGS = f"{a1111.FLAGS} {XFORMERS_FLAGS} --sub-quad-q-chunk-size 64"


@pytest.fixture(scope="module")
def stock(data: Path) -> dict[str, list[str]]:
    settings = {"disabled_extensions": ["stable-fast"]}
    with start(data, "stock", settings, flags=FLAGS, packages=XFORMERS) as webui:
        return Played(webui).round(SWITCHES, status=False).images


@pytest.fixture(scope="module")
def played(data: Path, stock: dict[str, list[str]]) -> Iterator[Played]:
    with start(data, "extended", {"sfast_allow_cpu": True}, flags=FLAGS, packages=XFORMERS) as webui:
        yield Played(webui).round(SWITCHES, status=True)


test_image_is_the_one_without_the_extension = a1111.equal_to_stock(SWITCHES)


@pytest.mark.parametrize("name", IMAGES)
def test_plans_ran(played: Played, name: str) -> None:
    accelerated(played, name)
    assert played.reasons(name) == {}


@pytest.mark.parametrize("name", IMAGES)
def test_the_plan_after_a_switch_is_that_of_sdp(played: Played, name: str) -> None:
    of = "sdp, sliced" if name.endswith("sliced") else "sdp"
    same_plan(last_plan(played.reports[name]), last_plan(played.reports[of]))


@pytest.mark.parametrize("name", [name for name in IMAGES if " again" in name])
def test_switching_back_takes_no_new_capture(played: Played, name: str) -> None:
    assert played.gained(name, "captures") == 0


def test_slices_for_want_of_memory_make_no_other_plan(data: Path, played: Played, stock: dict[str, list[str]]) -> None:
    def images(seed: int) -> list[str]:
        return a1111.play(played.webui, "txt2img", {**PLAIN, "seed": seed})

    def captures() -> int:
        return a1111.count(played.webui.get("/sfast/v1/status"), "captures")

    webui = played.webui
    a1111.play(webui, "options", {"cross_attention_optimization": TITLES["Doggettx"]})
    before, ample = captures(), images(1)
    free_memory(data, SCARCE)
    try:
        assert apart(images(1), stock["Doggettx"]) < TOLERANCE and captures() == before
        # a size that is new while memory is scarce
        taller: dict[str, Any] = {**PLAIN, "height": 192}
        a1111.play(webui, "txt2img", taller)
        scarce = webui.get("/sfast/v1/status")
    finally:
        free_memory(data, None)
    assert apart(ample, stock["Doggettx"]) < TOLERANCE
    a1111.play(webui, "options", {"cross_attention_optimization": TITLES["sdp"]})
    a1111.play(webui, "txt2img", taller)
    after = webui.get("/sfast/v1/status")
    assert a1111.count(scarce, "captures") == before + 1 and after["last_error"] is None
    same_plan(last_plan(scarce), last_plan(after))
