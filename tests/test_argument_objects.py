"""Arguments and results that are objects: what a forward may see of them that their parts do not tell."""

from __future__ import annotations

import collections
import dataclasses
import enum
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from sfast_ext import Config, accelerate

CPU = Config(allow_cpu=True, drop_slower=False)
CALLS = 3


class Net(nn.Module):
    def __init__(self, use):
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.use = nn.Linear(4, 4), use

    def forward(self, x, *args):
        return self.use(self.linear(x), *args)


def check(use, *calls):
    """Make each call several times, and compare with an untouched twin. Returns the accelerator."""
    net, twin = Net(use), Net(use)
    accelerator = accelerate(net, CPU)
    with torch.no_grad():
        for make in calls:
            for _ in range(CALLS):
                ours, theirs = net(*make()), twin(*make())
                torch.testing.assert_close(ours, theirs)
    accelerator.release()
    return accelerator.report


def tensor(**attributes):
    found = torch.ones(2, 4)
    for name, value in attributes.items():
        setattr(found, name, value)
    return found


def with_level(kind, *args, **attributes):
    found = kind(*args)
    for name, value in attributes.items():
        setattr(found, name, value)
    return found


class Table(dict):
    pass


class Row(tuple):
    pass


@dataclasses.dataclass
class Data:
    scale: float = 1.0


@dataclasses.dataclass
class Late:
    scale: float
    level: float = dataclasses.field(init=False, default=1.0)


@dataclasses.dataclass
class Doubles:
    value: Any

    def __post_init__(self):
        self.value = self.value * 2


class Doubled(NamedTuple("Doubled", [("value", Any), ("level", float)])):
    def __new__(cls, value, level):
        return super().__new__(cls, value * 2, level)


def test_a_tensor_that_is_two_arguments_is_another_call_than_two_tensors():
    def use(x, a, b):
        return x + a if a is b else x + a + b

    one, two = torch.ones(2, 4), torch.ones(2, 4)
    x = torch.randn(2, 4)
    report = check(use, lambda: (x, one, two), lambda: (x, one, one), lambda: (x, one, two))
    assert report.counter("captures") == 2 and not report.as_dict()["reasons"]


def test_equal_numbers_are_not_the_same_argument():
    x = torch.ones(2, 4)
    report = check(lambda x, a, b: x * a + b, lambda: (x, 2.0, 2.0), lambda: (x, 2.0, 3.0))
    assert report.counter("captures") == 1


LEVELS = {
    "a dictionary": lambda **level: with_level(Table, {"a": 1}, **level),
    "a tuple": lambda **level: with_level(Row, (1, 2), **level),
    "a dataclass": lambda **level: with_level(Data, **level),
    "a dataclass's field": lambda **level: with_level(Late, 1.0, **level),
    "a tensor": tensor,
}


@pytest.mark.parametrize("kind", LEVELS)
def test_an_attribute_of_an_argument_is_not_lost(kind):
    def use(x, given):
        return x * getattr(given, "level", 1.0)

    x = torch.randn(2, 4)
    check(use, lambda: (x, LEVELS[kind]()), lambda: (x, LEVELS[kind](level=2.0)), lambda: (x, LEVELS[kind](level=3.0)))


SETTINGS = {"level": 1.0}


@dataclasses.dataclass
class WithProperty:
    scale: float = 1.0

    @property
    def level(self):
        return SETTINGS["level"]


class TupleWithMethod(NamedTuple):
    scale: float = 1.0

    @property
    def level(self):
        return SETTINGS["level"]


class Mode(enum.Enum):
    SOFT = 1

    @property
    def level(self):
        return SETTINGS["level"]


@pytest.mark.parametrize("made", [WithProperty, TupleWithMethod, lambda: Mode.SOFT])
def test_what_the_class_of_an_argument_reads_is_not_followed(made):
    def make(level):
        SETTINGS["level"] = level
        return torch.ones(2, 4), made()

    report = check(lambda x, given: x * given.level, lambda: make(1.0), lambda: make(2.0))
    assert "whose class has code" in " ".join(report.as_dict()["reasons"])


def test_the_class_of_an_argument_with_a_value_of_its_own_is_not_followed():
    @dataclasses.dataclass
    class Other:
        scale: float = 1.0

    Other.level = 1.0

    def make(level):
        Other.level = level
        return torch.ones(2, 4), Other()

    check(lambda x, given: x * given.level, lambda: make(1.0), lambda: make(2.0))


class Plain(enum.Enum):
    SOFT = 1
    HARD = "b"


class Pair(NamedTuple):
    scale: float
    other: Any = None


@dataclasses.dataclass(frozen=True)
class Frozen:
    scale: float


@pytest.mark.parametrize("made", [Pair, Frozen, Data, Late, lambda scale: collections.OrderedDict(scale=scale)])
def test_plain_objects_are_served(made):
    def use(x, given):
        return x * (given["scale"] if isinstance(given, dict) else given.scale)

    report = check(use, lambda: (torch.ones(2, 4), made(1.0)), lambda: (torch.ones(2, 4), made(2.0)))
    assert report.counter("captures") == 2


def test_a_plain_enumeration_is_served():
    x = torch.ones(2, 4)
    report = check(lambda x, mode: x * (1 if mode is Plain.SOFT else 2), *(lambda m=m: (x, m) for m in Plain))
    assert report.counter("captures") == 2


def test_an_argument_whose_constructor_computes_arrives_as_it_is():
    report = check(
        lambda x, a, b: x * a.value + b.value, lambda: (torch.ones(2, 4), Doubles(1.5), Doubled(torch.ones(4), 0.5))
    )
    assert report.counter("captures") and not report.as_dict()["reasons"]


def results(make):
    net, twin = Net(make), Net(make)
    accelerator = accelerate(net, CPU)
    with torch.no_grad():
        found = [(net(x), twin(x)) for x in [torch.ones(2, 4)] * CALLS]
    accelerator.release()
    return found


def test_a_result_whose_constructor_computes_is_the_same():
    for ours, theirs in results(Doubles):
        torch.testing.assert_close(ours.value, theirs.value)


@pytest.mark.parametrize("made", [collections.Counter, lambda d: collections.defaultdict(list, d), Table])
def test_a_result_that_is_a_dictionary_is_the_same(made):
    for ours, theirs in results(lambda x: made({"a": x})):
        assert type(ours) is type(theirs)
        torch.testing.assert_close(dict(ours), dict(theirs))


def test_attributes_of_a_result_are_not_lost():
    for ours, theirs in results(lambda x: with_level(Data, x, level=2.0)):
        assert vars(ours).keys() == vars(theirs).keys() and ours.level == 2.0
        torch.testing.assert_close(ours.scale, theirs.scale)


@pytest.mark.parametrize(
    "result", [lambda x, k: (x * k, k), lambda x, k: (x * k, [k * 2]), lambda x, k: {"x": x * k, "words": str(k)}]
)
def test_a_number_in_the_result_is_the_number(result):
    net, twin = Net(result), Net(result)
    accelerator = accelerate(net, CPU)
    with torch.no_grad():
        for k in (2.0, 2.0, 2.0, 3.0, 3.0, 3.0):
            ours, theirs = net(torch.ones(2, 4), k), twin(torch.ones(2, 4), k)
            assert str(ours) == str(theirs)
    assert accelerator.report.counter("captures") > 0 and not accelerator.report.counter("errors")
    accelerator.release()
