"""*Compare the last image with and without* in the WebUIs that are not AUTOMATIC1111, through their API."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("PIL")
from . import forge, sdnext
from .a1111 import PLAIN, TOLERANCE, apart
from .webui import WebUI, encoded

FORGES = {"neo": forge.NEO, "classic": forge.CLASSIC, "forge": forge.OLD, "reforge": forge.REFORGE}
HOSTS = [
    pytest.param("sdnext", marks=sdnext.MARKS),
    *(pytest.param(name, marks=program.marks) for name, program in FORGES.items()),
]
OFF = {**PLAIN, "override_settings": {"sfast_enabled": False}}
SEEDS = {**PLAIN, "seed": -1}


@contextlib.contextmanager
def running(name: str, factory: pytest.TempPathFactory) -> Iterator[WebUI]:
    """A WebUI with a model."""
    if name == "sdnext":
        with sdnext.start(sdnext.make_data(factory), {}, extension=True) as webui:
            sdnext.model_loaded(webui)
            yield webui
        return
    data = forge.make(factory.mktemp(name), FORGES[name])
    with forge.start(data, "compare", {"sfast_allow_cpu": True}, FORGES[name]) as webui:
        yield webui


@pytest.fixture(scope="module", params=HOSTS)
def webui(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WebUI]:
    """It is up."""
    with running(request.param, tmp_path_factory) as webui:
        yield webui


def ended(webui: WebUI) -> dict[str, Any]:
    """The job, once it is over."""
    until = time.monotonic() + 600
    while time.monotonic() < until:
        job: dict[str, Any] = webui.get("/sfast/v1/job")["job"]
        if job["state"] not in ("waiting", "running"):
            return job
        time.sleep(0.2)
    raise AssertionError(job)


@pytest.mark.parametrize("asked", [PLAIN, OFF, SEEDS], ids=["plain", "off", "any seed"])
def test_the_last_image_is_compared_with_the_webui_s_own(webui: WebUI, asked: dict[str, Any]) -> None:
    last = webui.post("/sdapi/v1/txt2img", asked)["images"]
    webui.post("/sfast/v1/compare", {})
    job = ended(webui)
    assert job["state"] == "done", (job, webui.tail())
    found = webui.get("/sfast/v1/comparison")["comparison"]
    assert found["same_request"] and found["mean_difference"] < TOLERANCE, found
    assert found["accelerated"]["steps"]["accelerated"] > 0 and found["original"]["steps"]["accelerated"] == 0, found
    for name in ("accelerated", "original"):
        assert apart([encoded(webui.image(f"/sfast/v1/comparison/{name}.png"))], last[:1]) < TOLERANCE, name
    time.sleep(1)
    status = webui.get("/sfast/v1/status")
    assert status["enabled"] and status["last_error"] is None
