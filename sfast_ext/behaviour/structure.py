"""The structure of a module tree: what two models of one kind have in common."""

from __future__ import annotations

import types
from collections.abc import Hashable, Iterable

from torch import nn

from sfast_ext.behaviour.fingerprint import MECHANICS, ClassReading, Reader
from sfast_ext.behaviour.reach import looked_into
from sfast_ext.behaviour.snapshot import NoSnapshot

KnownCode = dict[Hashable, tuple[frozenset[str], dict[type, ClassReading]]]
"""What was read of classes, by the classes and the code of functions that were read together; see `structure`."""


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
        super().__init__(skip, root)
        self.known = known
        # it is never checked again
        self.snapshot = NoSnapshot()
        self.numbers: dict[int, int] = {}

    def read_classes(self, kinds: Iterable[type]) -> None:
        # the package and the extension tell what is foreign
        together = self.package, self.extension, tuple(kinds), looked_into(self.functions.values())
        found = None if self.known is None else self.known.get(together)
        if found is None:
            super().read_classes(kinds)
            if self.known is not None:
                self.known[together] = self.names, self.classes
        else:
            self.names, self.classes = found

    def first_sight(self, module: nn.Module) -> bool:
        # numbers instead of addresses: a module in two places has the same number in both trees
        first = id(module) not in self.numbers
        self.key.append(self.numbers.setdefault(id(module), len(self.numbers)))
        return first

    def identity(self, value: object) -> Hashable:
        shared = isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType))
        return super().identity(value if shared else type(value))
