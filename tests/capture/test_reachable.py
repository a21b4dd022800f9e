"""The places that a forward can write to are found, and put back."""

from __future__ import annotations

import functools
import threading

import pytest
from torch import nn

from sfast_ext.capture.state import State


class Slots:
    __slots__ = ("__hidden", "level")

    def __init__(self, level: int) -> None:
        self.level, self.__hidden = level, [0]

    @property
    def hidden(self) -> list[int]:
        return self.__hidden


class Model(nn.Module):
    def __init__(self, processor) -> None:
        super().__init__()
        self.processor = processor

    def forward(self, x):
        return self.processor(x)


class Made:
    """A property, and what a method finds through a partial function."""

    kept: dict[str, int] = {}

    def __init__(self) -> None:
        self.bound = functools.partial(self.add, [1])

    def add(self, items, x):
        return x + len(items)

    @property
    def size(self):
        return len(Made.kept)

    def __call__(self, x):
        return self.bound(x) + self.size


def within(name):
    counter, seen, made = Slots(0), [{"a": set()}], Made()

    def processor(x):
        counter.level += len(seen)
        return made(x)

    changes = {
        "slot": lambda: setattr(counter, "level", 5),
        "list in a private slot": lambda: counter.hidden.append(1),
        "list": lambda: seen.append(1),
        "dictionary in a list": lambda: seen[0].update(b=1),
        "set in a dictionary": lambda: seen[0]["a"].add(1),
        "closure": lambda: setattr(processor.__closure__[0], "cell_contents", Slots(1)),
        "argument of a partial function": lambda: made.bound.args[0].append(2),
        "attribute": lambda: setattr(made, "other", 1),
        "dictionary of a class": lambda: Made.kept.update(a=1),
        "attribute of a function": lambda: setattr(processor, "calls", 1),
        "default of a function": lambda: within.__defaults__,
    }
    return Model(processor), changes[name]


@pytest.mark.parametrize(
    "name",
    [
        "slot", "list in a private slot", "list", "dictionary in a list", "set in a dictionary", "closure",
        "argument of a partial function", "attribute", "dictionary of a class", "attribute of a function",
    ],
)  # fmt: skip
def test_what_a_forward_can_change_is_found_and_put_back(name, monkeypatch):
    # what the model does not hold itself is left alone while other threads run
    monkeypatch.setattr(threading, "active_count", lambda: 1)
    model, change = within(name)
    state = State(model, model.forward)
    assert state.changed() is None
    change()
    assert state.changed() is not None
    state.put_back()
    assert state.changed() is None


def test_what_only_reads_changes_nothing():
    model, read = within("default of a function")
    state = State(model, model.forward)
    read()
    assert state.changed() is None
