"""Photographs of the extension in a running WebUI: its settings, the badge and the tab; for the README, and to look at.

    python tests/hosts/live/photograph.py http://127.0.0.1:7860 folder [--theme dark] [--width 400] [--generate]

Needs playwright, which is no dependency of the project, and a Chromium: CHROMIUM names one, else playwright's own is
used. Prints what the browser's console said of errors, what was not found, and how often the page asked for the status
while it was idle.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

CLICK = """([root, title]) => {
    const buttons = [...document.querySelectorAll(`${root} button`)];
    const found = buttons.filter((button) => button.textContent.trim() === title && button.offsetParent !== null);
    if (found.length > 0) found[0].click();
    return found.length;
}"""
IDLE_MS = 5000
IMAGE_MS = 240_000


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("url")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--theme", choices=("light", "dark"), default="light")
    parser.add_argument("--width", type=int, default=1200)
    parser.add_argument("--generate", action="store_true", help="make two images first")
    arguments = parser.parse_args()

    from playwright.sync_api import sync_playwright

    arguments.folder.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=os.environ.get("CHROMIUM"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": arguments.width, "height": 1000}, device_scale_factor=1)
        errors: list[str] = []
        asked: list[str] = []
        missing: list[str] = []
        page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("response", lambda answer: missing.append(answer.url) if answer.status >= 400 else None)
        page.on("request", lambda request: asked.append(request.url) if "/sfast/" in request.url else None)
        page.goto(f"{arguments.url}/?__theme={arguments.theme}", timeout=180_000)
        page.wait_for_selector(".sfast-badge .sfast-state", state="attached", timeout=90_000)
        page.wait_for_timeout(3000)
        if arguments.generate:
            _generate(page)
        before = len(asked)
        page.wait_for_timeout(IDLE_MS)
        print(f"requests in {IDLE_MS / 1000:.0f} s of idleness: {len(asked) - before}")
        _photograph(page, arguments.folder, f"{arguments.theme}-{arguments.width}")
        print(f"errors in the console: {errors}; not found: {missing}")
        browser.close()


def _generate(page: Any) -> None:
    said: list[str] = []
    for _ in range(2):
        page.locator("#txt2img_generate").click()
        for _ in range(IMAGE_MS // 250):
            text = page.locator(".sfast-badge .sfast-text").first.inner_text()
            if not said or said[-1] != text:
                said.append(text)
            page.wait_for_timeout(250)
            if page.evaluate("async () => !(await (await fetch('./sfast/v1/status')).json()).busy") and len(said) > 1:
                break
        page.wait_for_timeout(4000)
        said.append(page.locator(".sfast-badge .sfast-text").first.inner_text())
    print(f"the badge said: {said}")


def _photograph(page: Any, folder: Path, name: str) -> None:
    badge = page.locator(".sfast-badge").first
    _of(page, "#txt2img_actions_column", folder / f"badge-{name}.png")
    badge.locator(".sfast-state").focus()
    page.wait_for_timeout(700)
    page.screenshot(path=folder / f"details-{name}.png")
    page.keyboard.press("Escape")
    if page.evaluate(CLICK, ["#tabs", "Stable Fast"]):
        page.wait_for_timeout(2500)
        _of(page, "#tab_stable_fast", folder / f"tab-{name}.png")
        page.locator("#stable_fast_report").click()
        page.wait_for_timeout(2000)
        print(page.locator("#stable_fast_report_text textarea").input_value()[:1500])
        page.locator("#stable_fast_drop").click()
        page.wait_for_timeout(2000)
        print(page.locator("#stable_fast_dropped").last.inner_text())
    if page.evaluate(CLICK, ["#tabs", "Settings"]):
        page.wait_for_timeout(1500)
        page.evaluate(CLICK, ["#settings", "Stable Fast"])
        page.wait_for_timeout(1500)
        _of(page, "#column_settings_stable_fast", folder / f"settings-{name}.png")


def _of(page: Any, selector: str, file: Path) -> None:
    """A photograph of the whole of an element, also of what is below the screen; of what is seen if there is none."""
    found = page.locator(selector)
    if found.count() and found.first.is_visible():
        found.first.screenshot(path=file)
    else:
        page.screenshot(path=file, full_page=True)


if __name__ == "__main__":
    main()
