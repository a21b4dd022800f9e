"""Reads the values that code finds: in closures, defaults of arguments, globals, other modules and classes."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Hashable, Iterable
from enum import Enum
from logging import Logger
from types import BuiltinFunctionType, FunctionType, MemberDescriptorType, ModuleType
from typing import Any

import torch
from torch import nn

from sfast_ext.behaviour.contents import Contents
from sfast_ext.behaviour.foreign_code import COMMON, KERNELS, is_foreign, layers, package, written_by
from sfast_ext.behaviour.forward_slot import AcceleratedForward
from sfast_ext.behaviour.reach import code_names, functions_of, imported_names, only_set, runs_by_syntax
from sfast_ext.behaviour.value_types import in_library, is_of_library
from sfast_ext.behaviour.values import CONFIGS, Names, Values, held_by

# calls that are followed from a method: in a library only within its package
_MAX_DEPTH, _MAX_DEPTH_IN_LIBRARY = 8, 3
# modules in modules
_MAX_MODULE_DEPTH = 4
# what runs if code calls a class, derives one from it, or subscripts it
_MAKERS = ("__new__", "__init__", "__post_init__", "__init_subclass__", "__class_getitem__")
_NO_VALUES = (Logger, functools._lru_cache_wrapper)


class CodeValues:
    """Reads the values that functions and classes find. Values in the code of an installed library are compared if
    their type is known; others are taken as unchanging there.

    Args:
        names: the names that the code of the forward can look up.
        identity, tensor, module, contents: see `Values`.
        patches: identities of functions of patches, which are not read.
        extension: that of the model's class. Functions of another are patches.
        looked: what the last reading found, see `looked`.
        ignored: see `Hooks.ignored_globals`.
    """

    def __init__(
        self,
        names: frozenset[str],
        *,
        identity: Callable[[object], Hashable],
        tensor: Callable[[torch.Tensor], Hashable],
        module: Callable[[nn.Module], Hashable | None],
        contents: Contents,
        patches: frozenset[int] = frozenset(),
        extension: str | None = None,
        looked: dict[type | None, set[str]] | None = None,
        ignored: frozenset[tuple[str, str]] = frozenset(),
    ) -> None:
        self.names, self.contents, self._ignored = names, contents, ignored
        self._identity, self._patches, self._extension = identity, patches, extension
        self.values = Values(
            names,
            identity=identity,
            tensor=tensor,
            module=module,
            function=self.function,
            kind=self.kind,
            python_module=lambda module, where, strict: self._module(module, where, names, "", strict, 0),
            from_outside=self._from_outside,
            contents=contents,
        )
        self.functions: dict[int, Any] = {}
        """Functions among values."""
        self.looked: dict[type | None, set[str]] = {}
        """The names that functions look up, by the class that they are methods of."""
        self._looked_before = {} if looked is None else looked
        self._owner: type | None = None
        self.tables = False
        """Whether a table of settings was found, of which only what code looks up counts."""
        self._read: set[Hashable] = set()
        self._may_be_made: dict[type, None] = {}
        self._depth = 0

    def function(self, function: Any, where: str, strict: bool = True) -> Hashable:
        """The key of a function by its identity, and by what it finds."""
        if isinstance(function, AcceleratedForward):
            return None
        if id(function) in self._patches or is_foreign(function, self._extension):
            return self._identity(function)
        if not isinstance(function, FunctionType):
            return self.values.read(function, where, self.names, strict)
        self.functions.setdefault(id(function), function)
        if id(function) in self._read:
            return self._identity(function)
        self._read.add(id(function))
        self.looked.setdefault(self._owner, set()).update(code_names(function.__code__))
        common, library = written_by(function) in COMMON, in_library(function.__code__.co_filename)
        # a decorator of Python or torch, as torch.no_grad, is around code that is read as without it
        outer, strict = strict, strict and not common and not library
        here = f"{function.__module__}.{function.__qualname__}"
        key: list[Hashable] = [self._identity(function)]
        if function.__closure__:
            cells = function.__closure__
            # in a library, those that are of its package are checked by the quick check
            inside = self.contents.objects(lambda: held_by(cells)) if strict else held_by(cells)
            for name, each in zip(function.__code__.co_freevars, inside):
                there = f"{name} in the closure of {here}"
                if isinstance(each, ModuleType):
                    looked, own = code_names(function.__code__), written_by(function)
                    key.append(self._module(each, there, looked, own, strict, 0))
                else:
                    wrapped = common and isinstance(each, FunctionType)
                    key.append(self.values.read(each, there, self.names, outer if wrapped else strict))
        if common:
            return tuple(key)
        if strict:
            self.contents.objects(lambda: (function.__defaults__, function.__kwdefaults__, function.__code__))
            # reloading a module in place replaces it
            key.append(function.__code__)
        for defaults in (function.__defaults__, function.__kwdefaults__):
            if defaults:
                key.append(self.values.read(defaults, f"the defaults of {here}", self.names, strict))
        if vars(function) and strict:
            self.contents.container(vars(function))
            inner = ((name, value) for name, value in vars(function).items() if name != "__wrapped__")
            key += [self.values.read(value, f"{here}.{name}", self.names, strict) for name, value in inner]
        if self._depth < (_MAX_DEPTH if strict else _MAX_DEPTH_IN_LIBRARY):
            self._depth += 1
            key += self._globals(function, strict)
            self._depth -= 1
        return tuple(key)

    def _from_outside(self, kind: type) -> frozenset[str]:
        """The names that functions look up which are no methods of a class."""
        self.tables = True
        names = (names for owner, names in self._looked_before.items() if owner is None or owner not in kind.__mro__)
        return frozenset().union(*names)

    def _globals(self, function: FunctionType, strict: bool) -> list[Hashable]:
        around, names, own = function.__globals__, code_names(function.__code__), written_by(function)
        if ignored := {name for module, name in self._ignored if module == around.get("__name__")}:
            names -= ignored & only_set(function.__code__)
        found: list[Hashable] = []
        for name in names - around.keys() if strict else ():
            # one of these may be defined later, over a builtin function say
            self.contents.name(around, name)
        for name in sorted(names & around.keys()):
            if not name.startswith("__"):
                where = f"{around.get('__name__')}.{name}"
                found += [name, self._found(around, name, where, names, own, strict, 0)]
        for name in sorted({*imported_names(function)}):
            if package(name) not in COMMON | KERNELS:
                if name in sys.modules:
                    found += [name, self._found(sys.modules, name, name, names, own, strict, 0)]
                elif strict:
                    self.contents.name(sys.modules, name)
        return found

    def _found(
        self, home: dict, name: str, where: str, names: frozenset[str], own: str, strict: bool, depth: int
    ) -> Hashable:
        """The key of what code finds under a name in a module.

        Args:
            names: the names that the code looks up.
            own: the package of the code.
        """
        value = home.get(name)
        if isinstance(value, ModuleType):
            if package(value.__name__) not in COMMON:
                # another module of settings may take its place
                self.contents.name(home, name)
            return self._module(value, where, names, own, strict, depth)
        if isinstance(value, _NO_VALUES):
            return None
        if isinstance(value, type):
            if strict:
                self.contents.name(home, name)
            return self.kind(value, where, self.names, strict, own)
        if isinstance(value, FunctionType):
            if strict:
                self.contents.name(home, name)
            if self._is_theirs(value, own):
                # a decorator of theirs may be around a function of this code, as torch.no_grad and contextmanager are
                inside = [layer for layer in layers(value) if not self._is_theirs(layer, own)]
                return (self._identity(value), *[self.function(each, where, strict) for each in inside])
            return self.function(value, where, strict)
        tool = not strict and _is_a_tool(value, own)
        if tool and callable(value):
            return None
        self.contents.name(home, name)
        if issubclass(type(value), nn.Module):
            return self._module_object(value, where, names, strict)
        return None if tool else self.values.read(value, where, self.names, strict)

    def _is_theirs(self, function: FunctionType, own: str) -> bool:
        """Whether a function belongs to Python, to torch or to another library than the code that finds it."""
        home = written_by(function)
        return home != own and (home in COMMON or in_library(function.__code__.co_filename))

    def _module(
        self, module: ModuleType, where: str, names: frozenset[str], own: str, strict: bool, depth: int
    ) -> Hashable:
        home, of = vars(module), package(module.__name__)
        # not by getattr, which may run code of the module
        library = of != own and in_library(home.get("__file__") or "")
        # a module among values has no code around it that could belong to another library
        theirs = library and own != ""
        if of in COMMON or depth >= _MAX_MODULE_DEPTH or (not strict and theirs):
            return None
        found: list[Hashable] = []
        if type(module) is not ModuleType and not library:
            # its class looks up others
            names |= self.names
        for name in sorted(names & home.keys()):
            value = home[name]
            if name.startswith("__") or (library and (callable(value) or isinstance(value, ModuleType))):
                continue
            inner = self._found(home, name, f"{module.__name__}.{name}", names, own, strict and not library, depth + 1)
            found += [name, inner]
        if not library:
            if isinstance(made := home.get("__getattr__"), FunctionType):
                # it runs for names that are not there
                self.contents.name(home, "__getattr__")
                found.append(self.function(made, f"{module.__name__}.__getattr__", strict))
            if type(module) is not ModuleType:
                found.append(self.kind(type(module), module.__name__, self.names, strict))
        return tuple(found)

    def _module_object(self, module: nn.Module, where: str, names: frozenset[str], strict: bool) -> Hashable:
        """A module that code finds in a global: only attributes that this code looks up."""
        home = vars(module)
        found: list[Hashable] = [self._identity(module)]
        for name in sorted(names & home.keys()):
            self.contents.name(home, name)
            if not issubclass(type(home[name]), nn.Module):
                found += [name, self.values.read(home[name], f"{where}.{name}", names, strict)]
        return tuple(found)

    def kind(self, kind: type, where: str, names: Names, strict: bool = True, own: str = "") -> Hashable:
        """The key of a class that code finds: attributes with the names that it looks up, and what its methods find."""
        theirs = package(kind.__module__) != own and self._of_library(kind)
        if package(kind.__module__) in COMMON or theirs:
            return self._identity(kind)
        looked = self.names if names is None else names
        if not strict:
            # members of an enumeration cannot be replaced
            settings = [] if issubclass(kind, Enum) else self._settings(kind, looked)
            return (self._identity(kind), *settings)
        if not issubclass(kind, nn.Module):
            self._may_be_made.setdefault(kind)
        found = self._inside(kind, looked, strict)
        # a property of the class is one of its class
        made_by = [] if type(kind) is type else self._inside(type(kind), looked, strict)
        return (self._identity(kind), *found, *made_by)

    def _settings(self, kind: type, names: frozenset[str]) -> list[Hashable]:
        """The attributes of a class that code of an installed library finds, its methods excepted."""
        found: list[Hashable] = []
        for owner in kind.__mro__:
            if package(owner.__module__) in COMMON or (owner, names) in self._read:
                continue
            self._read.add((owner, names))
            inside = vars(owner)
            for name in sorted(names & inside.keys()):
                value = inside[name]
                if not name.startswith("__") and not hasattr(type(value), "__get__"):
                    self.contents.name(owner, name)
                    if not _is_a_tool(value, package(owner.__module__)):
                        where = f"{owner.__module__}.{owner.__qualname__}.{name}"
                        found += [name, self.values.read(value, where, self.names, strict=False)]
        return found

    def kinds(self, kinds: Iterable[type]) -> list[Hashable]:
        """The key of the classes of modules, and of objects that they call: of methods and attributes that run."""
        key: list[Hashable] = []
        for kind in kinds:
            strict = not self._of_library(kind)
            key += self._inside(kind, self.names, strict)
            if type(kind) is not type:
                # a property of the class is one of its class
                key += self._inside(type(kind), self.names, strict)
        return key

    def made(self) -> list[Hashable]:
        """The key of what runs if objects of the classes are made that the code finds. Call this after all else was
        read: whether it makes any is not known, so values that cannot be compared are taken as unchanging here."""
        key: list[Hashable] = []
        seen: set[type] = set()
        while kinds := [kind for kind in self._may_be_made if kind not in seen]:
            seen.update(kinds)
            for owner in dict.fromkeys(owner for kind in kinds for owner in kind.__mro__):
                if package(owner.__module__) not in COMMON and ("made", owner) not in self._read:
                    self._read.add(("made", owner))
                    key += self._makers(owner)
        return key

    def _makers(self, owner: type) -> list[Hashable]:
        found: list[Hashable] = []
        inside = vars(owner)
        here = f"{owner.__module__}.{owner.__qualname__}"
        for maker in _MAKERS:
            for function in functions_of(inside.get(maker)):
                self.contents.name(owner, maker)
                found.append(self.function(function, f"{here}.{maker}", strict=False))
                names = (name for layer in layers(function) for name in code_names(layer.__code__))
                for name in sorted({name for name in names if name in inside and not name.startswith("__")}):
                    if not list(functions_of(inside[name])):
                        self.contents.name(owner, name)
                        found += [name, self.values.read(inside[name], f"{here}.{name}", self.names, strict=False)]
        return found

    def _of_library(self, kind: type) -> bool:
        functions = (each for value in vars(kind).values() for each in functions_of(value))
        # not of a decorator around a method: torch itself is a library
        of, own = (layer for each in functions for layer in layers(each)), package(kind.__module__)
        return in_library(next((layer.__code__.co_filename for layer in of if written_by(layer) == own), ""))

    def _inside(self, kind: type, names: frozenset[str], strict: bool) -> list[Hashable]:
        found: list[Hashable] = []
        for owner in kind.__mro__:
            if package(owner.__module__) in COMMON or (owner, names) in self._read:
                continue
            self._read.add((owner, names))
            here = f"{owner.__module__}.{owner.__qualname__}"
            if strict:
                self.contents.owner(owner)
            outer, self._owner = self._owner, owner
            for name, value in list(vars(owner).items()):
                if (name not in names and not runs_by_syntax(name)) or isinstance(value, MemberDescriptorType):
                    continue
                functions = [] if isinstance(value, type) else list(functions_of(value))
                methods = bool(functions) and hasattr(type(value), "__get__")
                if (strict or not methods) and not (name.startswith("__") and not functions):
                    self.contents.name(owner, name)
                if functions:
                    found += [self.function(each, f"{here}.{name}", strict) for each in functions]
                elif not name.startswith("__"):
                    found += [name, self.values.read(value, f"{here}.{name}", names, strict)]
            self._owner = outer
        return found


def _is_a_tool(value: Any, own: str) -> bool:
    """Whether code of an installed library has a function in C, or another library's object, such as a registry or a
    compiled kernel: these change without another result."""
    kind = type(value)
    if isinstance(value, BuiltinFunctionType):
        return True
    if package(kind.__module__) in (own, CONFIGS) or isinstance(value, (list, dict, set)):
        return False
    return is_of_library(kind) and (callable(value) or hasattr(value, "__dict__"))
