"""What the README tells a new user to do, in a fresh AUTOMATIC1111: to install, make images, find out why one is not
faster, empty the list of plans, send a report, and remove it all. What is clicked is found by the words that it shows.

What is installed is the last commit of this checkout.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("PIL")
from . import a1111
from .browser import CHROMIUM, OURS, Page, opened
from .pages import quick
from .webui import WebUI

pytestmark = [*a1111.MARKS, pytest.mark.skipif(not CHROMIUM, reason="SFAST_CHROMIUM names no Chromium")]
NAME = "stable-fast-webui"


class User:
    """A user's WebUI, which is started and closed, and the page in a browser."""

    def __init__(self, folder: Path) -> None:
        self._models, self.data, self._images = folder / "models", folder / "data", folder / "images"
        for each in (self._models, self.data, self._images):
            each.mkdir()
        a1111.make_models(self._models)
        a1111.make_data(self.data, self._models)
        (self.data / "extensions" / "stable-fast").unlink()
        self.repository = folder / NAME
        command = ["git", "clone", "--quiet", f"file://{a1111.CHECKOUT}", str(self.repository)]
        subprocess.run(command, check=True, timeout=120)
        self.settings = self.data / "fresh.json"
        self._open = contextlib.ExitStack()
        self.webui: WebUI
        self.page: Page

    def start(self) -> str:
        """Start the WebUI and open its page. Returns what the console says."""
        kept = json.loads(self.settings.read_text("utf-8")) if self.settings.exists() else {}
        # --server-name closes its tab Extensions, as --listen does
        flags = f"{a1111.FLAGS} --enable-insecure-extension-access"
        self.webui = self._open.enter_context(a1111.start(self.data, "fresh", kept, "--gradio-queue", flags))
        self.page = self._open.enter_context(opened(self.webui.url, "", self._images))
        self.page.page.goto(self.webui.url, timeout=180_000, wait_until="domcontentloaded")
        self.page.page.wait_for_selector("#txt2img_generate", timeout=120_000)
        self.page.page.wait_for_timeout(3000)
        return self.webui.log()

    def close(self) -> None:
        """Close both."""
        self._open.close()
        self._images = self._images.with_name(f"{self._images.name}-next")

    def tabs(self, *names: str) -> None:
        """Open a tab, and one in it."""
        for name in names:
            self.page.click("button", name)
            self.page.page.wait_for_timeout(500)

    def details(self) -> str:
        """What the badge says when it is pointed at."""
        badge = self.page.page.locator(self.page.own_badge).first
        badge.hover()
        self.page.page.wait_for_timeout(800)
        self.page.image("details")
        return str(badge.locator(".sfast-details").inner_text())


@pytest.fixture(scope="module")
def user(tmp_path_factory: pytest.TempPathFactory) -> Iterator[User]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SFAST_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        user = User(tmp_path_factory.mktemp("user"))
        try:
            yield user
        finally:
            user.close()


def test_it_is_installed_from_its_address(user: User) -> None:
    user.start()
    user.tabs("Extensions", "Install from URL")
    user.page.page.get_by_label("URL for extension's git repository").fill(str(user.repository))
    user.page.click("button", "Install")
    user.page.until(lambda: "Installed into" in user.page.page.inner_text("#tab_extensions"), "it is installed", 60)
    user.page.image("installed")
    user.close()
    assert (user.data / "extensions" / NAME / "install.py").is_file()


def test_the_console_and_the_badge_say_what_is_there(user: User) -> None:
    log = user.start()
    (line,) = [each for each in log.splitlines() if "Stable Fast 0." in each]
    assert "torch finds no NVIDIA GPU" in line or "NVIDIA" in line, line
    assert "Traceback" not in log
    user.page.until(lambda: user.page.badge() not in ("", "…"), "the badge has an answer")
    said = user.details()
    assert "What to do" in said and "Open the tab Stable Fast" in said, said


def test_without_a_gpu_it_is_tried_on_the_cpu(user: User) -> None:
    user.page.to_settings()
    user.page.image("settings")
    box = user.page.page.get_by_label("Also run on the CPU")
    box.check()
    user.page.click("button", "Apply settings")
    user.page.page.wait_for_timeout(2000)
    user.page.to_images()
    user.page.until(lambda: user.page.badge() == "ready", "the badge follows", 30)
    quick(user.page)
    user.page.generate()
    assert user.page.generate()[-1].endswith("it/s")


def test_why_an_image_with_a_hypernetwork_is_not_faster(user: User) -> None:
    said = user.page.generate("a dog <hypernet:hyper:1>")
    assert said[-1].startswith("original: a hypernetwork is active: hyper"), said
    assert "remove it from the prompt" in user.details()
    with user.page.page.context.expect_page() as opening:
        user.page.page.locator(user.page.own_badge).first.get_by_text("What to do").click()
    told = opening.value
    told.wait_for_load_state()
    entry = told.locator("#hypernetwork")
    assert "hypernetwork" in told.url and entry.evaluate("(each) => each.getBoundingClientRect().top") < 300
    assert "Remove <hypernet:…> from the prompt" in told.inner_text("body")
    told.close()
    user.page.page.mouse.move(0, 0)


def test_the_list_of_plans_is_emptied_and_a_report_is_copied(user: User) -> None:
    user.page.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    user.tabs("Stable Fast")
    user.page.until(lambda: "128×128" in user.page.text("#stable_fast_view"), "the plans are listed", 30)
    user.page.image("tab")
    user.page.click("button", "Forget all ready sizes")
    user.page.until(lambda: "None yet" in user.page.text("#stable_fast_view"), "the list is empty", 20)
    user.page.click("button", "Copy a report")
    copied = user.page.until(lambda: user.page.page.evaluate("navigator.clipboard.readText()"), "it is copied", 20)
    assert copied == user.page.page.input_value("#stable_fast_report_text textarea")
    assert "a hypernetwork is active: <name>" in copied and "hyper.pt" not in copied and "a dog" not in copied
    # what a form asks for
    for asked in ("Stable Fast 0.", "1.10", "torch", "Settings"):
        assert asked in copied, asked


def test_it_is_removed(user: User) -> None:
    assert user.page.errors == []
    user.tabs("Extensions", "Installed")
    user.page.page.locator(f"input[name='enable_{NAME}']").uncheck()
    user.page.image("unticked")
    user.page.page.locator("#tab_extensions button", has_text="Apply and").first.click()
    user.page.page.wait_for_timeout(4000)
    user.close()
    log = user.start()
    assert "Stable Fast 0." not in log and user.page.page.query_selector(".sfast-badge") is None
    user.close()
    shutil.rmtree(user.data / "extensions" / NAME)
    log = user.start()
    assert "Traceback" not in log and user.page.page.query_selector("#tab_stable_fast") is None
    user.page.to_images()
    user.page.page.fill("#txt2img_prompt textarea", "a dog")
    quick(user.page)
    user.page.click("button", "Generate")
    gallery = "#txt2img_gallery img"
    user.page.until(lambda: user.page.page.query_selector(gallery), "the WebUI makes images as before", 120)
    # what the README says that stays
    stays = [key for key in json.loads(user.settings.read_text("utf-8")) if OURS.search(key)]
    assert stays and all(key.startswith("sfast_") for key in stays), stays
    assert not OURS.search((user.data / "ui-config.json").read_text("utf-8"))
