"""What a forward does to the lists and dictionaries among its arguments.

diffusers' UNet pops the residuals of a T2I-Adapter off the caller's list. A replay does the same by an edit: which
items a container keeps, in which order. A change of another kind cannot be repeated.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from sfast_ext import argument_objects

Path = tuple[Any, ...]


class Edit(NamedTuple):
    """The items of a container that stay, by their places or keys before the call."""

    path: Path
    """From the arguments: the name or position of one, then places, keys and attributes."""
    kept: tuple[Any, ...] | None
    """None if something else was done to it, which cannot be repeated on other arguments."""


class Containers:
    """The containers among the arguments of a call, as they are before it."""

    def __init__(self, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        self._found = [(path, each, _copy(each)) for path, each in _containers(args, kwargs)]

    def edits(self) -> tuple[Edit, ...]:
        """What was done to them since."""
        found: list[Edit] = []
        for path, container, was in self._found:
            now = _copy(container)
            if _same(now, was):
                continue
            kept = _kept(now, was) if type(container) in (list, dict) else None
            several = len({id(each) for _, each, _ in self._found}) != len(self._found)
            found.append(Edit(path, None if several else kept))
        return tuple(found)

    def put_back(self) -> None:
        """Undo what was done to them since."""
        for _, container, was in self._found:
            if not _same(_copy(container), was):
                _fill(container, was)


def apply(edits: Sequence[Edit], args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Do to the arguments of a call what the forward did to those of the recorded one."""
    changes = [(edit, _at(edit.path, args, kwargs)) for edit in edits]
    for edit, container in changes:
        if isinstance(container, list):
            container[:] = [container[place] for place in edit.kept or ()]
        else:
            _fill(container, {key: container[key] for key in edit.kept or ()})


def distinct(args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether no container is there twice: what is taken out of one would be missing in the other."""
    found = [id(each) for _, each in _containers(args, kwargs)]
    return len(set(found)) == len(found)


def with_own_containers(args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with containers anew, and the same values in them."""
    known: dict[int, Any] = {}
    return tuple(_anew(x, known) for x in args), {name: _anew(x, known) for name, x in kwargs.items()}


def _anew(value: Any, known: dict[int, Any]) -> Any:
    if id(value) in known:
        return known[id(value)]
    new: Any
    if type(value) is list:
        new = known[id(value)] = []
        new += [_anew(x, known) for x in value]
    elif type(value) is dict:
        new = known[id(value)] = {}
        new.update({key: _anew(x, known) for key, x in value.items()})
    elif isinstance(value, tuple):
        items = [_anew(x, known) for x in value]
        if all(a is b for a, b in zip(items, value)):
            return value
        new = argument_objects.make_tuple(type(value), items)
    elif argument_objects.is_data(type(value)):
        parts = argument_objects.entries(value, type(value))
        if parts is None:
            return value
        new = argument_objects.make_data(type(value), {name: _anew(each, known) for name, each in parts})
        known[id(value)] = new
    else:
        return value
    return new


def _containers(args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[tuple[Path, Any]]:
    for place, each in enumerate(args):
        yield from _within((place,), each)
    for name, each in kwargs.items():
        yield from _within((name,), each)


def _within(path: Path, value: Any) -> Iterator[tuple[Path, Any]]:
    if isinstance(value, (torch.Tensor, str, type)):
        return
    if dataclasses.is_dataclass(value):
        yield path, value
        for name, each in _copy(value).items():
            yield from _within((*path, name), each)
    elif isinstance(value, dict):
        yield path, value
        for key, each in value.items():
            yield from _within((*path, key), each)
    elif isinstance(value, (list, tuple)):
        if isinstance(value, list):
            yield path, value
        for place, each in enumerate(value):
            yield from _within((*path, place), each)


def _copy(container: Any) -> Any:
    if dataclasses.is_dataclass(container):
        fields = {f.name: getattr(container, f.name, None) for f in dataclasses.fields(container)}
        return {**fields, **(container if isinstance(container, dict) else {}), **getattr(container, "__dict__", {})}
    return dict(container) if isinstance(container, dict) else list(container)


def _same(now: Any, was: Any) -> bool:
    if len(now) != len(was):
        return False
    if isinstance(was, dict):
        return all(a is b for a, b in zip(now, was)) and all(a is b for a, b in zip(now.values(), was.values()))
    return all(a is b for a, b in zip(now, was))


def _kept(now: Any, was: Any) -> tuple[Any, ...] | None:
    """The places or keys of what is left, or None if there is anything new."""
    if isinstance(was, dict):
        return tuple(now) if all(key in was and was[key] is value for key, value in now.items()) else None
    places: dict[int, list[int]] = {}
    for place, each in enumerate(was):
        places.setdefault(id(each), []).append(place)
    # of a tensor that is there twice either may be taken: it is in each call of the plan
    found = [places[id(each)].pop(0) if places.get(id(each)) else None for each in now]
    return None if None in found else tuple(found)


def _at(path: Path, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    first, *rest = path
    value = args[first] if isinstance(first, int) else kwargs[first]
    for key in rest:
        value = getattr(value, key) if dataclasses.is_dataclass(value) else value[key]
    return value


def _fill(container: Any, was: Any) -> None:
    if isinstance(container, list):
        container[:] = was
    elif isinstance(container, dict) and not dataclasses.is_dataclass(container):
        container.clear()
        container.update(was)
    else:
        for name, value in was.items():
            object.__setattr__(container, name, value)


def words(path: Path) -> str:
    """A path in words."""
    first, *rest = path
    name = f"argument {first}" if isinstance(first, int) else str(first)
    return name + "".join(f"[{key!r}]" for key in rest)
