"""Settings in the code of a package that is installed: they change as those of a program do. Its tools do not count."""

from __future__ import annotations

import collections
import copy
import datetime
import fractions
import functools
import importlib
import re
import sys
import types

import numpy as np
import pytest
from settings_models import NAMESPACE, Data, DataWithSlots, Holder, Model, Processor, Slots, keys_of
from torch import nn

from sfast_ext.behaviour.value_types import in_library

PROCESSORS = """
import contextvars
import functools
import math

import another_library
from a_package import settings

OPTIONS = None
TABLE = {"a": None}
VARIABLE = contextvars.ContextVar("level", default=None)
REGISTRY, kernel = another_library.Registry(), another_library.Kernel()
root = math.sqrt


class Config:
    level, registry = None, another_library.Registry()


class Metaclass(type):
    level = None


class Processor(metaclass=Metaclass):
    held = None

    class Inner:
        level = None

    def __call__(self, x):
        REGISTRY.count()
        Config.registry.count()
        found = (OPTIONS, TABLE["a"], VARIABLE.get(), Config.level, type(self).level, self.held, self.Inner.level)
        return kernel(x), root(x), found, settings.OPTIONS, settings.Config.level
"""
SETTINGS = """
OPTIONS = None


class Config:
    level = None
"""
LIBRARY = """
class Registry:
    calls = 0

    def count(self):
        self.calls += 1


class Kernel:
    def __init__(self):
        self.cache = {}

    def __call__(self, x):
        self.cache[len(self.cache)] = x
        return x
"""


@pytest.fixture
def home(tmp_path, request):
    """The folder of installed packages."""
    return tmp_path / getattr(request, "param", "site-packages")


@pytest.fixture
def package(home, monkeypatch):
    """The processors of a package that is installed next to another library."""
    (home / "a_package").mkdir(parents=True)
    (home / "a_package" / "__init__.py").touch()
    (home / "a_package" / "processors.py").write_text(PROCESSORS, encoding="utf-8")
    (home / "a_package" / "settings.py").write_text(SETTINGS, encoding="utf-8")
    (home / "another_library.py").write_text(LIBRARY, encoding="utf-8")
    monkeypatch.syspath_prepend(str(home))
    yield importlib.import_module("a_package.processors")
    for name in ("a_package", "a_package.processors", "a_package.settings", "another_library"):
        sys.modules.pop(name, None)


PLACES = {
    "a global": lambda p, v: setattr(p, "OPTIONS", v),
    "an entry of a global": lambda p, v: p.TABLE.update(a=v),
    "a context variable": lambda p, v: p.VARIABLE.set(v),
    "a class": lambda p, v: setattr(p.Config, "level", v),
    "a class of another module": lambda p, v: setattr(p.settings.Config, "level", v),
    "another module": lambda p, v: setattr(p.settings, "OPTIONS", v),
    "the metaclass": lambda p, v: setattr(p.Metaclass, "level", v),
    "the class": lambda p, v: setattr(p.Processor, "held", v),
    "a class within the class": lambda p, v: setattr(p.Processor.Inner, "level", v),
}


def of_objects(value):
    found = np.empty(1, dtype=object)
    found[0] = value
    return found


def in_a_module(value):
    made = types.ModuleType("options")
    made.level = value
    return made


def in_a_class(value):
    return type("Options", (), {"level": value})


VALUES = {
    "a namespace": (lambda: NAMESPACE(level=1.0), lambda v: setattr(v, "level", 2.0)),
    "an object of a program": (lambda: Holder([1]), lambda v: v.level.append(2)),
    "a data class": (lambda: Data(1.0), lambda v: setattr(v, "level", 2.0)),
    "slots": (lambda: Slots(1.0), lambda v: setattr(v, "level", 2.0)),
    "a data class with slots": (lambda: DataWithSlots([1]), lambda v: v.level.append(1)),
    "a UserDict": (lambda: collections.UserDict(a=1), lambda v: v.update(a=2)),
    "a UserList": (lambda: collections.UserList([1]), lambda v: v.append(2)),
    "a ChainMap": (lambda: collections.ChainMap({}, {"a": 1}), lambda v: v.update(a=2)),
    "a deque": (lambda: collections.deque([1.0]), lambda v: v.append(2.0)),
    "an array of objects": (lambda: of_objects(1.0), lambda v: v.__setitem__(0, 2.0)),
    "a list in an array of objects": (lambda: of_objects([1.0]), lambda v: v[0].append(2.0)),
    "a partial": (lambda: functools.partial(print, end=1), lambda v: v.keywords.update(end=2)),
    "a module": (lambda: in_a_module(1.0), lambda v: setattr(v, "level", 2.0)),
    "a class": (lambda: in_a_class(1.0), lambda v: setattr(v, "level", 2.0)),
    "a list of lists": (lambda: [[1]], lambda v: v[0].append(2)),
}


@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize("place", PLACES)
def test_a_setting_of_an_installed_package_that_changes_in_place_is_seen(package, place, name):
    make, change = VALUES[name]
    value = make()
    PLACES[place](package, value)
    keys = keys_of(Model(package.Processor()))
    number, foreign = keys.read()
    assert foreign is None and keys.trusted and keys.read() == (number, None)
    change(value)
    assert not keys.trusted
    second, foreign = keys.read()
    assert second != number and foreign is None and keys.trusted


@pytest.mark.parametrize("before, after", [(1.0, 2.0), (functools.partial(print, 1), functools.partial(print, 2))])
@pytest.mark.parametrize("place", PLACES)
def test_a_setting_of_an_installed_package_that_is_replaced_is_seen(package, place, before, after):
    PLACES[place](package, before)
    keys = keys_of(Model(package.Processor()))
    number, _ = keys.read()
    PLACES[place](package, after)
    assert not keys.trusted and keys.read()[0] != number
    PLACES[place](package, before)
    assert not keys.trusted and keys.read()[0] == number


@pytest.mark.parametrize("place", PLACES)
def test_a_module_of_settings_that_takes_the_place_of_another_is_seen(package, place):
    before, after = in_a_module(frozenset({1})), in_a_module(frozenset({2}))
    PLACES[place](package, before)
    keys = keys_of(Model(package.Processor()))
    number, _ = keys.read()
    PLACES[place](package, after)
    assert not keys.trusted and keys.read()[0] != number


SETTINGS_OF_A_PROGRAM = in_a_module(frozenset({1}))


@pytest.mark.parametrize("before", [in_a_module(1.0), in_a_module(frozenset({1})), in_a_module({"a": [1]})])
def test_a_module_of_settings_of_a_program_that_is_replaced_is_seen(monkeypatch, before):
    monkeypatch.setitem(globals(), "SETTINGS_OF_A_PROGRAM", before)
    keys = keys_of(Model(lambda x: x * SETTINGS_OF_A_PROGRAM.level))
    number, _ = keys.read()
    monkeypatch.setitem(globals(), "SETTINGS_OF_A_PROGRAM", in_a_module("another"))
    assert not keys.trusted and keys.read()[0] != number
    monkeypatch.setitem(globals(), "SETTINGS_OF_A_PROGRAM", before)
    assert not keys.trusted and keys.read()[0] == number


@pytest.mark.parametrize("place", PLACES)
def test_a_value_of_an_installed_package_that_cannot_be_compared_is_no_obstacle(package, place):
    PLACES[place](package, iter([1]))
    assert keys_of(Model(package.Processor())).read()[1] is None


def test_tools_of_another_library_may_change(package):
    keys = keys_of(Model(package.Processor()))
    number, _ = keys.read()
    for _ in range(3):
        package.REGISTRY.count()
        package.Config.registry.count()
        package.kernel(1)
        assert keys.trusted and keys.read() == (number, None)
    package.REGISTRY = package.another_library.Registry()
    assert not keys.trusted


class Nested(Processor):
    class Config:
        level = 1.0

        class Deeper:
            level = [1.0]

    def __call__(self, x):
        return x * self.Config.level * self.Config.Deeper.level[0]


@pytest.mark.parametrize("change", ["a number", "a list deeper", "a class"])
def test_a_class_within_the_class_of_a_processor_is_read(monkeypatch, change):
    monkeypatch.setattr(Nested.Config.Deeper, "level", [1.0])
    monkeypatch.setattr(Nested.Config, "level", 1.0)
    keys = keys_of(Model(Nested(1.0)))
    number, _ = keys.read()
    if change == "a number":
        Nested.Config.level = 2.0
    elif change == "a list deeper":
        Nested.Config.Deeper.level[0] = 2.0
    else:
        monkeypatch.setattr(Nested, "Config", type("Config", (), {"level": 1.0, "Deeper": Nested.Config.Deeper}))
    assert not keys.trusted and keys.read()[0] != number


OF_LAYERS = {
    "bytes": (b"a", b"ab"),
    "a fraction": (fractions.Fraction(1, 2), fractions.Fraction(1, 3)),
    "a range": (range(3), range(4)),
    "a time": (datetime.timedelta(seconds=1), datetime.timedelta(seconds=2)),
    "a date": (datetime.date(2000, 1, 1), datetime.date(2000, 1, 2)),
    "a pattern": (re.compile("a"), re.compile("ab")),
    "many numbers": ((1,) * 100, (1,) * 99 + (2,)),
    "text and bytes": (("a", b"a"), ("a", b"b")),
    "None and numbers": ((None, 1), (None, 2)),
    "code": (compile("1", "a", "eval"), compile("2", "a", "eval")),
}


class Reads(nn.Module):
    def __init__(self, level):
        super().__init__()
        self.inner, self.level = nn.Linear(2, 2), level

    def forward(self, x):
        return self.inner(x), self.level


@pytest.mark.parametrize("name", OF_LAYERS)
def test_a_value_of_a_layer_that_is_replaced_is_seen(name):
    before, after = OF_LAYERS[name]
    model = Reads(before)
    keys = keys_of(model)
    number, _ = keys.read()
    model.level = after
    assert not keys.trusted and keys.read()[0] != number
    if name != "code":
        model.level = copy.deepcopy(before)
        assert keys.read()[0] == number


def listed(home, *names, listing="RECORD", info="a_package-1.0.dist-info"):
    """Leave what `pip install --target` leaves."""
    (home / info).mkdir(parents=True)
    (home / info / listing).write_text("".join(f"{name},sha256=abc,12\n" for name in names), encoding="utf-8")


@pytest.mark.parametrize("home", ["packages"], indirect=True)
def test_tools_of_a_package_that_is_installed_elsewhere_may_change(home, package):
    listed(home, "a_package/processors.py", "another_library.py")
    test_tools_of_another_library_may_change(package)


@pytest.mark.parametrize("home", ["packages"], indirect=True)
def test_objects_of_a_user_s_own_package_are_read(home, package):
    listed(home, "another_package/processors.py")
    keys = keys_of(Model(package.Processor()))
    keys.read()
    package.REGISTRY.count()
    assert not keys.trusted


IN_LIBRARY = {
    "a module": ("one.py", ["one.py"], True),
    "a module of a package": ("two/inside/three.py", ["two/__init__.py", "two/inside/three.py"], True),
    "a user's module next to a package": ("mine.py", ["two/__init__.py"], False),
    "a user's module within a package": ("two/mine.py", ["two/__init__.py"], False),
    "one whose name begins alike": ("two_more/__init__.py", ["two/__init__.py"], False),
    "one of the same name deeper": ("work/one.py", ["one.py"], False),
    "one above the folder": ("one.py", ["../one.py"], False),
    "nothing is listed": ("one.py", [], False),
}


@pytest.mark.parametrize("case", IN_LIBRARY)
def test_which_files_are_an_installed_package_s(tmp_path, monkeypatch, case):
    file, names, expected = IN_LIBRARY[case]
    monkeypatch.syspath_prepend(str(tmp_path))
    listed(tmp_path, *names)
    assert in_library(str(tmp_path / file)) is expected


@pytest.mark.parametrize(
    "how",
    [
        {"listing": "SOURCES.txt", "info": "one.egg-info"},  # of a program's own folder
        {"info": "build/one-1.0.dist-info"},
        {"listing": "INSTALLER"},
    ],
    ids=str,
)
def test_other_lists_do_not_count(tmp_path, monkeypatch, how):
    monkeypatch.syspath_prepend(str(tmp_path))
    listed(tmp_path, "one.py", **how)
    assert not in_library(str(tmp_path / "one.py"))


def test_a_folder_that_nothing_is_imported_from_does_not_count(tmp_path):
    listed(tmp_path, "one.py")
    assert not in_library(str(tmp_path / "one.py"))


def test_a_list_that_cannot_be_read_is_none(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    listed(tmp_path, "one.py")
    listed(tmp_path, info="two-1.0.dist-info")
    (tmp_path / "two-1.0.dist-info" / "RECORD").write_bytes(b"two.py,\xff\xfe\n")
    assert in_library(str(tmp_path / "one.py")) and not in_library(str(tmp_path / "two.py"))


@pytest.mark.parametrize("entry", [None, b"/somewhere", 3])
def test_an_entry_of_the_path_that_is_no_text_is_passed_over(monkeypatch: pytest.MonkeyPatch, entry: object) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, entry])
    in_library.cache_clear()
    assert not in_library("/somewhere/a_file_of_nobody.py") and in_library(np.__file__)
