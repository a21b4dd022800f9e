"""What constructors read, code of functions that is replaced, and classes of objects that are replaced."""

from __future__ import annotations

import copy
import dataclasses

import numpy as np
import pytest
from settings_models import Model, Slots, keys_of, use

GLOBALS: dict = {}
VALUES = {
    "numbers": (1.0, 2.0),
    "lists": ([[1]], [[2]]),
    "slots": (Slots(1), Slots(2)),
    "arrays": (np.ones(2), np.zeros(2)),
}


def behind_a_constructor(v):
    class Reads:
        def __init__(self):
            self.level = GLOBALS["made"]

    GLOBALS["made"] = v
    return (lambda x: x * use(Reads().level)), lambda new: GLOBALS.update(made=new)


def of_the_only_object(v):
    class Only:
        one = None

        def __new__(cls):
            if cls.one is None:
                cls.one = super().__new__(cls)
            return cls.one

    Only().level = v
    return (lambda x: x * use(Only().level)), lambda new: setattr(Only.one, "level", new)


def behind_a_constructor_of_a_base(v):
    settings = {"level": v}

    class Base:
        def __init__(self):
            self.level = settings["level"]

    @dataclasses.dataclass
    class Reads(Base):
        other: int = 1

        def __post_init__(self):
            super().__init__()

    held = {"made": [Reads]}
    return (lambda x: x * use(held["made"][0]().level)), lambda new: settings.update(level=new)


def behind_a_subscript_of_a_class(v):
    settings = {"level": v}

    class Table:
        def __class_getitem__(cls, key):
            return settings[key]

    return (lambda x: x * use(Table["level"])), lambda new: settings.update(level=new)


def behind_a_class_that_is_derived(v):
    settings = {"level": v}

    class Base:
        def __init_subclass__(cls):
            cls.level = settings["level"]

    def forward(x):
        class Derived(Base):
            pass

        return x * use(Derived.level)

    return forward, lambda new: settings.update(level=new)


MADE = [
    behind_a_constructor, of_the_only_object, behind_a_constructor_of_a_base, behind_a_subscript_of_a_class,
    behind_a_class_that_is_derived,
]  # fmt: skip


@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize("place", MADE)
def test_what_makes_an_object_is_read(place, name):
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


@pytest.mark.parametrize("place", MADE[:1] + MADE[3:])
def test_a_value_that_cannot_be_compared_is_unchanging_if_objects_may_be_made(place):
    keys = keys_of(Model(place(iter([1.0]))[0]))
    assert keys.read()[1] is None and keys.trusted


@pytest.mark.parametrize("kind", ["function", "method", "global"])
def test_a_function_whose_code_is_replaced_is_another(kind):
    codes = [eval(f"lambda x: x * {factor}").__code__ for factor in (1.0, 2.0)]

    def inner(x):
        return x * 1.0

    class Runs:
        def __call__(self, x):
            return inner(x)

    inner.__code__ = codes[0]
    globals()["INNER"] = inner
    processors = {"function": inner, "method": Runs(), "global": lambda x: INNER(x)}  # noqa: F821
    keys = keys_of(Model(processors[kind]))
    number, _ = keys.read()
    assert keys.trusted
    inner.__code__ = codes[1]
    assert not keys.trusted and keys.read()[0] != number
    inner.__code__ = codes[0]
    assert not keys.trusted and keys.read()[0] == number


class Soft:
    def __call__(self, x):
        return x


class Hard:
    def __call__(self, x):
        return x * 2


class SoftSlots:
    __slots__ = ("level",)

    def __call__(self, x):
        return x


class HardSlots:
    __slots__ = ("level",)

    def __call__(self, x):
        return x * 2


HELD = {
    "a processor": lambda one: one,
    "in a closure": lambda one: lambda x: one(x),
    "in a list": lambda one: (lambda held: lambda x: held[0](x))([one]),
    "in a default": lambda one: lambda x, one=one: one(x),
    "in an object": lambda one: (lambda held: lambda x: held.level(x))(Slots(one)),
}


@pytest.mark.parametrize("kinds", [(Soft, Hard), (SoftSlots, HardSlots)])
@pytest.mark.parametrize("place", HELD)
def test_an_object_that_is_given_another_class_is_another(place, kinds):
    one = kinds[0]()
    keys = keys_of(Model(HELD[place](one)))
    number, _ = keys.read()
    assert keys.trusted
    one.__class__ = kinds[1]
    assert not keys.trusted and keys.read()[0] != number
    one.__class__ = kinds[0]
    assert not keys.trusted and keys.read()[0] == number
