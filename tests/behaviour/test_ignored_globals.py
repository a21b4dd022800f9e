"""Globals in which a host's functions note what they did: `Hooks.ignored_globals`."""

from __future__ import annotations

import sys
import types

import pytest
import torch
from torch import nn

from sfast_ext import Config, accelerate
from sfast_ext.behaviour.key import BehaviourKeys
from sfast_ext.hooks import Hooks

CPU = Config(allow_cpu=True, drop_slower=False)
NAME = "their_memory"
IGNORED = frozenset({(NAME, "signal")})
CODE = """
import sys

signal = other = False

def empty():
    global signal
    signal = False

def sets_another():
    global signal, other
    signal = other = False

def sets_both_ways():
    global signal
    if other is not None:
        signal = False
    else:
        del signal

def sets_within():
    def inner():
        global signal
        signal = False
    inner()

def reads_first():
    global signal
    if signal:
        signal = False

def adds():
    global signal
    signal += 1

def reads_within():
    global signal
    signal = False
    return lambda: signal

def sets_within_what_it_reads():
    def inner():
        global signal
        signal = False
    return inner, signal

def by_a_text():
    global signal
    signal = False
    return globals()["signal"]

def by_a_text_of_several():
    global signal
    signal = False
    return [globals()[name] for name in ("signal", "other")]

def by_its_own_name():
    global signal
    signal = False
    return sys.modules[__name__].signal

def reads():
    return signal

def calls_what_reads():
    empty()
    return reads()

class Reads:
    level = property(lambda self: signal)

def of_an_object():
    empty()
    return Reads().level
"""
ONLY_SET = ("empty", "sets_within")
READ = (
    "reads_first", "adds", "reads_within", "sets_within_what_it_reads", "by_a_text",
    "by_a_text_of_several", "by_its_own_name", "reads", "calls_what_reads", "of_an_object", "sets_both_ways",
)  # fmt: skip


@pytest.fixture
def memory(monkeypatch):
    made = types.ModuleType(NAME)
    exec(CODE, vars(made))
    monkeypatch.setitem(sys.modules, NAME, made)
    return made


FORWARD = """
def forward(self, x):
    import their_memory
    x = self.linear(x)
    if len(x) > 100:
        their_memory.{name}()
    return x{more}
"""
LOOKED_UP = " * (2.0 if their_memory.signal else 1.0)"


def net(name, more=""):
    """A network whose forward calls this function if its input is large."""
    found: dict = {"__name__": __name__}
    exec(FORWARD.format(name=name, more=more), found)
    model = type("Net", (nn.Module,), {"forward": found["forward"], "__module__": __name__})()
    model.linear = nn.Linear(4, 4)
    return model.eval()


def keys_of(model, ignored=IGNORED):
    keys = BehaviourKeys(model, frozenset(), None, 8, ignored_globals=ignored)
    keys.begin_generation()
    return keys


def changed(memory, model, ignored=IGNORED, name="signal"):
    """Whether another value has another key, at the next call and in the next generation."""
    keys = keys_of(model, ignored)
    first = keys.read()
    setattr(memory, name, True)
    at_once = not keys.trusted
    keys.begin_generation()
    later = keys.read() != first
    assert at_once == later
    return later


@pytest.mark.parametrize("name", ONLY_SET)
def test_what_code_only_sets_is_no_part_of_the_key_if_the_host_names_it(memory, name):
    model = net(name)
    assert not changed(memory, model)
    memory.signal = False
    assert changed(memory, model, frozenset())
    memory.signal = False
    assert changed(memory, model, frozenset({("their_memory.more", "signal"), (NAME, "sign")}))


@pytest.mark.parametrize("name", READ)
def test_what_code_looks_up_is_part_of_it_whatever_the_host_says(memory, name):
    assert changed(memory, net(name))


def test_what_code_looks_up_in_the_module_is_part_of_it(memory):
    assert changed(memory, net("empty", LOOKED_UP))


def test_another_name_that_it_sets_is_part_of_it(memory):
    model = net("sets_another")
    assert not changed(memory, model)
    memory.signal = False
    assert changed(memory, model, name="other")


def test_a_name_that_is_defined_later_is_none_of_it(memory):
    del memory.signal
    keys = keys_of(net("empty"))
    first = keys.read()
    memory.empty()
    assert keys.trusted and keys.read() == first


def counted(memory, model, ignored):
    """Captures of three calls, of which the note is another with the second, and what they gave."""
    accelerator = accelerate(model, CPU, hooks=Hooks(ignored_globals=ignored))
    found, x = [], torch.ones(2, 4)
    with torch.no_grad():
        for signal in (True, False, False):
            accelerator.new_generation()
            memory.signal = signal
            found.append(model(x))
    count = accelerator.report.counter("captures")
    accelerator.release()
    return count, found, model.linear(x)


def test_plans_stay_when_the_note_changes_and_go_when_what_is_read_does(memory):
    count, found, expected = counted(memory, net("empty"), IGNORED)
    assert count == 1
    torch.testing.assert_close(found, [expected] * 3)
    assert counted(memory, net("empty"), frozenset())[0] == 2
    count, found, expected = counted(memory, net("empty", LOOKED_UP), IGNORED)
    assert count == 2
    torch.testing.assert_close(found, [2 * expected, expected, expected])
