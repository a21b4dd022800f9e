"""Classes of arguments. The behaviour key reads what code finds by name: the class of what a caller passes is not among
that."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from types import FunctionType
from typing import Any

from sfast_ext import reasons
from sfast_ext.behaviour.foreign_code import COMMON, OF_OBJECTS, package, written_by
from sfast_ext.behaviour.value_types import is_of_library
from sfast_ext.capture.capture import CaptureRefused

# these run when an object is made or compared
_QUIET = OF_OBJECTS | {"__post_init__", "__eq__", "__hash__", "__setattr__", "__replace__"}


def refuse_code(tree: Any) -> None:
    """Refuse classes among the arguments of a call that hold more than their objects do: methods, properties, values. A
    forward may use them. Those of installed libraries are taken as unchanging.

    Args:
        tree: see `Call`.

    Raises:
        CaptureRefused: there is one.
    """
    kind = next((kind for kind in _kinds(tree) if _has_code(kind)), None)
    if kind is not None:
        raise CaptureRefused(reasons.HAS_CODE(f"{kind.__module__}.{kind.__qualname__}"))


def _kinds(tree: Any) -> Iterator[type]:
    tag = tree[0]
    if tag == "call":
        inner = (*tree[1], *(each for _, each in tree[2]))
    elif tag in ("tuple", "list", "data", "dict"):
        yield tree[1]
        inner = tree[2] if tag in ("tuple", "list") else tuple(each for _, each in tree[2])
    else:
        if tag == "const" and isinstance(tree[2], enum.Enum):
            yield tree[1]
        return
    for each in inner:
        yield from _kinds(each)


def _has_code(kind: type) -> bool:
    return any(
        _counts(kind, name, value)
        for owner in kind.__mro__
        if package(owner.__module__) not in COMMON and package(owner.__module__) != "builtins"
        if not is_of_library(owner)
        for name, value in vars(owner).items()
    )


def _counts(kind: Any, name: str, value: Any) -> bool:
    if name.startswith("__"):
        if not isinstance(value, FunctionType) or name in _QUIET:
            return False
        # what Python makes for a dataclass or a named tuple has no file
        return not value.__code__.co_filename.startswith("<") and written_by(value) not in COMMON
    if issubclass(kind, enum.Enum):
        return not name.startswith("_") and not isinstance(value, kind) and name not in kind.__members__
    # a default of a field, which is in the object, and what finds an entry of a named tuple
    fields = (*getattr(kind, "__dataclass_fields__", ()), *getattr(kind, "_fields", ()))
    return name not in (*fields, "_fields", "_field_defaults", "_make", "_replace", "_asdict", "_field_types")
