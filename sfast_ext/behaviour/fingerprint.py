"""The behaviour key: all that changes what a forward computes without showing in its arguments.

Two fingerprints of a module tree compare equal as long as nobody patched a forward or a class, added a hook, exchanged
a processor or a submodule, or changed a scalar attribute (FreeU's factors, an adapter's scale). Weights' values are not
part of it: the weight arena follows those.

Instance patches are told apart from what a module is: a forward, another method or a hook that somebody laid over one
instance, and a class or an attention processor that an extension of the host brought or exchanged.
"""

from __future__ import annotations

import enum
import functools
import types
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from sfast_ext.behaviour import surroundings
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
from sfast_ext.behaviour.forward_slot import AcceleratedForward, is_own_forward
from sfast_ext.behaviour.reach import names_within
from sfast_ext.behaviour.snapshot import LONGEST, NoSnapshot, Snapshot

_SCALARS = (bool, int, float, str, torch.dtype, torch.device, torch.Size, enum.Enum)
_FUNCTIONS = (
    types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.MethodWrapperType, functools.partial,
)  # fmt: skip
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
# diffusers notes in a config where it was read from, and by which version it was written
_ORIGINS = frozenset({"_name_or_path", "_diffusers_version", "_use_default_values"})
_MECHANICS = frozenset(nn.Module().__dict__) | {
    "forward", "_old_forward", "_parameters", "_buffers", "_modules", "_is_full_backward_hook", "_version",
    "_forward_hooks", "_forward_pre_hooks", "_hf_hook",
}  # fmt: skip


@dataclass
class Fingerprint:
    """The behaviour key of a module tree.

    `key` names objects by address; `alive` and `snapshot` hold them, so that none can give its address to another while
    the fingerprint is kept. `patches` are what others put on the instances below the root.
    """

    key: tuple[Hashable, ...]
    alive: list[object]
    patches: list[Patch]
    snapshot: Snapshot
    classes: dict[type, _Class]
    names: frozenset[str]
    around: surroundings.Surroundings
    torch_check: surroundings.TorchQuickCheck

    def unchanged(self) -> bool:
        """Whether everything that was read of instances, and of torch itself, is still the very same object: at a
        fraction of a reading's cost.

        True means that a reading would find the same in them. False does not say that it would not.
        """
        if not self.snapshot.unchanged() or surroundings.look() != self.around:
            return False
        if not self.torch_check.unchanged():
            # something came that says nothing, as a tracer's own
            self.torch_check = surroundings.TorchQuickCheck(self.names, self.classes, self.around)
        return True

    def unchanged_quick(self) -> bool:
        """A look for each call; see `Snapshot.unchanged_quick`."""
        return self.snapshot.unchanged_quick() and self.torch_check.unchanged()

    def classes_unchanged(self, root: nn.Module) -> bool:
        """Whether a reading would find the same in the classes of all modules, and in what their methods call."""
        reader = _Reader(frozenset(), root)
        reader.names = self.names
        return all(reader.read_class(kind) == known for kind, known in self.classes.items())


Vouch = Callable[[nn.Module, str, Any], bool]


def fingerprint(
    root: nn.Module, ignored: frozenset[str] = frozenset(), transparent: Vouch | None = None
) -> Fingerprint:
    """Read the behaviour key of a module tree; some milliseconds for SDXL.

    Args:
        root: the module. Wrappers and hooks on the root itself run around the forward that is accelerated, and say
            nothing about it.
        ignored: attribute names whose values say nothing about behaviour (a host's bookkeeping of weights).
        transparent: see `Hooks.transparent`; which function such a forward is says nothing either.
    """
    reader = _Reader(_MECHANICS | ignored, root, transparent)
    around = surroundings.look()
    reader.surroundings(around, root)
    reader.read_all(root)
    return reader.fingerprint(around)


def structure(root: nn.Module, ignored: frozenset[str] = frozenset()) -> tuple[Hashable, ...]:
    """The behaviour key with kinds in place of objects: equal for two modules that compute alike with the same weights.

    Shapes and dtypes are not part of it; the weight arena knows those.
    """
    reader = _Structure(_MECHANICS | ignored, root)
    reader.read_all(root)
    return tuple(reader.key)


class _Class(NamedTuple):
    """What was read of a class: its part of the key, and (what, function) of another party's."""

    key: list[Hashable]
    patches: list[tuple[str, Any]]


class _Reader:
    def __init__(self, skip: frozenset[str], root: nn.Module, transparent: Vouch | None = None) -> None:
        self.skip = skip
        self.transparent = transparent
        # a network that an extension brings is made of its own classes
        self.extension = owning_extension(type(root))
        self.package = package(type(root).__module__)
        self.key: list[Hashable] = []
        self.alive: list[object] = []
        self.patches: list[Patch] = []
        self.seen: set[int] = set()
        self.snapshot: Snapshot = Snapshot(skip)
        self.classes: dict[type, _Class] = {}
        self.names: frozenset[str] = frozenset()
        # cells of what runs
        self.run: list[types.CellType] = []
        # (path, module, class) of modules and of what they call, whose path is that of an attribute
        self.called: list[tuple[str, nn.Module, type]] = []
        self.place: tuple[str, nn.Module] | None = None
        # functions among attributes, and those that others put around a module
        self.functions: dict[int, Any] = {}

    def fingerprint(self, around: surroundings.Surroundings) -> Fingerprint:
        snapshot = self.snapshot.seal(self.names, self.run)
        torch_check = surroundings.TorchQuickCheck(self.names, self.classes, around)
        return Fingerprint(
            tuple(self.key), self.alive, self.patches, snapshot, self.classes, self.names, around, torch_check
        )

    def read_all(self, root: nn.Module) -> None:
        """All modules, then the code that they run: which of it that is follows from all of it."""
        self.read("", root, is_root=True)
        kinds = dict.fromkeys(kind for *_, kind in self.called)
        self.names = names_within(kinds, self.functions.values())
        for kind in kinds:
            self.classes[kind] = self.read_class(kind)
            self.key += self.classes[kind].key
        for path, module, kind in self.called:
            self.patches += [Patch(path, module, what, f) for what, f in self.classes[kind].patches]
        for function in self.functions.values():
            for layer in layers(function):
                self.key += [self.read_in(*found) for found in read_by(layer)]

    def surroundings(self, around: surroundings.Surroundings, root: nn.Module) -> None:
        """Note what is replaced in torch, and hooks on all modules."""
        for name, function in around.replaced:
            self.key.append((name, self.identity(function)))
            if name == surroundings.ATTENTION and function is not None and knowable(function):
                # no kernel calls it, and libraries of attention are put there
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
        self.snapshot.module(module)
        kind: Any = type(module)
        self.called.append((path, module, kind))
        attributes = module.__dict__
        present = sum(p is not None for p in attributes["_parameters"].values())
        self.key += [kind, self.kind(kind, "forward"), module.training, present]
        if not is_root:
            self.patched(path, module)
        for name, value in attributes.items():
            if value is None or name in self.skip or isinstance(value, (torch.Tensor, AcceleratedForward)):
                # a forward of ours may be stored by who laid another over it
                continue
            foreign = not isinstance(value, (type, nn.Module)) and is_foreign(value, self.extension)
            if overrides_method(module, name, value):
                self.patches.append(Patch(path, module, "method", value))
            elif foreign:
                self.patches.append(Patch(path, module, name, value))
            self.place = None if foreign else (f"{path}.{name}" if path else name, module)
            found = self.value(value)
            self.place = None
            if found is not None:
                self.key.append((name, found))
        for name, child in attributes["_modules"].items():
            if child is not None:
                self.read(f"{path}.{name}" if path else name, child)

    def read_class(self, kind: type) -> _Class:
        """Note the methods of a class, what they call and hold, and those that another party put there."""
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
                # where another's class calls the model's own code, it is its method that is foreign
                theirs = [each for each in foreign if written_by(each) != self.package] or foreign and [value]
                found += [("function", each) for each in theirs]
        for container, name, value in torchs_methods(kind):
            self.snapshot.name(container, name)
            key.append(None if value is None else self.identity(value))
            found += [("function", each) for each in foreign_layers(value, container)]
        return _Class(key, found)

    def read_in(self, container: type | dict, name: str, value: Any) -> Hashable:
        """What a method found under a name."""
        self.snapshot.name(container, name)
        if value is None or isinstance(value, PLAIN):
            return value
        return self.identity(value) if callable(value) else self.value(value)

    def code(self, value: Any) -> None:
        """What is called, or has methods, among a module's attributes: its code is read with all other."""
        if isinstance(value, _FUNCTIONS):
            if id(value) not in self.functions:
                self.functions[id(value)] = value
                closure = [cell for layer in layers(value) for cell in layer.__closure__ or ()]
                self.run += closure
                self.key += [self.held(cell) for cell in closure]
        elif self.place is not None:
            self.called.append((*self.place, type(value)))

    def held(self, cell: types.CellType) -> Hashable:
        """What a function keeps in its closure."""
        content = self.snapshot.cell(cell)
        if isinstance(content, torch.Tensor):
            return id(content)
        plain = not isinstance(content, (type, types.FunctionType))
        found = self.value(content) if plain else None
        return self.identity(content) if found is None else found

    def patched(self, path: str, module: nn.Module) -> None:
        attributes = module.__dict__
        for slot in ("forward", "_old_forward"):
            function = attributes.get(slot)
            if isinstance(function, AcceleratedForward):
                # one of ours, on a part of this module: what counts is what it stands for
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
            for hook in hooks.values():
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
        # a bound method is a new object at each access
        inner = getattr(function, "__func__", None)
        if inner is not None:
            return (self.identity(function.__self__), self.identity(inner))  # type: ignore[attr-defined]
        return self.identity(function)

    def value(self, value: Any, depth: int = 0) -> Hashable | None:
        if isinstance(value, _SCALARS):
            return (type(value), value)
        if isinstance(value, (nn.Module, torch.Tensor)) or value is None:
            return None
        if isinstance(value, list):
            self.look(value, depth)
        if isinstance(value, (tuple, list)):
            return tuple(self.value(v, depth + 1) for v in value) if depth < 2 and len(value) <= LONGEST else None
        if isinstance(value, dict):
            if not self.look(value, depth):
                return None
            return tuple((str(k), self.value(v, depth + 1)) for k, v in value.items() if k not in _ORIGINS)
        settings = getattr(value, "__dict__", None)
        if not callable(value):
            # settings kept in an object, on a module or in a processor
            if not isinstance(settings, dict):
                return None
            if package(type(value).__module__) not in COMMON:
                self.code(value)
            if not self.look(settings, depth) or not settings:
                return None
            return (type(value), tuple((k, self.value(v, depth + 1)) for k, v in settings.items()))
        # an attention processor, an activation, a callback: which it is, and what scalars it carries
        if not isinstance(value, type):
            self.code(value)
        inner = settings if depth <= 1 and isinstance(settings, dict) else None
        if inner is not None:
            self.snapshot.container(inner)
        scalars = tuple((k, self.value(v, depth + 1)) for k, v in (inner or {}).items())
        return (self.function(value), self.kind(type(value), "__call__"), scalars)

    def look(self, container: dict | list, depth: int) -> bool:
        """Whether a container is read; it is looked at in either case, as it may become one that is."""
        if depth >= 2:
            return False
        short = len(container) <= LONGEST
        (self.snapshot.container if short else self.snapshot.long)(container)
        return short


class _Structure(_Reader):
    """Reads what two objects have in common where they are of one kind."""

    def __init__(self, skip: frozenset[str], root: nn.Module) -> None:
        super().__init__(skip, root)
        # nobody looks again
        self.snapshot = NoSnapshot()
        self.numbers: dict[int, int] = {}

    def first_sight(self, module: nn.Module) -> bool:
        # the order of first sight stands for the object: a module in two places is so in both trees
        first = id(module) not in self.numbers
        self.key.append(self.numbers.setdefault(id(module), len(self.numbers)))
        return first

    def identity(self, value: object) -> Hashable:
        shared = isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType))
        return super().identity(value if shared else type(value))
