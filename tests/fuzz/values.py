"""Python values of all kinds that hold one number, the expression that reads it, and how it is changed in place."""

from __future__ import annotations

import array
import collections
import datetime
import enum
import fractions
import functools
import pathlib
import random
import re
import types
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, NamedTuple

import numpy as np
import torch

NUMBERS = (0.8, 0.9, 1.0, 1.1, 1.2)
DEEP = 3
"""Containers around a number, at most."""


class Strength(enum.Enum):
    LEAST, LESS, PLAIN, MORE, MOST = NUMBERS


class Tenths(enum.IntEnum):
    LEAST, LESS, PLAIN, MORE, MOST = (round(10 * k) for k in NUMBERS)


class Plain:
    value: Any = None


class Slots:
    __slots__ = ("value",)


class Inherited(Plain):
    other = 1


class Properties:
    def __init__(self) -> None:
        self._value: Any = None

    @property
    def value(self) -> Any:
        return self._value

    @value.setter
    def value(self, value: Any) -> None:
        self._value = value


@dataclass
class Data:
    value: Any
    name: str = "data"


@dataclass(frozen=True)
class Frozen:
    value: Any


@dataclass
class SlotData:
    __slots__ = ("value",)
    value: Any


class Pair(NamedTuple):
    name: str
    value: Any


class OwnList(list):
    pass


class OwnDict(dict):
    pass


def anything(*args: Any, **kwargs: Any) -> None:
    """What a partial holds a value for."""


class Kind(NamedTuple):
    """Where a number is in an object of one kind."""

    make: Callable[[float], Any]
    text: str
    """An expression of the number; `{}` is the object."""
    write: Callable[[Any, float], Any] | None = None


def _tenths(make: Callable[[int], Any]) -> Callable[[float], Any]:
    return lambda k: make(round(10 * k))


def _nested(k: float) -> Any:
    # in a class it is a method
    return lambda *_: k


LEAVES: dict[str, Kind] = {
    "float": Kind(float, "{}"),
    "int": Kind(_tenths(int), "{} / 10"),
    "bool": Kind(lambda k: k > 1, "(1.15 if {} else 0.9)"),
    "None": Kind(lambda k: None if k > 1 else 0, "(1.15 if {} is None else 0.9)"),
    "text": Kind(str, "float({})"),
    "the length of a text": Kind(_tenths(lambda n: "x" * n), "len({}) / 10"),
    "bytes": Kind(_tenths(bytes), "len({}) / 10"),
    "bytearray": Kind(
        _tenths(lambda n: bytearray([n])), "{}[0] / 10", lambda x, k: x.__setitem__(0, round(10 * k))
    ),
    "complex": Kind(lambda k: complex(k, 1), "{}.real"),
    "Decimal": Kind(lambda k: Decimal(str(k)), "float({})"),
    "Fraction": Kind(_tenths(lambda n: fractions.Fraction(n, 10)), "float({})"),
    "np.float32": Kind(np.float32, "float({})"),
    "np.float64": Kind(np.float64, "float({})"),
    "np.int64": Kind(_tenths(np.int64), "int({}) / 10"),
    "np.bool_": Kind(lambda k: np.bool_(k > 1), "(1.15 if {} else 0.9)"),
    "np.str_": Kind(lambda k: np.str_(k), "float(str({}))"),
    "array of NumPy": Kind(
        lambda k: np.array([2.0, k]), "float({}[1])", lambda x, k: x.__setitem__(1, k)
    ),
    "array of NumPy in two dimensions": Kind(
        lambda k: np.full((3, 40), k), "float({}[2, 7])", lambda x, k: x.fill(k)
    ),
    "array of records": Kind(
        lambda k: np.array([(1, k)], dtype=[("n", "i4"), ("k", "f8")]), "float({}['k'][0])",
        lambda x, k: x["k"].fill(k),
    ),
    "array": Kind(lambda k: array.array("d", [k]), "{}[0]", lambda x, k: x.__setitem__(0, k)),
    "range": Kind(_tenths(range), "len({}) / 10"),
    "slice": Kind(_tenths(lambda n: slice(0, n)), "{}.stop / 10"),
    "Enum": Kind(Strength, "{}.value"),
    "IntEnum": Kind(_tenths(Tenths), "int({}) / 10"),
    "timedelta": Kind(lambda k: datetime.timedelta(seconds=k), "{}.total_seconds()"),
    "date": Kind(_tenths(lambda n: datetime.date(2000, 1, n)), "{}.day / 10"),
    "path": Kind(_tenths(lambda n: pathlib.PurePosixPath("x" * n)), "len(str({})) / 10"),
    "pattern": Kind(_tenths(lambda n: re.compile("x" * n)), "len({}.pattern) / 10"),
    "torch.Size": Kind(_tenths(lambda n: torch.Size([1, n])), "{}[1] / 10"),
    "torch.device": Kind(_tenths(lambda n: torch.device("cuda", n)), "{}.index / 10"),
    "torch.dtype": Kind(lambda k: torch.float16 if k > 1 else torch.int8, "(1.15 if {}.is_floating_point else 0.9)"),
    "set": Kind(
        _tenths(lambda n: {n}), "max({}) / 10", lambda x, k: (x.clear(), x.add(round(10 * k))),
    ),
    "frozenset": Kind(_tenths(lambda n: frozenset({n, 1})), "max({}) / 10"),
    "Counter": Kind(
        _tenths(lambda n: collections.Counter(a=n)), "{}['a'] / 10", lambda x, k: x.update(a=round(10 * k) - x["a"])
    ),
    "function": Kind(_nested, "{}()"),
    "class": Kind(lambda k: type("Options", (), {"k": k}), "{}.k", lambda x, k: setattr(x, "k", k)),
}  # fmt: skip


class Container(NamedTuple):
    """An object that holds another one."""

    make: Callable[[Any], Any]
    text: str
    """An expression of what is held; `{}` is the container."""
    get: Callable[[Any], Any]
    put: Callable[[Any, Any], Any] | None = None


def _attribute(make: Callable[[], Any], name: str = "value") -> Container:
    def made(held: Any) -> Any:
        found = make()
        setattr(found, name, held)
        return found

    return Container(
        made, "{}." + name, lambda x: getattr(x, name), lambda x, held: setattr(x, name, held)
    )


def _item(make: Callable[[Any], Any], key: Any, *, fixed: bool = False) -> Container:
    put = None if fixed else (lambda x, held: x.__setitem__(key, held))
    return Container(make, "{}[" + repr(key) + "]", lambda x: x[key], put)


CONTAINERS: dict[str, Container] = {
    "list": _item(lambda x: [1.0, x], 1),
    "list of many": _item(lambda x: [*range(70), x], 70),
    "list of a thousand": _item(lambda x: [*range(700), x, *range(299)], 700),
    "list of the package's": _item(lambda x: OwnList([x]), 0),
    "tuple": _item(lambda x: (x, 2), 0, fixed=True),
    "dict": _item(lambda x: {"a": x, "b": 1}, "a"),
    "dict by number": _item(lambda x: {3: x}, 3),
    "dict by tuple": _item(lambda x: {(1, "b"): x}, (1, "b")),
    "dict of the package's": _item(lambda x: OwnDict(a=x), "a"),
    "OrderedDict": _item(lambda x: collections.OrderedDict(a=x), "a"),
    "defaultdict": _item(lambda x: collections.defaultdict(float, a=x), "a"),
    "deque": _item(lambda x: collections.deque([x, 1]), 0),
    "deque of a length": _item(lambda x: collections.deque([1, x], maxlen=2), 1),
    "UserDict": _item(lambda x: collections.UserDict(a=x), "a"),
    "UserList": _item(lambda x: collections.UserList([x]), 0),
    "ChainMap": _item(lambda x: collections.ChainMap({}, {"a": x}), "a"),
    "mappingproxy": _item(lambda x: types.MappingProxyType({"a": x}), "a", fixed=True),
    "array of objects": Container(
        lambda x: _objects(x), "{}[0]", lambda a: a[0], lambda a, x: a.__setitem__(0, x)
    ),
    "namespace": _attribute(types.SimpleNamespace),
    "object": _attribute(Plain),
    "object of a subclass": _attribute(Inherited),
    "object with slots": _attribute(Slots),
    "object with a property": _attribute(Properties),
    "module": _attribute(lambda: types.ModuleType("generated_package.options")),
    "dataclass": _attribute(lambda: Data(None)),
    "dataclass with slots": _attribute(lambda: SlotData(None)),
    "frozen dataclass": Container(Frozen, "{}.value", lambda x: x.value),
    "named tuple": Container(lambda x: Pair("a", x), "{}.value", lambda x: x.value),
    "partial": Container(lambda x: functools.partial(anything, x), "{}.args[0]", lambda x: x.args[0]),
    "partial by name": Container(
        lambda x: functools.partial(anything, a=x), "{}.keywords['a']", lambda x: x.keywords["a"],
        lambda x, held: x.keywords.update(a=held),
    ),
}  # fmt: skip


def _objects(x: Any) -> Any:
    found = np.empty(1, dtype=object)
    found[0] = x
    return found


class Value:
    """One kind of value: a leaf, and containers around it."""

    def __init__(self, rng: random.Random, deepest: int = DEEP) -> None:
        self.kind = rng.choice(list(LEAVES))
        self.around = rng.choices(list(CONTAINERS), k=rng.choice([*range(deepest + 1), 1]))

    @property
    def words(self) -> str:
        """As `list of dict of float`."""
        return " of ".join([*self.around, self.kind])

    def make(self, k: float) -> Any:
        """A new object with this number."""
        made = LEAVES[self.kind].make(k)
        for name in reversed(self.around):
            made = CONTAINERS[name].make(made)
        return made

    def read(self, expression: str) -> str:
        """The expression of the number in the object of an expression."""
        for name in self.around:
            expression = CONTAINERS[name].text.format(expression)
        return LEAVES[self.kind].text.format(expression)

    def change(self, value: Any, k: float, where: int) -> bool:
        """Change the number in place, at the nearest place from `where` on outwards that can be; False: nowhere."""
        held = [value]
        for name in self.around:
            held.append(CONTAINERS[name].get(held[-1]))
        write = LEAVES[self.kind].write
        if write is not None and where >= len(self.around):
            write(held[-1], k)
            return True
        for i in reversed(range(min(len(self.around), where + 1))):
            put = CONTAINERS[self.around[i]].put
            if put is not None:
                inner = Value.__new__(Value)
                inner.kind, inner.around = self.kind, self.around[i + 1 :]
                put(held[i], inner.make(k))
                return True
        if write is not None:
            write(held[-1], k)
        return write is not None
