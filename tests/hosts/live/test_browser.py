"""What a user does in the page of the real WebUIs, step by step in a real browser: see `browser.py`.

Steps of a WebUI follow each other: each needs the ones before it. An image of each is in pytest's folder.
"""

from __future__ import annotations

import re

import pytest

pytest.importorskip("PIL")
from .browser import Page
from .pages import MARKS, SET, STOPS, THEMES, choose, quick

pytestmark = MARKS
RAW = "a dog on a hill\nSteps: 6, Size: 512x512, Seed: 1, CFG scale: 6, Stable Fast tolerance: 0.05"


def test_the_page_opens_with_a_badge(page: Page) -> None:
    page.image("open")
    assert page.badge() == "ready"
    assert page.page.locator(page.own_badge).first.bounding_box()["width"] > 100


def test_the_first_image_shows_its_stages_and_the_second_its_pace(page: Page) -> None:
    said = page.generate()
    page.image("first image")
    assert any(text.startswith("preparing ") for text in said), said
    # AUTOMATIC1111's bar shows the stage; SD.Next's a number of seconds alone
    has_bar = page.page.query_selector("#script_list") is not None and not page.theme
    assert not has_bar or any(text.startswith("Stable Fast: ") for text in said), said
    assert page.generate()[-1].endswith("it/s")
    page.image("second image")


def test_nothing_is_asked_while_idle(page: Page) -> None:
    asked: list[str] = []
    listen = lambda request: asked.append(request.url) if "/sfast/" in request.url else None
    # after an image the badge asks a few times more
    page.page.wait_for_timeout(8000)
    page.page.on("request", listen)
    page.page.wait_for_timeout(6000)
    page.page.remove_listener("request", listen)
    assert asked == []


def test_the_tab_that_the_modern_theme_opens_is_accelerated(page: Page) -> None:
    if page.theme != "Modern":
        pytest.skip("its tab Control makes images of text, too")
    page.click('button[tabitemid*="#control_tabitem"]')
    for field, value in {"before_resize_width": "128", "before_resize_height": "128", "steps": "6"}.items():
        page.page.locator(f"#control_{field} input[type=number]").first.evaluate(SET, value)
    page.generate(tab="control")
    assert page.generate(tab="control")[-1].endswith("it/s")
    assert page.page.locator("#control_generate_group .sfast-badge").is_visible()
    page.image("control")
    page.to_images()


def test_badge_and_its_details_are_accessible(page: Page) -> None:
    badge = page.page.locator(page.own_badge).first
    badge.locator(".sfast-state").focus()
    page.until(lambda: badge.locator(".sfast-details").is_visible(), "the details are seen", 10)
    page.page.wait_for_timeout(500)
    page.image("details")
    inside = badge.locator(".sfast-details").bounding_box()
    widest = badge.locator(".sfast-details").evaluate("(each) => each.scrollWidth - each.clientWidth")
    assert inside["x"] >= 0 and widest <= 1
    page.accessible(page.own_badge)


def test_the_tab_is_reached_by_keyboard_alone(page: Page) -> None:
    page.page.locator(f"{page.own_badge} .sfast-state").first.focus()
    for _ in range(3):
        page.page.keyboard.press("Tab")
        if page.page.evaluate("document.activeElement.className") == "sfast-link":
            break
    page.page.keyboard.press("Enter")
    page.until(lambda: "Ready sizes" in page.text("#stable_fast_view"), "the tab is drawn", 30)
    stops = page.page.evaluate(STOPS, page.tab)
    assert stops["reached"] >= 12 and not stops["behind"], stops
    page.image("tab")
    page.accessible(page.tab)


def test_sizes_are_prepared_measured_and_cancelled(page: Page) -> None:
    page.to_tab()
    page.fill("#stable_fast_sizes textarea", "192x128")
    longer = page.page.locator("#stable_fast_tokens input").nth(1)
    longer.focus()
    page.page.keyboard.press("Space")
    page.click("#stable_fast_prepare")
    page.until(lambda: "Prepare Done" in page.job(), "it is prepared")
    page.image("prepared")
    assert "192×128, 1 image, 154 tokens Ready" in page.job().replace(" – ", " ").replace("– ", "")
    longer.uncheck()
    page.click("#stable_fast_measure")
    page.until(lambda: "Measure Done" in page.job(), "it is measured")
    page.until(lambda: "Measurements that were kept" in page.text("#stable_fast_job"), "it is kept", 20)
    page.until(lambda: page.page.is_visible("#stable_fast_job .sfast-bars"), "the chart is drawn by itself", 20)
    page.click("#stable_fast_measure")
    page.until(lambda: page.page.is_visible("#stable_fast_job .sfast-curve svg"), "there is a curve", 60)
    page.image("measured")
    page.fill("#stable_fast_sizes textarea", "256x256, 320x320, 384x384, 448x448")
    cancel = "#stable_fast_cancel"
    assert not page.page.is_visible(cancel)
    page.click("#stable_fast_measure")
    page.until(lambda: "Measure Running" in page.job(), "it runs")
    page.until(lambda: page.page.is_visible(cancel), "it can be cancelled", 10)
    page.image("measuring")
    page.click(cancel)
    page.until(lambda: "Measure Cancelled" in page.job(), "it is cancelled")
    page.until(lambda: not page.page.is_visible(cancel), "there is nothing to cancel", 10)
    page.image("cancelled")
    page.fill("#stable_fast_sizes textarea", "500x500")
    page.click("#stable_fast_measure")
    page.until(lambda: "500x500" in page.text("#stable_fast_told .sfast-error"), "the fault is told", 10)
    page.until(lambda: page.page.evaluate(FOCUSED) == "stable_fast_sizes", "the cursor is in the field", 10)
    page.image("fault")
    page.fill("#stable_fast_sizes textarea", "256x256")
    page.fill("#stable_fast_images textarea", "none")
    page.click("#stable_fast_prepare")
    page.until(lambda: page.page.evaluate(FOCUSED) == "stable_fast_images", "the cursor is in the other field", 10)
    page.fill("#stable_fast_images textarea", "1")
    page.accessible(page.tab)


def test_the_last_image_is_compared(page: Page) -> None:
    page.to_tab()
    page.click("#stable_fast_compare")
    page.until(lambda: "Compare Done" in page.job(), "it is compared", 240)
    images = page.page.locator("#stable_fast_job .sfast-pair img")
    page.until(lambda: images.count() == 2, "there are two images", 20)
    for number in range(2):
        page.until(lambda n=number: images.nth(n).evaluate("(each) => each.naturalWidth") > 0, "the image is seen", 20)
    assert "of 255" in page.job() and "Without Stable Fast" in page.job()
    page.image("compared")
    page.accessible(page.tab)


def test_it_is_switched_off_for_a_comparison_and_on_again(page: Page) -> None:
    page.to_tab()
    off, on = "#stable_fast_off", "#stable_fast_on"
    page.until(lambda: page.page.is_visible(off) and not page.page.is_visible(on), "it is on", 10)
    page.click(off)
    page.until(lambda: page.badge() == "off", "it is off", 20)
    page.until(lambda: page.page.is_visible(on) and not page.page.is_visible(off), "it can be switched on", 10)
    page.image("off")
    page.click(on)
    page.until(lambda: page.badge() != "off", "it is on again", 20)


def test_the_link_opens_the_settings(page: Page) -> None:
    page.to_tab()
    page.click("#stable_fast_view .sfast-link", "Settings")
    page.until(lambda: page.page.is_visible("#setting_sfast_enabled"), "the settings are seen", 20)
    page.to_images()


FOCUSED = "(document.activeElement.closest('[id^=stable_fast_]') || {}).id"
WIDTHS = (420, 700, 1024, 1920)
OUTSIDE = """(place) => [...document.querySelectorAll(`${place} *`)].filter((each) => {
    const box = each.getBoundingClientRect();
    return box.width > 1 && (box.right > window.innerWidth + 1 || box.left < -1);
}).map((each) => `${each.tagName} ${each.className} ${each.textContent.slice(0, 40)}`)"""
FIRST = """() => {
    const cell = [...document.querySelectorAll('#stable_fast_view table')].pop().querySelector('tbody td');
    return [cell.textContent, cell.getBoundingClientRect().left];
}"""
LONG = """async (reasons) => {
    const own = window.sfastFetch = window.fetch;
    window.fetch = async (url, ...rest) => {
        const answer = await own(url, ...rest);
        if (!String(url).endsWith('/status')) return answer;
        const status = await answer.json();
        return new Response(JSON.stringify({...status, reasons_listed: reasons}));
    };
    await stableFast.refresh();
}"""


@pytest.mark.parametrize("width", WIDTHS)
def test_nothing_of_the_tab_is_outside_of_the_screen(page: Page, width: int) -> None:
    page.to_tab()
    page.page.set_viewport_size({"width": width, "height": 950})
    try:
        why = "the GPU has too little memory left next to the model to prepare this size"
        reason = {"reason": f"{why}; {'x' * 90}", "reason_parts": [why, "; ", "x" * 90], "code": "out-of-memory"}
        page.page.evaluate(LONG, [{**reason, "calls": 30000, "calls_last": 30, "seconds_ago": 8.0}])
        page.until(lambda: why in page.text("#stable_fast_view"), "the reason is drawn", 10)
        page.image(f"wide {width}")
        for place in ("#stable_fast_view", "#stable_fast_job"):
            assert page.page.evaluate(OUTSIDE, place) == []
        # what one came for stands first in a row
        text, left = page.page.evaluate(FIRST)
        assert why in text and left < width / 2
    finally:
        page.page.set_viewport_size({"width": 1300, "height": 950})
        page.page.evaluate("() => { window.fetch = window.sfastFetch; return stableFast.refresh(); }")


def test_plans_are_dropped_and_the_report_is_given(page: Page) -> None:
    page.to_tab()
    page.click("#stable_fast_drop")
    page.until(lambda: "None yet" in page.text("#stable_fast_view"), "the list is empty", 20)
    page.until(lambda: "Sizes forgotten:" in page.text("#stable_fast_dropped"), "it is told", 20)
    page.click("#stable_fast_report")
    report = "#stable_fast_report_text textarea"
    page.until(lambda: "Settings" in page.page.input_value(report), "the report is there", 20)
    assert "a dog" not in page.page.input_value(report)
    page.image("dropped")


def test_a_localisation_of_the_page_s_own_dump_finds_every_string(page: Page) -> None:
    if not page.page.evaluate("typeof dumpTranslations === 'function'"):
        pytest.skip("AUTOMATIC1111 alone dumps what it has seen")
    page.to_images()
    # a plan of the VAE is made at the second one of a size
    page.generate()
    page.generate()
    page.to_tab()
    page.until(lambda: "VAE decoder" in page.text("#stable_fast_view"), "the tab has the image and the VAE", 20)
    dumped = set(page.page.evaluate("Object.keys(dumpTranslations())"))
    # other numbers in every place
    page.to_images()
    quick(page, width="192")
    page.generate()
    page.generate()
    page.to_tab()
    page.until(lambda: "192" in page.text("#stable_fast_view"), "the tab has the next image", 20)
    texts = page.page.evaluate(TEXTS, [".sfast-badge", page.tab, page.settings])
    assert len(texts) > 60 and {"Ready sizes", "Stable Fast", "Prepare"} <= set(texts)
    assert [text for text in texts if re.search("[A-Za-z]{3,}", text) and text not in dumped] == []
    quick(page)


TEXTS = """(places) => places.flatMap((place) => [...document.querySelectorAll(place)].flatMap((root) => {
    const found = [];
    const walker = document.createTreeWalker(root, NodeFilter.SHOW_TEXT);
    while (walker.nextNode()) found.push(walker.currentNode.textContent.trim());
    return found;
})).filter(Boolean)"""


def test_a_locale_of_sdnext_s_finds_all_that_it_looks_at(page: Page) -> None:
    if not page.theme:
        pytest.skip("of SD.Next: its locales name buttons and labels, not the texts of tables and sentences")
    page.to_images()
    page.generate()
    page.to_tab()
    page.until(lambda: "Last used" in page.text("#stable_fast_view"), "the tab has the image", 20)
    labels = page.page.evaluate(LABELS, [page.tab, page.settings])
    known = {"Prepare", "Forget all ready sizes", "Last used", "Accelerate the VAE"}
    assert len(labels) > 30 and known <= set(labels), labels
    entries = [{"id": "", "label": each, "localized": f"« {each} »", "hint": "a hint"} for each in labels]
    # the one after English; an entry without a hint is left out
    page.page.route("**/file=ui/locale/locale_tb.json", lambda route: route.fulfill(json={"a": entries}))
    page.page.evaluate("document.getElementById('locale-container').click()")
    page.until(lambda: "« Prepare »" in page.text("#stable_fast_prepare"), "it is translated", 20)
    assert [each for each in page.page.evaluate(LABELS, [page.tab, page.settings]) if "«" not in each] == []
    # SD.Next watches the page while it starts, and no longer: what is drawn later has no other language
    page.image("locale")
    page.open()
    page.to_images()
    # the page begins anew with the host's sizes: a megapixel, on a CPU
    quick(page)


LABELS = """(places) => places.flatMap((place) => [...document.querySelectorAll(place)]).flatMap((root) =>
    // as setHints.ts has them
    [...root.querySelectorAll('button, h2, label > span, .label-wrap > span, span[data-testid="block-info"]')]
).map((each) => each.textContent.trim()).filter((text) => /[A-Za-z]{3,}/.test(text))"""


def test_a_changed_setting_is_in_the_infotext_and_is_restored_from_it(page: Page) -> None:
    page.to_settings()
    page.image("settings")
    page.accessible(page.settings)
    field = page.page.locator("#setting_sfast_tolerance input[type=number]").first
    assert field.evaluate("(each) => (each.labels.length || each.getAttribute('aria-labelledby')) !== 0")
    stops = page.page.evaluate(STOPS, page.settings)
    assert stops["reached"] >= 12 and not stops["behind"], stops
    switch = page.page.locator("#setting_sfast_triton input").first
    was = switch.is_checked()
    for now in (not was, was):
        switch.focus()
        page.page.keyboard.press("Space")
        assert switch.is_checked() == now
    field.evaluate(SET, "0.05")
    page.apply()
    page.to_images()
    page.generate()
    page.until(lambda: "Stable Fast tolerance: 0.05" in page.infotext(), "the infotext names it", 20)
    page.image("infotext")
    # what SD.Next shows is not what its images have in them
    infotext = RAW if page.theme else page.infotext()
    page.to_settings()
    field.evaluate(SET, "0.02")
    page.apply()
    page.to_images()
    page.generate()
    page.until(lambda: "Stable Fast tolerance" not in page.infotext(), "the infotext names it no more", 20)
    page.fill("#txt2img_prompt textarea", infotext)
    page.click("#paste, #txt2img_paste")
    page.page.wait_for_timeout(2500)
    page.image("restored")
    page.generate(page.page.input_value("#txt2img_prompt textarea"))
    page.until(lambda: "Stable Fast tolerance: 0.05" in page.infotext(), "the infotext names it again", 20)


GRIDS = {
    "": ("#script_list", "X/Y/Z plot", "#script_txt2img_xyz_plot_x_type", "#xyz_grid_fill_x_tool_button"),
    "SD.Next": (
        "#txt2img_script_list",
        "XYZ Grid Script",
        "#script_txt2img_xyz_grid_script_x_type",
        "#xyz_grid_x_list",
    ),
}
"""The list of scripts, the grid's name in it, its first axis, and the button that fills that."""


def test_a_grid_compares_on_and_off(page: Page) -> None:
    page.to_images()
    scripts, name, axis, fill = GRIDS["SD.Next" if page.theme else ""]
    if page.page.query_selector(scripts) is None:
        pytest.skip("the small page has no scripts")
    quick(page)
    to_scripts(page, True)
    choose(page, scripts, name)
    choose(page, axis, "[Stable Fast] enabled")
    # writes all values of the axis
    page.click(fill)
    page.page.wait_for_timeout(1500)
    to_scripts(page, False)
    page.generate()
    # plans ran for its first image; the second is the last one, and not accelerated
    page.until(lambda: page.badge() == "ready", "nothing is said of the first image", 30)
    image = page.page.locator("#txt2img_gallery .thumbnail-lg img, #txt2img_gallery .preview img").first
    page.until(lambda: image.evaluate("(each) => each.naturalWidth") >= 2 * 128, "a grid of two", 30)
    page.image("grid")
    to_scripts(page, True)
    choose(page, scripts, "None")
    to_scripts(page, False)
    # the values were those of the grid's images alone
    assert page.generate()[-1].endswith("it/s")


def to_scripts(page: Page, there: bool) -> None:
    """Open the tab in which scripts are chosen, and the one with the prompt again; elsewhere both are seen."""
    if page.theme == "Modern":
        page.click("#txt2img_scripts" if there else "#txt2img_prompts")


def test_after_the_ui_is_reloaded_images_are_accelerated_again(page: Page) -> None:
    # SD.Next ends its process, and starts another
    reload = "#restart_submit" if page.theme else "#settings_restart_gradio"
    if page.page.query_selector(reload) is None:
        pytest.skip("the small page is not reloaded")
    if page.theme == "Modern":
        page.click("#btn_system")
    else:
        page.to_settings()
    before = page.starts()
    # its page asks twice a second, and on a busy machine hits the time in which a request ends it: see a1111.STARTED
    page.page.route("**/internal/ping*", lambda route: route.continue_() if page.starts() > before else route.abort())
    page.click(reload)
    # the host empties the page, and loads it again when its server is back
    page.page.wait_for_selector(".sfast-badge", state="detached", timeout=30_000)
    page.page.wait_for_selector(".sfast-badge .sfast-state", state="attached", timeout=240_000)
    assert page.starts() > before
    page.until(lambda: page.badge() == "ready", "nothing of the scripts before is left")
    # the modern theme moves it
    page.until(lambda: page.page.locator(page.own_badge).count() == 1, "there is one badge", 30)
    page.to_images()
    quick(page)
    assert page.generate()[-1].endswith("it/s")
    page.image("reloaded")


def test_the_theme_that_is_chosen_in_the_page_is_followed(page: Page) -> None:
    if not page.theme:
        pytest.skip("there is none to choose that counts before a new start")
    for theme in THEMES[page.theme]:
        page.to_settings("User Interface", "#setting_gradio_theme input")
        choose(page, "#setting_gradio_theme", theme)
        page.apply()
        followed = f"link[href*='{theme}.css']"
        page.page.wait_for_selector(followed, state="attached", timeout=30_000)
        page.to_images()
        page.page.wait_for_timeout(1500)
        page.image(f"theme {theme}")
        page.accessible(page.own_badge)
        page.to_tab()
        page.image(f"theme {theme}, tab")
        page.accessible(page.tab)


@pytest.mark.parametrize("width", [1300, 400])
def test_nothing_of_ours_is_cut_off_in_the_dark(page: Page, width: int) -> None:
    page.page.set_viewport_size({"width": width, "height": 900})
    page.open("?__theme=dark")
    page.page.wait_for_timeout(4000)
    page.image(f"dark {width}")
    for badge in page.page.locator(".sfast-badge:visible").all():
        box = badge.bounding_box()
        assert box["x"] >= 0 and box["x"] + box["width"] <= width, box
    page.to_tab()
    page.page.wait_for_timeout(800)
    page.image(f"dark tab {width}")
    page.accessible(page.tab)
    for part in ("#stable_fast_view", "#stable_fast_job", "#stable_fast_sizes", "#stable_fast_report"):
        box = page.page.locator(part).first.bounding_box()
        assert box is None or box["x"] + box["width"] <= width + 1, (part, box)
    if width == 400:
        return  # the hosts' own settings are wider there
    page.to_settings()
    for setting in page.page.locator("[id^='setting_sfast_']:visible").all():
        box = setting.bounding_box()
        assert box["x"] + box["width"] <= width + 1, (setting.get_attribute("id"), box)
    page.image(f"dark settings {width}")


def test_the_console_of_the_browser_has_no_error_of_ours(page: Page) -> None:
    assert page.errors == []
