"""Tuples, dictionaries and dataclasses of other classes than Python's own: what is in one, and how another like it is
made.

One is taken apart only if it can be put together again from its parts, without its class's code: that of a constructor
may compute with what it gets. Whatever else an object holds, a forward may read, so it is refused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from types import FunctionType
from typing import Any


def entries(value: Any, kind: type) -> Sequence[tuple[str, Any]] | None:
    """The parts of a tuple, dictionary or dataclass: attributes of the latter by their names. None for another value,
    and if it has more.

    Args:
        kind: its class, which is not tuple, list or dict.
    """
    held = getattr(value, "__dict__", {})
    if is_data(kind):
        names = [f.name for f in dataclasses.fields(value) if hasattr(value, f.name)]
        found = [(name, getattr(value, name)) for name in [*names, *(name for name in held if name not in names)]]
        # outputs of diffusers and transformers are dictionaries of their fields
        return found if not isinstance(value, dict) or (len(found) == len(names) and _holds(value, found)) else None
    if held or hasattr(kind, "__missing__") or not isinstance(value, (tuple, dict)):
        return None
    return [*dict.items(value)] if isinstance(value, dict) else [("", each) for each in value]


def is_data(kind: type) -> bool:
    """Whether a class is that of dataclasses."""
    return hasattr(kind, "__dataclass_fields__")


def make_tuple(kind: Any, items: Sequence[Any]) -> Any:
    """A tuple of this class."""
    if kind is tuple:
        return tuple(items)
    own = kind.__new__ is tuple.__new__ or isinstance(kind.__new__, FunctionType)
    # a class in C has its own
    return tuple.__new__(kind, items) if own else kind(items)


def make_dict(kind: Any, entries: dict[Any, Any]) -> Any:
    """A dictionary of this class."""
    new = kind.__new__(kind)
    base = _base(kind)
    for key, value in entries.items():
        base.__setitem__(new, key, value)
    return new


def make_data(kind: Any, fields: dict[str, Any]) -> Any:
    """A dataclass with these attributes."""
    new = kind.__new__(kind)
    for name, value in fields.items():
        object.__setattr__(new, name, value)
    if isinstance(new, dict):
        base = _base(kind)
        for name, value in _items(fields.items()):
            base.__setitem__(new, name, value)
    return new


def _base(kind: type) -> Any:
    """The class in C of a dictionary, whose methods run no other code."""
    return next(each for each in kind.__mro__ if each.__module__ in ("builtins", "collections"))


def _items(fields: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    return ((name, value) for name, value in fields if value is not None)


def _holds(value: dict[Any, Any], fields: Iterable[tuple[str, Any]]) -> bool:
    """Whether a dictionary holds these fields and nothing else."""
    there, wanted = [*dict.items(value)], [*_items(fields)]
    return len(there) == len(wanted) and all(a == c and b is d for (a, b), (c, d) in zip(there, wanted))
