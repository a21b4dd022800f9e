"""Reads what values hold, to any depth: settings of processors, closures, defaults, globals, attributes of classes.

A value is compared if its type is known. Its identity is enough only if it cannot change. A value that the forward can
reach, and that is of an unknown type or too large to compare for each call, is named: the call must be bypassed.
"""

from __future__ import annotations

import contextvars
import functools
import threading
import types
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterable
from typing import Any, NamedTuple

import torch
from torch import nn

from sfast_ext import reasons
from sfast_ext.behaviour.contents import Contents
from sfast_ext.behaviour.foreign_code import package
from sfast_ext.behaviour.forward_slot import AcceleratedForward
from sfast_ext.behaviour.quick_check import content_of
from sfast_ext.behaviour.value_types import (
    ATOMS,
    BY_WORDS,
    BY_WORDS_OF_ALL,
    OF_MEMBERS,
    buffer_content,
    buffer_size,
    hides_state,
    is_buffer,
    is_common,
    is_enum,
    is_frozen,
    is_immutable,
    is_of_library,
    is_own,
    is_silent,
    parts_of,
    plain_key,
    random_state,
    slots_of,
)

MAX_ITEMS = 10_000
"""Items of one container that can be compared for each call."""
MAX_BYTES = 1 << 16
"""Bytes of one array that can be compared for each call."""
_MAX_IN_ALL = 100_000
_MAX_DEPTH = 120
# an object that looks its attributes up in a longer dictionary is a table of settings, of which a forward reads few
_MAX_OPTIONS = 16
_PLAIN = ATOMS | BY_WORDS
_BASES: tuple[type, ...] = (int, float, complex, str, bytes, *(BY_WORDS - {float, complex}), range)
ORIGINS = frozenset({"_name_or_path", "_diffusers_version", "_use_default_values"})
"""Entries of a diffusers config for the source of the model, without influence on behaviour."""
CONFIGS = "omegaconf"
"""Hosts build models from its lists and dictionaries."""

Names = frozenset[str] | None
"""The names that code looks up in a value; None if any may be."""


class Unknown(NamedTuple):
    """A value that a forward can reach and that cannot be compared."""

    where: str
    value: Any
    why: str

    def reason(self) -> reasons.Reason:
        """The value for the report."""
        kind = type(self.value)
        return reasons.UNKNOWN_VALUE(self.where, f"{kind.__module__}.{kind.__qualname__}", self.why)


class Values:
    """Reads values.

    Args:
        names: the names that the code of the forward can look up.
        identity: the key of an object by its identity.
        tensor: the key of a tensor.
        module: the key of a module of the tree. None for another module.
        function: the key of a function, which is read as well: (function, place, strict).
        kind: the key of a class among values: (class, place, names, strict).
        python_module: the key of a Python module among values: (module, place, strict).
        from_outside: the names that code outside of a class looks up.
        contents: what is compared later.
    """

    def __init__(
        self,
        names: frozenset[str],
        *,
        identity: Callable[[object], Hashable],
        tensor: Callable[[torch.Tensor], Hashable],
        module: Callable[[nn.Module], Hashable | None],
        function: Callable[[Any, str, bool], Hashable],
        kind: Callable[[type, str, Names, bool], Hashable],
        python_module: Callable[[types.ModuleType, str, bool], Hashable],
        from_outside: Callable[[type], frozenset[str]],
        contents: Contents,
    ) -> None:
        self.names, self.contents = names, contents
        self._identity, self._tensor, self._module = identity, tensor, module
        self._function, self._kind, self._python_module = function, kind, python_module
        self._from_outside = from_outside
        self.unknown: list[Unknown] = []
        self.kinds: dict[type, str] = {}
        """Classes of objects that were read, with the place of the first."""
        self.modules: dict[int, tuple[str, nn.Module]] = {}
        """Modules outside the tree."""
        self._seen: dict[Hashable, int] = {}
        # no address is used again
        self._alive: list[Any] = []
        self._depth = 0
        self._left = _MAX_IN_ALL

    def read(self, value: Any, where: str, names: Names, strict: bool = True) -> Hashable:
        """The key of a value.

        Args:
            where: the place, for the report.
            names: the names that are looked up in it.
            strict: whether a value that cannot be compared is named.
        """
        kind = type(value)
        if kind in _PLAIN:
            return plain_key(value)
        if self._depth >= _MAX_DEPTH:
            return self._refuse(where, value, f"that is nested more than {_MAX_DEPTH} deep", strict)
        self._depth += 1
        try:
            return self._read(value, kind, where, names, strict)
        finally:
            self._depth -= 1

    def _read(self, value: Any, kind: Any, where: str, names: Names, strict: bool) -> Hashable:
        if issubclass(kind, torch.Tensor):
            return (kind, self._tensor(value))
        if issubclass(kind, type):
            return self._kind(value, where, names, strict)
        if kind in weakref.ProxyTypes:
            return self._referent(value, where, names, strict)
        if issubclass(kind, nn.Module):
            return self._read_module(value, where)
        if issubclass(kind, AcceleratedForward) or is_own(kind):
            return None
        if issubclass(kind, types.ModuleType):
            return self._python_module(value, where, strict)
        if is_immutable(value):
            return (kind, value.dtype.str, value.tobytes()) if hasattr(value, "tobytes") else (kind, value)
        if kind is tuple and all(type(each) in _PLAIN for each in value):
            return (kind, *map(plain_key, value))
        if is_enum(value):
            member: Hashable = (kind, value.name, self.read(value._value_, f"{where}.value", names, strict))
            return member if is_common(kind) else (member, self._of_member(value, kind, where, names, strict))
        if (key := self._callable(value, kind, where, names, strict)) is not None:
            return key
        if isinstance(value, BY_WORDS_OF_ALL):
            return (kind, repr(value))
        if is_silent(value):
            return (kind, self._same(value)) if callable(value) else kind
        # cycles end here
        place = id(value), names
        if place in self._seen:
            return ("again", self._seen[place])
        self._seen[place] = len(self._seen)
        self._alive.append(value)
        return self._mutable(value, kind, where, names, strict)

    def _of_member(self, value: Any, kind: type, where: str, names: Names, strict: bool) -> Hashable:
        """What a member of an enumeration holds in addition to its name and value."""
        names = self.names if names is None else names
        place = id(value), names
        if place in self._seen:
            return None
        self._seen[place] = len(self._seen)
        self._alive.append(value)
        return self._attributes(value, kind, where, names - OF_MEMBERS, strict)

    def _mutable(self, value: Any, kind: type, where: str, names: Names, strict: bool) -> Hashable:
        if is_buffer(value):
            key: Hashable = self._buffer(value, where, names, strict)
        elif package(kind.__module__) == CONFIGS and hasattr(value, "__dict__"):
            return self._config_node(value, kind, where, names, strict)
        elif isinstance(value, (list, tuple, dict, set, frozenset, deque, types.MappingProxyType)):
            if len(value) > min(MAX_ITEMS, self._left):
                return self._refuse(where, value, f"of {len(value)} items: too many to compare for each call", strict)
            self._left -= len(value)
            key = self._container(value, where, names, strict)
        elif isinstance(value, slice):
            return (kind, *(self.read(each, where, names, strict) for each in (value.start, value.stop, value.step)))
        elif isinstance(value, contextvars.ContextVar):
            (content,) = self.contents.objects(lambda: (value.get(None),))
            return (kind, self.read(content, f"the context variable {value.name}", names, strict))
        elif isinstance(value, weakref.ref):
            self.contents.plain(lambda: id(value()))
            return (kind, self.read(value(), where, names, strict))
        elif isinstance(value, threading.local):
            found = self.contents.objects(lambda: (*vars(value), *vars(value).values()))
            return (kind, *(self.read(each, where, names, strict) for each in found))
        elif (state := random_state(value)) is not None:
            return (kind, self.contents.plain(state))
        elif (base := next((base for base in _BASES if isinstance(value, base)), None)) is not None:
            key = (base, base.__repr__(value))  # type: ignore[call-arg]
        elif isinstance(value, BaseException):
            key = self._arguments(value, where, names, strict)
        elif hides_state(kind):
            return self._refuse(where, value, "whose content cannot be compared", strict)
        else:
            key = None
        if is_frozen(kind):
            # its attributes are its entries
            return (kind, key)
        return (kind, key, self._attributes(value, kind, where, names, strict))

    def _same(self, value: Any) -> Hashable:
        """The key of a function in C, which is the same one for two blocks or another."""
        self._identity(value)
        return id(value)

    def _refuse(self, where: str, value: Any, why: str, strict: bool) -> Hashable:
        if strict:
            self.unknown.append(Unknown(where, value, why))
        # equal to nothing, so that a block with such a value is recorded by itself
        return ("unknown", object()) if strict else None

    def _referent(self, proxy: Any, where: str, names: Names, strict: bool) -> Hashable:
        try:
            return self.read(proxy.__repr__.__self__, where, names, strict)
        except ReferenceError:
            return None

    def _read_module(self, module: nn.Module, where: str) -> Hashable:
        known = self._module(module)
        if known is None:
            self.modules.setdefault(id(module), (where, module))
            return self._identity(module)
        return ("module", known)

    def _buffer(self, value: Any, where: str, names: Names, strict: bool) -> Hashable:
        size = buffer_size(value)
        if size is None:
            if not strict and value.dtype == object:
                items = self.contents.objects(lambda: tuple(value.ravel().tolist()))
                return (value.shape, *(self.read(each, where, names, strict) for each in items))
            return self._refuse(where, value, "of objects, whose content cannot be compared", strict)
        if size > MAX_BYTES:
            return self._refuse(where, value, f"of {size} bytes: too many to compare for each call", strict)
        return self.contents.plain(lambda: buffer_content(value))

    def _container(self, value: Any, where: str, names: Names, strict: bool) -> Hashable:
        if isinstance(value, dict):
            # before the values, so that a change in between is detected
            keys = list(dict.keys(value))
            frozen = is_frozen(type(value))
            values = list(dict.values(value)) if frozen else self.contents.container(value)
            if isinstance(value, defaultdict):
                (factory,) = self.contents.objects(lambda: (value.default_factory,))
                keys, values = [*keys, None], [*values, factory]
            return self._pairs(keys, values, where, names, strict)
        if isinstance(value, types.MappingProxyType):
            found = self.contents.objects(lambda: (*value.keys(), *value.values()))
            return self._pairs(found[: len(found) // 2], found[len(found) // 2 :], where, names, strict)
        if isinstance(value, list):
            items = self.contents.container(value)
        elif isinstance(value, (tuple, frozenset)):
            items = [*value]
        else:
            # the order of a set is what a loop over it sees
            base = set if isinstance(value, set) else deque
            items = [*self.contents.objects(lambda: tuple(base.__iter__(value)))]
            if base is deque:
                items.append(value.maxlen)
        if all(type(item) in _PLAIN for item in items):
            return tuple(map(plain_key, items))
        return tuple([self.read(item, f"{where}[{i}]", names, strict) for i, item in enumerate(items)])

    def _pairs(
        self, keys: Iterable[Any], values: Iterable[Any], where: str, names: Names, strict: bool
    ) -> tuple[Hashable, ...]:
        found: list[Hashable] = []
        for key, value in zip(keys, values):
            if not isinstance(key, str) or key not in ORIGINS:
                plain = type(key) in _PLAIN
                found.append(plain_key(key) if plain else self.read(key, f"a key of {where}", names, strict))
                plain = type(value) in _PLAIN
                found.append(plain_key(value) if plain else self.read(value, f"{where}[{key!r}]", names, strict))
        return tuple(found)

    def _callable(self, value: Any, kind: Any, where: str, names: Names, strict: bool) -> Hashable:
        """The key of a function, None for another value."""
        if issubclass(kind, types.FunctionType):
            return self._function(value, where, strict)
        if issubclass(kind, types.MethodType):
            function = self._function(value.__func__, where, strict)
            return (kind, function, self.read(value.__self__, where, names, strict))
        if issubclass(kind, (types.BuiltinFunctionType, types.MethodWrapperType)):
            bound = value.__self__
            plain = bound is None or isinstance(bound, types.ModuleType)
            key = self._identity(value) if plain else self.read(bound, where, names, strict)
            return (kind, value.__qualname__, key)
        if (parts := parts_of(value)) is not None:
            if issubclass(kind, property) and not strict:
                parts = ()
            found = [self.read(each, where, names, strict) for each in parts]
            if issubclass(kind, functools.partial):
                found.append(self._attributes(value, kind, where, names, strict))
            return (kind, *found)
        if callable(value) and hides_state(kind):
            inner = getattr(value, "__wrapped__", None)
            words = kind.__name__.lower()
            if inner is not None or any(word in words for word in ("function", "method", "func", "descriptor")):
                return (kind, self._same(value), self.read(inner, where, names, strict))
        if hasattr(kind, "__get__") and hides_state(kind):
            # a descriptor, as of a named tuple's field or a slot
            return (kind, self._same(value))
        return None

    def _attributes(self, value: Any, kind: type, where: str, names: Names, strict: bool) -> Hashable:
        """What the dictionary and the slots of an object hold under the names that are looked up."""
        if not is_common(kind):
            self.kinds.setdefault(kind, where)
            if strict and not is_of_library(kind):
                self.contents.kind(value)
        # the names that Python's own methods look up are not collected
        names = None if is_common(kind) else names
        try:
            home = object.__getattribute__(value, "__dict__")
        except AttributeError:
            home = None
        found: list[Hashable] = []
        if home:
            self.contents.attributes(home, names)
            dynamic = any("__getattr__" in vars(owner) for owner in kind.__mro__)
            for name, each in list(home.items()):
                if name in ORIGINS or (names is not None and name not in names):
                    continue
                if dynamic and names is not None and isinstance(each, dict) and len(each) > _MAX_OPTIONS:
                    # not the names of its methods that load and save
                    found += [name, self._table(each, f"{where}.{name}", self._from_outside(kind), strict)]
                else:
                    found += [name, self.read(each, f"{where}.{name}", names, strict)]
        elif home is not None:
            self.contents.attributes(home, names)
        slots = [(name, each) for name, each in slots_of(kind) if names is None or name in names]
        if slots:
            inside = self.contents.objects(lambda: tuple(_slot(value, each) for _, each in slots))
            for (name, _), each in zip(slots, inside):
                found += [name, self.read(each, f"{where}.{name}", names, strict)]
        return tuple(found)

    def _table(self, table: dict, where: str, names: frozenset[str], strict: bool) -> Hashable:
        """A long dictionary of an object that looks its attributes up: the entries with names that are looked up."""
        self.contents.attributes(table, names)
        here = [name for name in list(table) if name in names]
        return tuple([(name, self.read(table.get(name), f"{where}[{name!r}]", self.names, strict)) for name in here])

    def _arguments(self, value: BaseException, where: str, names: Names, strict: bool) -> Hashable:
        found = self.contents.objects(lambda: value.args)
        return tuple([self.read(each, where, names, strict) for each in found])

    def _config_node(self, node: Any, kind: type, where: str, names: Names, strict: bool) -> Hashable:
        """A list, dictionary or value of omegaconf by what is in it, not by its parents: those are the configuration of
        the whole model."""
        inside = ("_content", "_val")
        found = self.contents.objects(lambda: tuple(vars(node).get(each) for each in inside))
        return (kind, *(self.read(each, where, names, strict) for each in found))


def _slot(value: Any, descriptor: Any) -> Any:
    try:
        return descriptor.__get__(value)
    except AttributeError:
        return None


def held_by(cells: tuple[types.CellType, ...]) -> tuple[Any, ...]:
    """What closure cells hold."""
    return tuple(map(content_of, cells))
