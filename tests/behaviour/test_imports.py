"""What a forward finds in modules that it imports when it runs, in packages, and behind decorators of torch."""

from __future__ import annotations

import contextlib
import importlib
import re
import sys
import types

import pytest
import torch
from torch import nn

from sfast_ext import Config, accelerate

CPU = Config(allow_cpu=True, drop_slower=False)
NET = """
import their_package
import their_package.state

def absolute(x):
    import their_package.state
    CHANGE(their_package.state)
    return x * their_package.state.level

def under_a_name(x):
    import their_package.state as state
    CHANGE(state)
    return x * state.level

def from_its_package(x):
    from their_package import state
    CHANGE(state)
    return x * state.level

def relative(x):
    from . import state
    CHANGE(state)
    return x * state.level

def a_name_of_it(x):
    from .state import level, seen
    seen.append(1)
    return x * level

def a_function_of_it(x):
    from .state import current
    return x * current()

def nested(x):
    def inner():
        from . import state
        CHANGE(state)
        return state.level
    return x * inner()

def without_an_import(x):
    CHANGE(their_package.state)
    return x * their_package.state.level
"""
STATE = """
level = 1.0
calls = 0
seen = []

def current():
    seen.append(1)
    return level
"""
WAYS = ["absolute", "under_a_name", "from_its_package", "relative", "a_name_of_it", "a_function_of_it", "nested",
        "without_an_import"]  # fmt: skip


CHANGES = {
    "nothing": "len({0}.seen)",
    "a count": "{0}.calls += 1",
    "a list": "{0}.seen.append(1)",
    "an attribute": "{0}.made = getattr({0}, 'made', 0) + 1",
}


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Makes a package with code that imports a module of it, and may change it."""

    def make(change="nothing"):
        folder = tmp_path / "their_package"
        folder.mkdir()
        changed = re.sub(r"CHANGE\((.*)\)", lambda found: CHANGES[change].format(found[1]), NET)
        state = STATE if change != "nothing" else STATE.replace("seen.append(1)", "pass")
        net = changed if change != "nothing" else changed.replace("seen.append(1)", "pass")
        for name, text in (("__init__", ""), ("state", state), ("net", net)):
            (folder / f"{name}.py").write_text(text)
        monkeypatch.syspath_prepend(str(tmp_path))
        for known in [known for known in sys.modules if known.partition(".")[0] == "their_package"]:
            monkeypatch.delitem(sys.modules, known)
        importlib.invalidate_caches()
        return importlib.import_module("their_package.net"), importlib.import_module("their_package.state")

    return make


class Net(nn.Module):
    def __init__(self, run):
        super().__init__()
        self.linear, self.run = nn.Linear(4, 4), run

    def forward(self, x):
        return self.run(self.linear(x))


@contextlib.contextmanager
def accelerated(run):
    net = Net(run)
    accelerator = accelerate(net, CPU)
    accelerator.new_generation()
    with torch.no_grad():
        yield net, accelerator
    accelerator.release()


@pytest.mark.parametrize("way", WAYS)
def test_a_value_in_a_module_that_a_forward_imports_is_seen_at_the_next_call(package, way):
    code, state = package()
    with accelerated(getattr(code, way)) as (net, accelerator):
        x = torch.randn(2, 4)
        for step in range(6):
            state.level = 1.0 + step // 3
            torch.testing.assert_close(net(x), net.linear(x) * state.level)
        assert accelerator.report.counter("captures") == 2


def test_a_module_that_takes_the_place_of_an_imported_one_is_seen(package, monkeypatch):
    code, _ = package()
    with accelerated(code.under_a_name) as (net, _):
        x = torch.randn(2, 4)
        for _ in range(3):
            net(x)
        other = types.ModuleType("their_package.state")
        other.level, other.seen = 5.0, []
        monkeypatch.setitem(sys.modules, "their_package.state", other)
        monkeypatch.setattr(sys.modules["their_package"], "state", other)
        torch.testing.assert_close(net(x), net.linear(x) * 5)


@pytest.mark.parametrize("change", [change for change in CHANGES if change != "nothing"])
@pytest.mark.parametrize("way", WAYS)
def test_what_a_forward_keeps_in_a_module_that_it_imports_is_kept_at_each_call(package, way, change):
    code, state = package(change)
    with accelerated(getattr(code, way)) as (net, _):
        for _ in range(5):
            net(torch.randn(2, 4))
    assert sorted((state.calls, len(state.seen), getattr(state, "made", 0))) == [0, 0, 5]


class InPlaceOfAModule:
    calls = 0

    def __init__(self, levels):
        self.levels = levels

    @property
    def level(self):
        return self.levels[0]


class OtherModule(types.ModuleType):
    @property
    def level(self):
        return self.levels[0]


def an_object(levels):
    return InPlaceOfAModule(levels)


def of_another_class(levels):
    made = OtherModule("made")
    made.levels = levels
    return made


def with_getattr(levels):
    made = types.ModuleType("made")
    made.__getattr__ = lambda name: levels[0]
    return made


@pytest.mark.parametrize("imported", [True, False])
@pytest.mark.parametrize("make", [an_object, of_another_class, with_getattr])
def test_what_a_module_computes_when_it_is_asked_is_seen_at_the_next_call(make, imported, monkeypatch):
    levels = [1.0]
    monkeypatch.setitem(sys.modules, "made", make(levels))
    monkeypatch.setitem(globals(), "MADE", sys.modules["made"])

    def by_import(x):
        import made

        return x * made.level

    with accelerated(by_import if imported else lambda x: x * MADE.level) as (net, accelerator):
        x = torch.randn(2, 4)
        for step in range(6):
            levels[0] = 1.0 + step // 3
            torch.testing.assert_close(net(x), net.linear(x) * levels[0])
        assert accelerator.report.counter("captures") == 2


def test_what_a_forward_keeps_in_an_object_in_place_of_a_module_is_kept_at_each_call(monkeypatch):
    monkeypatch.setitem(sys.modules, "made", an_object([1.0]))

    def run(x):
        import made

        made.calls += 1
        return x

    with accelerated(run) as (net, _):
        for _ in range(5):
            net(torch.randn(2, 4))
    assert sys.modules["made"].calls == 5


def test_what_a_modules_own_getattr_keeps_is_kept_at_each_call(monkeypatch):
    calls = []
    made = types.ModuleType("made")
    made.__getattr__ = lambda name: calls.append(name) or 1.0
    monkeypatch.setitem(sys.modules, "made", made)

    def run(x):
        import made

        return x * made.level

    with accelerated(run) as (net, _):
        for _ in range(5):
            net(torch.randn(2, 4))
    assert calls.count("level") == 5


MADE = None


class Object:
    pass


OBJECT = Object()


def test_an_attribute_that_a_forward_makes_on_an_object_of_a_module_is_kept_at_each_call():
    def run(x):
        OBJECT.made = getattr(OBJECT, "made", 0) + 1
        return x

    with accelerated(run) as (net, _):
        for _ in range(5):
            net(torch.randn(2, 4))
    assert OBJECT.made == 5


LEVELS: dict = {}


@torch.no_grad()
def of_torch(x):
    return x * LEVELS["a"][0]


@contextlib.contextmanager
def of_python():
    yield LEVELS["a"][0]


def in_a_context(x):
    with of_python() as level:
        return x * level


class FirstMethod:
    @torch.no_grad()
    def __call__(self, x):
        return x * LEVELS["a"][0]


DECORATED = {
    "of torch": lambda x: of_torch(x),
    "of torch, itself": of_torch,
    "of Python": in_a_context,
    "a method": FirstMethod(),
}


@pytest.mark.parametrize("name", DECORATED)
def test_a_value_behind_a_decorator_is_seen_at_the_next_call(name):
    LEVELS["a"] = [1.0]
    with accelerated(DECORATED[name]) as (net, accelerator):
        x = torch.randn(2, 4)
        for step in range(6):
            LEVELS["a"][0] = 1.0 + step // 3
            torch.testing.assert_close(net(x), net.linear(x) * LEVELS["a"][0])
        assert accelerator.report.counter("captures") == 2


@pytest.mark.parametrize("name", DECORATED)
def test_a_value_behind_a_decorator_that_cannot_be_compared_is_named(name):
    LEVELS["a"] = [1.0] * 20_000
    with accelerated(DECORATED[name]) as (net, accelerator):
        x = torch.randn(2, 4)
        for _ in range(3):
            net(x)
        LEVELS["a"][0] = 2.0
        torch.testing.assert_close(net(x), net.linear(x) * 2)
        assert "too many to compare" in " ".join(accelerator.report.as_dict()["reasons"])
