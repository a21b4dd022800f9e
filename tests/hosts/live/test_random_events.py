"""Random patches in the real WebUIs: some of the events of `python -m hosts.live.random_events`."""

from __future__ import annotations

from pathlib import Path

import pytest

from . import a1111, random_events, sdnext
from .webui import difference

EVENTS = 40
# what shows in no image: a number that nothing reads, and one that this attention does not
HIDDEN = ("counter", "scale")
SHOWN = 2.0  # of 255, mean over the image


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("a1111", marks=a1111.MARKS),
        pytest.param("sdnext", marks=sdnext.MARKS),
    ],
)
def played(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> random_events.Events:
    """Each kind of patch by itself, and some at random, in a WebUI without the extension and in one with it."""
    folder: Path = tmp_path_factory.mktemp(request.param)
    options = random_events.arguments(["--host", request.param, "--events", str(EVENTS)])
    plans = [random_events.alone(options, short=True), *random_events.planned(options)]
    found = random_events.Events(options, plans)
    found.play(random_events.HOSTS[request.param](folder, options.after))
    return found


def test_images_are_the_same_and_plans_are_few_and_come_again(played):
    assert not played.faults


def test_plans_ran_beside_patches(played):
    result = played.result()
    assert result["captures"] > 0
    assert result["eager_runs"] + result["replays"] > 2 * result["captures"]
    assert result["reasons"]


def test_each_patch_changes_the_image(played):
    alone = played.plans[0]
    plain = played.stock[alone.seed, 0]
    shown: dict[str, float] = {}
    for number, image in enumerate(alone.images):
        for kind in (event.kind for event in image.events if event.op == "lay" and event.step < 0):
            shown[kind] = difference(played.stock[alone.seed, number], plain)
    assert not {kind: by for kind, by in shown.items() if by < SHOWN and kind not in HIDDEN}
