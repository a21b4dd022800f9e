from __future__ import annotations

import array
import collections
import datetime
import decimal
import fractions
import functools
import logging
import operator
import random
import re
import threading
import types
import weakref
from pathlib import PurePath

import numpy as np
import pytest
import torch
from settings_models import (
    NAMESPACE,
    Data,
    DataWithSlots,
    Derived,
    Holder,
    Levels,
    Mode,
    Model,
    Number,
    Point,
    Processor,
    Slots,
    Table,
    keys_of,
    use,
)
from torch import nn

from sfast_ext.behaviour.fingerprint import fingerprint
from sfast_ext.behaviour.structure import structure
from sfast_ext.behaviour.values import MAX_BYTES, MAX_ITEMS

REPLACED = {
    "numpy's float16": (np.float16(1), np.float16(2)),
    "numpy's bool": (np.bool_(True), np.bool_(False)),
    "another type of number": (1, 1.0),
    "a bool for a number": (1, True),
    "the other zero": (0.0, -0.0),
    "precision of a decimal": (decimal.Decimal("1.0"), decimal.Decimal("1.00")),
    "fractions": (fractions.Fraction(1, 3), fractions.Fraction(2, 3)),
    "complex": (1j, 2j),
    "bytes": (b"a", b"b"),
    "ranges": (range(3), range(4)),
    "slices": (slice(0, 3), slice(0, 4)),
    "a slice of lists": (slice([1]), slice([2])),
    "tuples in tuples": (((1, (2,)),), ((1, (3,)),)),
    "a list in a tuple": (([1.0],), ([2.0],)),
    "frozensets": (frozenset({1}), frozenset({2})),
    "members of an enumeration": (Mode.SOFT, Mode.HARD),
    "dates": (datetime.date(2020, 1, 1), datetime.date(2021, 1, 1)),
    "dtypes": (torch.float16, torch.bfloat16),
    "memory formats": (torch.channels_last, torch.contiguous_format),
    "named tuples": (Point(1, []), Point(2, [])),
    "namespaces": (NAMESPACE(level=1), NAMESPACE(level=2)),
    "slots": (Slots(1), Slots(2)),
    "data classes": (Data(1), Data(2)),
    "data classes with slots": (DataWithSlots(1), DataWithSlots(2)),
    "views of dictionaries": (types.MappingProxyType({"a": 1}), types.MappingProxyType({"a": 2})),
    "maps in a chain": (collections.ChainMap({}, {"a": 1}), collections.ChainMap({}, {"a": 2})),
    "a dictionary's order": ({1: 1, 2: 2}, {2: 2, 1: 1}),
    "keys of a dictionary": ({"a": 1}, {"b": 1}),
    "the default of a dictionary": (collections.defaultdict(int), collections.defaultdict(float)),
    "structured scalars": (np.void(b"a"), np.void(b"b")),
    "memory": (memoryview(b"a"), memoryview(b"b")),
    "masked arrays": (np.ma.masked_array([1.0, 2.0], mask=[0, 1]), np.ma.masked_array([1.0, 2.0], mask=[1, 0])),
    "the constant of masked arrays": (np.ma.masked, 1.0),
    "subclasses of float": (Number(1), Number(2)),
    "partials": (functools.partial(max, 1), functools.partial(max, 2)),
    "methods of objects": (Holder([1]).__init__, Holder([2]).__init__),
    "methods of dictionaries": ({"a": 1}.get, {"a": 2}.get),
    "random generators": (random.Random(1), random.Random(2)),
    "numpy's random generators": (np.random.default_rng(1), np.random.default_rng(2)),
    "shapes of arrays": (np.zeros((2, 3)), np.zeros((3, 2))),
    "dtypes of arrays": (np.zeros(2, np.int32), np.zeros(2, np.float32)),
    "getters": (operator.itemgetter(0), operator.itemgetter(1)),
    "functions of numpy": ([np.sin], [np.cos]),
    "functions of torch": ([torch.sin], [torch.cos]),
    "operators of torch": ({"f": torch.ops.aten.sin}, {"f": torch.ops.aten.cos}),
    "limits of a dtype": (torch.finfo(torch.float16), torch.finfo(torch.float32)),
    "classes": ([nn.ReLU], [nn.SiLU]),
    "patterns": (re.compile("a"), re.compile("b")),
    "paths": (PurePath("a"), PurePath("b")),
    "maximal lengths": (collections.deque([1], 2), collections.deque([1], 3)),
}


@pytest.mark.parametrize("name", REPLACED)
def test_a_setting_that_is_replaced_changes_the_key(name):
    before, after = REPLACED[name]
    model = Model(Processor(before))
    first = fingerprint(model)
    assert first.unknown == [] and first.unchanged() and first.unchanged_quick()
    model.processor.levels = after
    assert not first.contents.unchanged() and not first.unchanged()
    second = fingerprint(model)
    assert second.key != first.key and second.unknown == []
    model.processor.levels = before
    assert fingerprint(model).key == first.key


CHANGED = {
    "a nested list": ([[1], [2]], lambda v: v[1].append(3)),
    "an item that moves to the next list": ([[1, 2], [3]], lambda v: v[1].insert(0, v[0].pop())),
    "a tuple's list": (([1],), lambda v: v[0].clear()),
    "the last of many": ([0] * 5000, lambda v: v.__setitem__(-1, 1)),
    "one of many in a dictionary": ({i: i for i in range(300)}, lambda v: v.update({299: 0})),
    "a key": ({"a": 1}, lambda v: v.update(b=v.pop("a"))),
    "an entry far inside": ({"a": [{"b": ({"c": 1},)}]}, lambda v: v["a"][0]["b"][0].update(c=2)),
    "a set": ({1}, lambda v: v.add(2)),
    "a set in a list": ([{1}], lambda v: v[0].discard(1)),
    "a deque": (collections.deque([1, 2]), lambda v: v.rotate(1)),
    "a subclass of list": (Levels([1]), lambda v: v.append(2)),
    "an attribute of a subclass of list": (Levels([1]), lambda v: setattr(v, "level", 2)),
    "a subclass of dict": (Table(a=1), lambda v: v.update(a=2)),
    "a counter": (collections.Counter("ab"), lambda v: v.update("a")),
    "a user's dictionary": (collections.UserDict(a=1), lambda v: v.update(a=2)),
    "bytes": (bytearray(b"a"), lambda v: v.append(1)),
    "an array": (array.array("f", [1]), lambda v: v.append(2)),
    "numpy's array": (np.zeros(3), lambda v: v.__setitem__(2, 1)),
    "a view of an array": (np.zeros((3, 4))[:, ::2], lambda v: v.__setitem__((0, 1), 1)),
    "a shape": (np.zeros(4), lambda v: setattr(v, "shape", (2, 2))),
    "a namespace": (NAMESPACE(level=NAMESPACE(level=1)), lambda v: setattr(v.level, "level", 2)),
    "inherited slots": (Derived(1), lambda v: setattr(v, "level", 2)),
    "a slot that was empty": (Derived(1), lambda v: setattr(v, "level", [1])),
    "an attribute that was missing": (Holder(1), lambda v: delattr(v, "level")),
    "a data class": (Data([1]), lambda v: v.level.append(2)),
    "what a view shows": (types.MappingProxyType(SHOWN := {"a": 1}), lambda v: SHOWN.update(a=2)),
    "keywords of a partial": (functools.partial(max, key=None), lambda v: v.keywords.update(key=len)),
    "arguments of a partial": (functools.partial(max, [1]), lambda v: v.args[0].append(2)),
    "an object behind a weak reference": (weakref.ref(KEPT := Holder(1)), lambda v: setattr(KEPT, "level", 2)),
    "an object behind a proxy": (weakref.proxy(KEPT), lambda v: setattr(KEPT, "level", 3)),
    "a generator that was drawn from": (random.Random(1), lambda v: v.random()),
    "a list that holds itself": ((CYCLE := [1], CYCLE.append(CYCLE))[0], lambda v: v.__setitem__(0, 2)),
    "a function's attribute": (use, lambda v: setattr(v, "level", 2)),
    "a thread's value": (threading.local(), lambda v: setattr(v, "level", 2)),
    "an event": (threading.Event(), lambda v: v.set()),
    "an exception's arguments": (ValueError([1]), lambda v: v.args[0].append(2)),
}


@pytest.mark.parametrize("name", CHANGED)
def test_a_setting_that_changes_in_place_is_seen_at_the_next_call(name):
    value, change = CHANGED[name]
    keys = keys_of(Model(Processor(value)))
    number, foreign = keys.read()
    assert foreign is None and keys.trusted and keys.read()[0] == number
    change(value)
    assert not keys.trusted and keys.read()[0] != number


EQUAL = {
    "numbers": lambda: float("1.5"),
    "lists": lambda: [1.0, [2.0]],
    "not a number": lambda: float("nan"),
    "arrays": lambda: np.ones(3),
    "namespaces": lambda: NAMESPACE(level=(1, float("2.5"))),
    "dictionaries": lambda: {"a": {float("0.5"): "b"}},
    "cycles": lambda: (CYCLE := [1], CYCLE.append(CYCLE))[0],
}


@pytest.mark.parametrize("name", EQUAL)
def test_an_equal_value_in_the_place_of_another_changes_no_key(name):
    model = Model(Processor(EQUAL[name]()))
    before = fingerprint(model)
    model.processor.levels = EQUAL[name]()
    assert fingerprint(model).key == before.key


def test_a_number_that_is_assigned_again_needs_no_reading():
    model = Model(Processor([float("1.5"), {"a": float("2.5")}]))
    before = fingerprint(model)
    model.processor.levels[0], model.processor.levels[1]["a"] = float("1.5"), float("2.5")
    assert before.unchanged_quick()


UNKNOWN = {
    "an iterator": (iter([1]), "list_iterator"),
    "a generator": ((x for x in [1]), "generator"),
    "an iterator far inside": ({"a": [(zip([1]),)]}, "zip"),
    "a long list": ([0] * (MAX_ITEMS + 1), "list of 10001 items: too many"),
    "a large array": (np.zeros(MAX_BYTES), "numpy.ndarray of 524288 bytes: too many"),
    "an array of objects": (np.array([None, [1]], dtype=object), "numpy.ndarray of objects"),
    "a match": (re.match("a", "a"), "re.Match"),
    "keys of a dictionary": ({}.keys(), "dict_keys"),
    "deep": (functools.reduce(lambda inner, _: [inner], range(500), 1), "nested more than 120 deep"),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_a_value_that_cannot_be_compared_is_named(name):
    value, words = UNKNOWN[name]
    _, foreign = keys_of(Model(Processor(value))).read()
    assert foreign is not None and foreign.startswith("the forward can read the model.processor.levels")
    assert words in foreign


@pytest.mark.parametrize("name", UNKNOWN)
def test_a_value_that_no_code_looks_up_is_no_obstacle(name):
    model = Model(Processor(1.0))
    model.processor.history = model.kept = UNKNOWN[name][0]
    keys = keys_of(model)
    assert keys.read()[1] is None and keys.trusted


SILENT = {
    "locks": lambda: threading.RLock(),
    "threads": lambda: threading.Thread(),
    "modules": lambda: types,
    "loggers": lambda: logging.getLogger("x"),
    "generators of torch": lambda: torch.Generator(),
    "torch's functions": lambda: [torch.sin, nn.functional.gelu, torch.ops.aten.add, torch.finfo(torch.float16)],
    "classes": lambda: [nn.Linear, dict, np.ndarray],
    "patterns": lambda: re.compile("a"),
    "tensors": lambda: {"a": [torch.zeros(2)]},
    "paths": lambda: PurePath("a"),
    "numpy's functions": lambda: [np.sin, np.dot, np.float32],
}


@pytest.mark.parametrize("name", SILENT)
def test_what_says_nothing_is_no_obstacle(name):
    keys = keys_of(Model(Processor(SILENT[name]())))
    assert keys.read()[1] is None and keys.trusted


def test_blocks_with_other_settings_have_another_structure():
    for name, (before, after) in REPLACED.items():
        assert structure(Model(Processor(before))) != structure(Model(Processor(after))), name
    for name, (value, _) in UNKNOWN.items():
        assert structure(Model(Processor(value))) != structure(Model(Processor(value))), name


def test_blocks_with_equal_settings_have_one_structure():
    for name, make in EQUAL.items():
        assert structure(Model(Processor(make()))) == structure(Model(Processor(make()))), name
