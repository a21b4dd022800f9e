"""The steps of a user on a small page of each Gradio that a WebUI has, with the real session, settings, tab, API and
JavaScript: see `hosts/live/small_page.py`. A browser takes them in `hosts/live/test_browser.py`; here its part is taken
by Gradio's own description of the page, and by node.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest
from hosts.live.webui import WebUI
from test_javascript import run

from sfast_ext.ui import settings_table

from .steps import Page

ROOT = Path(__file__).parents[2]
PYTHONS = [each for each in os.environ.get("SFAST_GRADIO_PYTHON", "").split(os.pathsep) if each]
VERSIONS = ("3.41.2", "3.43.2")
GENERATE, SIZES, INFOTEXT = "txt2img_generate", "stable_fast_sizes", "html_info_txt2img"


def until(holds, seconds=60):
    """Wait until something holds, and return what it gives."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        found = holds()
        if found:
            return found
        time.sleep(0.1)
    raise AssertionError(f"not within {seconds} s")


def badge(page):
    return page.api("status")["badge"]["text"]


def drawn(page, script=""):
    """What the real JavaScript makes of what the page answers, once the tab is seen."""
    shown = """
        observers.forEach((each) => each([{isIntersecting: true}]));
        await settle();
        shown.badge = byClass('sfast-text', badges()[0]).textContent;
        shown.tab = document.getElementById('stable_fast_view').textContent;
        shown.job = document.getElementById('stable_fast_job').textContent;
    """
    kept = {**page.api("comparison"), "measurements": page.api("measurements")}
    return run(shown + script, {**page.api("status"), **kept})


def job(page, state):
    """The job, once it is in this state."""
    return until(lambda: (page.api("job")["job"] or {}).get("state") == state and page.api("job")["job"])


def the_page_has_it_all(page):
    assert page.config["version"] in VERSIONS
    for file in (ROOT / "javascript").glob("*.js"):
        assert file.read_text(encoding="utf-8") in page.html, file.name
    for setting in settings_table.ALL:
        assert setting.label in page.named(f"setting_{setting.key}")["label"]
    assert badge(page) == drawn(page)["badge"] == "ready"


def a_image_shows_its_stages_and_the_next_its_pace(page):
    said = set()
    image = threading.Thread(target=page.click, args=[GENERATE])
    image.start()
    while image.is_alive():
        said.add(badge(page))
        time.sleep(0.1)
    assert any(text.startswith("preparing 128x128") for text in said), said
    page.click(GENERATE)
    shown = drawn(page)
    assert shown["badge"].endswith("it/s") and "128×128,|1|image,|77|tokens|(last image)" in shown["tab"]


def sizes_are_prepared_measured_and_cancelled(page):
    page.fill(SIZES, "192x128")
    page.fill("stable_fast_tokens", ["150"])
    scripts = page.click("stable_fast_prepare")
    assert page.shown("stable_fast_told") == ""
    # each of the scripts that buttons run is one that the page has
    drawn(page, "".join(f"await ({script})();" for script in scripts))
    (row,) = job(page, "done")["rows"]
    assert row["label"] == "192x128, 1 image, 154 tokens"
    assert "Prepare|Done|1 / 1" in drawn(page)["job"]
    page.fill("stable_fast_tokens", [])
    page.click("stable_fast_measure")
    job(page, "done")
    shown = drawn(page)["job"]
    assert "Measurements that were kept" in shown and "The last measurement" in shown and "14.8 ms|2.1×" in shown
    assert "Over time" not in shown
    page.click("stable_fast_measure")
    job(page, "done")
    assert "Over time|·|192×128,|1|image" in drawn(page)["job"]
    page.fill(SIZES, "256x256, 320x320, 384x384, 448x448")
    page.click("stable_fast_measure")
    job(page, "running")
    page.click("stable_fast_cancel")
    assert page.shown("stable_fast_told") == "Cancelled."
    job(page, "cancelled")
    assert "Measure|Cancelled" in drawn(page)["job"]
    page.fill(SIZES, "<img>")
    page.click("stable_fast_prepare")
    assert "Not started:" in page.shown("stable_fast_told") and "<img>" not in page.shown("stable_fast_told")
    assert 'data-field="stable_fast_sizes"' in page.shown("stable_fast_told")


def the_last_image_is_compared(page):
    page.click("stable_fast_compare")
    assert page.shown("stable_fast_told") == ""
    assert [row["label"] for row in job(page, "done")["rows"]] == ["without Stable Fast", "with Stable Fast"]
    shown = drawn(page)["job"]
    assert "2.1×|faster" in shown and "Mean difference of the pixels:|0.0" in shown and "of 255" in shown
    assert "With Stable Fast|·" in shown and "Without Stable Fast|·" in shown
    for name in ("accelerated", "original"):
        assert page.file(f"comparison/{name}.png").startswith(b"\x89PNG")


def plans_are_dropped_and_the_report_is_given(page):
    assert page.api("plans")
    page.click("stable_fast_drop")
    assert page.api("plans") == [] and "Sizes forgotten:" in page.shown("stable_fast_dropped")
    assert "None yet" in drawn(page)["tab"]
    page.click("stable_fast_report")
    report = page.shown("stable_fast_report_text")
    assert "Settings" in report and "a dog" not in report


def a_changed_setting_is_in_the_infotext_and_is_restored_from_it(page):
    page.fill("setting_sfast_tolerance", 0.05)
    page.click("settings_submit")
    page.click(GENERATE)
    written = page.shown(INFOTEXT)
    assert "Stable Fast tolerance: 0.05" in written
    page.fill("setting_sfast_tolerance", 0.02)
    page.click("settings_submit")
    page.click(GENERATE)
    assert "Stable Fast tolerance" not in page.shown(INFOTEXT)
    page.fill("txt2img_prompt", "a dog on a hill\nSteps: 6, Stable Fast tolerance: 0.05")
    page.click("paste")
    page.click(GENERATE)
    assert page.shown(INFOTEXT) == written


@pytest.mark.parametrize("python", PYTHONS, ids=lambda python: Path(python).parents[1].name)
def test_what_a_user_does(python, tmp_path, monkeypatch):
    monkeypatch.setenv("SFAST_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("SFAST_SMALL_PAGE_PACE", "0.3")
    command = [python, str(ROOT / "tests" / "hosts" / "live" / "small_page.py")]
    with WebUI(command, tmp_path, tmp_path / "log", ready="/sfast/v1/status") as webui:
        page = Page(webui.url)
        for field, value in {"prompt": "a dog on a hill", "width": 128, "height": 128}.items():
            page.fill(f"txt2img_{field}", value)
        the_page_has_it_all(page)
        a_image_shows_its_stages_and_the_next_its_pace(page)
        sizes_are_prepared_measured_and_cancelled(page)
        the_last_image_is_compared(page)
        plans_are_dropped_and_the_report_is_given(page)
        a_changed_setting_is_in_the_infotext_and_is_restored_from_it(page)
