"""The random events that are played in real WebUIs, as far as they are drawn without one."""

from __future__ import annotations

import ast
import re
from types import ModuleType, SimpleNamespace

import pytest
import torch
from hosts.live import random_events, random_sequences, random_sites
from hosts.live.random_sequences import Event, Image, each_alone, sequence, storm_bound, storm_bound_of_all
from torch import nn

HOSTS = ("a1111", "sdnext")
SEEDS = range(20)


def event(step: int, op: str, which: int = 1, kind: str = "eps", keep: str = "own", strength: float = 2.0) -> Event:
    return Event(step, op, which, kind, keep, "script", 0, strength)


@pytest.mark.parametrize("host", HOSTS)
def test_the_same_seed_gives_the_same_images(host):
    assert sequence(3, 60, host) == sequence(3, 60, host)
    assert sequence(3, 60, host) != sequence(4, 60, host)
    assert sequence(3, 60, "a1111") != sequence(3, 60, "sdnext")


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("seed", SEEDS)
def test_what_is_laid_is_taken_later_and_once(host, seed):
    laid: dict[int, Event] = {}
    images = sequence(seed, 80, host)
    for image in images:
        assert [e.id for e in image.before] == list(laid)
        steps = [e.step for e in image.events]
        assert steps == sorted(steps)
        assert all(-1 <= step < image.steps for step in steps)
        for each in image.events:
            assert (each.op == "lay") == (each.id not in laid)
            if each.op == "turn":
                assert random_sites.can_turn(each.kind, each.keep)
            if each.op == "take":
                del laid[each.id]
            elif each.op == "lay":
                laid[each.id] = each
    assert not laid
    assert 80 <= sum(len(image.events) for image in images) <= 81


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("seed", SEEDS)
def test_patches_of_a_group_are_taken_in_the_reverse_order(host, seed):
    laid: list[Event] = []
    for each in (e for image in sequence(seed, 80, host) for e in image.events):
        group = random_sites.SITES[each.kind].group
        if each.op == "lay":
            laid.append(each)
        elif each.op == "take":
            same = [e.id for e in laid if random_sites.SITES[e.kind].group == group]
            assert each.id == same[-1] or not group
            laid = [e for e in laid if e.id != each.id]


@pytest.mark.parametrize("host", HOSTS)
def test_calm_images_come_in_a_row_and_have_no_patch(host):
    images = sequence(1, 200, host)
    calm = [image for image in images if image.calm]
    assert not any(image.events or image.before for image in calm)
    assert sum(image.calm == random_sequences.CALM for image in calm) > 2
    for one, other in zip(images, images[1:]):
        if other.calm > 1:
            assert one.calm == other.calm - 1
            assert (one.width, one.height) == (other.width, other.height)


@pytest.mark.parametrize("host", HOSTS)
def test_each_kind_comes_by_itself(host):
    for short in (True, False):
        images = each_alone(host, short=short)
        assert {e.kind for image in images for e in image.events} == set(random_sites.kinds(host))
        ids = [e.id for image in images for e in image.events if e.op == "lay"]
        assert sorted(e.id for image in images for e in image.events if e.op == "take") == ids


def test_behaviours_are_those_between_events():
    assert Image(128, 128, 4, 1).behaviours() == 1
    assert Image(128, 128, 4, 1, [event(-1, "lay")]).behaviours() == 1
    assert Image(128, 128, 4, 1, [event(2, "lay")]).behaviours() == 2
    assert (
        Image(128, 128, 4, 1, [event(0, "lay"), event(1, "turn", strength=3.0), event(2, "take")]).behaviours() == 3
    )
    # laid and taken before the same step: nobody sees it
    assert Image(128, 128, 4, 1, [event(2, "lay"), event(2, "take")]).behaviours() == 1
    moving = event(0, "lay", kind="hook", keep="step")
    assert Image(128, 128, 5, 1, before=[moving]).behaviours() == 5
    assert Image(128, 128, 5, 1, [event(2, "take", kind="hook", keep="step")], before=[moving]).behaviours() == 3


def test_a_storm_is_more_captures_than_behaviours():
    plain, patched = Image(128, 128, 8, 1), Image(128, 128, 8, 1, [event(2, "lay")])
    assert storm_bound(patched) == storm_bound(plain) + 1 < patched.steps
    assert storm_bound(plain, parts=3) == 4 + random_sequences.SPARE
    assert storm_bound_of_all([plain] * 50, [0] * 50) == storm_bound_of_all([plain], [0])
    assert storm_bound_of_all([patched, plain], [1, 0]) == storm_bound_of_all([plain], [0]) + 4


@pytest.mark.parametrize("host", HOSTS)
def test_sites_are_whole_modules(host):
    for kind in random_sites.kinds(host):
        for keep in random_sites.SITES[kind].keeps:
            text = random_sites.source(kind, keep, host)
            names = {node.name for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)}
            assert {"lay", "pick"} <= names
            left = re.search(r"KEEP|AMOUNT|ATTENTION|BLOCKS|RESIDUAL|NORMS|INNER|METHOD", text)
            assert left is None, (kind, left)


class ResBlock(nn.Module):
    def forward(self, x):
        return x + 1


@pytest.mark.parametrize("keep", random_sites.ALL)
def test_a_patch_does_what_its_number_says_until_it_is_taken(keep):
    module = ModuleType("a_third_party")
    exec(random_sites.source("block forward", keep, "a1111"), vars(module))
    unet, x = nn.Sequential(ResBlock()), torch.ones(2)
    module.STEP = 2
    for seed in (0, 1):
        take, turn = module.lay(unet, seed, 3.0)
        by = 1.5 if keep == "step" else 1.0
        assert torch.equal(unet(x), 2 * 3.0 * by * x)
        if random_sites.can_turn("block forward", keep):
            turn(5.0)
            assert torch.equal(unet(x), 2 * 5.0 * by * x)
        else:
            assert turn is None
        take()
        assert torch.equal(unet(x), 2 * x)


def status(captures: int, *, runs: int = 0, error: object = None, calls: int = 0) -> dict:
    return {
        "version": "0", "host": {}, "environment": {}, "last_error": error, "reasons_since_start": {},
        "counters": {"captures": captures, "eager_runs": runs},
        "accelerators": [{"name": "unet", "parts": [{"name": "unet.middle_block", "calls": calls}]}],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("now", "words"),
    [
        (status(1, runs=6), None),
        (status(4, runs=6), "a capture storm: 4 captures for 1 behaviours"),
        (status(4, runs=6, calls=6), None),
        (status(1, runs=6, error={"message": "x"}), "an error of ours"),
        (status(0), "no plan ran although all patches are gone"),
    ],
)
def test_a_fault_names_the_command_that_plays_it_again(now, words):
    options = random_events.arguments(["--host", "sdnext", "--events", "40", "--seed", "7", "--after"])
    plan = random_events.Plan(7, 40, [Image(128, 128, 6, 1, calm=random_sequences.CALM)])
    played = random_events.Events(options, [plan])
    played._judge_report(plan, 0, status(0), now)
    if words is None:
        assert not played.faults
        return
    (fault,) = played.faults
    assert words in fault
    assert fault.endswith("again: python -m hosts.live.random_events --host sdnext --seed 7 --events 40 --after")


def test_the_command_line_chooses_what_is_played():
    options = random_events.arguments(["--events", "250", "--seed", "5", "--kinds", "eps,hook"])
    plans = random_events.planned(options)
    assert [(plan.seed, plan.events) for plan in plans] == [(5, 100), (6, 100), (7, 50)]
    assert {e.kind for plan in plans for image in plan.images for e in image.events} == {"eps", "hook"}
    options.images = "2:4"
    assert [plan.images for plan in random_events.planned(options)] == [plan.images[2:4] for plan in plans]
    with pytest.raises(SystemExit):
        random_events.arguments(["--kinds", "processor"])


@pytest.mark.parametrize("alike", [True, False])
def test_an_image_that_only_the_webui_with_the_extension_cannot_make_is_a_fault(alike):
    options = random_events.arguments(["--events", "200"])
    started: list[bool] = []

    class Failing:
        def __init__(self, extension):
            self.extension = extension

        def __enter__(self):
            return self

        def __exit__(self, *exc):
            pass

        def get(self, path):
            return status(0)

        def post(self, path, payload):
            raise RuntimeError("no numbers" if alike or not self.extension else "an error of another kind")

        def tail(self):
            return ""

    def start(*, extension):
        started.append(extension)
        return Failing(extension)

    played = random_events.Events(options, random_events.planned(options))
    played.play(SimpleNamespace(start=start, ready=lambda webui: None))
    assert started == [False, False, True, True], "each seed has a WebUI of its own"
    assert len(played.faults) == (0 if alike else 2)
    assert all("the WebUI with the extension failed: an error of another kind" in fault for fault in played.faults)
    assert played.result()["failed_without_the_extension_too"] == {"0": "no numbers", "1": "no numbers"}
