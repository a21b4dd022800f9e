"""The pages on which the tests in a browser take their steps: the real WebUIs', and small ones of Gradio alone."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("PIL")
from . import a1111, sdnext
from .browser import CHROMIUM, Page
from .webui import WebUI

MARKS = [
    pytest.mark.hosts,
    pytest.mark.skipif(not CHROMIUM, reason="SFAST_CHROMIUM names no Chromium"),
]
PYTHONS = [each for each in os.environ.get("SFAST_GRADIO_PYTHON", "").split(os.pathsep) if each]
"""Interpreters with a Gradio that a WebUI has, for `small_page.py`."""
MODERN = Path(sdnext.HOST or "") / "extensions-builtin" / "sdnext-modernui" / "html"
HOSTS = [
    pytest.param("AUTOMATIC1111", marks=a1111.MARKS),
    pytest.param("Standard", marks=sdnext.MARKS),
    # a submodule of SD.Next's
    *([pytest.param("Modern", marks=sdnext.MARKS)] if sdnext.HOST and MODERN.is_dir() else []),
    *(f"small page {number}" for number in range(len(PYTHONS))),
]
THEMES = {"Standard": ("simple-light", "black-teal"), "Modern": ("Eoan-Light", "Default")}
"""SD.Next's two pages, and for each a theme that is chosen while it is open, and its own again."""
SET = """(input, value) => {
    input.value = value;
    input.dispatchEvent(new Event('input', {bubbles: true}));
    input.dispatchEvent(new Event('blur', {bubbles: true}));
}"""
QUICK = {"steps": "6", "width": "128", "height": "128"}


@contextlib.contextmanager
def running(name: str, factory: pytest.TempPathFactory) -> Iterator[WebUI]:
    """A WebUI that is up."""
    if name.startswith("small page"):
        command = [PYTHONS[int(name.split()[-1])], str(Path(__file__).with_name("small_page.py"))]
        with WebUI(command, Path(__file__).parent, factory.mktemp("small") / "log", ready="/sfast/v1/status") as webui:
            yield webui
        return
    if name == "AUTOMATIC1111":
        models = factory.mktemp("models")
        a1111.make_models(models)
        data = a1111.make_data(factory.mktemp("a1111"), models)
        with a1111.start(data, "page", {"sfast_allow_cpu": True}, "--gradio-queue") as webui:
            yield webui
        return
    data = sdnext.make_data(factory)
    settings = {"theme_type": name, "gradio_theme": "Default", "show_progress_type": "Approximate"}
    # of the modern theme, which shows the tab Control alone at first
    settings["uiux_hide_legacy"] = False
    with sdnext.start(data, settings, extension=True) as webui:
        sdnext.model_loaded(webui)
        yield webui


def quick(page: Page, **size: str) -> None:
    """Set a small image of few steps."""
    for field, value in {**QUICK, **size}.items():
        page.page.locator(f"#txt2img_{field} input[type=number]").first.evaluate(SET, value)


def choose(page: Page, dropdown: str, value: str) -> None:
    """Choose in a dropdown of gradio's."""
    page.page.locator(f"{dropdown} input").first.click()
    page.page.locator(f"{dropdown} ul.options li", has_text=value).first.click()
    page.page.wait_for_timeout(800)


STOPS = """(tab) => {
    const all = [...document.querySelector(tab).querySelectorAll('a, button, input, textarea')];
    const seen = all.filter((each) => each.offsetParent !== null && !each.id.startsWith('modification_indicator_'));
    return {reached: seen.length, behind: seen.filter((each) => each.tabIndex < 0).map((each) => each.outerHTML)};
}"""
