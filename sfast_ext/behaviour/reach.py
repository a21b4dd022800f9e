"""The names that the code of a forward can look up.

An attribute, a method or a global with another name cannot change what that code computes. So the check for each call
skips it; a reading, once per generation, does not. Names come from code objects, and from strings that `getattr` may
get: constants, defaults of arguments, and strings in globals. Of a name that is composed at run time the constants are
known that it may begin or end with, see `Walk.follow_composed`.
"""

from __future__ import annotations

import dis
import functools
import importlib.util
import re
from collections.abc import Hashable, Iterable, Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

from sfast_ext.behaviour.foreign_code import CALLS, COMMON, OF_OBJECTS, layers, package, written_by
from sfast_ext.behaviour.snapshot import MAX_LENGTH

_FIRST = frozenset({"forward", "_old_forward", *CALLS})
# nesting of attributes and containers
_MAX_DEPTH = 2
# what looks up an attribute by a name that is a value, and what puts strings together
_BY_VALUE = frozenset({"getattr", "attrgetter", "__dict__"})
_COMPOSING = frozenset({"BUILD_STRING", "BINARY_ADD", "INPLACE_ADD", "BINARY_MODULO"})
_COMPOSERS, _METHODS = frozenset({"format", "join"}), frozenset({"LOAD_ATTR", "LOAD_METHOD"})
_PLACEHOLDER = re.compile(r"%\w|\{[^}]*\}")
# from a constant to what puts it into a string
_MAX_STEPS = 5
_IMPORT_NAME, _STORE_ATTR = dis.opmap["IMPORT_NAME"], dis.opmap["STORE_ATTR"]
_STORE_GLOBAL = dis.opmap["STORE_GLOBAL"]
# what sets an attribute by a name that is a value
_SETTERS = frozenset({"setattr", "__setattr__", "__dict__", "vars"})
# of a composed name, shorter constants are not followed: too many names would match
_MIN_LENGTH = 2


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
        # constants of code that composes the names of attributes
        self._fragments: set[str] = set()
        self._of_classes: set[str] = set()
        self._methods: dict[str, list[Any]] = {}
        self._owners: set[type] = set()
        self._seen: set[FunctionType] = set()
        self._waiting: list[str] = []

    def stored(self) -> frozenset[str]:
        """The names of attributes that the code sets."""
        return frozenset().union(*(_stored(function.__code__) for function in self._seen))

    def add_class(self, kind: type) -> None:
        """Add the methods of a class. A method runs if its name is looked up."""
        for owner in kind.__mro__:
            if owner in self._owners or owner is object:
                continue
            self._owners.add(owner)
            common = package(owner.__module__) in COMMON
            self._of_classes.update(() if common else vars(owner))
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
            self._fragments |= _fragments(layer.__code__)
            self._waiting += _strings(layer.__defaults__)
            self._waiting += _strings((layer.__kwdefaults__ or {}).values())
            for name in names & around.keys():
                self._add_global(around[name], names)

    def follow_composed(self, names: Iterable[str]) -> None:
        """Add those names, and names in classes, that code may compose: they begin or end with a constant of it."""
        ends = tuple(self._fragments)
        if ends:
            self.follow([name for name in {*names, *self._of_classes} if name.startswith(ends) or name.endswith(ends)])

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


def only_set(code: CodeType) -> frozenset[str]:
    """The names of globals that code sets and does not look up, including nested functions."""
    bound, others = _set_and_others(code)
    return bound - others


@functools.lru_cache(maxsize=8192)
def _set_and_others(code: CodeType) -> tuple[frozenset[str], frozenset[str]]:
    """The names of globals that code sets, and those that it has otherwise: in other instructions, and as strings."""
    inner = [_set_and_others(constant) for constant in code.co_consts if isinstance(constant, CodeType)]
    bound = {name for names, _ in inner for name in names}
    others = {*_strings(code.co_consts), *(name for _, names in inner for name in names)}
    for step in dis.get_instructions(code):
        if isinstance(step.argval, str):
            (bound if step.opcode == _STORE_GLOBAL else others).add(step.argval)
    return frozenset(bound), frozenset(others)


def imported_names(function: FunctionType) -> Iterator[str]:
    """The full names of modules that a function imports when it runs, whether or not they are loaded. What it finds in
    them is in no namespace around it."""
    for name, level in _imports(function.__code__):
        if level:
            try:
                name = importlib.util.resolve_name("." * level + name, function.__globals__.get("__package__"))
            except ImportError:
                continue
        yield name
        if level == 0 and "." in name:
            # `import a.b` binds `a`
            yield package(name)


@functools.lru_cache(maxsize=8192)
def _imports(code: CodeType) -> frozenset[tuple[str, int]]:
    """What code imports, including nested functions: (name, level of a relative import)."""
    inner = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    found = frozenset().union(*map(_imports, inner))
    if _IMPORT_NAME not in code.co_code[::2]:
        return found
    steps = list(dis.get_instructions(code))
    own = set()
    for i, step in enumerate(steps):
        if step.opcode == _IMPORT_NAME:
            # the level and the names that are taken are loaded in front of it
            own.add((step.argval, next((each.argval for each in steps[i - 2 : i] if type(each.argval) is int), 0)))
    return found.union(own)


@functools.lru_cache(maxsize=8192)
def _stored(code: CodeType) -> frozenset[str]:
    """The names of attributes that code sets, including nested functions."""
    found = frozenset().union(*(_stored(constant) for constant in code.co_consts if isinstance(constant, CodeType)))
    if not _SETTERS.isdisjoint(code.co_names):
        found = found.union(_strings(code.co_consts))
    if _STORE_ATTR not in code.co_code[::2]:
        return found
    return found.union(step.argval for step in dis.get_instructions(code) if step.opcode == _STORE_ATTR)


@functools.lru_cache(maxsize=8192)
def _fragments(code: CodeType) -> frozenset[str]:
    """The constants that code puts into strings, if it looks attributes up by a value; including nested functions.

    Those with characters that no name has are parts of messages.
    """
    found = frozenset().union(*(_fragments(constant) for constant in code.co_consts if isinstance(constant, CodeType)))
    if _BY_VALUE.isdisjoint(code.co_names):
        return found
    steps = list(dis.get_instructions(code))
    composed = [i for i, step in enumerate(steps) if _composes(step)]
    near = {each for i in composed for each in range(i - _MAX_STEPS, i)}
    constants = (step.argval for i, step in enumerate(steps) if i in near and step.opname == "LOAD_CONST")
    parts = (_PLACEHOLDER.sub("", constant) for constant in constants if isinstance(constant, str))
    return found.union(part for part in parts if len(part) >= _MIN_LENGTH and f"_{part}".isidentifier())


def _composes(step: dis.Instruction) -> bool:
    """Whether an instruction puts strings together. From Python 3.11 on all operators are one instruction."""
    if step.opname == "BINARY_OP":
        return step.argrepr in ("+", "+=", "%", "%=")
    return step.opname in _COMPOSING or (step.opname in _METHODS and step.argval in _COMPOSERS)


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
