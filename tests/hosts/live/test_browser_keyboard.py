"""All that is ours done by keyboard alone, in a real browser: the focus is moved by Tab, is seen, and is never kept.

Steps of a WebUI follow each other: each needs the ones before it.
"""

from __future__ import annotations

import pytest

pytest.importorskip("PIL")
from .browser import Page
from .pages import MARKS

pytestmark = MARKS

IS = "(selector) => document.activeElement.matches(selector)"
LOOK = """(each) => {
    const style = getComputedStyle(each);
    const outline = style.outlineStyle === 'none' || style.outlineWidth === '0px' ? '' : style.outline;
    return [outline, style.boxShadow, style.borderColor, style.backgroundColor].join(' ');
}"""
SETTLED = 400
"""Milliseconds until colours have changed: hosts let them fade."""
MANY = "256x256, 320x320, 384x384, 448x448, 512x512, 576x576"


def tab_to(page: Page, selector: str, key: str = "Tab", most: int = 400) -> None:
    """Go to what is ours by this key; its focus is seen, and it can be left."""
    keyboard = page.page.keyboard
    for _ in range(most):
        keyboard.press(key)
        if page.page.evaluate(IS, selector):
            break
    else:
        raise AssertionError(f"{selector} is not reached by {key}")
    # asked for each time, as what is ours is drawn anew
    look = lambda: page.page.locator(selector).first.evaluate(LOOK)
    page.page.wait_for_timeout(SETTLED)
    focused = look()
    for back in ("Tab", "Shift+Tab"):
        keyboard.press(back)
        if back == "Tab":
            page.page.wait_for_timeout(SETTLED)
            assert not page.page.evaluate(IS, selector), f"{selector} is not left"
            # what is the host's is left to it
            ours = "sfast" in selector or "stable_fast" in selector
            assert not ours or look() != focused, f"no focus is seen at {selector}: {focused}"
    assert page.page.evaluate(IS, selector), f"{selector} is not found again"


def write(page: Page, selector: str, text: str, key: str = "Tab") -> None:
    """Go to a field, and write into it."""
    tab_to(page, selector, key)
    page.page.keyboard.press("Control+A")
    page.page.keyboard.type(text)


def press(page: Page, selector: str, key: str = "Tab", with_key: str = "Enter", most: int = 400) -> None:
    """Go to a button, and press it."""
    tab_to(page, selector, key, most)
    page.page.keyboard.press(with_key)


def named(page: Page, selector: str, text: str) -> str:
    """A selector of the one that has this text."""
    page.page.locator(selector, has_text=text).first.evaluate("(each, name) => { each.dataset.sought = name; }", text)
    return f"[data-sought='{text}']"


def test_the_details_of_the_badge_open_and_close(page: Page) -> None:
    page.generate()
    page.page.locator("#txt2img_generate").focus()
    state = f"{page.own_badge} .sfast-state"
    details = page.page.locator(f"{page.own_badge} .sfast-details").first
    expanded = lambda: page.page.locator(state).first.get_attribute("aria-expanded")
    tab_to(page, state, most=20)
    assert details.is_visible()
    page.image("details")
    page.page.keyboard.press("Enter")
    assert details.is_visible() and expanded() == "true"
    page.page.keyboard.press("Escape")
    assert not details.is_visible() and expanded() == "false"
    # who closes them stays where they were
    assert page.page.evaluate(IS, state)
    page.page.keyboard.press("Space")
    assert details.is_visible() and expanded() == "true"
    tab_to(page, f"{page.own_badge} .sfast-link", most=3)
    page.page.keyboard.press("Escape")
    assert not details.is_visible() and page.page.evaluate(IS, state)
    page.page.keyboard.press("Enter")
    press(page, f"{page.own_badge} .sfast-link")
    page.until(lambda: "Ready sizes" in page.text("#stable_fast_view"), "the tab is drawn", 30)


def test_the_list_of_plans_is_sorted(page: Page) -> None:
    # the link has gone with the page that it was on
    page.page.locator("#stable_fast_refresh").focus()
    for column in (9, 1):
        heading = f"#stable_fast_view th:nth-child({column})"
        tab_to(page, f"{heading} button", "Shift+Tab", most=20)
        orders = []
        for key in ("Enter", "Space"):
            page.page.keyboard.press(key)
            orders.append(page.page.locator(heading).get_attribute("aria-sort"))
            # the table is drawn anew
            assert page.page.evaluate(IS, f"{heading} button")
        assert sorted(orders) == ["ascending", "descending"]
    page.image("sorted")


@pytest.mark.parametrize("kind", ["Prepare", "Measure"])
def test_sizes_are_started_and_cancelled(page: Page, kind: str) -> None:
    page.page.locator("#stable_fast_refresh").focus()
    write(page, "#stable_fast_sizes textarea", MANY)
    tokens = "#stable_fast_tokens label:first-child input"
    for ticked in (True, False):
        press(page, tokens, "Tab" if ticked else "Shift+Tab", with_key="Space")
        assert page.page.locator(tokens).is_checked() == ticked
        page.page.keyboard.press("Tab")
    press(page, f"#stable_fast_{kind.lower()}", with_key="Enter" if kind == "Prepare" else "Space")
    page.until(lambda: f"{kind} Running" in page.job(), "it runs")
    press(page, "#stable_fast_cancel", most=4)
    page.until(lambda: f"{kind} Cancelled" in page.job(), "it is cancelled")
    page.image(f"{kind} cancelled")


def test_plans_are_dropped(page: Page) -> None:
    press(page, "#stable_fast_drop", "Shift+Tab")
    page.until(lambda: "None yet" in page.text("#stable_fast_view"), "the list is empty", 20)
    page.until(lambda: "Sizes forgotten:" in page.text("#stable_fast_dropped"), "it is told", 20)


def test_the_report_is_copied_and_the_tab_is_left(page: Page) -> None:
    page.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    press(page, "#stable_fast_report")
    report = "#stable_fast_report_text textarea"
    text = page.until(lambda: page.page.input_value(report), "the report is there", 20)
    assert "Settings" in text
    page.until(lambda: page.page.evaluate("navigator.clipboard.readText()") == text, "it is copied", 20)
    page.until(lambda: page.text("#stable_fast_copied") == "Copied", "it is told", 20)
    tab_to(page, report, most=4)
    page.image("report")
    for _ in range(4):
        page.page.keyboard.press("Tab")
    inside = "(tab) => document.querySelector(tab).contains(document.activeElement)"
    assert not page.page.evaluate(inside, page.tab)


def test_a_setting_is_changed(page: Page) -> None:
    if page.theme == "Modern":
        # its button for them is no button
        page.to_settings()
    else:
        press(page, named(page, "#tabs > .tab-nav button", "System" if page.theme else "Settings"), "Shift+Tab")
        press(page, named(page, "#settings > .tab-nav button", "Stable Fast"))
        page.until(lambda: page.page.is_visible("#setting_sfast_enabled"), "the settings are seen", 30)
    assert page.theme or not page.page.is_visible("#setting_sfast_triton")
    if not page.page.is_visible("#setting_sfast_triton"):
        press(page, "#setting_sfast_expert_heading .sfast-link")
        page.until(lambda: page.page.is_visible("#setting_sfast_triton"), "those for experts are seen", 10)
    switch, number = "#setting_sfast_triton input", "#setting_sfast_tolerance input[type=number]"
    slider = "#setting_sfast_tolerance input[type=range]"
    was = page.page.locator(switch).is_checked()
    press(page, switch, with_key="Space")
    assert page.page.locator(switch).is_checked() != was
    page.page.keyboard.press("Space")
    write(page, number, "0.05")
    tab_to(page, slider)
    page.page.keyboard.press("ArrowRight")
    page.until(lambda: float(page.page.input_value(number)) > 0.05, "the arrow moves it", 10)
    page.image("setting")
    press(page, "#settings_submit", "Shift+Tab")
    told = lambda: (page.page.text_content("#settings_result") or "").lower()
    page.until(lambda: "changed" in told(), "applied", 30)


def test_the_console_of_the_browser_has_no_error_of_ours(page: Page) -> None:
    assert page.errors == []
