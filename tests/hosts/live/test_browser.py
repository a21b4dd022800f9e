"""What a user does in the page of the real WebUIs, step by step in a real browser: see `browser.py`.

Steps of a WebUI follow each other: each needs the ones before it. A picture of each is in pytest's folder.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

pytest.importorskip("PIL")
from . import a1111, sdnext
from .browser import CHROMIUM, Page, opened

pytestmark = [
    pytest.mark.hosts,
    pytest.mark.skipif(not CHROMIUM, reason="SFAST_CHROMIUM names no Chromium"),
]
HOSTS = [pytest.param("AUTOMATIC1111", marks=a1111.MARKS)]
SET = """(input, value) => {
    input.value = value;
    input.dispatchEvent(new Event('input', {bubbles: true}));
    input.dispatchEvent(new Event('blur', {bubbles: true}));
}"""
QUICK = {"steps": "6", "width": "128", "height": "128"}


@contextlib.contextmanager
def running(name: str, factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a WebUI."""
    if name == "AUTOMATIC1111":
        models = factory.mktemp("models")
        a1111.make_models(models)
        data = a1111.make_data(factory.mktemp("a1111"), models)
        with a1111.start(data, "page", {"sfast_allow_cpu": True}, "--gradio-queue") as webui:
            yield webui.url
        return
    data = sdnext.make_data(factory)
    settings = {"theme_type": name, "gradio_theme": "Default", "show_progress_type": "Approximate"}
    with sdnext.start(data, settings, extension=True) as webui:
        sdnext.model_loaded(webui)
        yield webui.url


@pytest.fixture(scope="module", params=HOSTS)
def page(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    pytest.importorskip("playwright.sync_api")
    name = request.param
    pictures = tmp_path_factory.mktemp(f"pictures-{name}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SFAST_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        with (
            running(name, tmp_path_factory) as url,
            opened(url, "" if name == "AUTOMATIC1111" else name, pictures) as page,
        ):
            page.open()
            page.to_pictures()
            # SD.Next's tiny model is too quick for stages to be seen, at small sizes
            size = {} if name == "AUTOMATIC1111" else {"width": "512", "height": "512"}
            for field, value in {**QUICK, **size}.items():
                page.page.locator(f"#txt2img_{field} input[type=number]").first.evaluate(SET, value)
            yield page


def test_the_page_opens_with_a_badge(page: Page) -> None:
    page.picture("open")
    assert page.badge() == "ready"
    assert page.page.locator("#txt2img_actions_column .sfast-badge").first.bounding_box()["width"] > 100


def test_the_first_picture_shows_its_stages_and_the_second_its_pace(page: Page) -> None:
    said = page.generate()
    page.picture("first picture")
    assert any(text.startswith("preparing ") for text in said), said
    assert any(text.startswith("Stable Fast: ") for text in said), said
    assert page.generate()[-1].endswith("it/s")
    page.picture("second picture")


def test_badge_and_its_details_are_accessible(page: Page) -> None:
    badge = page.page.locator("#txt2img_actions_column .sfast-badge").first
    badge.locator(".sfast-state").focus()
    page.until(lambda: badge.locator(".sfast-details").is_visible(), "the details are seen", 10)
    page.page.wait_for_timeout(500)
    page.picture("details")
    inside = badge.locator(".sfast-details").bounding_box()
    widest = badge.locator(".sfast-details").evaluate("(each) => each.scrollWidth - each.clientWidth")
    assert inside["x"] >= 0 and widest <= 1
    page.accessible("#txt2img_actions_column .sfast-badge")


def test_the_tab_is_reached_by_keyboard_alone(page: Page) -> None:
    page.page.locator("#txt2img_actions_column .sfast-state").first.focus()
    for _ in range(3):
        page.page.keyboard.press("Tab")
        if page.page.evaluate("document.activeElement.className") == "sfast-link":
            break
    page.page.keyboard.press("Enter")
    page.until(lambda: "Plans" in page.text("#stable_fast_view"), "the tab is drawn", 30)
    stops = page.page.evaluate(STOPS, page.tab)
    assert stops["reached"] >= 12 and not stops["behind"], stops
    page.picture("tab")
    page.accessible(page.tab)


STOPS = """(tab) => {
    const all = [...document.querySelector(tab).querySelectorAll('a, button, textarea')];
    const seen = all.filter((each) => each.offsetParent !== null);
    return {reached: seen.length, behind: seen.filter((each) => each.tabIndex < 0).map((each) => each.outerHTML)};
}"""


def test_sizes_are_prepared_measured_and_cancelled(page: Page) -> None:
    page.to_tab()
    page.fill("#stable_fast_sizes textarea", "192x128")
    page.click("#stable_fast_prepare")
    page.until(lambda: "Prepare Done" in page.job(), "it is prepared")
    page.picture("prepared")
    assert "192×128, 1 picture" in page.text("#stable_fast_job")
    page.click("#stable_fast_measure")
    page.until(lambda: "Measure Done" in page.job(), "it is measured")
    page.until(lambda: "Measurements that were kept" in page.text("#stable_fast_job"), "it is kept", 20)
    page.click("#stable_fast_chart")
    page.until(lambda: page.page.is_visible("#stable_fast_plot img"), "the chart is drawn", 60)
    page.picture("measured")
    page.fill("#stable_fast_sizes textarea", "256x256, 320x320, 384x384, 448x448")
    page.click("#stable_fast_measure")
    page.until(lambda: "Measure Running" in page.job(), "it runs")
    page.picture("measuring")
    page.click("#stable_fast_cancel")
    page.until(lambda: "Measure Cancelled" in page.job(), "it is cancelled")
    page.picture("cancelled")
    page.accessible(page.tab)


def test_plans_are_dropped_and_the_report_is_given(page: Page) -> None:
    page.to_tab()
    page.click("#stable_fast_drop")
    page.until(lambda: "None yet" in page.text("#stable_fast_view"), "the list is empty", 20)
    assert "Plans dropped:" in page.text("#stable_fast_dropped")
    page.click("#stable_fast_report")
    report = "#stable_fast_report_text textarea"
    page.until(lambda: "Settings" in page.page.input_value(report), "the report is there", 20)
    assert "a dog" not in page.page.input_value(report)
    page.picture("dropped")


def test_a_changed_setting_is_in_the_infotext_and_is_restored_from_it(page: Page) -> None:
    page.to_settings()
    page.picture("settings")
    page.accessible(page.settings)
    field = page.page.locator("#setting_sfast_tolerance input[type=number]").first
    assert field.evaluate("(each) => (each.labels.length || each.getAttribute('aria-labelledby')) !== 0")
    field.evaluate(SET, "0.05")
    page.apply()
    page.to_pictures()
    page.generate()
    page.until(lambda: "Stable Fast tolerance: 0.05" in page.infotext(), "the infotext names it", 20)
    page.picture("infotext")
    infotext = page.infotext()
    page.to_settings()
    field.evaluate(SET, "0.02")
    page.apply()
    page.to_pictures()
    page.generate()
    assert "Stable Fast tolerance" not in page.infotext()
    page.fill("#txt2img_prompt textarea", infotext)
    page.click("#paste, #txt2img_paste")
    page.page.wait_for_timeout(2500)
    page.picture("restored")
    page.generate(page.page.input_value("#txt2img_prompt textarea"))
    assert "Stable Fast tolerance: 0.05" in page.infotext()


@pytest.mark.parametrize("width", [1300, 400])
def test_nothing_of_ours_is_cut_off_in_the_dark(page: Page, width: int) -> None:
    page.page.set_viewport_size({"width": width, "height": 900})
    page.open("?__theme=dark")
    page.page.wait_for_timeout(4000)
    page.picture(f"dark {width}")
    for badge in page.page.locator(".sfast-badge:visible").all():
        box = badge.bounding_box()
        assert box["x"] >= 0 and box["x"] + box["width"] <= width, box
    page.to_tab()
    page.page.wait_for_timeout(800)
    page.picture(f"dark tab {width}")
    page.accessible(page.tab)
    for part in ("#stable_fast_view", "#stable_fast_job", "#stable_fast_sizes", "#stable_fast_report"):
        box = page.page.locator(part).first.bounding_box()
        assert box is None or box["x"] + box["width"] <= width + 1, (part, box)


def test_the_console_of_the_browser_has_no_error_of_ours(page: Page) -> None:
    assert page.errors == []
