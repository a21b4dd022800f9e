"""A forward that changes what it can reach runs once for each call, and what it keeps is what it keeps without us."""

from __future__ import annotations

import contextvars
import copy
import functools
import gc
import sys
import types

import pytest
from stateful import CALLS, CHANGES, GLOBAL_OBJECT, Kept, assert_same, built, fast, run, summary
from torch._subclasses.fake_tensor import FakeTensor

GLOBAL_LIST: list = []
GLOBAL_COUNT = 0
GLOBAL_DEEP = {"banks": [{"maps": []}]}
VARIABLE = contextvars.ContextVar("VARIABLE", default=0)
elsewhere = types.ModuleType("elsewhere_for_state")
elsewhere.seen = 0
elsewhere.maps = []
sys.modules["elsewhere_for_state"] = elsewhere


class OnClass:
    count = 0
    maps: list = []
    by_name: dict = {}


class Inherits(OnClass):
    pass


class WithProperty:
    def __init__(self):
        self._n = 0

    @property
    def n(self):
        self._n += 1
        return self._n


@functools.lru_cache(maxsize=None)
def bank():
    return []


def global_count(k, p, x):
    global GLOBAL_COUNT
    GLOBAL_COUNT += 1
    return x * (1 + GLOBAL_COUNT / 10)


def new_global(k, p, x):
    globals()["GLOBAL_NEW"] = globals().get("GLOBAL_NEW", 0) + 1
    return x


def context(k, p, x):
    VARIABLE.set(VARIABLE.get() + 1)
    return x * VARIABLE.get()


def lists_of_a_default(k, p, x, seen=[]):  # noqa: B006
    seen.append(x)
    return x + len(seen)


def attribute_of_a_function(k, p, x):
    attribute_of_a_function.n = getattr(attribute_of_a_function, "n", 0) + 1
    return x * attribute_of_a_function.n


def in_a_module(k, p, x):
    import elsewhere_for_state

    elsewhere_for_state.seen += 1
    elsewhere_for_state.maps.append(x)
    return x
ELSEWHERE = {
    "a global list": (lambda k, p, x: GLOBAL_LIST.append(x) or x, lambda: len(GLOBAL_LIST)),
    "a global number": (global_count, lambda: GLOBAL_COUNT),
    "a new global": (new_global, lambda: globals().get("GLOBAL_NEW", 0)),
    "deep in a global": (
        lambda k, p, x: GLOBAL_DEEP["banks"][0]["maps"].append(x) or x, lambda: len(GLOBAL_DEEP["banks"][0]["maps"])
    ),
    "a global object": (
        lambda k, p, x: setattr(GLOBAL_OBJECT, "count", GLOBAL_OBJECT.count + 1) or x, lambda: GLOBAL_OBJECT.count
    ),
    "a context variable": (context, lambda: VARIABLE.get()),
    "an attribute of a class": (
        lambda k, p, x: setattr(OnClass, "count", OnClass.count + 1) or x * OnClass.count, lambda: OnClass.count
    ),
    "a list of a class": (lambda k, p, x: Inherits.maps.append(x) or x, lambda: len(OnClass.maps)),
    "a dict of a class": (
        lambda k, p, x: OnClass.by_name.__setitem__(len(OnClass.by_name), x) or x, lambda: len(OnClass.by_name)
    ),
    "an attribute of another module": (in_a_module, lambda: (elsewhere.seen, len(elsewhere.maps))),
    "a default argument": (lists_of_a_default, lambda: len(lists_of_a_default.__defaults__[0])),
    "an attribute of a function": (attribute_of_a_function, lambda: getattr(attribute_of_a_function, "n", 0)),
}  # fmt: skip


def fakes(*things):
    """FakeTensors among all that is alive."""
    gc.collect()
    return [each for each in gc.get_objects() if type(each) is FakeTensor and any(each is thing for thing in things)]


@pytest.mark.parametrize("generations", [False, True])
@pytest.mark.parametrize("name", CHANGES)
def test_what_a_processor_keeps_is_what_it_keeps_without_us(name, generations):
    mine, theirs = Kept(), Kept()
    ours, twin = built(CHANGES[name], mine), built(CHANGES[name], theirs)
    accelerator = fast(ours)
    if generations:
        accelerator.new_generation()
    assert_same(run(ours), run(twin))
    assert summary(mine) == summary(theirs)
    for a, b in ((ours.first, twin.first), (ours.second, twin.second)):
        assert summary({k: v for k, v in vars(a).items() if k in ("seen", "n", "maps")}) == summary(
            {k: v for k, v in vars(b).items() if k in ("seen", "n", "maps")}
        )
    assert not accelerator.plans or name == "a removed attribute"
    accelerator.release()


@pytest.mark.parametrize("name", ELSEWHERE)
def test_what_is_kept_elsewhere_is_what_is_kept_without_us(name):
    change, read = ELSEWHERE[name]
    before = copy.deepcopy(read())
    ours, twin = built(change, Kept()), built(change, Kept())
    accelerator = fast(ours)
    expected_calls = 2 * CALLS
    run(ours)
    mine = read()
    run(twin)
    theirs = read()

    def grown(a, b):
        return [y - x for x, y in zip(a, b)] if isinstance(a, tuple) else b - a

    assert grown(before, mine) == grown(mine, theirs)
    assert grown(before, mine) in (expected_calls, [expected_calls] * 2)
    assert not accelerator.plans
    accelerator.release()


def test_the_reason_names_what_is_changed_from_the_first_call_on():
    kept = Kept()
    model = built(CHANGES["maps in a list"], kept)
    accelerator = fast(model)
    run(model, 1)
    (row,) = accelerator.report.as_dict()["reasons_listed"]
    assert row["reason"] == "its forward keeps state between calls, in first.processor.kept.items"
    run(model, 4)
    assert len(kept.items) == 10
