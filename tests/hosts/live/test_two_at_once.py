"""Two WebUIs of one kind on this machine at once, as for two cards, with one empty cache folder: both start together,
and make the same images at the same time. See `a1111.py`, `sdnext.py` and `forge.py` for where the WebUIs are."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from . import a1111, forge, sdnext
from .a1111 import TOLERANCE, count
from .webui import WebUI, difference

HOSTS = {
    "a1111": a1111.HOST,
    "sdnext": sdnext.HOST,
    "forge-neo": forge.NEO.folder,
    "forge": forge.OLD.folder,
}
pytestmark = pytest.mark.hosts
STEPS = [
    {"seed": 1},
    {"seed": 2, "prompt": "a ship at night"},
    {"seed": 3, "width": 192},
    {"seed": 4, "width": 192, "prompt": "a tree"},
]


def started(name: str, folder: Path, factory: pytest.TempPathFactory) -> WebUI:
    """One WebUI, with data that no other has."""
    settings = {"sfast_allow_cpu": True}
    if name == "sdnext":
        return sdnext.start(sdnext.make_data(factory), settings, extension=True)
    if name == "a1111":
        models = folder / "models"
        models.mkdir(parents=True)
        a1111.make_models(models)
        (folder / "data").mkdir()
        return a1111.start(a1111.make_data(folder / "data", models), "one", settings)
    folder.mkdir()
    program = forge.NEO if name == "forge-neo" else forge.OLD
    return forge.start(forge.make(folder, program), "one", settings, program)


@dataclass
class Pair:
    """What both made of each step, and their status at the end."""

    images: list[list[list[str]]] = field(default_factory=list)
    reports: list[dict[str, Any]] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    failed: list[BaseException] = field(default_factory=list)


def together(actions: list[Any], failed: list[BaseException]) -> None:
    """Run these in a thread each."""

    def run(action: Any) -> None:
        try:
            action()
        except BaseException as exc:
            failed.append(exc)

    threads = [threading.Thread(target=run, args=(action,)) for action in actions]
    for each in threads:
        each.start()
    for each in threads:
        each.join()


@pytest.fixture(scope="module", params=sorted(HOSTS))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    name = request.param
    if not HOSTS[name]:
        pytest.skip(f"no {name} is named")
    found, folder = Pair(), tmp_path_factory.mktemp(name)
    plain = sdnext.PLAIN if name == "sdnext" else a1111.PLAIN
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as stack:
        patch.setenv("SFAST_CACHE_DIR", str(folder / "cache"))
        webuis = [started(name, folder / f"data{i}", tmp_path_factory) for i in range(2)]
        for each in webuis:
            stack.callback(each.__exit__)
        together([each.__enter__ for each in webuis], found.failed)
        if not found.failed and name == "sdnext":
            together([lambda each=each: sdnext.model_loaded(each) for each in webuis], found.failed)
        for step in STEPS if not found.failed else []:
            made: list[list[str]] = [[], []]

            def make(i: int, step: dict[str, Any] = step, made: list[list[str]] = made) -> None:
                made[i] = webuis[i].post("/sdapi/v1/txt2img", {**plain, **step})["images"]

            together([lambda i=i: make(i) for i in range(2)], found.failed)
            found.images.append(made)
        time.sleep(a1111.STATUS_KEPT_S)
        if not found.failed:
            found.reports = [each.get("/sfast/v1/status") for each in webuis]
        found.files = sorted(os.listdir(folder / "cache")) if (folder / "cache").is_dir() else []
        yield found


def test_both_start_and_make_the_same_images(pair: Pair) -> None:
    assert not pair.failed, pair.failed
    for one, other in pair.images:
        assert len(one) == len(other) > 0
        assert max(difference(a, b) for a, b in zip(one, other)) < TOLERANCE


def test_both_are_accelerated_and_nothing_failed(pair: Pair) -> None:
    for report in pair.reports:
        assert count(report, "plans run") > 0, report["reasons"]
        assert report["last_error"] is None and report["counters"].get("errors", 0) == 0


def test_no_half_written_file_stays(pair: Pair) -> None:
    assert not [name for name in pair.files if name.startswith(".") and name != ".turn"], pair.files
