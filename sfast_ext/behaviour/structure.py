"""The structure of a module tree: what two models of one kind have in common."""

from __future__ import annotations

import types
from collections.abc import Hashable, Iterable
from typing import Any

import torch
from torch import nn

from sfast_ext.behaviour.contents import Contents, NoContents
from sfast_ext.behaviour.forward_slot import AcceleratedForward, forward_of, is_own_forward
from sfast_ext.behaviour.reach import Walk, looked_into, names_within
from sfast_ext.behaviour.reader import ClassReading, Reader
from sfast_ext.behaviour.snapshot import NoSnapshot
from sfast_ext.behaviour.value_types import MECHANICS


class KnownCode:
    """What was read of classes, by the classes and the code of functions that were read together; see `structure`."""

    def __init__(self) -> None:
        self.classes: dict[Hashable, dict[type, ClassReading]] = {}
        self.walks: dict[Hashable, Walk] = {}


def structure(
    root: nn.Module, ignored: frozenset[str] = frozenset(), known: KnownCode | None = None
) -> tuple[Hashable, ...]:
    """The behaviour key with types in place of objects. Equal for modules that compute the same with the same weights.

    Shapes and dtypes are not part of it: the weight arena compares those.

    Args:
        known: filled, and used again, by readings of several modules between which no code changes.
    """
    reader = _Structure(MECHANICS | ignored, root, known)
    reader.read_all(root)
    return tuple(reader.key)


class _Structure(Reader):
    """Reads what two objects of the same type have in common."""

    def __init__(self, skip: frozenset[str], root: nn.Module, known: KnownCode | None) -> None:
        below = forward_of(root)
        while isinstance(below, AcceleratedForward):
            below = below.previous
        super().__init__(skip, root, below=None if is_own_forward(below, root) else below)
        self.known = KnownCode() if known is None else known
        # it is never checked again
        self.snapshot = NoSnapshot()
        self.numbers: dict[int, int] = {}

    def read_classes(self, kinds: Iterable[type]) -> None:
        # the package and the extension tell what is foreign
        together = self.package, self.extension, tuple(kinds), self.names
        found = self.known.classes.get(together)
        if found is None:
            super().read_classes(kinds)
            self.known.classes[together] = self.classes
        else:
            self.classes = found

    def names_of(self, kinds: Iterable[type], functions: Iterable[Any]) -> frozenset[str]:
        together = tuple(kinds), looked_into(functions)
        found = self.known.walks.get(together)
        if found is None:
            found = self.known.walks[together] = Walk()
            names_within(kinds, functions, found)
        self.walk = found
        return frozenset(found.names)

    def code_values(self, kinds: Iterable[type]) -> list[Hashable]:
        # two modules that are compared share their classes
        return []

    def new_contents(self) -> Contents:
        return NoContents()

    def known_modules(self) -> Iterable[int]:
        return self.numbers

    def module_key(self, module: nn.Module) -> Hashable | None:
        # one outside the tree is the same for both, or another
        return self.numbers.get(id(module), (id(module),))

    def tensor(self, value: torch.Tensor) -> Hashable:
        return (value.dtype, tuple(value.shape))

    def first_sight(self, module: nn.Module) -> bool:
        # numbers instead of addresses: a module in two places has the same number in both trees
        first = id(module) not in self.numbers
        self.key.append(self.numbers.setdefault(id(module), len(self.numbers)))
        return first

    def identity(self, value: object) -> Hashable:
        shared = isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType))
        return super().identity(value if shared else type(value))
