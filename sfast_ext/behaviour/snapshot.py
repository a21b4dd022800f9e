"""A flat record of everything that a reading of the behaviour key saw, which can be checked in a handful of calls."""

from __future__ import annotations

import operator
from collections import OrderedDict
from itertools import chain, repeat
from types import CellType
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from sfast_ext.behaviour.quick_check import (
    HOOKS,
    PLACES,
    Attributes,
    NameTable,
    QuickCheck,
    addresses,
    attributes_of,
    content_of,
    namespace_of,
    same_content,
    values_in,
)

# containers with more items are not read
MAX_LENGTH = 64
# read separately
_SLOTS = frozenset({"forward", "_old_forward"})
_WRITERS = (dict.__setitem__, OrderedDict.__setitem__)
_MODULE = operator.attrgetter("module")


class Snapshot:
    """Everything that a reading saw: modules, containers, hooks, and the names that methods find.

    It holds references, so that no address is reused. Not to tensors, as some are large, or backups of a third party.

    Args:
        ignored: attributes of modules without influence on behaviour.
    """

    def __init__(self, ignored: frozenset[str] = frozenset()) -> None:
        self._ignored = ignored - _SLOTS
        self._modules: list[Attributes] = []
        self._homes: list[dict] = []
        self._loose: list[dict] = []
        self._loose_values: list[Any] = []
        self._empty: list[dict | list] = []
        self._sized: list[dict | list] = []
        self._lengths: list[int] = []
        # empty ones that are checked for each call
        self._bare: list[dict | list] = []
        # each handle of a hook takes the next id
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
        # with tensors in them: contents are compared by address
        self._mixed: list[dict | list] = []
        self._addresses: list[tuple[int, ...]] = []
        self._held: list[Any] = []
        self._long: list[dict | list] = []
        self._names: dict[int, tuple[type | dict, dict[str, Any]]] = {}
        self._classes: dict[type, int] = {}
        self._kinds: dict[tuple[Any, str], Any] = {}
        self._cells: list[CellType] = []
        self._contents: list[Any] = []

    # Everything is recorded before it is read, so that a change in between is detected by the next check.

    def module(self, module: nn.Module) -> tuple[int, ...]:
        """A module: attributes, submodules, and parameters, of which only None is recorded.

        Returns:
            The addresses of the dictionaries in which plans look for its weights.
        """
        self._modules.append(attributes_of(module, self._ignored))
        attributes = module.__dict__
        self._homes.append(attributes)
        self._hooks.append(HOOKS(attributes))
        self.container(attributes, loose=False)
        children, parameters = attributes["_modules"], attributes["_parameters"]
        if children:
            self.container(children)
        else:
            # a forward that calls a submodule would be another forward
            self._empty.append(children)
        self._size(parameters)
        self._parameters.append(parameters)
        self._parameter_names.extend(parameters)
        self._missing.extend(map(operator.is_, dict.values(parameters), repeat(None)))
        return tuple(id(each) for each in (parameters, attributes["_buffers"]) if each)

    def hooks(self, hooks: dict) -> None:
        """A dictionary of hooks of a module."""
        if hooks:
            self.container(hooks)
        else:
            self._empty.append(hooks)
            self._no_hooks.append(hooks)

    def container(self, container: dict | list, *, loose: bool = True) -> None:
        """A dict or list and its contents. `loose` if it is not the attributes of a module."""
        self._size(container)
        if not container:
            self._bare.append(container)
            return
        values = list(dict.values(container) if isinstance(container, dict) else container)
        if any(map(isinstance, values, repeat(torch.Tensor))):
            self._mixed.append(container)
            self._addresses.append(addresses(container))
            self._held += [value for value in (*container, *values) if not isinstance(value, torch.Tensor)]
        elif isinstance(container, dict):
            self._dicts.append(container)
            self._dict_keys.extend(container)
            self._dict_values += values
            # configs of diffusers cannot be written to
            if loose and type(container).__setitem__ in _WRITERS:
                self._loose.append(container)
                self._loose_values += values
        else:
            self._lists.append(container)
            self._list_items += values

    def long(self, container: dict | list) -> None:
        """A dict or list that is too long to be read. It is read once it becomes shorter."""
        self._long.append(container)

    def _size(self, container: dict | list) -> None:
        if container:
            self._sized.append(container)
            self._lengths.append(len(container))
        else:
            self._empty.append(container)

    def name(self, home: type | dict, name: str) -> None:
        """A name that a method looks up in a class or in its module. It may be undefined."""
        if isinstance(home, type):
            self._classes.setdefault(home, len(vars(home)))
        _, names = self._names.setdefault(id(home), (home, {}))
        names[name] = namespace_of(home).get(name)

    def cell(self, cell: CellType) -> Any:
        """A closure cell. Returns its contents, None if it is empty."""
        content = content_of(cell)
        self._cells.append(cell)
        # tensors are compared by address
        self._contents.append(id(content) if isinstance(content, torch.Tensor) else content)
        return content

    def kind(self, kind: Any, name: str) -> Any:
        """A method of a class. Returns it."""
        function = self._kinds[kind, name] = getattr(kind, name)
        return function

    def bare(self) -> frozenset[int]:
        """The identities of empty containers that are checked for each call."""
        return frozenset(map(id, self._bare))

    def seal(self, names: frozenset[str], run: list[CellType]) -> Snapshot:
        """Call this when everything was read.

        Args:
            names: the names that the code can look up; see `reach`.
            run: the closure cells of code that runs.
        """
        self._found = NameTable(self._names.values())
        looked_at = {id(cell) for cell in run}
        cells = [each for each in zip(self._cells, self._contents) if id(each[0]) in looked_at]
        self._quick_check = QuickCheck(
            modules=[_looked_at(each, names) for each in self._modules],
            hooks=self._hooks,
            no_hooks=self._no_hooks,
            next_hook=self._next_hook,
            found=[(home, _run(home, each, names)) for home, each in self._names.values()],
            sizes=list(self._classes.items()),
            methods=[(kind, name, f) for (kind, name), f in self._kinds.items() if not self._names_has(kind, name)],
            cells=([cell for cell, _ in cells], [content for _, content in cells]),
            bare=self._bare,
            loose=(self._loose, self._loose_values),
            lists=(self._lists, self._list_items),
            mixed=(self._mixed, self._addresses),
            parameters=self._parameters,
        )
        return self

    def _names_has(self, kind: Any, name: str) -> bool:
        _, names = self._names.get(id(kind), (kind, {}))
        return names.get(name) is not None

    def unchanged_quick(self) -> bool:
        """The check for each call; see `QuickCheck`."""
        return self._quick_check.unchanged()

    def unchanged(self) -> bool:
        """Whether everything is still the same object. Replaced parameters are ignored."""
        same = (
            all(map(operator.is_, map(vars, map(_MODULE, self._modules)), self._homes))
            and self._quick_check.unchanged_but_for_sizes()
            and self._found.unchanged()
            and all(getattr(kind, name) is function for (kind, name), function in self._kinds.items())
            and all(map(same_content, map(content_of, self._cells), self._contents))
            and not any(self._empty)
            and list(map(len, self._sized)) == self._lengths
            and all(map(operator.is_, chain.from_iterable(self._dicts), self._dict_keys))
            and all(map(operator.is_, values_in(self._dicts), self._dict_values))
            and all(map(operator.is_, chain.from_iterable(self._lists), self._list_items))
            and all(map(operator.is_, chain.from_iterable(self._parameters), self._parameter_names))
            and list(map(operator.is_, values_in(self._parameters), repeat(None))) == self._missing
            and all(len(container) > MAX_LENGTH for container in self._long)
        )
        if same:
            self._quick_check.note_sizes()
        return same


class NoSnapshot(Snapshot):
    """Records nothing."""

    def module(self, module: nn.Module) -> tuple[int, ...]:
        """Nothing."""
        return ()

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


def _runs_torchs_code(kind: type) -> bool:
    """Whether a class inherits from a class of torch other than nn.Module. Their methods look up attributes as well."""
    return any(o.__module__.partition(".")[0] == "torch" and o is not nn.Module for o in kind.__mro__)


def _run(home: type | dict, found: dict[str, Any], names: frozenset[str]) -> dict[str, Any]:
    # names that torch's own code looks up are not collected
    of_torch = isinstance(home, type) and _runs_torchs_code(home)
    return {name: value for name, value in found.items() if of_torch or name in names}


def _looked_at(attributes: Attributes, names: frozenset[str]) -> Attributes:
    if _runs_torchs_code(attributes.kind):
        return attributes
    looked = names.union(PLACES)
    kept = [(name, value) for name, value in zip(attributes.names, attributes.values) if name in looked]
    return attributes._replace(names=tuple(name for name, _ in kept), values=tuple(value for _, value in kept))
