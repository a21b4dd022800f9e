"""The random scenes that are played in real WebUIs, as far as they are drawn and judged without one."""

from __future__ import annotations

import contextlib
import json
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("PIL")
from hosts.live import random_scenes
from hosts.live.random_scene_hosts import HOSTS
from hosts.live.webui import encoded
from PIL import Image

SCENES = 300


def image(value: int) -> str:
    return encoded(Image.fromarray(np.full((8, 8, 3), value, dtype=np.uint8)))


@pytest.mark.parametrize("host", HOSTS)
def test_scenes_are_of_every_kind_and_the_same_for_a_seed(host):
    scenes = HOSTS[host].scenes(3, SCENES)
    assert scenes == HOSTS[host].scenes(3, SCENES) != HOSTS[host].scenes(4, SCENES)
    pictures = [(name, payload) for name, route, payload in scenes if route != "options" and name != "first"]
    assert [name for name, _ in pictures] == [f"3/{i}" for i in range(SCENES)]
    told = json.dumps(scenes)
    assert "<lora:" in told and "img2img" in told and '"enable_hr": true' in told and '"options"' in told
    assert ("FreeU" in told) == (host in ("forge", "reforge"))
    assert ("tiny-control" if host == "sdnext" else '"model": "control"') in told
    assert {payload["batch_size"] for _, payload in pictures} == {1, 2}
    assert len({payload["sampler_name"] for _, payload in pictures}) >= 3
    assert ("CLIP_stop" in told and "token_merging" in told) == (host != "sdnext")


class Host:
    """A host whose images are given."""

    name, flags, tolerance = "Given", "", 1.0

    def __init__(self, stock, ours, error=None):
        self.given, self.error = {False: stock, True: ours}, error

    def scenes(self, seed, count):
        return [("", "options", {}), *((f"{seed}/{i}", "txt2img", {"number": i}) for i in range(count))]

    def named(self, webui, steps):
        return steps

    def ready(self, webui):
        pass

    @contextlib.contextmanager
    def start(self, data, seed, *, extension):
        self.extension = extension
        report = {"counters": {"captures": 1}, "reasons_since_start": {"why": 2}, "last_error": self.error}
        yield SimpleNamespace(get=lambda path: report)

    def play(self, webui, route, payload):
        if route == "options":
            return []
        values = self.given[self.extension][payload["number"]]
        if values is None:
            raise RuntimeError("no numbers")
        return [image(value) for value in values]


@pytest.mark.parametrize(
    ("stock", "ours", "failed", "faults"),
    [
        ([[5]], [[5]], 0, 0),
        ([[5], [7, 8]], [[5], [7, 9]], 0, 0),
        ([[5], [7, 8]], [[5], [7, 10]], 0, 1),
        ([[5]], [[9]], 0, 1),
        ([None], [None], 1, 0),
        ([None], [[5]], 0, 1),
        ([[5]], [None], 0, 1),
        ([[5, 5]], [[5]], 0, 1),
        ([[5], [6], [7]], [[9], None, [7]], 0, 2),
    ],
)
def test_another_image_or_one_that_one_of_the_two_could_not_make_is_a_fault(stock, ours, failed, faults):
    found = random_scenes.compare(Host(stock, ours), None, 4, len(stock), "--again")
    assert (found.scenes, found.failed, len(found.faults)) == (len(stock), failed, faults)
    assert all(fault.startswith("4/") and fault.endswith("; --again") for fault in found.faults)
    total = random_scenes.Found()
    total.add(found)
    total.add(found)
    assert total.scenes == 2 * len(stock) and total.seeds == [4, 4] and total.reasons == {"why": 4}


def test_each_scene_is_told_of_as_it_is_judged_and_the_counters_at_the_end():
    told = []
    random_scenes.compare(Host([[5], [7], None], [[5], [9], None]), None, 4, 3, "--again", say=told.append)
    assert [(each["scene"], each["apart"], each["fault"]) for each in told[:-1]] == [
        ("4/0", 0.0, False), ("4/1", 2.0, True), ("4/2", None, False),
    ]  # fmt: skip
    assert told[-1] == {"seed": 4, "counters": {"captures": 1}, "reasons_since_start": {"why": 2}, "last_error": None}


def test_an_error_of_ours_is_a_fault():
    found = random_scenes.compare(Host([[5]], [[5]], "an error"), None, 4, 1, "--again")
    assert found.faults == ["an error; --again"]


def test_scenes_for_which_there_was_no_time_are_not_compared(monkeypatch):
    now = iter(range(100))
    monkeypatch.setattr(random_scenes, "time", SimpleNamespace(monotonic=lambda: next(now)))
    # one second a look at the clock: the original makes two images of four, then all of these are compared
    found = random_scenes.compare(Host([[5]] * 4, [[5], [9], [5], [5]]), None, 4, 4, "--again", 16)
    assert found.scenes == 2 and [fault.split(":")[0] for fault in found.faults] == ["4/1"]
