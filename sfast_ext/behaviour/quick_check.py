"""A look for each call at what a forward reads: whether it is still what a reading found, in a handful of calls."""

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
"""Attributes that the forwards of these very classes do not read."""
_UNREAD_WHILE: dict[type, tuple[str, Any, frozenset[str]]] = {
    nn.Conv2d: ("padding_mode", "zeros", frozenset({"_reversed_padding_repeated_twice"})),
    nn.Dropout: ("p", 0.0, frozenset({"training"})),
}
"""(attribute, value, what they do not read while it has that value)."""
# modules with the same attributes, from which on they are read together
_FEW = 4

Namespace = Mapping[str, Any]


class Attributes(NamedTuple):
    """Of one module: its class and its dictionary, the names of what is read, and what they stood for."""

    module: nn.Module
    kind: type
    length: int
    names: tuple[str, ...]
    values: tuple[Any, ...]


def attributes_of(module: nn.Module, ignored: frozenset[str]) -> Attributes:
    """What a look reads of a module's attributes: none where tensors are among them, which are told by address.

    Args:
        ignored: names that say nothing, whatever they are exchanged for.
    """
    home = module.__dict__
    if any(map(isinstance, dict.values(home), repeat(torch.Tensor))):
        return Attributes(module, type(module), len(home), (), ())
    unread = _UNREAD.get(type(module), _NOTHING)
    name, value, more = _UNREAD_WHILE.get(type(module), ("", None, _NOTHING))
    if name and home.get(name) == value:
        unread = unread | more
    # readings take "training" by itself
    names = tuple(n for n in home if n not in unread and (n == "training" or n not in ignored))
    return Attributes(module, type(module), len(home), names, tuple(map(home.get, names)))


class QuickCheck:
    """What is looked at for each call.

    What took the place of another that it is equal to is not told apart, nor a name in a container that is not a
    module's attributes. Not seen are hooks that come without torch's handle, where there was none, submodules of a
    module that had none, and whatever has a name that no code of the forward looks up.

    Args:
        modules: all of them; see `attributes_of`.
        hooks: their containers of hooks, of which `no_hooks` are the empty ones.
        next_hook: the number of torch's next handle when the first hook was looked for.
        found: what methods that run found in classes and in their modules, by name.
        sizes: of the classes among these.
        methods: (class, name, method).
        cells: of closures, and what is in them.
        bare: containers that are to stay empty.
        loose: containers and their values.
        lists: the same.
        mixed: containers of tensors, and the addresses of what is in them.
        parameters: by modules.
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
        self._classes, self._sizes = [vars(home) for home, _ in sizes], [size for _, size in sizes]
        self._found = NameTable((home, _there(home, names)) for home, names in found)
        self._methods = methods
        # empty ones, and tensors, which are told by address
        apart = [content is None or isinstance(content, torch.Tensor) for content in map(content_of, cells[0])]
        self._apart = list(compress(zip(*cells), apart))
        plain = list(map(operator.not_, apart))
        self._cells, self._contents = list(compress(cells[0], plain)), list(compress(cells[1], plain))
        self._bare, (self._lists, self._items) = bare, lists
        # views, which are made once
        self._loose, self._values = [dict.values(each) for each in loose[0]], loose[1]
        children = set(map(id, self._values))
        self._roots = [each.module for each in modules if id(each.module) not in children]
        kinds = {id(each.module): each.kind for each in modules}
        self._kinds = [kinds.get(id(each), type(each)) for each in (*self._values, *self._roots)]
        self._mixed, self._addresses = mixed
        # where a parameter is none, one may come; of those that are there the weight arena knows
        lacking: dict[str, list[dict]] = {}
        for each in parameters:
            for name in (name for name, value in each.items() if value is None):
                lacking.setdefault(name, []).append(each)
        self._lacking = [(operator.itemgetter(name), each) for name, each in lacking.items()]

    def note_sizes(self) -> None:
        """To be called when classes were read: what came since is nothing that is looked at."""
        self._sizes = list(map(len, self._classes))

    def unchanged(self) -> bool:
        """Whether nobody added, took away or exchanged an attribute, a submodule or a hook, nor a class or a method."""
        return list(map(len, self._classes)) == self._sizes and self.unchanged_but_for_sizes()

    def unchanged_but_for_sizes(self) -> bool:
        """Whether it holds for all that was there."""
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
                and list(chain.from_iterable(self._lists)) == self._items
                and list(map(addresses, self._mixed)) == self._addresses
                and all(list(map(get, each)).count(None) == len(each) for get, each in self._lacking)
            )
        except Exception:
            # an attribute is gone, or holds what cannot be compared
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
    """Modules, those together of which the same attributes are read."""

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
            # of a single name it gives no tuple
            values = [each.values[0] if len(names) == 1 else each.values for each in row]
            if len(row) < _FEW:
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


def _there(home: type | dict, names: dict[str, Any]) -> dict[str, Any]:
    """What is looked at by name: what a class is given is seen by its size."""
    return {n: v for n, v in names.items() if n in vars(home)} if isinstance(home, type) else names


class NameTable:
    """Names of namespaces, and what they stood for; those that were not there are to stay away."""

    def __init__(self, homes: Iterable[tuple[type | dict, dict[str, Any]]]) -> None:
        self._singles: list[tuple[Namespace, str]] = []
        self._gets: list[tuple[Callable[[Any], tuple], Namespace]] = []
        self._absent: list[Callable[[Any], bool]] = []
        self._views: list[Any] = []
        single: list[Any] = []
        several: list[Any] = []
        for home, names in homes:
            namespace = namespace_of(home)
            # one that is there may be None
            there = {name: value for name, value in names.items() if value is not None or name in namespace}
            if len(there) == 1:
                self._singles.append((namespace, next(iter(there))))
                single += there.values()
            elif there:
                self._gets.append((operator.itemgetter(*there), namespace))
                several += there.values()
            absent = frozenset(names).difference(there)
            if absent:
                # the shorter of the two is gone through
                few = len(absent) < len(namespace)
                self._absent.append(namespace.keys().isdisjoint if few else absent.isdisjoint)
                self._views.append(absent if few else namespace.keys())
        self._values = single + several

    def unchanged(self) -> bool:
        """Whether they stand for the same."""
        now = [namespace[name] for namespace, name in self._singles]
        for get, namespace in self._gets:
            now += get(namespace)
        if not all(map(operator.is_, now, self._values)):
            return False
        return all(stay(view) for stay, view in zip(self._absent, self._views))


def namespace_of(home: type | dict) -> Namespace:
    """The names of a class, or of what is one already."""
    return home if isinstance(home, dict) else vars(home)


def values_in(containers: list[dict]) -> chain:
    """The values of dictionaries, one after another."""
    return chain.from_iterable(map(dict.values, containers))


def addresses(container: dict | list) -> tuple[int, ...]:
    """Of what is in a container."""
    if isinstance(container, dict):
        return (*map(id, container), *map(id, dict.values(container)))
    return tuple(map(id, container))


def content_of(cell: CellType) -> Any:
    """What a closure's cell holds; None where it is empty."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def same_content(content: Any, noted: Any) -> bool:
    """Whether a cell holds what was noted: a tensor by its address."""
    return content is noted or (isinstance(content, torch.Tensor) and id(content) == noted)
