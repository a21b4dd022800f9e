"""A flat record of what values hold that can change in place, which is compared for each call."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, repeat
from typing import Any

import torch

from sfast_ext.behaviour.quick_check import Namespace, addresses, namespace_of
from sfast_ext.behaviour.value_types import same_value

Home = type | dict
_ABSENT = object()


class Contents:
    """What was read of values. An object in the place of another counts as a change, except for equal plain values and
    containers of these.

    Tensors are compared by address: no reference to them is held.

    Args:
        bare: identities of containers that something else checks for being empty.
    """

    def __init__(self, bare: frozenset[int] = frozenset()) -> None:
        self._bare = bare
        self._lists: list[list] = []
        self._dicts: list[dict] = []
        self._homes: dict[int, tuple[Home, dict[str, Any]]] = {}
        # dictionaries of which only some names matter: (dictionary, names, those that it has)
        self._open: list[tuple[dict, frozenset[str], list[str]]] = []
        self._open_keys: list[Any] = []
        self._owners: list[tuple[Namespace, int]] = []
        self._typed: list[Any] = []
        self._kinds: list[type] = []
        self._objects: list[Callable[[], Sequence[Any]]] = []
        self._plain: list[Callable[[], Any]] = []
        self._noted_objects: list[Any] = []
        self._noted_plain: list[Any] = []
        self._items: list[Any] = []
        self._keys: list[Any] = []
        self._values: list[Any] = []

    # Everything is noted before it is read, so that a change in between is detected by the next check.

    def container(self, container: list | dict) -> list[Any]:
        """A list or a dictionary. Returns its items, or its values."""
        if not container and id(container) in self._bare:
            return []
        if isinstance(container, dict):
            items = list(dict.values(container))
        else:
            items = list.copy(container)
        if any(map(isinstance, items, repeat(torch.Tensor))):
            self.plain(lambda: addresses(container))
        elif isinstance(container, dict):
            if type(container) is not dict:
                # the keys, in their order, without the class's own iteration
                self.objects(lambda: tuple(dict.keys(container)))
                self.objects(lambda: tuple(dict.values(container)))
            else:
                self._dicts.append(container)
                self._keys += container
                self._values += items
        elif type(container) is list:
            self._lists.append(container)
            self._items += items
        else:
            self.objects(lambda: list.copy(container))
        return items

    def attributes(self, home: dict, names: frozenset[str] | None) -> None:
        """The dictionary of an object.

        Args:
            names: those that are looked up in it. None for all.
        """
        there = list(home) if names is None else [name for name in list(home) if name in names]
        if names is None or len(there) == len(home):
            self.container(home)
            return
        for name in there:
            self.name(home, name)
        self._open.append((home, names, there))
        self._open_keys += home

    def name(self, home: Home, name: str) -> None:
        """A name in the dictionary of an object, a module or a class. It may be undefined."""
        _, names = self._homes.setdefault(id(home), (home, {}))
        value = namespace_of(home).get(name, _ABSENT)
        if isinstance(value, torch.Tensor):
            self.plain(lambda: id(namespace_of(home).get(name)))
        else:
            names[name] = value

    def owner(self, kind: type) -> None:
        """A class, which may get further attributes."""
        self._owners.append((vars(kind), len(vars(kind))))

    def kind(self, value: Any) -> None:
        """An object, which may be given another class."""
        self._typed.append(value)
        self._kinds.append(type(value))

    def objects(self, look: Callable[[], Sequence[Any]]) -> Sequence[Any]:
        """Objects that a function returns. Returns what it returns now."""
        found = look()
        if any(map(isinstance, found, repeat(torch.Tensor))):
            self.plain(lambda: tuple(map(id, look())))
        else:
            self._objects.append(look)
            self._noted_objects.append(found)
        return found

    def plain(self, look: Callable[[], Any]) -> Any:
        """A value that cannot change, which a function returns. Returns what it returns now."""
        found = look()
        self._plain.append(look)
        self._noted_plain.append(found)
        return found

    def seal(self) -> None:
        """Call this when everything was read."""
        self._lengths = list(map(len, self._lists)), list(map(len, self._dicts))
        self._has_more = any((self._owners, self._typed, self._lists, self._objects, self._plain))
        self._views = [dict.values(each) for each in self._dicts]
        self._gets: list[tuple[Callable[[Any], Any], Namespace]] = []
        self._singles: list[tuple[Callable[[Any], Any], Namespace]] = []
        self._noted_names: list[Any] = []
        self._absent: list[tuple[Callable[[Any], bool], Any]] = []
        single: list[Any] = []
        several: list[Any] = []
        for home, names in self._homes.values():
            namespace = namespace_of(home)
            there = [name for name, value in names.items() if value is not _ABSENT]
            if there:
                get = operator.itemgetter(*there)
                (self._singles if len(there) == 1 else self._gets).append((get, namespace))
                (single if len(there) == 1 else several).extend(names[name] for name in there)
            absent = frozenset(names).difference(there)
            if absent:
                # iterate over the shorter of the two
                few = len(absent) < len(namespace)
                self._absent.append(
                    (namespace.keys().isdisjoint, absent) if few else (absent.isdisjoint, namespace.keys())
                )
        self._noted_names = single + several

    def unchanged(self) -> bool:
        """Whether a reading would give the same. False may be a false alarm."""
        try:
            lists, dicts = self._lengths
            same = (
                self._names_unchanged()
                and list(map(len, self._dicts)) == dicts
                and _same(chain.from_iterable(self._dicts), self._keys)
                and _same(chain.from_iterable(self._views), self._values)
            )
            # a model seldom has these: ten comparisons of nothing take a microsecond
            if not same or not self._has_more:
                return same
            return (
                all(len(inside) == size for inside, size in self._owners)
                and list(map(type, self._typed)) == self._kinds
                and list(map(len, self._lists)) == lists
                and _same(chain.from_iterable(self._lists), self._items)
                and all(map(_same_row, [look() for look in self._objects], self._noted_objects))
                and [look() for look in self._plain] == self._noted_plain
            )
        except Exception:
            # something is gone, or changes in another thread
            return False

    def _names_unchanged(self) -> bool:
        now = [get(namespace) for get, namespace in self._singles]
        for get, namespace in self._gets:
            now += get(namespace)
        return (
            _same(now, self._noted_names)
            and all(stay(view) for stay, view in self._absent)
            and (
                list(chain.from_iterable(home for home, *_ in self._open)) == self._open_keys
                or all([name for name in home if name in names] == there for home, names, there in self._open)
            )
        )


def _same(now: Iterable[Any], then: list[Any]) -> bool:
    """Whether two rows of the same length hold the same."""
    now = list(now)
    return all(map(operator.is_, now, then)) or all(map(same_value, now, then))


def _same_row(now: Sequence[Any], then: Sequence[Any]) -> bool:
    return len(now) == len(then) and all(map(same_value, now, then))


class NoContents(Contents):
    """Compares nothing later."""

    def container(self, container: list | dict) -> list[Any]:
        """Its items, or its values."""
        return list(dict.values(container)) if isinstance(container, dict) else list.copy(container)

    def attributes(self, home: dict, names: frozenset[str] | None) -> None:
        """Nothing."""

    def name(self, home: Home, name: str) -> None:
        """Nothing."""

    def owner(self, kind: type) -> None:
        """Nothing."""

    def kind(self, value: Any) -> None:
        """Nothing."""

    def objects(self, look: Callable[[], Sequence[Any]]) -> Sequence[Any]:
        """What it returns now."""
        return look()

    def plain(self, look: Callable[[], Any]) -> Any:
        """What it returns now."""
        return look()
