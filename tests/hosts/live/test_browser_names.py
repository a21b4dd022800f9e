"""Names that are no harmless words are text on every page of ours, in the real AUTOMATIC1111: of a checkpoint, a LoRA,
a hypernetwork and an extension, as far as a file may be called so.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("PIL")
from . import a1111
from .a1111_models import old_save
from .browser import CHROMIUM, Page, opened
from .pages import quick
from .test_a1111_patches import EXTENSION, INSTANCE_FORWARD
from .webui import WebUI

pytestmark = [*a1111.MARKS, pytest.mark.skipif(not CHROMIUM, reason="SFAST_CHROMIUM names no Chromium")]

TAG = "<img src=x onerror=ran(this)>"
QUOTED = "\"two\" 'one' &amp; `${ran(0)}`"
# the override turns what follows it around; the letters run from right to left by themselves
HEBREW = "\u202e\u05e9\u05dc\u05d5\u05dd left"
MODEL = f"{TAG} {QUOTED} {HEBREW} {'m' * 120}"
FOLDER = "f" * 170
# what stands between < and > in a prompt
LORA = f"img src=x onerror=ran(this) {QUOTED} {HEBREW}"
EXTENSION_NAME = f"{TAG} {QUOTED} {HEBREW} {'e' * 120}"
# a hypernetwork's name lies in its file, where it may be anything
HYPERNETWORK = f"{TAG} </td></table><script>ran(0)</script> {QUOTED} {HEBREW} {'h' * 300}"
WIDTH = 400
# so narrow, the button and its badge are in another column
BADGE = "#tab_txt2img .sfast-badge"
OURS = ".sfast-badge, .sfast-live, #tab_stable_fast, [id^='setting_sfast_']"
# the host's own pages may run such a name
RAN = """window.ours = [];
window.ran = (each) => {
    if (!each || each.closest("OURS")) window.ours.push(each ? each.parentElement.outerHTML : 'code');
};""".replace("OURS", OURS)
ELEMENTS = """(places) => [...document.querySelectorAll(places)]
    .flatMap((each) => [...each.querySelectorAll('img[src="x"], script')]).length"""
WIDE = """(width) => [...document.querySelectorAll('.sfast-badge, .sfast-details, #stable_fast_view, #stable_fast_job')]
    .filter((each) => each.offsetParent !== null || each.classList.contains('sfast-details'))
    .filter((each) => each.getBoundingClientRect().right > width + 1 || each.scrollWidth > each.clientWidth + 1)
    .map((each) => `${each.id || each.className}: ${each.getBoundingClientRect().right}, ${each.scrollWidth}`)"""


@pytest.fixture(scope="module")
def webui(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WebUI]:
    models = tmp_path_factory.mktemp("models")
    a1111.make_models(models)
    named = models / "Stable-diffusion" / FOLDER
    named.mkdir()
    for kind in ("safetensors", "yaml"):
        (models / "Stable-diffusion" / f"tiny.{kind}").rename(named / f"{MODEL}.{kind}")
    (models / "Lora" / "strong.safetensors").rename(models / "Lora" / f"{LORA}.safetensors")
    file = models / "hypernetworks" / "hyper.pt"
    old_save({**torch.load(file, weights_only=False), "name": HYPERNETWORK}, file)
    data = a1111.make_data(tmp_path_factory.mktemp("a1111"), models)
    scripts = data / "extensions" / EXTENSION_NAME / "scripts"
    scripts.mkdir(parents=True)
    script = EXTENSION.format(option="patched", late=False, patch=INSTANCE_FORWARD, strength=5.0)
    (scripts / "patch.py").write_text(script, encoding="utf-8")
    settings = {"sfast_allow_cpu": True, "sd_model_checkpoint": f"{FOLDER}/{MODEL}.safetensors"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SFAST_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        with a1111.start(data, "names", settings, "--gradio-queue") as webui:
            yield webui


@pytest.fixture(scope="module")
def page(webui: WebUI, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with opened(webui.url, "", tmp_path_factory.mktemp("images")) as page:
        page.page.add_init_script(RAN)
        page.page.set_viewport_size({"width": WIDTH, "height": 900})
        page.open()
        page.to_images()
        quick(page)
        yield page


def harmless(page: Page) -> None:
    """Check that no name was run or made an element, and that nothing of ours is wider than the page."""
    assert page.page.evaluate("window.ours") == []
    assert page.page.evaluate(ELEMENTS, OURS) == 0
    assert page.page.evaluate(WIDE, WIDTH) == []


def badge_and_details(page: Page) -> tuple[str, str]:
    badge = page.page.locator(BADGE).first
    badge.locator(".sfast-state").focus()
    page.until(lambda: badge.locator(".sfast-details").is_visible(), "the details are seen", 10)
    page.page.wait_for_timeout(800)
    page.image("details")
    harmless(page)
    return badge.locator(".sfast-state").text_content(), badge.locator(".sfast-details").text_content()


def in_tab(page: Page) -> str:
    page.to_tab()
    page.click("#stable_fast_refresh")
    page.page.wait_for_timeout(1500)
    page.image("tab")
    harmless(page)
    return str(page.page.text_content("#stable_fast_view"))


def test_a_model_and_a_lora_are_named_in_the_tab_and_in_the_infotext(page: Page) -> None:
    for _ in range(2):
        said = page.generate(f"a dog <lora:{LORA}:1>")
    assert said[-1].endswith("it/s"), said
    assert MODEL in in_tab(page)
    page.to_images()
    infotext = page.infotext()
    assert f"<lora:{LORA}:1>" in infotext and f"Model: {MODEL}" in infotext
    harmless(page)


def test_a_measurement_names_no_model(page: Page) -> None:
    page.to_tab()
    page.fill("#stable_fast_sizes textarea", "128x128")
    page.click("#stable_fast_measure")
    page.until(lambda: "Measure Done" in page.job(), "it is measured")
    page.until(lambda: "Measurements that were kept" in page.text("#stable_fast_job"), "it is kept", 20)
    page.page.locator("#stable_fast_job summary").first.click()
    page.page.wait_for_timeout(500)
    page.image("measured")
    assert FOLDER not in page.page.text_content("#stable_fast_job")
    harmless(page)


@pytest.mark.parametrize("kind", ["hypernetwork", "extension"])
def test_what_stops_the_acceleration_is_named(page: Page, webui: WebUI, kind: str) -> None:
    name = {"hypernetwork": HYPERNETWORK, "extension": EXTENSION_NAME}[kind]
    webui.post("/sdapi/v1/options", {"patched": kind == "extension"})
    page.to_images()
    said = page.generate("a dog <hypernet:hyper:1>" if kind == "hypernetwork" else "a dog")
    assert said[-1].startswith("original"), said
    badge, details = badge_and_details(page)
    # the badge is shorter
    assert name in details and (name.partition(";")[0] in badge or kind == "extension")
    assert name in in_tab(page)
    webui.post("/sdapi/v1/options", {"patched": False})


def test_the_report_names_the_extension_alone(page: Page) -> None:
    page.to_tab()
    page.click("#stable_fast_report")
    report = "#stable_fast_report_text textarea"
    text = page.until(lambda: page.page.input_value(report), "the report is there", 20)
    assert EXTENSION_NAME in text
    assert not any(name in text for name in (MODEL, LORA, HYPERNETWORK, FOLDER))
    harmless(page)


def test_the_settings_have_nothing_of_them(page: Page) -> None:
    page.to_settings()
    page.image("settings")
    harmless(page)


@pytest.mark.parametrize("name", [TAG, QUOTED, HEBREW, "n" * 300, f"{TAG}{QUOTED}{HEBREW}" * 3])
def test_whatever_the_status_names_is_text(page: Page, name: str) -> None:
    def renamed(route: Any) -> None:
        answer = route.fetch()
        status = answer.json()
        # without their parts, as an older version gave them
        reason = {"reason": name, "code": "other", "calls": 3, "calls_last": 1, "seconds_ago": 5}
        row = {"label": name, "size": name, "ready": False, "reason": name}
        job = {
            "kind": "prepare",
            "state": "failed",
            "done": 1,
            "total": 1,
            "label": name,
            "message": name,
            "rows": [row],
        }
        status |= {"model": name, "badge": {"state": "original", "text": name, "detail": name, "help": name}}
        status |= {"environment": {"gpu": name, "torch": name}, "reasons_listed": [reason], "job": job}
        for plan in (plan for each in status["accelerators"] for plan in each["plans"]):
            plan.update(label=name, last_pass=True)
        route.fulfill(body=json.dumps(status), content_type="application/json")

    page.page.route("**/sfast/v1/status", renamed)
    try:
        page.to_images()
        assert all(name in said for said in badge_and_details(page))
        assert in_tab(page).count(name) >= 4
        # drawn where it is seen
        page.page.locator("#stable_fast_job").scroll_into_view_if_needed()
        page.until(lambda: page.page.text_content("#stable_fast_job").count(name) >= 3, "the job is drawn", 10)
        harmless(page)
    finally:
        page.page.unroute("**/sfast/v1/status")


def test_the_console_of_the_browser_has_no_error_of_ours(page: Page) -> None:
    assert page.errors == []
