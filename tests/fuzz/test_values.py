"""Generated values at generated places, states of torch and processors that keep state: each by itself on a tiny model,
and all of them at random on one with all kinds of layers. An untouched twin does the same."""

from __future__ import annotations

import copy
import functools
import itertools
import logging
import os
import random

import hypothesis
import pytest
import torch
from hypothesis import Phase, strategies
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test
from torch import nn

from fuzz import keeper_events, machine, state_events, value_events
from fuzz.compare import Wrong
from fuzz.keeper_events import KEEPS
from fuzz.nets import CONTEXT, Attention
from fuzz.state_events import STATES, TRANSFORMS
from fuzz.value_places import HOMES, PLACES, homes, wrappers
from fuzz.values import CONTAINERS, LEAVES, NUMBERS, Value
from fuzz.world import World
from sfast_ext import Config, accelerate
from sfast_ext.runtime.verify import relative_error
from sfast_ext.tools.lib import models

SETTINGS = hypothesis.settings(
    deadline=None, derandomize=False, database=None, phases=(Phase.generate, Phase.shrink),
    suppress_health_check=list(hypothesis.HealthCheck),
)  # fmt: skip
MINE = {**value_events.EVENTS, **keeper_events.EVENTS, **state_events.EVENTS}
# places of values, and models with events of all kinds: `make soak` plays more
RANDOM, EXAMPLES = (25, 2) if os.environ.get("SFAST_ALL_CASES") else (8, 1)
BESIDE = {machine.another_call: 2, machine.request_again: 2, machine.mode: 2, machine.calm: 3, machine.released: 1}


@pytest.fixture(autouse=True)
def quiet():
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Attention(8, 8), Attention(8, CONTEXT)

    def forward(self, sample: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        return sample + self.second(sample + self.first(sample), context)


class Pair:
    """A tiny model under an accelerator, and its twin, that answer as a `World` does."""

    def __init__(self, before: bool = True) -> None:
        self.twin = models.randomise(Net(), 0).eval().requires_grad_(False)
        self.subject = copy.deepcopy(self.twin)
        self.values, self.watched, self.patches, self.foreign = {}, {}, {}, set()
        self.states, self.seed = {}, 0
        if before:
            self.put_on()

    def put_on(self) -> None:
        self.accelerator = accelerate(self.subject, Config(allow_cpu=True))

    def both(self, change) -> None:
        change(self.subject)
        change(self.twin)

    def draw(self) -> list[torch.Tensor]:
        self.seed += 1
        generator = torch.Generator().manual_seed(self.seed)
        return [torch.randn(2, 5, width, generator=generator) for width in (8, CONTEXT)]

    def check(self, calls: int = 3, **more) -> None:
        for _ in range(calls):
            given = self.draw()
            found = []
            for model in (self.subject, self.twin):
                with torch.no_grad():
                    found.append(_within(list(self.states.values()), functools.partial(model, *given, **more)))
            if type(found[0]) is not torch.Tensor:
                raise Wrong(f"the result is a {type(found[0])}")
            error = relative_error(found[:1], found[1:])
            if not error < 1e-5:
                raise Wrong(f"the result differs by {error:.3g}")
            for look in self.watched.values():
                look()

    @property
    def served(self) -> int:
        return self.accelerator.report.counter("eager_runs")


def _within(states, run):
    if not states:
        return run()
    with states[0]():
        return _within(states[1:], run)


def value_of(kind: str = "float", *around: str) -> Value:
    value = Value(random.Random(0))
    value.kind, value.around = kind, list(around)
    return value


def follow(value: Value, place: str = "an attribute", home: str = HOMES[0]) -> Pair:
    """Change a value at a place in all ways; each change is to show, and what was before to come back."""
    pair = Pair()
    take = value_events.lay(pair, "it", place, value, NUMBERS[0], "first", home)
    pair.check(2)
    for where, k in ((None, NUMBERS[-1]), (9, NUMBERS[0]), (0, NUMBERS[-1])):
        value_events.change(pair.values["it"], k, where)
        pair.check(2)
    take()
    pair.check(2)
    assert pair.served, pair.accelerator.report.as_dict()["reasons"]
    return pair


@pytest.mark.long(but=range(0, 99, 2))
@pytest.mark.parametrize("around", CONTAINERS)
def test_each_container(around):
    follow(value_of("array of NumPy", "dict", around))


def in_turn(values, places):
    """Each value once, at one of the places after the other."""
    return list(zip(values, itertools.cycle(places)))


LOOKED_UP = ("an attribute of another module", "an attribute of the metaclass", "a global")


@pytest.mark.long(but=range(1, 99, 2))
@pytest.mark.parametrize(("around", "place"), in_turn(CONTAINERS, LOOKED_UP))
def test_each_container_in_an_installed_package(around, place):
    follow(value_of("float", "frozen dataclass", around), place, HOMES[-1])


SIMPLE = ("an attribute", "an attribute of the layer", "an attribute of the class")


@pytest.mark.parametrize(("kind", "place"), in_turn(LEAVES, SIMPLE))
def test_each_kind_of_value(kind, place):
    follow(value_of(kind), place)


@pytest.mark.parametrize(("place", "home"), [(place, home) for place in PLACES for home in sorted(set(homes(place)))])
def test_each_place(place, home):
    follow(value_of("np.float32", "list"), place, home)


@pytest.mark.parametrize("kind", KEEPS)
def test_each_processor_that_keeps(kind):
    pair = Pair()
    take = keeper_events.keep(pair, "first", kind)
    pair.check(5)
    take()
    pair.check()
    assert pair.served


@pytest.mark.parametrize("name", STATES)
def test_each_state_of_torch(name):
    for first in (False, True):
        pair = Pair()
        if not first:
            pair.check()
        pair.states[name] = lambda: STATES[name](1.2)
        pair.check()
        pair.states.clear()
        pair.check()
        assert pair.served


@pytest.mark.long(but=[0, 1, 2, 3, 4, 5, 6, 9])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_each_transform_of_a_call(name):
    w = World("small", 1)
    for _ in range(2):
        # also before there is a plan
        state_events.transform(w, name)
        w.check()
    assert w.plan_runs
    machine.finish(w)


@pytest.mark.parametrize(
    ("state", "played"),
    [
        ("a dispatch mode that watches", False), ("a counter of operations", False), ("another default dtype", True),
        (None, True),
    ],
)  # fmt: skip
def test_no_forward_ad_within_a_dispatch_mode(monkeypatch, state, played):
    names = []
    monkeypatch.setattr(state_events, "transform", lambda w, name: names.append(name))
    pair = Pair()
    if state is not None:
        pair.states[state] = lambda: STATES[state](1.0)
    for seed in range(100):
        state_events.transformed(pair, random.Random(seed))
    assert (set(names) >= {"jvp", "a dual tensor"}) == played
    assert set(names) >= {"vmap", "grad", "make_fx"}


def test_no_export_of_a_processor_that_keeps(monkeypatch):
    names = []
    monkeypatch.setattr(state_events, "transform", lambda w, name: names.append(name))
    pair = Pair()
    for _ in range(2):
        for seed in range(100):
            state_events.transformed(pair, random.Random(seed))
        assert ("export" in names) == (not pair.patches) and "make_fx" in names
        names.clear()
        pair.patches[keeper_events.KEEPER] = lambda: None


def test_products_are_not_changed_by_their_operators_if_the_layout_is_not_known():
    for first in ("channels_last", "state"):
        w = World("small", 21001)
        for name in (first, "channels_last" if first == "state" else "state"):
            machine.play(w, name, 4167929119)
            assert (state_events.PRODUCTS in w.states) == (name == first == "state")
        machine.finish(w)


@pytest.mark.thinned
@pytest.mark.parametrize("by_argument", [False, True])
@pytest.mark.parametrize("around", ["list", "dataclass with slots"])
@pytest.mark.parametrize("kind", ["float", "np.int64", "array of NumPy", "Decimal", "set"])
def test_a_wrapper_that_lay_on_the_forward_before(kind, around, by_argument):
    pair, value = Pair(before=False), value_of(kind, around)
    held, put = [value.make(NUMBERS[0]) for _ in range(2)], []
    for model, each in zip((pair.subject, pair.twin), held):
        if by_argument:
            model.forward = wrappers(value).taking_an_argument(model.forward)
        else:
            model.forward, putting = wrappers(value).laid_over(model.forward, each)
            put.append(putting)
    pair.put_on()
    for where in (None, 9, None, 0):
        for k in (NUMBERS[-1], NUMBERS[0]):
            pair.check(2, **({"settings": held[0]} if by_argument else {}))
            for i, each in enumerate(held):
                if where is None or not value.change(each, k, where):
                    held[i] = value.make(k)
                    if put:
                        put[i](held[i])
            pair.check(1, **({"settings": held[0]} if by_argument else {}))


def test_values_at_random_places():
    @hypothesis.seed(0)
    @hypothesis.settings(SETTINGS, max_examples=RANDOM)
    @hypothesis.given(
        seed=strategies.integers(0, 2**32),
        where=strategies.sampled_from([(place, home) for place in PLACES for home in sorted(set(homes(place)))]),
        changes=strategies.lists(
            strategies.tuples(strategies.sampled_from(NUMBERS), strategies.sampled_from((None, 0, 1, 2, 9))),
            min_size=1, max_size=5,
        ),
    )  # fmt: skip
    def followed(seed, where, changes):
        (place, home), pair, value = where, Pair(), Value(random.Random(seed))
        value_events.lay(pair, "it", place, value, NUMBERS[1], "second", home)
        pair.check(2)
        for k, deep in changes:
            value_events.change(pair.values["it"], k, deep)
            pair.check(2)

    followed()


def test_all_of_it_at_random():
    listed = machine.listed({**MINE, **BESIDE})

    class Machine(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            self.world = World("small", 1)

        @rule(name=strategies.sampled_from(listed), seed=strategies.integers(0, 2**16))
        def event(self, name: str, seed: int) -> None:
            machine.play(self.world, name, seed)

        def teardown(self) -> None:
            machine.finish(self.world)

    hypothesis.seed(1)(Machine)
    # a failure names the command that plays it again; to make it short takes minutes
    settings = hypothesis.settings(SETTINGS, max_examples=EXAMPLES, stateful_step_count=25, phases=(Phase.generate,))
    run_state_machine_as_test(Machine, settings=settings)


def test_an_export_that_fails_leaves_nothing(monkeypatch):
    def fails(*_: object) -> None:
        torch.nn.modules.module.register_module_buffer_registration_hook(lambda *_: None)
        raise RuntimeError("not exported")

    monkeypatch.setattr(torch.export, "export", fails)
    before = dict(torch.nn.modules.module._global_buffer_registration_hooks)
    with pytest.raises(RuntimeError, match="not exported"):
        state_events._export(torch.nn.Identity(), (torch.ones(1),), {})
    assert torch.nn.modules.module._global_buffer_registration_hooks == before
