"""Reads the modules of a tree, what they hold, and the code that they run; see `fingerprint` and `structure`."""

from __future__ import annotations

import enum
import functools
import types
import weakref
from collections.abc import Callable, Hashable, Iterable
from typing import Any, NamedTuple

import torch
from torch import nn

from sfast_ext.behaviour import surroundings
from sfast_ext.behaviour.code_values import CodeValues
from sfast_ext.behaviour.contents import Contents
from sfast_ext.behaviour.foreign_code import (
    COMMON,
    PLAIN,
    Patch,
    Place,
    cells,
    foreign_layers,
    free_values,
    is_foreign,
    knowable,
    layers,
    methods,
    overrides_method,
    owning_extension,
    package,
    read_by,
    torchs_methods,
    written_by,
)
from sfast_ext.behaviour.forward_slot import AcceleratedForward, OwnHook, is_own_forward
from sfast_ext.behaviour.reach import Walk, names_within
from sfast_ext.behaviour.snapshot import MAX_LENGTH, Snapshot
from sfast_ext.behaviour.value_types import ATOMS, is_own, is_plain_tuple, plain_key
from sfast_ext.behaviour.values import CONFIGS, ORIGINS

_SCALARS = (bool, int, float, str, torch.dtype, torch.device, torch.Size, enum.Enum)
_PLAIN_WEIGHTS = frozenset({nn.Parameter, torch.Tensor})
_METHODS = (types.MethodType, types.MethodWrapperType)
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, *_METHODS, functools.partial)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")

Vouch = Callable[[nn.Module, str, Any], bool]


class ClassReading(NamedTuple):
    """What was read of a class: its part of the key, and foreign functions as (kind, function)."""

    key: list[Hashable]
    patches: list[tuple[str, Any]]


class Reader:
    """Reads the behaviour key of a module tree; see `fingerprint`.

    Args:
        skip: names of attributes that are not read. For the others see `fingerprint`.
    """

    def __init__(
        self,
        skip: frozenset[str],
        root: nn.Module,
        transparent: Vouch | None = None,
        below: Callable[..., Any] | None = None,
        ignored_globals: frozenset[tuple[str, str]] = frozenset(),
    ) -> None:
        self.skip, self.transparent, self.below = skip, transparent, below
        self.ignored_globals = ignored_globals
        # the classes of a network from an extension are not foreign to it
        self.extension = owning_extension(type(root))
        self.package = package(type(root).__module__)
        self.key: list[Hashable] = []
        self.alive: list[object] = []
        self.patches: list[Patch] = []
        self.seen: set[int] = set()
        self.snapshot: Snapshot = Snapshot(skip)
        self.classes: dict[type, ClassReading] = {}
        self.names: frozenset[str] = frozenset()
        # closure cells of code that runs
        self.run: list[types.CellType] = []
        # (path, module, class) of modules, and of objects that they call, with the path of the attribute
        self.called: list[tuple[str, nn.Module, type]] = []
        self.place: tuple[str, nn.Module] | None = None
        # functions among attributes, and functions put around a module
        self.functions: dict[int, Any] = {}
        # by the path of a module, its attributes that may hold further values, without those of patches
        self.modules: list[tuple[str, list[tuple[str, Any]]]] = []
        self.attributes: set[str] = set()  # of modules
        self.weights: dict[type, None] = {}  # classes of weights that compute, as quantised ones do
        self.tensors: dict[int, weakref.ref[torch.Tensor]] = {}  # whose addresses are in the key
        self.walk = Walk()
        self.values: CodeValues

    def read_all(self, root: nn.Module) -> None:
        """Read all modules, then the code that they run. Which code runs is only known after all modules were read."""
        self.read("", root, is_root=True)
        self.key += self.read_values()
        kinds = dict.fromkeys(kind for *_, kind in self.called)
        self.read_classes(kinds)
        for kind in kinds:
            self.key += self.classes[kind].key
        for path, module, kind in self.called:
            self.patches += [Patch(path, module, what, f) for what, f in self.classes[kind].patches]
        for function in self.functions.values():
            for layer in layers(function):
                self.key += [self.read_in(*found) for found in read_by(layer)]

    def read_classes(self, kinds: Iterable[type]) -> None:
        self.classes = {kind: self.read_class(kind) for kind in kinds}

    def read_values(self) -> list[Hashable]:
        """Read what values hold. Objects in them have code, whose names lead to further values."""
        for owner, name, _ in (each for kind in self.weights for each in methods(kind, frozenset())):
            self.snapshot.name(owner, name)
        kinds = self.weights | dict.fromkeys(kind for *_, kind in self.called)
        names = self.names_of(kinds, self.functions.values())
        looked: dict[type | None, set[str]] = {}
        while True:
            # not those of patches: a host vouches for these, or the call is bypassed
            patches = frozenset(id(patch.function) for patch in self.patches)
            self.values = values = CodeValues(
                names,
                identity=self.identity,
                tensor=self.tensor,
                module=self.module_key,
                contents=self.new_contents(),
                patches=patches,
                extension=self.extension,
                looked=looked,
                ignored=self.ignored_globals,
            )
            key: list[Hashable] = [self.values_of(*each) for each in self.modules if each[1]]
            if self.below is not None:
                key.append(values.function(self.below, "the forward of the model"))
            key += self.code_values(kinds)
            key += self.values.made()
            modules = [each for i, each in values.values.modules.items() if i not in self.known_modules()]
            for each in modules:
                self.read(*each)
            known = len(kinds)
            kinds.update(dict.fromkeys((*values.values.kinds, *(kind for *_, kind in self.called))))
            self.walk.follow_composed(self.attributes | values.values.passed_over)
            more = self.names_of(kinds, (*self.functions.values(), *values.functions.values()))
            if more == names and len(kinds) == known and not modules and (not values.tables or values.looked == looked):
                self.names = names
                return key
            names, looked = more, values.looked

    def names_of(self, kinds: Iterable[type], functions: Iterable[Any]) -> frozenset[str]:
        """The names that code can look up."""
        return names_within(kinds, functions, self.walk)

    def values_of(self, path: str, held: list[tuple[str, Any]]) -> Hashable:
        """The key of what the attributes of a module hold that the code looks up."""
        names, read = self.values.names, self.values.values.read
        inside = [(name, value) for name, value in held if name in names]
        return tuple([(name, read(value, f"{path or 'the model'}.{name}", names)) for name, value in inside])

    def code_values(self, kinds: Iterable[type]) -> list[Hashable]:
        """The key of what the methods and attributes of classes hold."""
        return self.values.kinds(kinds)

    def new_contents(self) -> Contents:
        return Contents(self.snapshot.bare())

    def known_modules(self) -> Iterable[int]:
        return self.seen

    def tensor(self, value: torch.Tensor) -> Hashable:
        # no reference is held
        self.tensors[id(value)] = weakref.ref(value)
        return id(value)

    def module_key(self, module: nn.Module) -> Hashable | None:
        return id(module) if id(module) in self.seen else None

    def surroundings(self, around: surroundings.Surroundings, root: nn.Module) -> None:
        """Read replaced functions of torch, and global module hooks."""
        for name, function in around.replaced:
            self.key.append((name, self.identity(function)))
            if name == surroundings.ATTENTION and function is not None and knowable(function):
                # attention libraries are put there, and a capture records what they do
                self.functions[id(function)] = function
                self.key += [self.free_value(place, value) for place, value in free_values(function)]
            else:
                self.patches.append(Patch(name, root, "replaced", function))
        for hook in around.hooks:
            self.key.append(("hook on all modules", self.function(hook)))
            self.patches.append(Patch("", root, "hook on all modules", hook))

    def free_value(self, place: Place, value: Any) -> Hashable:
        if isinstance(place, types.CellType):
            self.run.append(place)
            return self.held(place)
        self.snapshot.name(*place)
        return value if isinstance(value, PLAIN) else self.identity(value)

    def kind(self, kind: Any, name: str) -> Hashable:
        return self.identity(self.snapshot.kind(kind, name))

    def read(self, path: str, module: nn.Module, *, is_root: bool = False) -> None:
        if not self.first_sight(module):
            return
        places = self.snapshot.module(module)
        held: list[tuple[str, Any]] = []
        self.modules.append((path, held))
        kind: Any = type(module)
        self.called.append((path, module, kind))
        attributes = module.__dict__
        weights = [type(p) for p in attributes["_parameters"].values() if p is not None]
        self.weights.update(dict.fromkeys(kind for kind in weights if kind not in _PLAIN_WEIGHTS))
        self.key += [kind, self.kind(kind, "forward"), module.training, len(weights), places]
        if not is_root:
            self.patched(path, module)
        elif self.below is not None:
            self.key.append(("below", self.function(self.below)))
            self.code(self.below)
            self.functions[id(self.below)] = self.below
        self.attributes.update(attributes)
        for name, value in attributes.items():
            if value is None or name in self.skip or isinstance(value, (torch.Tensor, AcceleratedForward)):
                # a third party may have stored our forward
                continue
            foreign = not isinstance(value, (type, nn.Module)) and is_foreign(value, self.extension)
            if overrides_method(module, name, value):
                self.patches.append(Patch(path, module, "method", value))
            elif foreign:
                self.patches.append(Patch(path, module, name, value))
            elif type(value) not in ATOMS and not isinstance(value, nn.Module) and not is_plain_tuple(value):
                held.append((name, value))
            self.place = None if foreign else (f"{path}.{name}" if path else name, module)
            if (found := self.value(value)) is not None:
                self.key.append((name, found))
            self.place = None
        for name, child in attributes["_modules"].items():
            if child is not None:
                self.read(f"{path}.{name}" if path else name, child)

    def read_class(self, kind: type) -> ClassReading:
        """Read the methods of a class, what they call and close over, and which are foreign."""
        forward: Any = getattr(kind, "forward", None)
        key: list[Hashable] = []
        found: list[tuple[str, Any]] = []
        if forward is not None:
            owner = next(owner for owner in kind.__mro__ if "forward" in vars(owner))
            theirs = [forward] if is_foreign(forward, self.extension) else foreign_layers(vars(owner)["forward"], owner)
            found = [("class", function) for function in theirs]
        for container, name, value in methods(kind, self.names):
            key.append(self.read_in(container, name, value))
            if not callable(value):
                continue
            if isinstance(container, type):
                closure = list(cells(value, container))
                key += [self.held(cell) for cell in closure]
                self.run += closure if name in self.names else []
            if value is forward:
                continue
            if is_foreign(value, self.extension):
                found.append(("function", value))
            elif isinstance(container, type):
                foreign = foreign_layers(value, container, imported=True)
                # if a foreign class only calls the model's own code, its method is what is foreign
                theirs = [each for each in foreign if written_by(each) != self.package] or foreign and [value]
                found += [("function", each) for each in theirs]
        for container, name, value in torchs_methods(kind):
            self.snapshot.name(container, name)
            key.append(None if value is None else self.identity(value))
            found += [("function", each) for each in foreign_layers(value, container)]
        return ClassReading(key, found)

    def read_in(self, container: type | dict, name: str, value: Any) -> Hashable:
        """The key of what a method finds under a name."""
        self.snapshot.name(container, name)
        if value is None or isinstance(value, PLAIN):
            return value
        return self.identity(value) if callable(value) else self.value(value)

    def code(self, value: Any) -> None:
        """Register an attribute that is called or has methods, so that its code is read."""
        if isinstance(value, _FUNCTIONS):
            if id(value) not in self.functions:
                self.functions[id(value)] = value
                closure = [cell for layer in layers(value) for cell in layer.__closure__ or ()]
                self.run += closure
                self.key += [self.held(cell) for cell in closure]
        elif self.place is not None:
            self.called.append((*self.place, type(value)))

    def held(self, cell: types.CellType) -> Hashable:
        """The key of the contents of a closure cell."""
        content = self.snapshot.cell(cell)
        if isinstance(content, torch.Tensor):
            self.tensors[id(content)] = weakref.ref(content)
            return id(content)
        plain = not isinstance(content, (type, types.FunctionType))
        found = self.value(content) if plain else None
        return self.identity(content) if found is None else found

    def patched(self, path: str, module: nn.Module) -> None:
        attributes = module.__dict__
        for slot in ("forward", "_old_forward"):
            function = attributes.get(slot)
            while isinstance(function, AcceleratedForward):
                # on a part
                function = function.previous
            if function is not None and not is_own_forward(function, module):
                if slot != "forward" or self.transparent is None or not self.transparent(module, slot, function):
                    self.key.append((slot, self.function(function)))
                self.functions[id(function)] = function
                if slot == "forward":
                    self.patches.append(Patch(path, module, "forward", function))
        for slot in _HOOKS:
            hooks = attributes.get(slot)
            if hooks is None:
                continue
            self.snapshot.hooks(hooks)
            for hook in [hook for hook in hooks.values() if not isinstance(hook, OwnHook)]:
                self.key.append((slot, self.function(hook)))
                self.functions[id(hook)] = hook
                self.patches.append(Patch(path, module, "hook", hook))

    def first_sight(self, module: nn.Module) -> bool:
        self.key.append(id(module))
        first = id(module) not in self.seen
        self.seen.add(id(module))
        return first

    def identity(self, value: object) -> Hashable:
        self.alive.append(value)
        return id(value)

    def function(self, function: object) -> Hashable:
        # a bound method is a new object for each access
        inner = getattr(function, "__func__", None)
        if inner is not None:
            return (self.identity(function.__self__), self.identity(inner))  # type: ignore[attr-defined]
        return self.identity(function)

    def value(self, value: Any, depth: int = 0) -> Hashable | None:
        kind: Any = type(value)
        if isinstance(value, (nn.Module, torch.Tensor)) or value is None or is_own(kind):
            return None
        if isinstance(value, _SCALARS) or kind in ATOMS:
            return plain_key(value)
        if is_plain_tuple(value):
            return tuple(map(plain_key, value))
        if isinstance(value, list):
            self.look(value, depth)
        if isinstance(value, (tuple, list)):
            return tuple(self.value(v, depth + 1) for v in value) if depth < 2 and len(value) <= MAX_LENGTH else None
        if isinstance(value, dict):
            if not self.look(value, depth):
                return None
            return tuple((str(k), self.value(v, depth + 1)) for k, v in value.items() if k not in ORIGINS)
        settings = getattr(value, "__dict__", None)
        if package(type(value).__module__) == CONFIGS and isinstance(settings, dict):
            return self.config_node(value, settings, depth)
        if not callable(value):
            # an object with settings
            if not isinstance(settings, dict):
                return None
            if package(type(value).__module__) not in COMMON:
                self.code(value)
            if not self.look(settings, depth) or not settings:
                return None
            return (type(value), tuple((k, self.value(v, depth + 1)) for k, v in settings.items()))
        # an attention processor, an activation, a callback: its identity and its scalars
        if not isinstance(value, type):
            self.code(value)
        inner = settings if depth <= 1 and isinstance(settings, dict) else None
        if inner is not None:
            self.snapshot.container(inner)
        scalars = tuple((k, self.value(v, depth + 1)) for k, v in (inner or {}).items())
        return (self.function(value), self.kind(type(value), "__call__"), scalars)

    def config_node(self, node: Any, attributes: dict, depth: int) -> Hashable:
        """A list, dictionary or value of omegaconf by what is in it.

        Not by its parents, which are the configuration of the whole model, nor by its class: those are libraries' code,
        and three of them are five times as much as all that a UNet runs.
        """
        self.snapshot.container(attributes)
        return (type(node), self.value(attributes.get("_content", attributes.get("_val")), depth))

    def look(self, container: dict | list, depth: int) -> bool:
        """Whether a container is read. It is added to the snapshot in any case, as its length may change."""
        if depth >= 2:
            return False
        short = len(container) <= MAX_LENGTH
        (self.snapshot.container if short else self.snapshot.long)(container)
        return short
