"""Wrappers of a forward that keep state, and forwards that keep none."""

from __future__ import annotations

import collections
import functools

import pytest
from stateful import CALLS, CHANGES, Kept, Root, assert_same, built, fast, run, summary


def plain(part, x):
    return x


WRAPPERS = {}


def wrapper(cls):
    WRAPPERS[cls.__name__] = cls
    return cls


@wrapper
class EverySecond:
    def __init__(self, inner):
        self.inner, self.n, self.last = inner, 0, None

    def __call__(self, x):
        self.n += 1
        if self.n % 2:
            self.last = self.inner(x)
        return self.last * 1.0


@wrapper
class WithCache:
    """As DeepCache keeps features, in a dict of dicts."""

    def __init__(self, inner):
        self.inner, self.cache = inner, {"step": 0, "features": {}}

    def __call__(self, x):
        self.cache["step"] += 1
        if self.cache["step"] % 3 == 1:
            self.cache["features"]["out"] = self.inner(x)
        return self.cache["features"]["out"] + x * 0.1


def closed_over(inner):
    n, last = 0, None

    def forward(x):
        nonlocal n, last
        n += 1
        if n % 2:
            last = inner(x)
        return last + 0

    return forward


def in_a_partial(inner):
    def step(state, x):
        state.append(x)
        return inner(x) * len(state)

    return functools.partial(step, [])


WRAPPERS["closed_over"] = closed_over
WRAPPERS["in_a_partial"] = in_a_partial


@pytest.mark.parametrize("name", WRAPPERS)
def test_a_wrapper_of_the_forward_that_counts_stays_in_phase(name):
    ours, twin = Root(lambda: plain).eval(), Root(lambda: plain).eval()
    ours.forward, twin.forward = WRAPPERS[name](ours.forward), WRAPPERS[name](twin.forward)
    accelerator = fast(ours)
    assert_same(run(ours, 7), run(twin, 7))
    assert not accelerator.plans
    reasons = accelerator.report.as_dict()["reasons"]
    assert any("keeps state between calls" in reason for reason in reasons), reasons
    accelerator.release()


def filled_once(k, p, x):
    if k.last is None:
        k.last = 2.0
    return x * k.last


def by_shape(k, p, x):
    if x.shape not in k.map:
        k.map[x.shape] = float(x.shape[0])
    return x * k.map[x.shape]


class Makers(collections.OrderedDict):
    """Makes an object for each look, as the table of activations of transformers does."""

    def __getitem__(self, key):
        return super().__getitem__(key)()


MAKERS = Makers(number=functools.partial(float, 2), thing=object)

NO_CHANGE = {
    "what is filled once": filled_once,
    "what is filled by shape": by_shape,
    "an equal value": lambda k, p, x: setattr(k, "count", int("0")) or x,
    "an equal list": lambda k, p, x: setattr(k, "shape", [2, 4]) or x,
    "the shape": lambda k, p, x: setattr(k, "last", tuple(x.shape)) or x,
    "a local list": lambda k, p, x: [x].pop(),
    "a cache of numbers": lambda k, p, x: x * doubled(2),
    "what is put and taken": lambda k, p, x: (k.items.append(x), k.items.pop())[1],
    "a flag that is set and put back": lambda k, p, x: (setattr(k, "count", 5), setattr(k, "count", 0)) and x,
    "a look at a table that makes its entries": lambda k, p, x: x * MAKERS["number"],
    "a read": lambda k, p, x: x * (k.count + 1) + len(k.items),
}


@functools.lru_cache(maxsize=None)
def doubled(n):
    return 2 * n


@pytest.mark.parametrize("name", NO_CHANGE)
def test_what_changes_nothing_is_accelerated(name):
    mine, theirs = Kept(), Kept()
    ours, twin = built(NO_CHANGE[name], mine), built(NO_CHANGE[name], theirs)
    accelerator = fast(ours)
    assert_same(run(ours), run(twin))
    (plan,) = accelerator.plans.values()
    assert plan.replays >= 2
    assert summary(mine) == summary(theirs)
    accelerator.release()


def test_state_that_is_no_longer_changed_is_no_obstacle():
    kept = Kept()
    model = built(CHANGES["maps in a list"], kept)
    accelerator = fast(model)
    run(model)
    assert not accelerator.plans
    model.first.processor.change = model.second.processor.change = NO_CHANGE["a read"]
    run(model, 8)
    assert accelerator.plans and len(kept.items) == 2 * CALLS
    accelerator.release()
