"""Which plan is dropped, and how long a key stays rejected."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from sfast_ext.plans import payback
from sfast_ext.plans.payback import REJECTED_FOR
from sfast_ext.report import Report
from sfast_ext.runtime.plan_cache import PlanCache, PlanKey


class Closing:
    """A plan that notes that it was closed."""

    def __init__(self) -> None:
        self.closed, self.weights = False, []

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def cache() -> Any:
    arena: Any = SimpleNamespace(bind=lambda weights: None, unbind=lambda weights: None)
    return PlanCache(arena, Report(), threading.RLock(), 2)


def used(cache: Any, key: Any) -> None:
    """As a call server does."""
    if cache.latest is not cache.plans[key]:
        cache.touch(key)


def test_the_plan_that_was_used_longest_ago_is_dropped(cache):
    plans = {name: Closing() for name in "abcd"}
    for name in "ab":
        cache.put(name, plans[name])
    used(cache, "b")
    used(cache, "a")
    cache.put("c", plans["c"])
    assert list(cache.plans) == ["a", "c"] and plans["b"].closed
    used(cache, "a")
    used(cache, "a")
    cache.put("d", plans["d"])
    assert list(cache.plans) == ["a", "d"] and plans["c"].closed


def test_a_plan_that_is_made_anew_is_the_last(cache):
    first, other, again = Closing(), Closing(), Closing()
    cache.put("a", first)
    cache.put("b", other)
    cache.put("a", again)
    assert cache.latest is again and list(cache.plans) == ["b", "a"]


def test_a_dropped_plan_is_not_the_latest(cache):
    plan = Closing()
    cache.put("a", plan)
    assert cache.latest is plan
    cache.drop("a")
    assert cache.latest is None and plan.closed
    cache.touch("a")  # by a thread that runs it still
    assert cache.latest is None


def test_a_rejection_expires_with_generations_and_lasts_longer_each_time(cache):
    for times in range(3):
        cache.reject("a", "a reason")
        for _ in range(REJECTED_FOR * 2**times - 1):
            cache.new_generation()
            assert cache.rejection("a") == "a reason"
        cache.new_generation()
        assert cache.rejection("a") is None


def test_a_rejection_expires_with_calls_only_if_no_generation_is_announced(cache, monkeypatch):
    monkeypatch.setattr(payback, "REJECTED_CALLS", 3)
    cache.reject("a", "a reason")
    assert [cache.rejection("a") for _ in range(4)] == ["a reason"] * 3 + [None]
    cache.reject("b", "a reason")
    cache.new_generation()
    assert all(cache.rejection("b") for _ in range(50))


def test_keys_differ_in_each_of_their_parts():
    key: Any = PlanKey("signature", 1, "host", "cpu")
    others = [key._replace(**{name: "other"}) for name in PlanKey._fields]
    assert len({key, *others}) == 6 and key == PlanKey("signature", 1, "host", "cpu")
    assert key.model == (1, "host", "cpu")
    same = [name for name, other in zip(PlanKey._fields, others) if other.model == key.model]
    assert same == ["signature", "eight_bits"]
