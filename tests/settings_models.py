"""Objects with settings, and a model whose processor reads some."""

from __future__ import annotations

import collections
import dataclasses
import enum
import types

from torch import nn

from sfast_ext.behaviour.key import BehaviourKeys

NAMESPACE = types.SimpleNamespace


class Slots:
    __slots__ = ("level",)

    def __init__(self, level):
        self.level = level


class Derived(Slots):
    __slots__ = ("more",)


@dataclasses.dataclass
class Data:
    level: object


@dataclasses.dataclass(slots=True)
class DataWithSlots:
    level: object


class Mode(enum.Enum):
    SOFT = 1
    HARD = 2


class Holder:
    def __init__(self, level):
        self.level = level


class Levels(list):
    pass


class Table(dict):
    pass


class Number(float):
    pass


Point = collections.namedtuple("Point", "level rest")


class Processor:
    def __init__(self, levels):
        self.levels = levels

    def __call__(self, x):
        return x * float(use(self.levels))


def use(levels):
    level = getattr(levels, "level", None)
    return 1.0 if level is None else level


class Model(nn.Module):
    def __init__(self, processor):
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.processor = processor

    def forward(self, x):
        return self.processor(self.inner(x))


def keys_of(model):
    keys = BehaviourKeys(model, frozenset(), None, 8)
    keys.begin_generation()
    return keys
