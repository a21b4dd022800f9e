"""The names that the code of a forward can look up.

An attribute, a method or a global with another name cannot change what that code computes. So the check for each call
skips it; a reading, once per generation, does not. Names come from code objects, and from strings that `getattr` may
get: constants, defaults of arguments, and strings in globals. A name that is composed at run time is not found.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterable, Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

from sfast_ext.behaviour.foreign_code import CALLS, COMMON, OF_OBJECTS, layers, package, written_by
from sfast_ext.behaviour.snapshot import MAX_LENGTH

_FIRST = frozenset({"forward", "_old_forward", *CALLS})
# nesting of attributes and containers
_MAX_DEPTH = 2


def names_within(kinds: Iterable[type], functions: Iterable[Any], walk: Walk | None = None) -> frozenset[str]:
    """The names that the forwards of some classes can look up.

    Args:
        kinds: the classes of modules, and of objects that they call.
        functions: other functions that run, such as hooks.
        walk: one that found some of them before.
    """
    walk = Walk() if walk is None else walk
    for kind in kinds:
        walk.add_class(kind)
    for function in functions:
        walk.add(function)
    walk.follow(_FIRST)
    return frozenset(walk.names)


def looked_into(functions: Iterable[Any]) -> frozenset[Hashable]:
    """What `names_within` reads of functions, by identity: equal if only their closures hold other values.

    accelerate makes a function for each module.
    """
    return frozenset(
        (id(layer.__code__), id(layer.__globals__), id(layer.__defaults__), id(layer.__kwdefaults__))
        for function in functions
        for layer in layers(function)
    )


class Walk:
    """Follows names from functions and classes."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self._methods: dict[str, list[Any]] = {}
        self._owners: set[type] = set()
        self._seen: set[FunctionType] = set()
        self._waiting: list[str] = []

    def add_class(self, kind: type) -> None:
        """Add the methods of a class. A method runs if its name is looked up."""
        for owner in kind.__mro__:
            if owner in self._owners or owner is object:
                continue
            self._owners.add(owner)
            common = package(owner.__module__) in COMMON
            for name, value in vars(owner).items():
                for function in functions_of(value):
                    if common and _is_common(function):
                        continue
                    self._methods.setdefault(name, []).append(function)
                    if runs_by_syntax(name) or name in self.names:
                        self.add(function)

    def add(self, function: Any) -> None:
        """Add a function that runs, its layers, and what they find in their globals."""
        for layer in layers(function):
            if layer in self._seen:
                continue
            self._seen.add(layer)
            names, around = code_names(layer.__code__), layer.__globals__
            self._waiting += names
            self._waiting += _strings(layer.__defaults__)
            self._waiting += _strings((layer.__kwdefaults__ or {}).values())
            for name in names & around.keys():
                self._add_global(around[name], names)

    def _add_global(self, value: Any, names: frozenset[str], depth: int = 0) -> None:
        if isinstance(value, (str, frozenset, set)):
            self._waiting += _strings(value)
        elif isinstance(value, (tuple, list, dict)):
            self._waiting += _strings(value)
            if depth < _MAX_DEPTH and len(value) <= MAX_LENGTH:
                for each in value.values() if isinstance(value, dict) else value:
                    if callable(each):
                        self._add_global(each, names, depth + 1)
        elif isinstance(value, type):
            self.add_class(value)
        elif isinstance(value, ModuleType):
            if package(value.__name__) not in COMMON:
                self._add_attributes(value, names, depth)
        elif isinstance(value, FunctionType) and package(value.__module__ or "") in COMMON:
            # what it calls in torch is found by its names
            for layer in layers(value):
                self._waiting += code_names(layer.__code__)
        elif callable(value):
            self.add(value)
        elif hasattr(value, "__dict__"):
            # a host may keep torch's own methods in an object, and call them from its replacements
            self._add_attributes(value, names, depth)

    def _add_attributes(self, value: Any, names: frozenset[str], depth: int) -> None:
        for name in names & vars(value).keys() if depth < _MAX_DEPTH else ():
            inner = vars(value)[name]
            if not isinstance(inner, ModuleType):
                self._add_global(inner, names, depth + 1)

    def follow(self, names: Iterable[str]) -> None:
        """Add the methods with these names, and so on recursively."""
        self._waiting += names
        while self._waiting:
            name = self._waiting.pop()
            if name not in self.names:
                self.names.add(name)
                for function in self._methods.get(name, ()):
                    self.add(function)


def _is_common(function: Any) -> bool:
    """Whether all layers of a function belong to torch or Python."""
    if isinstance(function, FunctionType) and function.__closure__ is None:
        return written_by(function) in COMMON
    return all(written_by(layer) in COMMON for layer in layers(function))


def functions_of(value: Any) -> Iterator[Any]:
    """The functions of an attribute of a class: a method, or those of a property."""
    if isinstance(value, property):
        yield from filter(None, (value.fget, value.fset))
    elif isinstance(value, functools.cached_property):
        yield value.func
    elif callable(function := getattr(value, "__func__", value)):
        yield function


def runs_by_syntax(name: str) -> bool:
    """Whether a method with this name runs without a name in the code."""
    return name.startswith("__") and name.endswith("__") and name not in OF_OBJECTS


@functools.lru_cache(maxsize=8192)
def code_names(code: CodeType) -> frozenset[str]:
    """The names that code looks up or may look up, including nested functions and strings."""
    inner = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return frozenset(code.co_names).union(_strings(code.co_consts), *map(code_names, inner))


def _strings(values: Any) -> list[str]:
    """The identifiers among constants, including nested tuples."""
    if isinstance(values, str):
        values = (values,)
    found: list[str] = []
    for value in values or ():
        if isinstance(value, str):
            if value.isidentifier():
                found.append(value)
        elif isinstance(value, (tuple, frozenset)):
            found += _strings(value)
    return found
