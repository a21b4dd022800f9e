"""Sizes that never repeat cost nothing: hires fix and three faces, with a clock that only work moves."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from sfast_ext import Config, accelerate
from sfast_ext.behaviour.key import BehaviourKeys
from sfast_ext.runtime import plan_cache
from sfast_ext.runtime.plan_cache import Earnings
from sfast_ext.weights.arena import WeightArena


class Clock:
    now = 0.0


class Watch:
    def __init__(self) -> None:
        self.began = Clock.now
        self.ms: float | None = None

    def stop(self) -> None:
        self.ms = Clock.now - self.began

    def elapsed(self) -> float | None:
        return self.ms


@dataclass
class Plan:
    ms_before: float | None
    ms_after: float | None
    replays: int = 0


class Card:
    """A GPU on which plans take a part of the original's time, and are made in so many milliseconds."""

    def __init__(self, build: float, part: float, pixel: float) -> None:
        self.build, self.part, self.pixel = build, part, pixel
        self.earnings, self.plans = Earnings(), {}
        self.ours = self.stock = self.built = 0.0

    def step(self, size: tuple[int, int]) -> None:
        original = self.pixel * size[0] * size[1]
        self.stock += original
        self.earnings.calls += 1
        plan = self.plans.get(size)
        if plan is not None:
            plan.replays += 1
            self.ours += original * self.part
            return
        self.earnings.calls -= 1
        due, watch = self.earnings.due(size), Watch()
        self.earnings.calls += 1
        Clock.now += original
        self.ours += original
        watch.stop()
        if due:
            self.ours += self.build
            self.built += 1
            self.plans[size] = Plan(original, original * self.part)
            self.earnings.built(size, self.plans[size], self.build)
        else:
            self.earnings.ran(size, watch)  # type: ignore[arg-type]

    def image(self, *passes: tuple[tuple[int, int], int]) -> None:
        for size, steps in passes:
            self.earnings.new_generation()
            for _ in range(steps):
                self.step(size)


def never_repeated(index: int, steps: int = 20) -> list[tuple[tuple[int, int], int]]:
    """Hires fix and three faces, each of a size of its own."""
    hires = ((1024 + 8 * index, 1024), steps // 2)
    return [hires, *(((384 + 8 * index, 392 + 8 * face), steps // 2) for face in range(3))]


# of a fast card and of slow ones: ms of a plan, its part of the time, and ms of a step at 512x512
CARDS = [(1200.0, 0.45, 11.0), (1500.0, 0.5, 40.0), (2500.0, 0.55, 120.0), (3500.0, 0.6, 400.0), (800.0, 0.9, 25.0)]


@pytest.mark.parametrize("card", CARDS)
@pytest.mark.parametrize("images", [1, 3, 10, 60, 300])
def test_hires_fix_and_three_faces_that_never_repeat_are_not_slower_than_stock(card, images):
    build, part, step = card
    ours = Card(build, part, step / 512**2)
    for index in range(images):
        ours.image(((512, 512), 20), *never_repeated(index))
        # that of the size that repeats; all others are paid by what plans have saved
        assert ours.ours <= ours.stock + build, index
    if images == 300:
        assert ours.ours < ours.stock


@pytest.mark.parametrize("card", CARDS)
def test_sizes_that_repeat_are_accelerated_from_their_second_pass_at_the_latest(card):
    build, part, step = card
    ours = Card(build, part, step / 512**2)
    passes = [((512, 512), 20), ((1024, 1024), 10), ((512, 640), 10), ((448, 448), 10), ((640, 448), 10)]
    ours.image(*passes)
    ours.image(*passes)
    assert ours.built == len(passes)


def test_a_first_size_that_was_asked_for_is_served_at_once_and_the_next_once_both_are_earned():
    known = Earnings(wanted=True)
    assert known.due("a")
    plan = Plan(10.0, 4.0)
    known.built("a", plan, 600.0)
    assert not known.due("b")
    plan.replays = 199
    assert not known.due("b")
    plan.replays = 200
    assert known.due("c") and known.due("b")
    other = Plan(10.0, 4.0)
    known.built("c", other, 600.0)
    assert not known.due("d")


def test_the_first_size_is_served_in_its_second_pass():
    known = Earnings()
    for size in "abc":
        known.new_generation()
        assert not known.due(size)
        for _ in range(30):
            known.ran(size, watched(35.0))  # type: ignore[arg-type]
            assert not known.due(size)
    known.new_generation()
    assert known.due("b") and not known.due("d")


@pytest.mark.parametrize(("ms", "runs"), [(1100.0, 10), (400.0, 25), (5000.0, 2), (20_000.0, 2)])
def test_the_first_size_is_served_in_its_first_pass_once_going_without_has_cost_a_plan(ms, runs):
    known = Earnings()
    assert not known.due("a")
    # the first run loads what the others find
    known.ran("a", watched(9 * ms))  # type: ignore[arg-type]
    found = 1
    while not known.due("a"):
        known.ran("a", watched(ms))  # type: ignore[arg-type]
        found += 1
    assert found == runs


@pytest.mark.parametrize("card", CARDS)
@pytest.mark.parametrize("images", [1, 10])
def test_sizes_none_of_which_repeats_cost_nothing(card, images):
    build, part, step = card
    ours = Card(build, part, step / 512**2)
    for index in range(images):
        first = ((512 + 8 * index, 520), 20)
        ours.image(first, *((size, steps) for size, steps in never_repeated(index)[1:]))
    slow = step > 200
    assert ours.ours <= ours.stock + slow * build and ours.built <= slow * (plan_cache.MAX_DEBT + images)


@pytest.mark.parametrize(("before", "after"), [(None, 4.0), (10.0, None), (None, None), (4.0, 4.0), (3.0, 4.0)])
def test_what_is_not_known_to_save_time_earns_nothing(before, after):
    known = Earnings()
    known.due("a")
    known.built("a", Plan(before, after, replays=10**6), 600.0)
    assert not known.due("b")


def watched(milliseconds: float) -> Watch:
    watch = Watch()
    Clock.now += milliseconds
    watch.stop()
    return watch


@pytest.mark.parametrize(("steps", "ms", "at"), [(20, 150.0, 3), (20, 126.0, 3), (20, 80.0, None), (12, 160.0, None)])
def test_a_size_is_served_in_its_first_pass_if_the_rest_of_it_pays(steps, ms, at):
    known = Earnings()
    known.due("a")
    known.built("a", Plan(None, None), 400.0)
    known.calls = steps
    known.new_generation()
    found = None
    for step in range(1, steps + 1):
        if known.due("b"):
            found = step
            break
        known.ran("b", watched(ms))  # type: ignore[arg-type]
        known.calls += 1
    assert found == at
    # what counts are its own steps
    assert not known.due("c")


def test_the_shortest_of_the_last_passes_tells_how_many_steps_are_left():
    known = Earnings()
    known.due("a")
    known.built("a", Plan(None, None), 400.0)
    for steps in (5, 30, 30, 30):
        known.calls = steps
        known.new_generation()
    known.due("b")
    for _ in range(2):
        known.ran("b", watched(100.0))  # type: ignore[arg-type]
    assert not known.due("b")
    known.calls = 30
    known.new_generation()
    known.due("c")
    for _ in range(2):
        known.ran("c", watched(100.0))  # type: ignore[arg-type]
    assert known.due("c")


def test_a_run_that_has_not_ended_tells_nothing():
    known = Earnings()
    known.due("a")
    known.built("a", Plan(None, None), 400.0)
    for _ in range(plan_cache.PASSES):
        known.calls = 30
        known.new_generation()
    known.due("b")
    watch = Watch()
    for each in (watched(1000.0), watch):
        known.ran("b", each)  # type: ignore[arg-type]
    Clock.now += 1000.0
    assert not known.due("b")
    watch.stop()
    assert known.due("b")


def test_sizes_that_are_used_twice_and_never_again_are_no_longer_served_at_once():
    known, made = Earnings(), 0
    known.due("first")
    known.built("first", Plan(None, None), 400.0)
    for size in range(40):
        for _ in range(2):
            known.new_generation()
            if known.due(size):
                known.built(size, Plan(None, None), 400.0)
                made += 1
    assert made == plan_cache.MAX_DEBT - 1


def test_the_first_plan_is_made_once_its_assumed_price_is_lost():
    known = Earnings()
    for run in range(20):
        assert known.due("a") == (run * 1000.0 * plan_cache.GAIN >= plan_cache.FIRST_PLAN_MS), run
        watch = Watch()
        watch.ms = 1000.0
        known.ran("a", watch)  # type: ignore[arg-type]


def test_what_is_remembered_is_bounded():
    known = Earnings()
    known.due("a")
    known.built("a", Plan(None, None), plan_cache.FIRST_PLAN_MS)
    for kind in range(3 * plan_cache.MAX_KINDS):
        assert not known.due(kind)
        known.ran(kind, Watch())  # type: ignore[arg-type]
    assert len(known._met) == plan_cache.MAX_KINDS >= len(known._runs)


def test_random_sessions_cost_no_more_than_a_few_plans_that_were_not_earned():
    for seed in range(60):
        chosen = random.Random(seed)
        build, part, step = chosen.choice(CARDS)
        ours = Card(build, part, step / 512**2)
        sizes = [(64 * chosen.randint(5, 20), 64 * chosen.randint(5, 20)) for _ in range(chosen.randint(1, 200))]
        for _ in range(chosen.randint(1, 120)):
            ours.image(*((chosen.choice(sizes), chosen.randint(1, 30)) for _ in range(chosen.randint(1, 5))))
            assert ours.ours <= 1.1 * ours.stock + build * (plan_cache.MAX_DEBT + 1)


class Sized:
    """A small accelerated network beside an untouched twin, called in several sizes."""

    def __init__(self, **config: Any) -> None:
        layers = [torch.nn.Conv2d(4, 8, 3, padding=1), torch.nn.SiLU(), torch.nn.Conv2d(8, 4, 3, padding=1)]
        self.module = torch.nn.Sequential(*layers).eval().requires_grad_(False)
        self.accelerator = accelerate(self.module, Config(allow_cpu=True, cuda_graphs=False, **config))

    def first(self, side: int) -> bool:
        """Whether two passes of a size make the first plan."""
        earned = self.accelerator.config.earned
        made = []
        for _ in range(1 + earned):
            self.accelerator.new_generation()
            made.append(self.made(side))
        return made == [False, True][1 - earned :]

    @torch.no_grad()
    def made(self, side: int) -> bool:
        """Whether a call of this size makes a plan."""
        before = self.accelerator.report.counter("captures")
        self.module(torch.ones(1, 4, side, side))
        return self.accelerator.report.counter("captures") > before


def test_an_accelerator_waits_with_the_second_size_and_says_why():
    ours = Sized(earned=True)
    assert ours.first(8) and not ours.made(12) and not ours.made(12) and not ours.made(16)
    assert any("is new" in reason for reason in ours.accelerator.report.as_dict()["reasons"])
    ours.accelerator.new_generation()
    assert ours.made(12) and not ours.made(20)
    # what it made is used
    assert not ours.made(12) and ours.accelerator.report.counter("eager_runs") == 1


def test_a_call_that_waits_neither_reads_the_key_nor_lays_out_the_weights(monkeypatch):
    ours = Sized(earned=True)
    # the second call reads the key that the first has left
    assert ours.first(8) and not ours.made(12)
    asked = []
    monkeypatch.setattr(WeightArena, "sync", lambda *args: asked.append("weights"))
    monkeypatch.setattr(BehaviourKeys, "read", lambda *args: asked.append("key"))
    for side in (12, 16, 12):
        assert not ours.made(side)
    assert not asked and not ours.accelerator.report.counter("errors")
    assert sum(ours.accelerator.report.as_dict()["reasons"].values()) == 5


def test_the_same_size_with_another_behaviour_does_not_wait():
    ours = Sized(earned=True)
    assert ours.first(8)
    ours.accelerator.new_generation()
    ours.module[1].inplace = True
    assert ours.made(8)


def test_without_the_setting_every_size_is_served_at_once():
    ours = Sized()
    ours.accelerator.new_generation()
    assert all(ours.made(side) for side in (8, 12, 16, 20))


def test_plans_that_were_dropped_by_the_user_are_made_again_at_once():
    ours = Sized(earned=True)
    assert ours.first(8)
    for _ in range(6):
        ours.accelerator.forget_plans("the user has dropped them")
        ours.accelerator.new_generation()
        assert ours.made(8) and not ours.made(12)
    ours.accelerator.forget_plans("the user has dropped them")
    # not if weights change again and again
    ours.accelerator.new_generation()
    assert ours.made(8)
    ours.accelerator.forget_plans("weights", at_once=False)
    ours.accelerator.new_generation()
    assert not ours.made(16)
