from __future__ import annotations

import contextvars
import copy
import enum
import functools
import itertools
import types

import numpy as np
import pytest
import torch
from settings_models import Holder, Model, Processor, Slots, keys_of, use
from torch import nn

from sfast_ext import Config, accelerate
from sfast_ext.behaviour.fingerprint import fingerprint
from sfast_ext.behaviour.key import BehaviourKeys

CPU = Config(allow_cpu=True, drop_slower=False)
GLOBAL: object = None
NUMBERS = itertools.count()
GLOBALS: dict = {}
OBJECT = Holder(None)
VARIABLE: contextvars.ContextVar = contextvars.ContextVar("level")


class Config:
    level: object = None


class WithProperty:
    @property
    def level(self):
        return Config.level


class Metaclass(type):
    level: object = None

    @property
    def current(cls):
        return cls.level


class Made(metaclass=Metaclass):
    pass


class LooksUp:
    def __init__(self, level):
        self.entries = {**{f"other{i}": i for i in range(100)}, "strength": level}

    def __getattr__(self, name):
        return self.entries[name]


def in_a_closure(v):
    def forward(x):
        return x * use(v)

    def change(new):
        nonlocal v
        v = new

    return forward, change


def in_a_global(v):
    globals()["GLOBAL"] = v
    return (lambda x: x * use(GLOBAL)), lambda new: globals().update(GLOBAL=new)


def in_a_global_dictionary(v):
    GLOBALS["a"] = [v]
    return (lambda x: x * use(GLOBALS["a"][0])), lambda new: GLOBALS["a"].__setitem__(0, new)


def in_a_global_object(v):
    OBJECT.level = v
    return (lambda x: x * use(OBJECT.level)), lambda new: setattr(OBJECT, "level", new)


def in_a_context_variable(v):
    VARIABLE.set(v)
    return (lambda x: x * use(VARIABLE.get())), VARIABLE.set


def in_a_class(v):
    Config.level = v
    return (lambda x: x * use(Config.level)), lambda new: setattr(Config, "level", new)


def behind_a_property(v):
    Config.level = v
    one = WithProperty()
    return (lambda x: x * use(one.level)), lambda new: setattr(Config, "level", new)


def in_a_metaclass(v):
    Metaclass.level = v
    return (lambda x: x * use(Made.current)), lambda new: setattr(Metaclass, "level", new)


def in_a_default(v):
    def forward(x, level=v):
        return x * use(level)

    return forward, lambda new: setattr(forward, "__defaults__", (new,))


def in_a_keyword_default(v):
    def forward(x, *, level=v):
        return x * use(level)

    return forward, lambda new: forward.__kwdefaults__.update(level=new)


def in_a_partial(v):
    made = functools.partial(lambda x, level: x * use(level), level=v)
    return made, lambda new: made.keywords.update(level=new)


def in_another_module(v):
    there = types.ModuleType("their_settings")
    there.deeper = types.ModuleType("their_settings.deeper")
    there.deeper.strength = v
    return (lambda x: x * use(there.deeper.strength)), lambda new: setattr(there.deeper, "strength", new)


def looked_up(v):
    one = LooksUp(v)
    return (lambda x: x * use(one.strength)), lambda new: one.entries.update(strength=new)


def of_a_bound_method(v):
    class Runs(Holder):
        def run(self, x):
            return x * use(self.level)

    one = Runs(v)
    return one.run, lambda new: setattr(one, "level", new)


def of_a_cached_function(v):
    found = [v]
    cached = functools.lru_cache(lambda: found[0])
    return (lambda x: x * use(cached())), lambda new: found.__setitem__(0, new)


def in_a_module_outside_the_tree(v):
    other = nn.Identity()
    other.strength = v
    held = [other]
    return (lambda x: x * use(held[0].strength)), lambda new: setattr(other, "strength", new)


def by_the_name_of_a_global(v):
    globals()["BY_NAME"] = v
    return (lambda x: x * use(globals()["BY_NAME"])), lambda new: globals().update(BY_NAME=new)


def of_a_function_that_is_called(v):
    def inner():
        return inner.strength

    inner.strength = v
    return (lambda x: x * use(inner())), lambda new: setattr(inner, "strength", new)


def of_a_static_method(v):
    class Runs:
        table = {"a": v}

        @staticmethod
        def level():
            return Runs.table["a"]

        def __call__(self, x):
            return x * use(self.level())

    return Runs(), lambda new: Runs.table.update(a=new)


def of_a_member_of_an_enumeration(v):
    class Mode(enum.Enum):
        SOFT = 1
        HARD = 2

    Mode.SOFT.level = v
    return (lambda x: x * use(Mode.SOFT.level)), lambda new: setattr(Mode.SOFT, "level", new)


def of_a_member_in_a_list(v):
    class Mode(enum.IntEnum):
        SOFT = 1

        def __init__(self, value):
            self.options = {"level": v}

    held = [Mode.SOFT]
    return (lambda x: x * use(held[0].options["level"])), lambda new: Mode.SOFT.options.update(level=new)


def of_an_operator(v):
    held = [v]

    def scaled(x: torch.Tensor) -> torch.Tensor:
        return x * use(held[0])

    scaled.__annotations__ = {"x": torch.Tensor, "return": torch.Tensor}
    operator = torch.library.custom_op(f"value_places::scaled{next(NUMBERS)}", scaled, mutates_args=())
    return (lambda x: operator(x)), lambda new: held.__setitem__(0, new)


PLACES = [
    in_a_closure, in_a_global, in_a_global_dictionary, in_a_global_object, in_a_context_variable, in_a_class,
    behind_a_property, in_a_metaclass, in_a_default, in_a_keyword_default, in_a_partial, in_another_module, looked_up,
    of_a_bound_method, of_a_cached_function, in_a_module_outside_the_tree, by_the_name_of_a_global,
    of_a_function_that_is_called, of_a_static_method, of_a_member_of_an_enumeration, of_a_member_in_a_list,
]  # fmt: skip
if hasattr(torch.library, "custom_op"):
    PLACES.append(of_an_operator)
VALUES = {
    "numbers": (1.0, 2.0),
    "lists": ([[1]], [[2]]),
    "slots": (Slots(1), Slots(2)),
    "arrays": (np.ones(2), np.zeros(2)),
}


@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize("place", PLACES)
def test_a_value_is_compared_wherever_the_code_finds_it(place, name):
    before, after = copy.deepcopy(VALUES[name])
    processor, change = place(before)
    keys = keys_of(Model(processor))
    number, foreign = keys.read()
    assert foreign is None and keys.trusted
    change(after)
    assert not keys.trusted
    second, foreign = keys.read()
    assert second != number and foreign is None and keys.trusted
    change(before)
    assert not keys.trusted and keys.read()[0] == number


@pytest.mark.parametrize("place", PLACES)
def test_a_value_that_changes_in_place_is_seen_wherever_the_code_finds_it(place):
    value = {"a": [1]}
    keys = keys_of(Model(place(value)[0]))
    number, _ = keys.read()
    value["a"][0] = 2
    assert not keys.trusted and keys.read()[0] != number


@pytest.mark.parametrize("place", PLACES)
def test_a_value_that_cannot_be_compared_is_named_wherever_the_code_finds_it(place):
    assert "list_iterator" in str(keys_of(Model(place(iter([1]))[0])).read()[1])


@pytest.mark.parametrize("place", PLACES)
def test_without_generations_it_is_seen_at_the_next_call_as_well(place):
    value = {"a": [1]}
    keys = BehaviourKeys(Model(place(value)[0]), frozenset(), None, 8)
    number, _ = keys.read()
    assert keys.read()[0] == number
    value["a"][0] = 2
    assert keys.read()[0] != number


@pytest.mark.parametrize("place", PLACES)
def test_a_class_of_settings_that_is_patched_is_seen(place, monkeypatch):
    keys = keys_of(Model(place(Holder(1.0))[0]))
    number, _ = keys.read()
    monkeypatch.setattr(Holder, "level", property(lambda self: 2.0), raising=False)
    assert not keys.trusted and keys.read()[0] != number


def test_only_what_code_looks_up_in_a_long_table_counts():
    one = LooksUp(1.0)
    keys = keys_of(Model(lambda x: x * one.strength))
    number, _ = keys.read()
    one.entries["other1"] = iter([])
    assert keys.trusted and keys.read() == (number, None)


def test_a_wrapper_beneath_the_accelerated_forward_is_read():
    model, state = Model(Processor(1.0)), {"factor": [[[1.0]]]}

    def below(x):
        return x * state["factor"][0][0][0]

    before = fingerprint(model, below=below)
    assert before.unchanged_quick()
    state["factor"][0][0][0] = 2.0
    assert not before.unchanged_quick() and fingerprint(model, below=below).key != before.key


class Wrapper:
    def __init__(self, inner):
        self.inner, self.settings = inner, {"factors": [(1.0, Slots(1.0))]}

    def __call__(self, x):
        return self.inner(x) * self.settings["factors"][0][1].level


@pytest.mark.parametrize("announced", [True, False])
def test_what_a_wrapper_laid_before_acceleration_reads_is_seen(announced):
    model = Model(Processor(1.0))
    model.forward = wrapper = Wrapper(model.forward)
    accelerator = accelerate(model, CPU)
    with torch.no_grad():
        for step in range(6):
            if announced and step % 3 == 0:
                accelerator.new_generation()
            wrapper.settings["factors"][0][1].level = factor = 1.0 + step // 2
            x = torch.randn(2, 2)
            torch.testing.assert_close(model(x), model.inner(x) * factor)
    assert accelerator.report.counter("captures") > 0
    accelerator.release()
    assert model.forward is wrapper
