"""A WebUI's page in a real browser: finds its tabs, clicks, takes an image of each step, keeps what the console says.

SFAST_CHROMIUM   a Chromium or Chrome; playwright drives it, which is no package of the project
SFAST_AXE        axe.min.js of axe-core; without it nothing is checked for accessibility
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

CHROMIUM = os.environ.get("SFAST_CHROMIUM")
AXE = os.environ.get("SFAST_AXE") or None
OURS = re.compile(r"stable_?fast|sfast", re.IGNORECASE)
SERIOUS = ("serious", "critical")

CLICK = """([selector, text]) => {
    const all = [...document.querySelectorAll(selector)].filter((each) => each.offsetParent !== null);
    const found = all.find((each) => !text || each.textContent.trim() === text);
    if (found) found.click();
    return Boolean(found);
}"""
FOLLOW = """() => stableFast.onStatus((status) => {
    const {eager_runs, replays, captures, fallbacks} = status.counters;
    window.sfastSteps = [eager_runs, replays, captures, fallbacks].reduce((sum, each) => sum + (each || 0), 0);
    window.sfastBusy = status.busy;
})"""
FAULTS = """async (selector) => {
    // SD.Next's own mark beside each changed setting has no name
    const place = {include: [selector], exclude: ['[id^="modification_indicator_"]']};
    const found = await axe.run(place, {resultTypes: ['violations']});
    return found.violations.map((each) => [
        each.impact, each.id, each.nodes.map((node) => `${node.target.join(' ')}: ${node.failureSummary}`).join('; ')
    ]);
}"""


class Page:
    """One page of a WebUI.

    Args:
        theme: "" (the host's only page), "Standard" or "Modern" (SD.Next's two).
        images: the folder for the images of the steps.
    """

    def __init__(self, page: Any, url: str, theme: str, images: Path) -> None:
        self.page, self.url, self.theme, self._images = page, url, theme, images
        self.tab = "#tab_stable_fast_tabitem" if theme == "Modern" else "#tab_stable_fast"
        # the modern theme moves it
        self.own_badge = f"#txt2img_{'generate_group' if theme == 'Modern' else 'actions_column'} .sfast-badge"
        self.settings = "#settings_section_tab_stable_fast" if theme else "#column_settings_stable_fast"
        self.errors: list[str] = []
        """What the console said of us."""
        self.starts: Callable[[], int] = lambda: 0
        """How often the WebUI has started its server."""
        self._number = 0
        page.on("console", lambda message: self._said(message.text, message.location) if message.type == "error" else 0)
        page.on("pageerror", lambda error: self._said(f"{error} {getattr(error, 'stack', '')}", {}))

    def _said(self, text: str, location: dict[str, Any]) -> None:
        said = f"{text} ({location.get('url', '')})"
        if OURS.search(said):
            self.errors.append(said)

    def open(self, query: str = "") -> None:
        """Load the page, and wait for the badge."""
        self.page.goto(f"{self.url}/{query}", timeout=180_000, wait_until="domcontentloaded")
        self.page.wait_for_selector(".sfast-badge .sfast-state", state="attached", timeout=180_000)
        self.until(lambda: self.badge() not in ("", "…"), "the badge has an answer")

    def image(self, name: str) -> None:
        """Take an image of what is seen now."""
        self._number += 1
        self.page.screenshot(path=self._images / f"{self._number:02}-{name}.png", timeout=60_000)

    def until(self, holds: Callable[[], Any], what: str, seconds: float = 120) -> Any:
        """Wait until something holds, and return what it gives."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            found = holds()
            if found:
                return found
            self.page.wait_for_timeout(100)
        raise AssertionError(f"not within {seconds:.0f} s: {what}; badge: {self.badge()!r}")

    def click(self, selector: str, text: str = "") -> None:
        """Click the first of these that is seen, as tabs of the hosts move while others open."""
        what = f"{selector} {text}"
        self.until(lambda: self.page.evaluate(CLICK, [selector, text]), f"{what} can be clicked", 30)

    def fill(self, selector: str, value: str) -> None:
        """Write into a field, and leave it."""
        self.page.fill(selector, value, timeout=20_000)
        self.page.locator(selector).first.blur()

    def text(self, selector: str) -> str:
        """What is written there."""
        return str(self.page.locator(selector).first.inner_text(timeout=20_000))

    def badge(self) -> str:
        """What the badge of txt2img says."""
        found = self.page.query_selector(".sfast-badge .sfast-text")
        return "" if found is None else (found.text_content() or "").strip()

    def job(self) -> str:
        """What is said of Prepare or Measure, on one line."""
        return " ".join(self.text("#stable_fast_job").split())

    def to_images(self) -> None:
        """Open the tab in which images are made."""
        if self.theme == "Modern":
            self.click('button[tabitemid*="#txt2img_tabitem"]')
        else:
            self.click("#tabs > .tab-nav button", "Text" if self.theme else "txt2img")
        self.until(lambda: self.page.is_visible("#txt2img_prompt textarea"), "the prompt is seen", 30)

    def to_tab(self) -> None:
        """Open the tab Stable Fast."""
        if self.theme == "Modern":
            self.click('button[tabitemid*="#tab_stable_fast_"]')
        else:
            self.click("#tabs > .tab-nav button", "Stable Fast")
        self.until(lambda: "Ready sizes" in self.text("#stable_fast_view"), "the tab is drawn", 30)

    def to_settings(self, section: str = "Stable Fast", setting: str = "#setting_sfast_enabled") -> None:
        """Open a section of the settings, which has this setting."""
        if self.page.is_visible(setting):
            return
        if self.theme == "Modern":
            # its button would close them
            # exactly: the system's panel, which stays open over a restart, has a "User interface" too
            if self.page.locator(".tab-nav button:visible", has_text=re.compile(rf"^\s*{section}\s*$")).count() == 0:
                self.click("#btn_settings")
        else:
            self.click("#tabs > .tab-nav button", "System" if self.theme else "Settings")
        # the modern theme has them beside the page
        self.click(".tab-nav button" if self.theme == "Modern" else "#settings > .tab-nav button", section)
        self.until(lambda: self.page.is_visible(setting), "the settings are seen", 30)
        experts = '#setting_sfast_expert_heading .sfast-link[aria-expanded="false"]'
        if self.page.is_visible(experts):
            self.page.click(experts)

    def apply(self) -> None:
        """Apply the settings."""
        self.click("#settings_submit")
        # what is told may be of the time before
        self.page.wait_for_timeout(1500)
        self.until(lambda: "changed" in (self.page.text_content("#settings_result") or "").lower(), "applied", 30)

    def generate(self, prompt: str = "a dog on a hill", tab: str = "txt2img") -> list[str]:
        """Make an image. Returns what the badge and the progress bar said meanwhile."""
        self.fill(f"#{tab}_prompt textarea", prompt)
        said: list[str] = []
        # what the page itself asks for: SD.Next answers a client so many times a minute
        self.page.evaluate(FOLLOW)
        before = self.page.evaluate("window.sfastSteps")
        self.click(f"#{tab}_generate")
        end = time.monotonic() + 240
        while time.monotonic() < end:
            bar = self.page.query_selector("#txt2img_results .progressDiv .progress")
            for text in (self.badge(), "" if bar is None else (bar.text_content() or "").strip()):
                if text and text not in said:
                    said.append(text)
            if self.page.evaluate("!window.sfastBusy") and self.page.evaluate("window.sfastSteps") > before:
                break
            self.page.wait_for_timeout(100)
        # the page asks once more after the end
        self.page.wait_for_timeout(2500)
        return [*said, self.badge()]

    def infotext(self) -> str:
        """What is written below the image."""
        return self.page.locator("#html_info_txt2img, #html_info_formatted_txt2img").last.inner_text(timeout=20_000)

    def accessible(self, selector: str) -> None:
        """Check that axe-core finds nothing serious in what is ours."""
        assert self.page.query_selector(selector) is not None, selector
        if AXE is None:
            return
        # colours of a button that is pointed at are the host's
        self.page.mouse.move(0, 0)
        if not self.page.evaluate("typeof axe === 'object'"):
            self.page.evaluate(Path(AXE).read_text(encoding="utf-8"))
        faults = [fault for fault in self.page.evaluate(FAULTS, selector) if fault[0] in SERIOUS]
        assert not faults, faults


@contextlib.contextmanager
def opened(url: str, theme: str, images: Path) -> Iterator[Page]:
    """A page of the WebUI in a browser of its own, without a network beside this machine."""
    from playwright.sync_api import sync_playwright

    local = "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", local])
        try:
            yield Page(browser.new_page(viewport={"width": 1300, "height": 950}), url, theme, images)
        finally:
            browser.close()
