"""The check for each call: whether what a forward reads is unchanged since a reading, in a handful of calls."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from itertools import chain, compress, repeat
from types import CellType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

HOOKS = operator.itemgetter("_forward_hooks", "_forward_pre_hooks")
PLACES = ("_parameters", "_buffers", "_modules")
"""Dictionaries of a module that hold what its forward reads. All else watches those that were read, and would not
notice others in their places. An equal one is the same until it differs."""
_CONTENT = operator.attrgetter("cell_contents")
_NOTHING: frozenset[str] = frozenset()
_NORM = frozenset({"training", "elementwise_affine", "affine", "num_channels"})
_UNREAD: dict[type, frozenset[str]] = {
    nn.Linear: frozenset({"training", "in_features", "out_features"}),
    nn.Conv2d: frozenset({"training", "in_channels", "out_channels", "kernel_size", "transposed", "output_padding"}),
    nn.GroupNorm: _NORM,
    nn.LayerNorm: _NORM,
    nn.SiLU: frozenset({"training", "inplace"}),
    nn.Dropout: frozenset({"inplace"}),
    nn.ModuleList: frozenset({"training"}),
    nn.Sequential: frozenset({"training"}),
}
"""Attributes that the forwards of exactly these classes do not read."""
_UNREAD_WHILE: dict[type, tuple[str, Any, frozenset[str]]] = {
    nn.Conv2d: ("padding_mode", "zeros", frozenset({"_reversed_padding_repeated_twice"})),
    nn.Dropout: ("p", 0.0, frozenset({"training"})),
}
"""(attribute, value, attributes that are not read while it has that value)."""
# from this number on, modules with the same attributes are read together
_MIN_GROUP = 4

Namespace = Mapping[str, Any]


class Attributes(NamedTuple):
    """One module: class, length of its dictionary, names of checked attributes, and their values."""

    module: nn.Module
    kind: type
    length: int
    names: tuple[str, ...]
    values: tuple[Any, ...]


def attributes_of(module: nn.Module, ignored: frozenset[str]) -> Attributes:
    """The attributes of a module to check. None if there are tensors among them, which are compared by address.

    Args:
        ignored: names without influence on behaviour.
    """
    home = module.__dict__
    if any(map(isinstance, dict.values(home), repeat(torch.Tensor))):
        return Attributes(module, type(module), len(home), (), ())
    unread = _UNREAD.get(type(module), _NOTHING)
    name, value, more = _UNREAD_WHILE.get(type(module), ("", None, _NOTHING))
    if name and home.get(name) == value:
        unread = unread | more
    # "training" is read separately
    names = tuple(n for n in home if n not in unread and (n == "training" or n not in ignored))
    # nothing in an empty one can be replaced
    names += tuple(name for name in PLACES if home[name])
    return Attributes(module, type(module), len(home), names, tuple(map(home.get, names)))


class QuickCheck:
    """The check for each call. It is faster than `Snapshot.unchanged`, and sees less.

    Not seen: an object that was replaced by an equal one; a renamed key in a container other than a module's
    attributes; the first hook of a module if it was added without torch's handle; submodules of a module that had none;
    another `__dict__` of a module; and whatever has a name that no code of the forward looks up.

    Args:
        modules: all modules; see `attributes_of`.
        hooks: their dictionaries of hooks. `no_hooks` are the empty ones.
        next_hook: the id of torch's next hook handle at the time of the reading.
        found: what methods that run found by name, in classes and in modules.
        sizes: the classes among these, with the number of their attributes.
        methods: (class, name, method).
        cells: closure cells, and their contents.
        bare: containers that must stay empty.
        loose: dictionaries, and their values.
        lists: lists, and their items.
        mixed: containers with tensors, and the addresses of their contents.
        parameters: the parameters of all modules.
    """

    def __init__(
        self,
        *,
        modules: list[Attributes],
        hooks: list[tuple[dict, dict]],
        no_hooks: list[dict],
        next_hook: int,
        found: list[tuple[type | dict, dict[str, Any]]],
        sizes: list[tuple[type, int]],
        methods: list[tuple[Any, str, Any]],
        cells: tuple[list[CellType], list[Any]],
        bare: list[dict | list],
        loose: tuple[list[dict], list[Any]],
        lists: tuple[list[list], list[Any]],
        mixed: tuple[list[dict | list], list[tuple[int, ...]]],
        parameters: list[dict],
    ) -> None:
        self._hooks, self._no_hooks, self._next_hook = hooks, no_hooks, next_hook
        self._homes = [each.module.__dict__ for each in modules]
        self._rows = _Rows(modules)
        places = [(home, name, home[name]) for home in self._homes for name in PLACES]
        # tensors of one element may be equal, and of another dtype; others raise
        self._of_ones = [(home, name, there) for home, name, there in places if any(map(_is_one, there.values()))]
        self._classes, self._sizes = [vars(home) for home, _ in sizes], [size for _, size in sizes]
        self._found = NameTable((home, _there(home, names)) for home, names in found)
        self._methods = methods
        # empty cells, and tensors, which are compared by address
        apart = [content is None or isinstance(content, torch.Tensor) for content in map(content_of, cells[0])]
        self._apart = list(compress(zip(*cells), apart))
        plain = list(map(operator.not_, apart))
        self._cells, self._contents = list(compress(cells[0], plain)), list(compress(cells[1], plain))
        self._bare, (self._lists, self._items) = bare, lists
        # views, created once
        self._loose, self._values = [dict.values(each) for each in loose[0]], loose[1]
        children = set(map(id, self._values))
        self._roots = [each.module for each in modules if id(each.module) not in children]
        kinds = {id(each.module): each.kind for each in modules}
        self._kinds = [kinds.get(id(each), type(each)) for each in (*self._values, *self._roots)]
        self._mixed, self._addresses = mixed
        # a parameter that is None may be set; existing ones are tracked by the weight arena
        lacking: dict[str, list[dict]] = {}
        for each in parameters:
            for name in (name for name, value in each.items() if value is None):
                lacking.setdefault(name, []).append(each)
        self._lacking = [(operator.itemgetter(name), each) for name, each in lacking.items()]

    def note_sizes(self) -> None:
        """Call this after classes were read and found unchanged: additions since then are irrelevant."""
        self._sizes = list(map(len, self._classes))

    def unchanged(self) -> bool:
        """Whether no attribute, submodule, hook, class or method was added, removed or replaced."""
        return list(map(len, self._classes)) == self._sizes and self.unchanged_but_for_sizes()

    def unchanged_but_for_sizes(self) -> bool:
        """The same, without additions to classes."""
        try:
            return (
                not any(self._bare)
                and self._no_hooks_came()
                and self._found.unchanged()
                and all(getattr(kind, name) is function for kind, name, function in self._methods)
                and all(map(operator.is_, map(_CONTENT, self._cells), self._contents))
                and all(same_content(content_of(cell), content) for cell, content in self._apart)
                and self._children_unchanged()
                and self._rows.unchanged()
                and all(home[name] is there for home, name, there in self._of_ones)
                and list(chain.from_iterable(self._lists)) == self._items
                and list(map(addresses, self._mixed)) == self._addresses
                and all(list(map(get, each)).count(None) == len(each) for get, each in self._lacking)
            )
        except Exception:
            # an attribute is gone, or its value cannot be compared
            return False

    def _children_unchanged(self) -> bool:
        now = list(chain.from_iterable(self._loose))
        return now == self._values and list(map(type, chain(now, self._roots))) == self._kinds

    def _no_hooks_came(self) -> bool:
        following = RemovableHandle.next_id
        if following != self._next_hook:
            if any(self._no_hooks) or list(map(HOOKS, self._homes)) != self._hooks:
                return False
            self._next_hook = following
        return True


class _Rows:
    """Modules, grouped by the names of checked attributes."""

    def __init__(self, modules: list[Attributes]) -> None:
        rows: dict[tuple[str, ...], list[Attributes]] = {}
        for each in modules:
            rows.setdefault(each.names, []).append(each)
        alike = [each for row in rows.values() for each in row]
        self._homes, self._lengths = [each.module.__dict__ for each in alike], [each.length for each in alike]
        rows.pop((), None)
        self._gets, self._values = [], []
        self._few, self._few_values = [], []
        for names, row in rows.items():
            get = operator.itemgetter(*names)
            # itemgetter returns no tuple for a single name
            values = [each.values[0] if len(names) == 1 else each.values for each in row]
            if len(row) < _MIN_GROUP:
                self._few += [(get, each.module.__dict__) for each in row]
                self._few_values += values
            else:
                self._gets.append((get, [each.module.__dict__ for each in row]))
                self._values.append(values)

    def unchanged(self) -> bool:
        return (
            list(map(len, self._homes)) == self._lengths
            and [list(map(get, homes)) for get, homes in self._gets] == self._values
            and [get(home) for get, home in self._few] == self._few_values
        )


def _is_one(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.numel() == 1


def _there(home: type | dict, names: dict[str, Any]) -> dict[str, Any]:
    """The names to check. Additions to a class are detected by its size instead."""
    return {n: v for n, v in names.items() if n in vars(home)} if isinstance(home, type) else names


class NameTable:
    """Names in namespaces with their values. Names that did not exist must stay undefined."""

    def __init__(self, homes: Iterable[tuple[type | dict, dict[str, Any]]]) -> None:
        self._singles: list[tuple[Namespace, str]] = []
        self._gets: list[tuple[Callable[[Any], tuple], Namespace]] = []
        self._absent: list[Callable[[Any], bool]] = []
        self._views: list[Any] = []
        single: list[Any] = []
        several: list[Any] = []
        for home, names in homes:
            namespace = namespace_of(home)
            # an existing name may have the value None
            there = {name: value for name, value in names.items() if value is not None or name in namespace}
            if len(there) == 1:
                self._singles.append((namespace, next(iter(there))))
                single += there.values()
            elif there:
                self._gets.append((operator.itemgetter(*there), namespace))
                several += there.values()
            absent = frozenset(names).difference(there)
            if absent:
                # iterate over the shorter of the two
                few = len(absent) < len(namespace)
                self._absent.append(namespace.keys().isdisjoint if few else absent.isdisjoint)
                self._views.append(absent if few else namespace.keys())
        self._values = single + several

    def unchanged(self) -> bool:
        """Whether all values are the same objects."""
        now = [namespace[name] for namespace, name in self._singles]
        for get, namespace in self._gets:
            now += get(namespace)
        if not all(map(operator.is_, now, self._values)):
            return False
        return all(stay(view) for stay, view in zip(self._absent, self._views))


def namespace_of(home: type | dict) -> Namespace:
    """The namespace of a class or a dictionary."""
    return home if isinstance(home, dict) else vars(home)


def values_in(containers: list[dict]) -> chain:
    """The values of all dictionaries."""
    return chain.from_iterable(map(dict.values, containers))


def addresses(container: dict | list) -> tuple[int, ...]:
    """The addresses of the contents of a container."""
    if isinstance(container, dict):
        return (*map(id, container), *map(id, dict.values(container)))
    return tuple(map(id, container))


def content_of(cell: CellType) -> Any:
    """The contents of a closure cell. None if it is empty."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def same_content(content: Any, noted: Any) -> bool:
    """Whether a cell has the recorded contents. A tensor is recorded by its address."""
    return content is noted or (isinstance(content, torch.Tensor) and id(content) == noted)
