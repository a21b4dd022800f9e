"""What a reading of the behaviour key looked at, laid out flat: another look is a handful of calls for all of it."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from itertools import chain, repeat
from types import CellType
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

# items of the largest container that is read
LONGEST = 64
_Namespace = Mapping[str, Any]
# readings take these by themselves
_SLOTS = frozenset({"forward", "_old_forward"})
_HOOKS = operator.itemgetter("_forward_hooks", "_forward_pre_hooks")
_NOTHING: frozenset[str] = frozenset()
_NORM = {"training", "elementwise_affine", "affine", "num_channels"}
_UNREAD: dict[type, set[str]] = {
    nn.Linear: {"training", "in_features", "out_features"},
    nn.Conv2d: {"training", "in_channels", "out_channels", "kernel_size", "transposed", "output_padding"},
    nn.GroupNorm: _NORM,
    nn.LayerNorm: _NORM,
    nn.SiLU: {"training", "inplace"},
    nn.Dropout: {"inplace"},
    nn.ModuleList: {"training"},
    nn.Sequential: {"training"},
}
"""Attributes that the forwards of these very classes do not read."""


class Scene:
    """Everything that a reading met: modules, containers, hooks, and the names that methods find.

    Objects are held, so that none can give its address to another; but not tensors, of which some are large and
    others' backups.

    Args:
        ignored: attributes of modules that say nothing, whatever they are exchanged for.
    """

    def __init__(self, ignored: frozenset[str] = frozenset()) -> None:
        self._ignored = ignored - _SLOTS
        # by the names of what is looked at: modules' attributes, and their values
        self._alike: dict[tuple[str, ...], tuple[list[dict], list[int], list[tuple]]] = {}
        self._loose: list[dict] = []
        self._loose_values: list[Any] = []
        self._modules: list[nn.Module] = []
        self._attributes: list[dict] = []
        self._types: list[type] = []
        self._empty: list[dict | list] = []
        self._sized: list[dict | list] = []
        self._lengths: list[int] = []
        # of the empty ones, those that are looked at for each call
        self._bare: list[dict | list] = []
        # hooks come with handles, of which each takes the next number
        self._no_hooks: list[dict] = []
        self._hooks: list[tuple[dict, dict]] = []
        self._next_hook = RemovableHandle.next_id
        self._dicts: list[dict] = []
        self._dict_keys: list[Any] = []
        self._dict_values: list[Any] = []
        self._lists: list[list] = []
        self._list_items: list[Any] = []
        self._parameters: list[dict] = []
        self._parameter_names: list[Any] = []
        self._missing: list[bool] = []
        # those that hold tensors: what is in them is told by address
        self._mixed: list[dict | list] = []
        self._addresses: list[tuple[int, ...]] = []
        self._held: list[Any] = []
        self._long: list[dict | list] = []
        self._names: dict[int, tuple[type | dict, dict[str, Any]]] = {}
        self._kinds: dict[tuple[Any, str], Any] = {}
        self._cells: list[CellType] = []
        self._contents: list[Any] = []

    # Each is noted before it is read: what changes in between is seen at the next look.

    def module(self, module: nn.Module) -> None:
        """A module: its attributes, submodules and parameters, of which only those count that are None."""
        self._modules.append(module)
        self._types.append(type(module))
        attributes = module.__dict__
        self._attributes.append(attributes)
        self._hooks.append(_HOOKS(attributes))
        self.container(attributes, loose=False)
        children, parameters = attributes["_modules"], attributes["_parameters"]
        if children:
            self.container(children)
        else:
            # a forward that would call one is another
            self._empty.append(children)
        self._size(parameters)
        self._parameters.append(parameters)
        self._parameter_names.extend(parameters)
        self._missing.extend(map(operator.is_, dict.values(parameters), repeat(None)))
        if not any(map(isinstance, dict.values(attributes), repeat(torch.Tensor))):
            unread = _UNREAD.get(type(module), _NOTHING)
            read = (name for name in attributes if name == "training" or name not in self._ignored)
            names = tuple(name for name in read if name not in unread)
            modules, lengths, values = self._alike.setdefault(names, ([], [], []))
            modules.append(attributes)
            lengths.append(len(attributes))
            values.append(tuple(map(attributes.get, names)))

    def hooks(self, hooks: dict) -> None:
        """The hooks of a module."""
        if hooks:
            self.container(hooks)
        else:
            self._empty.append(hooks)
            self._no_hooks.append(hooks)

    def container(self, container: dict | list, *, loose: bool = True) -> None:
        """A dict or list with what it holds; `loose` where it is not the attributes of a module."""
        self._size(container)
        if not container:
            self._bare.append(container)
            return
        values = list(dict.values(container) if isinstance(container, dict) else container)
        if any(map(isinstance, values, repeat(torch.Tensor))):
            self._mixed.append(container)
            self._addresses.append(_addresses(container))
            self._held += [value for value in (*container, *values) if not isinstance(value, torch.Tensor)]
        elif isinstance(container, dict):
            self._dicts.append(container)
            self._dict_keys.extend(container)
            self._dict_values += values
            if loose:
                self._loose.append(container)
                self._loose_values += values
        else:
            self._lists.append(container)
            self._list_items += values

    def long(self, container: dict | list) -> None:
        """A dict or list that is too long to be read: of interest when it is no more."""
        self._long.append(container)

    def _size(self, container: dict | list) -> None:
        if container:
            self._sized.append(container)
            self._lengths.append(len(container))
        else:
            self._empty.append(container)

    def name(self, home: type | dict, name: str) -> None:
        """A name that a method finds in a class or in its module, or one that is not there yet."""
        _, names = self._names.setdefault(id(home), (home, {}))
        names[name] = _namespace(home).get(name)

    def cell(self, cell: CellType) -> Any:
        """A cell of a function's closure; returns what it holds, None where it is empty."""
        content = content_of(cell)
        self._cells.append(cell)
        # tensors are told by address, as elsewhere
        self._contents.append(id(content) if isinstance(content, torch.Tensor) else content)
        return content

    def kind(self, kind: Any, name: str) -> Any:
        """A method of a class; returns what it is."""
        function = self._kinds[kind, name] = getattr(kind, name)
        return function

    def seal(self) -> Scene:
        """To be called when all was read."""
        self._found = _Found(self._names.values())
        self._methods = [(kind, name, function) for (kind, name), function in self._kinds.items()]
        self._groups = [_Alike(names, *each) for names, each in self._alike.items()]
        # where a parameter is none, one may come; of those that are there the weight arena knows
        lacking = [(p, name) for p in self._parameters for name, value in p.items() if value is None]
        self._lacking, self._lacking_names = [p for p, _ in lacking], [name for _, name in lacking]
        return self

    def looks_alike(self) -> bool:
        """A look for each call: whether nobody added, took away or exchanged an attribute, a submodule or a hook, nor a
        class or its methods.

        What took the place of another that it is equal to is not told apart, nor a name in a container that is not a
        module's attributes. Not seen are hooks that come without torch's handle, where there was none, and submodules
        of a module that had none.
        """
        try:
            return (
                not any(self._bare)
                and self._no_hooks_came()
                and list(map(type, self._modules)) == self._types
                and self._found.holds()
                and all(getattr(kind, name) is function for kind, name, function in self._methods)
                and all(map(_still, map(content_of, self._cells), self._contents))
                and all(group.holds() for group in self._groups)
                and list(_values(self._loose)) == self._loose_values
                and list(chain.from_iterable(self._lists)) == self._list_items
                and list(map(_addresses, self._mixed)) == self._addresses
                and not any(map(operator.is_not, map(dict.get, self._lacking, self._lacking_names), repeat(None)))
            )
        except Exception:
            # an attribute is gone, or holds what cannot be compared
            return False

    def _no_hooks_came(self) -> bool:
        following = RemovableHandle.next_id
        if following != self._next_hook:
            if any(self._no_hooks) or list(map(_HOOKS, self._attributes)) != self._hooks:
                return False
            self._next_hook = following
        return True

    def holds(self) -> bool:
        """Whether everything is the very object that it was, but for parameters that took the place of others."""
        return (
            self.looks_alike()
            and not any(self._empty)
            and list(map(len, self._sized)) == self._lengths
            and all(map(operator.is_, _keys(self._dicts), self._dict_keys))
            and all(map(operator.is_, _values(self._dicts), self._dict_values))
            and all(map(operator.is_, chain.from_iterable(self._lists), self._list_items))
            and all(map(operator.is_, _keys(self._parameters), self._parameter_names))
            and list(map(operator.is_, _values(self._parameters), repeat(None))) == self._missing
            and all(len(container) > LONGEST for container in self._long)
        )


class NoScene(Scene):
    """Notes nothing."""

    def module(self, module: nn.Module) -> None:
        """Nothing."""

    def container(self, container: dict | list, *, loose: bool = True) -> None:
        """Nothing."""

    def hooks(self, hooks: dict) -> None:
        """Nothing."""

    def long(self, container: dict | list) -> None:
        """Nothing."""

    def name(self, home: type | dict, name: str) -> None:
        """Nothing."""

    def cell(self, cell: CellType) -> Any:
        """What it holds."""
        return content_of(cell)


def content_of(cell: CellType) -> Any:
    """What a closure's cell holds; None where it is empty."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _still(content: Any, noted: Any) -> bool:
    return content is noted or (isinstance(content, torch.Tensor) and id(content) == noted)


class _Alike:
    """The attributes of modules that have the same ones, and what of them is read."""

    def __init__(self, names: tuple[str, ...], modules: list[dict], lengths: list[int], values: list[tuple]) -> None:
        self._modules, self._lengths = modules, lengths
        self._get = operator.itemgetter(*names) if names else None
        # of a single name it gives no tuple
        self._values = values if len(names) != 1 else [value for (value,) in values]

    def holds(self) -> bool:
        if list(map(len, self._modules)) != self._lengths:
            return False
        return self._get is None or list(map(self._get, self._modules)) == self._values


class _Found:
    """Names of namespaces, and what they stood for; those that were not there are to stay away."""

    def __init__(self, homes: Iterable[tuple[type | dict, dict[str, Any]]]) -> None:
        self._singles: list[tuple[_Namespace, str]] = []
        self._gets: list[tuple[Callable[[Any], tuple], _Namespace]] = []
        self._absent: list[Callable[[Any], bool]] = []
        self._views: list[Any] = []
        single: list[Any] = []
        several: list[Any] = []
        for home, names in homes:
            namespace = _namespace(home)
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

    def holds(self) -> bool:
        now = [namespace[name] for namespace, name in self._singles]
        for get, namespace in self._gets:
            now += get(namespace)
        if not all(map(operator.is_, now, self._values)):
            return False
        return all(stay(view) for stay, view in zip(self._absent, self._views))


def _namespace(home: type | dict) -> _Namespace:
    return home if isinstance(home, dict) else vars(home)


def _keys(containers: list[dict]) -> chain:
    return chain.from_iterable(containers)


def _values(containers: list[dict]) -> chain:
    return chain.from_iterable(map(dict.values, containers))


def _addresses(container: dict | list) -> tuple[int, ...]:
    if isinstance(container, dict):
        return (*map(id, container), *map(id, dict.values(container)))
    return tuple(map(id, container))
