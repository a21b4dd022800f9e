"""The random scenes that are played in real WebUIs, as far as they are drawn and judged without one."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import sys
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("PIL")
from hosts.live import random_scene_memory, random_scenes
from hosts.live.random_scene_draws import EIGHT_APART, OURS, PLANS_ALIKE
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
    images = [(name, payload) for name, route, payload in scenes if route != "options" and name != "first"]
    assert [name for name, _ in images] == [f"3/{i}" for i in range(SCENES)]
    told = json.dumps(scenes)
    assert "<lora:" in told and "img2img" in told and '"enable_hr": true' in told and '"options"' in told
    assert ("FreeU" in told) == (host in ("forge", "reforge"))
    if host != "a1111":
        assert ("tiny-control" if host == "sdnext" else '"model": "control"') in told
    assert {payload["batch_size"] for _, payload in images} == {1, 2}
    assert len({payload["sampler_name"] for _, payload in images}) >= 3
    assert ("CLIP_stop" in told and "token_merging" in told) == (host != "sdnext")


@pytest.mark.parametrize("host", HOSTS)
def test_in_8_bits_settings_of_ours_are_switched_and_on_again_and_sizes_stay_for_some_images(host):
    eight = dataclasses.replace(HOSTS[host], eight_bits=True, card=3.0)
    scenes = eight.scenes(3, SCENES)
    switched = [
        (key, payload[key]) for _, route, payload in scenes if route == "options" for key in OURS if key in payload
    ]
    assert {key for key, _ in switched} == set(OURS)
    assert switched[::2] == [(key, False) for key, _ in switched[::2]]
    assert switched[1::2] == [(key, True) for key, _ in switched[::2]][: len(switched) // 2]
    sizes = [(p["width"], p["height"], p["batch_size"]) for n, r, p in scenes if r != "options" and n != "first"]
    stays = sum(one == other for one, other in zip(sizes, sizes[1:])) / len(sizes)
    assert len(set(sizes)) >= 5 and stays > 0.6
    assert "control" not in json.dumps(scenes) and "checkpoint" in json.dumps(scenes)


def test_one_of_three_seeds_has_lowvram_in_automatic1111():
    given = [HOSTS["a1111"].flags_of(seed) for seed in (6, 7, 8)]
    assert [("--medvram" in each, "--lowvram" in each) for each in given] == [(0, 0), (1, 0), (0, 1)]


def test_the_reference_of_8_bits_has_them_too_and_is_on_no_card(monkeypatch, tmp_path):
    started = []
    for module in ("a1111", "forge", "sdnext"):
        monkeypatch.setattr(
            f"hosts.live.{module}.start", lambda *args, **more: started.append((args, more)) or SimpleNamespace(env={})
        )
    monkeypatch.setenv("SFAST_CARD_GIB", "0")
    for host in ("a1111", "neo", "sdnext"):
        for eight_bits in (True, False):
            chosen = dataclasses.replace(HOSTS[host], eight_bits=eight_bits, card=3.0)
            for reference in (True, False):
                chosen.start(tmp_path, 0, reference=reference)
                args, more = started.pop()
                told = json.dumps([each for each in args if isinstance(each, dict)])
                extended = more.get("extension", "disabled_extensions" not in told)
                assert extended == (eight_bits or not reference)
                assert ('"sfast_eight_bits": true' in told) == eight_bits
                assert (more["packages"] is None) == (eight_bits and reference)
        chosen.alone = True
        chosen.start(tmp_path, 0, reference=False)
        args, more = started.pop()
        told = json.dumps([each for each in args if isinstance(each, dict)])
        assert not more.get("extension", "disabled_extensions" not in told) and "sfast_" not in told
        assert more["packages"] is not None


class Host:
    """A host whose images are given; at rest one of 0, and with a LoRA another."""

    name, flags, tolerance, card, eight_bits = "Given", "", 1.0, None, False
    alone = False

    def __init__(self, stock, ours, error=None, lora=9, held=(), resident=()):
        self.given, self.error, self.lora = {True: stock, False: ours}, error, lora
        self.held, self.resident, self.options = list(held), resident, []

    def rest(self):
        return [("plain", "txt2img", {"value": 0})]

    def least(self):
        return "least", "txt2img", {"value": self.lora}

    def scenes(self, seed, count):
        return [("", "options", {}), *((f"{seed}/{i}", "txt2img", {"number": i}) for i in range(count))]

    def named(self, webui, steps):
        return steps

    def ready(self, webui):
        pass

    @contextlib.contextmanager
    def start(self, data, seed, *, reference):
        self.reference, self.made = reference, 0
        yield SimpleNamespace(get=self.status, post=self.asked)

    def status(self, path):
        ran = [i for i in range(self.made) if i in self.resident]
        plans = [{"resident": True, "used_at": 1.0 + max(ran)}] if ran else []
        accelerators = [{"plans": [{"resident": False, "used_at": 100.0 + self.made}, *plans]}]
        told = {"counters": {"captures": 1}, "reasons_since_start": {"why": 2}, "last_error": self.error}
        return {**told, "accelerators": accelerators}

    def asked(self, path, payload):
        assert path == "/sfast-scenes/memory"
        return self.held.pop(0) if self.held and not self.reference else {"gpu": 0, "system": None}

    def play(self, webui, route, payload):
        if route == "options":
            self.options.append((self.reference, payload))
            return []
        if "value" in payload:
            return [image(payload["value"])]
        self.made = payload["number"] + 1
        values = self.given[self.reference][payload["number"]]
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


def test_images_of_another_size_are_a_fault_and_those_of_faults_are_kept_with_the_logs(tmp_path):
    data, kept = tmp_path / "data", tmp_path / "kept"
    data.mkdir()
    (data / "compared.log").write_text("what it said")
    host = Host([[5], [7]], [[5], [9]])
    random_scenes.compare(host, data, 4, 2, "--again", kept=kept)
    assert sorted(each.name for each in kept.iterdir()) == [
        "4-1-0-compared.png", "4-1-0-reference.png", "4-1-compared.log",
    ]  # fmt: skip
    assert (kept / "4-1-compared.log").read_text() == "what it said"
    assert np.asarray(Image.open(kept / "4-1-0-compared.png")).max() == 9
    found = random_scenes.Found()
    wide = encoded(Image.fromarray(np.full((8, 16, 3), 5, dtype=np.uint8)))
    assert random_scenes.judge(found, "4/2", [wide], [image(5)], 1.0, "--again")["fault"]
    assert found.faults == ["4/2: images of [(8, 16)], the reference made [(8, 8)]; --again"] and not found.distances


def test_each_scene_is_told_of_as_it_is_judged_and_the_counters_at_the_end():
    told = []
    random_scenes.compare(Host([[5], [7], None], [[5], [9], None]), None, 4, 3, "--again", say=told.append)
    assert [(each["scene"], each["apart"], each["fault"]) for each in told[:-1]] == [
        ("4/0", 0.0, False), ("4/1", 2.0, True), ("4/2", None, False),
    ]  # fmt: skip
    nothing = {"gpu": 0, "system": None}
    assert told[-1] == {
        "seed": 4, "memory": {"start": nothing, "first": nothing, "end": nothing}, "counters": {"captures": 1},
        "reasons_since_start": {"why": 2}, "last_error": None,
    }  # fmt: skip
    assert not any(each["resident"] for each in told[:-1])


def test_what_the_webui_alone_holds_is_told_and_nothing_is_compared():
    told, at = [], [{"gpu": n, "system": n} for n in range(3)]
    host = Host([[5], [7], None], [[6], [9], None], held=at)
    host.alone = host.eight_bits = True
    found = random_scenes.alone(host, None, 4, 3, math.inf, told.append)
    assert (found.scenes, found.failed, found.faults, found.seeds) == (3, 1, [], [4])
    assert found.memory == [dict(zip(("start", "first", "end"), at))]
    assert told == [{"seed": 4, "memory": found.memory[0]}]
    assert not host.reference and not [payload for _, payload in host.options if payload.keys() & set(OURS)]


def test_an_error_of_ours_is_a_fault():
    found = random_scenes.compare(Host([[5]], [[5]], "an error"), None, 4, 1, "--again")
    assert found.faults == ["an error; --again"]


def test_scenes_for_which_there_was_no_time_are_not_compared(monkeypatch):
    now = iter(range(1000))
    monkeypatch.setattr(random_scenes, "time", SimpleNamespace(monotonic=lambda: next(now)))
    # one second a look at the clock, at each step: after three others the reference makes two images of four
    found = random_scenes.compare(Host([[5]] * 4, [[5], [9], [5], [5]]), None, 4, 4, "--again", 22)
    assert found.scenes == 2 and [fault.split(":")[0] for fault in found.faults] == ["4/1"]
    assert "end" in found.memory[0]


def in_8_bits(**more):
    host = Host([[5]] * 4, [[5]] * 4, **more)
    host.card, host.eight_bits = 3.0, True
    return random_scenes.compare(host, None, 4, 4, "--again"), host


def test_it_is_told_which_scenes_resident_plans_made():
    found, _ = in_8_bits(resident=(1, 2))
    assert found.resident == 2 and not found.faults
    total = random_scenes.Found()
    total.add(found)
    total.add(found)
    assert total.told()["resident"] == 4 and total.told()["least"] == 9 and total.told()["median"] == 0.0


def test_a_run_in_8_bits_without_a_resident_plan_shows_nothing():
    found, _ = in_8_bits()
    assert found.faults == ["nothing was resident: the run shows nothing; --again"]


def test_on_no_card_nothing_need_be_resident():
    host = Host([[5]], [[5]])
    host.eight_bits = True
    assert not random_scenes.compare(host, None, 4, 1, "--again").faults


@pytest.mark.parametrize(("lora", "faults"), [(1, 1), (2, 0)])
def test_a_lora_of_the_least_weight_must_be_seen(lora, faults):
    found = random_scenes.compare(Host([[5]], [[5]], lora=lora), None, 4, 1, "--again")
    assert len(found.faults) == faults and found.least == lora
    assert all("nothing wrong would be seen" in fault for fault in found.faults)


def test_what_a_lora_changes_is_told_by_the_first_image_with_it():
    host, values = Host([[5]], [[5]]), iter([9, 0, 0])
    host.least = lambda: ("least", "txt2img", {"value": next(values)})
    found = random_scenes.compare(host, None, 4, 1, "--again")
    assert not found.faults and found.least == 9


def test_an_image_with_a_lora_that_is_not_made_is_a_fault():
    host = Host([[5]], [[5]])
    host.least = lambda: ("least", "txt2img", {"number": 0})
    host.given[True] = [None]
    found = random_scenes.compare(host, None, 4, 1, "--again")
    assert any("was not made" in fault for fault in found.faults)


MB = random_scene_memory.MB


@pytest.mark.parametrize(
    ("start", "first", "end", "words"),
    [
        ((0, 500), (100, 900), (100, 1000), []),
        ((0, 500), (0, 600), (200, 600), ["GPU memory", "GPU memory"]),
        ((100, 500), (0, 600), (200, 600), ["GPU memory"]),
        ((0, 500), (0, 600), (0, 1000), ["system memory"]),
        ((0, 500), (0, 1400), (0, 1700), ["system memory"]),
        ((0, None), (0, None), (0, None), []),
    ],
)
def test_memory_that_grows_is_a_fault(start, first, end, words):
    held = [{"gpu": gpu * MB, "system": system and system * MB} for gpu, system in (start, first, end)]
    found = random_scenes.compare(Host([[5]], [[5]], held=held), None, 4, 1, "--again")
    assert [fault.split(" at rest")[0] for fault in found.faults] == words
    assert all(fault.endswith("; --again") for fault in found.faults)


def test_the_extension_is_off_while_memory_is_read_and_settings_are_as_they_were_then():
    host = Host([[5]], [[5]])
    host.scenes = lambda seed, count: [
        ("", "options", {"sfast_eight_bits": False}), ("4/0", "txt2img", {"number": 0}), ("", "options", {"a": 1}),
        ("4/1", "txt2img", {"number": 0}),
    ]  # fmt: skip
    steps = random_scenes.with_rests(host, host.scenes(4, 2))
    assert [name for name, *_ in steps if name] == [
        "least", "plain", "start", "4/0", "4/1", "least", "plain", "first",
    ]  # fmt: skip
    settings = {}
    at = {}
    for name, route, payload in steps:
        settings |= payload if route == "options" else {}
        at.setdefault(name, dict(settings))
    off = {"sfast_enabled": False}
    assert at["least"] == at["start"] == off and at["first"] == {"sfast_eight_bits": False, "a": 1, **off}
    assert at["4/1"] == settings | {"a": 1} and settings["sfast_enabled"] and not settings["sfast_eight_bits"]


def test_a_webui_without_the_extension_is_not_asked_for_its_settings():
    host = Host([[5]], [[5]])
    random_scenes.compare(host, None, 4, 1, "--again")
    assert not [payload for reference, payload in host.options if reference and OURS[0] in payload]
    assert [payload for reference, payload in host.options if not reference and OURS[0] in payload]
    host.options, host.eight_bits = [], True
    random_scenes.compare(host, None, 4, 1, "--again")
    assert [payload for reference, payload in host.options if reference and OURS[0] in payload]


def test_plans_are_made_at_once_and_of_the_same_layers_by_functions_that_there_are(monkeypatch):
    from sfast_ext.kernels.eight_bits import conv2d8
    from sfast_ext.passes import eight_bits, eight_bits_conv_match
    from sfast_ext.runtime import eight_bits as choice
    from sfast_ext.runtime.plan_cache import Earnings

    changed = [
        (eight_bits, "matches"), (eight_bits, "paying"), (eight_bits_conv_match, "MIN_PIXELS"),
        (conv2d8, "profitable"), (choice, "slower"), (Earnings, "due"),
    ]  # fmt: skip
    before = [vars(home)[name] for home, name in changed]
    for (home, name), value in zip(changed, before):
        monkeypatch.setattr(home, name, value)
    assert not Earnings().due("kind")
    exec(PLANS_ALIKE, {})
    assert all(vars(home)[name] is not value for (home, name), value in zip(changed, before))
    assert Earnings().due("kind") and "sfast_ext" in sys.modules
    assert EIGHT_APART > 2.5
