"""*Prepare the last size after the start* in AUTOMATIC1111: the first image finds its plan and is the same. One that
begins while the plan is made waits for nothing."""

from __future__ import annotations

import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from .a1111 import MARKS, PLAIN, TOLERANCE, apart, count, start
from .webui import WebUI, add_extension

pytestmark = MARKS
ON_A_CPU = """
import importlib.util

if importlib.util.find_spec("sfast_ext"):
    from sfast_ext.jobs import ahead

    ahead.GPU_ALONE = False
"""
ON = {"sfast_allow_cpu": True, "sfast_ahead": True}
TENTH = 0.1
WIDE = {**PLAIN, "width": 192}
FIRST = {
    "plain": PLAIN,
    "lora": {**PLAIN, "prompt": PLAIN["prompt"] + " <lora:strong:1>"},
    "prompt": {**PLAIN, "prompt": "a dog in the rain, " * 30},
    "wide": WIDE,
}
CHECKPOINTS = ("tiny.ckpt", "wide.safetensors")


@pytest.fixture(scope="module")
def cpu(data: Path) -> Path:
    """The data folder, with an extension that lets models on a CPU be prepared too."""
    add_extension(data, "zz-ahead-on-cpu", ON_A_CPU)
    return data


@pytest.fixture(scope="module")
def stock(cpu: Path) -> dict[str, list[str]]:
    """Images without the extension, by the name of the request or of the checkpoint."""
    with start(cpu, "ahead-stock", {"disabled_extensions": ["stable-fast"]}) as webui:
        made = {name: webui.post("/sdapi/v1/txt2img", each)["images"] for name, each in FIRST.items()}
        for name in CHECKPOINTS:
            webui.post("/sdapi/v1/options", {"sd_model_checkpoint": name})
            made[name] = webui.post("/sdapi/v1/txt2img", PLAIN)["images"]
        return made


@pytest.fixture(scope="module")
def keeping(cpu: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder in which a process has kept its call."""
    folder = tmp_path_factory.mktemp("kept") / "cache"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SFAST_CACHE_DIR", str(folder))
        with start(cpu, "ahead-keep", ON) as webui:
            webui.post("/sdapi/v1/txt2img", PLAIN)
    assert list(folder.rglob("last_calls.json"))
    return folder


@pytest.fixture
def kept(cpu: Path, keeping: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The data folder; the cache folder is a copy of what that process has left."""
    shutil.copytree(keeping, tmp_path / "cache")
    monkeypatch.setenv("SFAST_CACHE_DIR", str(tmp_path / "cache"))
    return cpu


def job(webui: WebUI) -> dict[str, Any] | None:
    return webui.get("/sfast/v1/job")["job"]


def ready(webui: WebUI) -> dict[str, Any]:
    until = time.monotonic() + 300
    while time.monotonic() < until:
        found = job(webui)
        if found is not None and found["state"] not in ("waiting", "running"):
            return found
        time.sleep(TENTH)
    raise AssertionError((job(webui), webui.tail()))


def begun(webui: WebUI) -> None:
    until = time.monotonic() + 300
    while (found := job(webui)) is None or found["state"] != "running":
        assert time.monotonic() < until
        time.sleep(TENTH / 10)


def clean(webui: WebUI) -> dict[str, Any]:
    """The status, which has no fault of ours."""
    time.sleep(1.0)
    status: dict[str, Any] = webui.get("/sfast/v1/status")
    assert status["last_error"] is None, status["last_error"]
    assert not status["busy"]
    return status


def test_the_first_image_finds_its_plan_and_so_do_others(kept: Path, stock: dict[str, list[str]]) -> None:
    with start(kept, "ahead", ON) as webui:
        prepared = ready(webui)
        assert prepared["state"] == "done" and prepared["rows"][0]["ready"], prepared
        first = webui.post("/sdapi/v1/txt2img", PLAIN)
        assert apart(first["images"], stock["plain"]) < TOLERANCE
        assert count(clean(webui), "captures") == 1
        for name in ("lora", "prompt", "plain"):
            assert apart(webui.post("/sdapi/v1/txt2img", FIRST[name])["images"], stock[name]) < TOLERANCE, name
        clean(webui)


@pytest.mark.parametrize("name", ["lora", "prompt", "wide"])
def test_a_first_image_of_another_kind_is_the_same(kept: Path, stock: dict[str, list[str]], name: str) -> None:
    with start(kept, "ahead-other", ON) as webui:
        assert ready(webui)["state"] == "done"
        assert apart(webui.post("/sdapi/v1/txt2img", FIRST[name])["images"], stock[name]) < TOLERANCE
        clean(webui)


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_another_checkpoint_that_is_chosen_first_is_used(kept: Path, stock: dict[str, list[str]], name: str) -> None:
    with start(kept, "ahead-checkpoint", ON) as webui:
        assert ready(webui)["state"] == "done"
        webui.post("/sdapi/v1/options", {"sd_model_checkpoint": name})
        assert apart(webui.post("/sdapi/v1/txt2img", PLAIN)["images"], stock[name]) < TOLERANCE
        clean(webui)


@pytest.mark.parametrize("delay", [0.0, 0.3, 1.0])
def test_an_image_that_begins_meanwhile_is_made_at_once(kept: Path, stock: dict[str, list[str]], delay: float) -> None:
    with start(kept, "ahead-given-up", ON) as webui:
        begun(webui)
        time.sleep(delay)
        images: list[list[str]] = []
        asks = [
            threading.Thread(target=lambda: images.append(webui.post("/sdapi/v1/txt2img", PLAIN)["images"]))
            for _ in range(2)
        ]
        began = time.monotonic()
        for each in asks:
            each.start()
        until = began + 60
        while (found := job(webui)) and found["state"] == "running" and time.monotonic() < until:
            time.sleep(TENTH / 10)
        waited = time.monotonic() - began
        for each in asks:
            each.join(300)
        assert len(images) == 2 and all(apart(each, stock["plain"]) < TOLERANCE for each in images)
        status = clean(webui)
        print(f"after {delay} s: given up within {waited:.2f} s, {ready(webui)['state']}; {status['reasons']}")
        # it may have been ready already
        assert ready(webui)["state"] in ("cancelled", "done") and waited < 10
