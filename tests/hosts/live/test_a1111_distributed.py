"""A batch over two AUTOMATIC1111, this checkout in both, by stable-diffusion-webui-distributed.

See `distributed.py` and `a1111.py` for what it needs. Both WebUIs are on this machine; `pytest -s` prints what each did
in each step.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from . import a1111
from .a1111 import MARKS, PLAIN, TOLERANCE, count, told
from .distributed import CHECKOUT, Killed, add_engine, kill, packages, texts
from .webui import WebUI, difference

pytestmark = [*MARKS, pytest.mark.skipif(not CHECKOUT, reason="SFAST_DISTRIBUTED_DIR names no checkout")]

PAIR = {**PLAIN, "batch_size": 2}
"""One image for each machine."""
STEPS: list[tuple[str, dict[str, Any]]] = [
    ("first", PAIR),
    ("another prompt", {**PAIR, "prompt": "a ship at night", "seed": 5}),
    ("a LoRA", told("", "<lora:strong:0.7>", batch_size=2)[2]),
    ("its weight", told("", "<lora:strong:-0.4>", batch_size=2)[2]),
    ("another LoRA", told("", "<lora:lokr:0.8>", batch_size=2, seed=9)[2]),
    ("no LoRA again", {**PAIR, "seed": 6}),
    ("another size", {**PAIR, "width": 192}),
    ("that size again", {**PAIR, "width": 192, "prompt": "a tree", "seed": 8}),
    ("four images", {**PAIR, "batch_size": 4}),
    ("four images again", {**PAIR, "batch_size": 4, "seed": 30}),
    ("hires fix", {**a1111.HIRES, "batch_size": 2}),
    ("img2img", {**a1111.IMG2IMG, "batch_size": 2}),
    ("odd number", {**PAIR, "batch_size": 3, "seed": 40}),
]


@dataclass
class Two:
    """The master, its worker, what each step made, and how many plans each ran in it."""

    master: WebUI
    worker: WebUI
    answers: dict[str, dict[str, Any]] = field(default_factory=dict)
    plans: dict[str, tuple[int, int]] = field(default_factory=dict)

    def reports(self) -> list[dict[str, Any]]:
        time.sleep(a1111.STATUS_KEPT_S)
        return [webui.get("/sfast/v1/status") for webui in (self.master, self.worker)]

    def do(self, name: str, payload: dict[str, Any]) -> dict[str, Any]:
        """One request to the master."""
        before = [count(report, "plans run") for report in self.reports()]
        answer: dict[str, Any] = self.master.post(f"/sdapi/v1/{kind_of(payload)}", payload)
        after = [count(report, "plans run") for report in self.reports()]
        self.answers[name] = answer
        self.plans[name] = (after[0] - before[0], after[1] - before[1])
        labels = [text.split("Worker Label: ")[-1] for text in texts(answer) if "Worker Label" in text]
        print(f"{name}: {len(answer['images'])} images, {len(labels)} by {labels}, plans run {self.plans[name]}")
        return answer


def kind_of(payload: dict[str, Any]) -> str:
    return "img2img" if "init_images" in payload else "txt2img"


def make(folder: Path, models: Path) -> Path:
    folder.mkdir()
    return a1111.make_data(folder, models)


@contextlib.contextmanager
def both(folder: Path, models: Path, settings: dict[str, Any]) -> Iterator[tuple[WebUI, WebUI]]:
    """A master with the engine, and its worker. They share one cache of compiled code, as those of one user do."""
    settings = {"return_grid": False, **settings}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SFAST_CACHE_DIR", str(folder / "cache"))
        with a1111.start(make(folder / "worker", models), "worker", settings) as worker:
            data = make(folder / "master", models)
            flags = " ".join([a1111.FLAGS, *add_engine(data, worker)])
            with a1111.start(data, "master", settings, flags=flags, packages=packages()) as master:
                yield master, worker


LONG = {**PAIR, "batch_size": 4, "steps": 30, "seed": 60}
AFTER = {**PAIR, "seed": 70}


@pytest.fixture(scope="module")
def without(tmp_path_factory: pytest.TempPathFactory, a1111_models: Path) -> tuple[dict[str, dict[str, Any]], Killed]:
    """The answers to the steps of two WebUIs with the engine and without this checkout, and what a kill did."""
    disabled = {"disabled_extensions": ["stable-fast"]}
    with both(tmp_path_factory.mktemp("without"), a1111_models, disabled) as (master, worker):
        answers = {}
        for name, payload in STEPS:
            answers[name] = master.post(f"/sdapi/v1/{kind_of(payload)}", payload)
        return answers, kill(master, worker, LONG, AFTER)


@pytest.fixture(scope="module")
def two(
    tmp_path_factory: pytest.TempPathFactory,
    a1111_models: Path,
    without: tuple[dict[str, dict[str, Any]], Killed],
) -> Iterator[Two]:
    """Both WebUIs after the steps."""
    with both(tmp_path_factory.mktemp("two"), a1111_models, {"sfast_allow_cpu": True}) as (master, worker):
        found = Two(master, worker)
        for name, payload in STEPS:
            found.do(name, payload)
        yield found


@pytest.mark.parametrize("name", [name for name, _ in STEPS])
def test_all_images_are_those_without_it(two: Two, without: Any, name: str) -> None:
    images, expected = two.answers[name]["images"], without[0][name]["images"]
    assert len(images) == len(expected) == dict(STEPS)[name]["batch_size"]
    assert max(difference(a, b) for a, b in zip(images, expected)) < TOLERANCE


@pytest.mark.parametrize("name", [name for name, _ in STEPS if name not in ("first",)])
def test_master_and_worker_are_accelerated(two: Two, name: str) -> None:
    assert min(two.plans[name]) > 0, two.plans[name]


@pytest.mark.parametrize("name", [name for name, _ in STEPS if name != "img2img"])
def test_infotexts_name_the_worker_and_its_seed(two: Two, name: str) -> None:
    found, payload = texts(two.answers[name]), dict(STEPS)[name]
    assert len(found) == payload["batch_size"]
    labelled = [i for i, text in enumerate(found) if "Worker Label: worker" in text]
    assert 0 < len(labelled) < len(found)
    for i, text in enumerate(found):
        assert f"Seed: {payload['seed'] + i}," in text, (i, text)


def test_nothing_failed_and_no_lora_or_size_made_more_plans_than_alone(two: Two) -> None:
    for report in two.reports():
        assert report["last_error"] is None and report["counters"].get("errors", 0) == 0
        # 128x128, 192x128 and hires fix, one image or two: what one WebUI needs
        assert 3 <= report["counters"]["captures"] <= 10


def test_a_setting_of_one_machine_is_not_the_other_s(two: Two) -> None:
    two.worker.post("/sdapi/v1/options", {"sfast_enabled": False})
    try:
        two.do("the worker's is off", {**PAIR, "seed": 50})
        mine, theirs = two.plans["the worker's is off"]
        assert mine > 0 and theirs == 0
    finally:
        two.worker.post("/sdapi/v1/options", {"sfast_enabled": True})
    two.do("it is on again", {**PAIR, "seed": 51})
    assert min(two.plans["it is on again"]) > 0


def test_a_worker_that_dies_takes_with_it_what_it_does_without_the_extension(two: Two, without: Any) -> None:
    # the engine does not mark it as unreachable, so it is given images once more
    before = count(two.reports()[0], "plans run")
    assert kill(two.master, two.worker, LONG, AFTER) == without[1]
    report = two.master.get("/sfast/v1/status")
    assert count(report, "plans run") > before and report["last_error"] is None
