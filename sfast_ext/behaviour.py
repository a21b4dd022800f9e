"""The behaviour key: all that changes what a forward computes without showing in its arguments.

Two fingerprints of a module tree compare equal as long as nobody patched a forward or a class, added a hook, exchanged
a processor or a submodule, or changed a scalar attribute (FreeU's factors, an adapter's scale). Weights' values are not
part of it: the weight arena follows those.

Instance patches are told apart from what a module is: a forward, another method or a hook that somebody laid over one
instance, and a class or an attention processor that an extension of the host brought or exchanged.
"""

from __future__ import annotations

import enum
import types
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from sfast_ext.patches import Patch, brought, home_of, methods, shadows
from sfast_ext.scene import LONGEST, NoScene, Scene
from sfast_ext.slot import AcceleratedForward, is_own_forward

_SCALARS = (bool, int, float, str, torch.dtype, torch.device, torch.Size, enum.Enum)
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

    `key` names objects by address; `alive` and `scene` hold them, so that none can give its address to another while
    the fingerprint is kept. `patches` are what others put on the instances below the root.
    """

    key: tuple[Hashable, ...]
    alive: list[object]
    patches: list[Patch]
    scene: Scene
    classes: dict[type, _Class]

    def holds(self) -> bool:
        """Whether everything that was read of instances is still the very same object: at a fraction of a reading's
        cost.

        True means that a reading would find the same in them. False does not say that it would not.
        """
        return self.scene.holds()

    def looks_alike(self) -> bool:
        """A glance, for each call; see `Scene.looks_alike`."""
        return self.scene.looks_alike()

    def classes_hold(self, root: nn.Module) -> bool:
        """Whether a reading would find the same in the classes of all modules, and in what their methods call."""
        reader = _Reader(frozenset(), root)
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
    reader.read("", root, is_root=True)
    return reader.fingerprint()


def structure(root: nn.Module, ignored: frozenset[str] = frozenset()) -> tuple[Hashable, ...]:
    """The behaviour key with kinds in place of objects: equal for two modules that compute alike with the same weights.

    Shapes and dtypes are not part of it; the weight arena knows those.
    """
    reader = _Structure(_MECHANICS | ignored, root)
    reader.read("", root, is_root=True)
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
        self.home = home_of(type(root))
        self.key: list[Hashable] = []
        self.alive: list[object] = []
        self.patches: list[Patch] = []
        self.seen: set[int] = set()
        self.scene: Scene = Scene()
        self.classes: dict[type, _Class] = {}

    def fingerprint(self) -> Fingerprint:
        return Fingerprint(tuple(self.key), self.alive, self.patches, self.scene.seal(), self.classes)

    def kind(self, kind: Any, name: str) -> Hashable:
        return self.identity(self.scene.kind(kind, name))

    def read(self, path: str, module: nn.Module, *, is_root: bool = False) -> None:
        if not self.first_sight(module):
            return
        self.scene.module(module)
        kind: Any = type(module)
        if kind not in self.classes:
            self.classes[kind] = self.read_class(kind)
            self.key += self.classes[kind].key
        attributes = module.__dict__
        present = sum(p is not None for p in attributes["_parameters"].values())
        self.key += [kind, self.kind(kind, "forward"), module.training, present]
        self.patches += [Patch(path, module, what, function) for what, function in self.classes[kind].patches]
        if not is_root:
            self.patched(path, module)
        for name, value in attributes.items():
            if value is None or name in self.skip or isinstance(value, (torch.Tensor, AcceleratedForward)):
                # a forward of ours may be stored by who laid another over it
                continue
            if shadows(module, name, value):
                self.patches.append(Patch(path, module, "method", value))
            elif not isinstance(value, (type, nn.Module)) and brought(value, self.home):
                self.patches.append(Patch(path, module, name, value))
            found = self.value(value)
            if found is not None:
                self.key.append((name, found))
        for name, child in attributes["_modules"].items():
            if child is not None:
                self.read(f"{path}.{name}" if path else name, child)

    def read_class(self, kind: type) -> _Class:
        """Note the methods of a class and what they call, and those that another party put there."""
        forward: Any = kind.forward  # type: ignore[attr-defined]
        key: list[Hashable] = []
        found = [("class", forward)] if brought(forward, self.home) else []
        for container, name, value in methods(kind):
            self.scene.name(container, name)
            plain = value is None or isinstance(value, (bool, int, float, str))
            key.append(value if plain else self.identity(value))
            if not plain and value is not forward and brought(value, self.home):
                found.append(("function", value))
        return _Class(key, found)

    def patched(self, path: str, module: nn.Module) -> None:
        attributes = module.__dict__
        for slot in ("forward", "_old_forward"):
            function = attributes.get(slot)
            if isinstance(function, AcceleratedForward):
                # one of ours, on a part of this module: what counts is what it stands for
                function = function.before
            if function is not None and not is_own_forward(function, module):
                if slot != "forward" or self.transparent is None or not self.transparent(module, slot, function):
                    self.key.append((slot, self.function(function)))
                if slot == "forward":
                    self.patches.append(Patch(path, module, "forward", function))
        for slot in _HOOKS:
            hooks = attributes.get(slot)
            if hooks is None:
                continue
            self.scene.container(hooks)
            for hook in hooks.values():
                self.key.append((slot, self.function(hook)))
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
            if not isinstance(settings, dict) or not self.look(settings, depth) or not settings:
                return None
            return (type(value), tuple((k, self.value(v, depth + 1)) for k, v in settings.items()))
        # an attention processor, an activation, a callback: which it is, and what scalars it carries
        inner = settings if depth == 0 and isinstance(settings, dict) else None
        if inner is not None:
            self.scene.container(inner)
        scalars = tuple((k, self.value(v, 1)) for k, v in (inner or {}).items() if not isinstance(v, torch.Tensor))
        return (self.function(value), self.kind(type(value), "__call__"), scalars)

    def look(self, container: dict | list, depth: int) -> bool:
        """Whether a container is read; it is looked at in either case, as it may become one that is."""
        if depth >= 2:
            return False
        short = len(container) <= LONGEST
        (self.scene.container if short else self.scene.long)(container)
        return short


class _Structure(_Reader):
    """Reads what two objects have in common where they are of one kind."""

    def __init__(self, skip: frozenset[str], root: nn.Module) -> None:
        super().__init__(skip, root)
        # nobody looks again
        self.scene = NoScene()
        self.numbers: dict[int, int] = {}

    def first_sight(self, module: nn.Module) -> bool:
        # the order of first sight stands for the object: a module in two places is so in both trees
        first = id(module) not in self.numbers
        self.key.append(self.numbers.setdefault(id(module), len(self.numbers)))
        return first

    def identity(self, value: object) -> Hashable:
        shared = isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType))
        return super().identity(value if shared else type(value))


class BehaviourKeys:
    """Numbers the behaviours of one module, so that a key of thousands of entries is compared once for each reading.

    Args:
        recognised, transparent: see `Hooks`.
        kept: how many behaviours are remembered.
        first: the number of the first.
    """

    def __init__(
        self,
        module: nn.Module,
        ignored: frozenset[str],
        recognised: Vouch | None,
        kept: int,
        first: int = 0,
        transparent: Vouch | None = None,
    ) -> None:
        self._module, self._ignored, self._recognised, self._kept = module, ignored, recognised, kept
        self._transparent = transparent
        self._numbers: OrderedDict[Hashable, tuple[int, Fingerprint]] = OrderedDict()
        self._count = first
        self._scene: Fingerprint | None = None
        self._ticks = False
        self._read_since_tick = False
        self.last: tuple[int, str | None] | None = None
        """What the last reading gave; None before the first."""

    def tick(self) -> None:
        """A generation begins. From the first tick on, a reading is sure until the next."""
        self._ticks = True
        self._read_since_tick = False

    @property
    def due(self) -> bool:
        """Whether a generation began since the last reading."""
        return self._ticks and not self._read_since_tick

    @property
    def sure(self) -> bool:
        """Whether `last` may be trusted without another reading."""
        return self._ticks and self._read_since_tick and self._scene is not None and self._scene.looks_alike()

    def now(self) -> tuple[int, str | None]:
        """What a reading gives, without one where `last` may be trusted."""
        return self.last if self.last is not None and self.sure else self.read()

    def read(self) -> tuple[int, str | None]:
        """A number for what the module computes now, and the foreign patch that keeps us away, in words, if any."""
        scene = self._scene
        if self.last is not None and scene is not None and scene.holds():
            if not self._ticks:
                return self.last
            if scene.classes_hold(self._module):
                # once a generation the host is asked again what it vouches for
                self.last = (self.last[0], self._foreign(scene))
                self._read_since_tick = True
                return self.last
        read = fingerprint(self._module, self._ignored, self._transparent)
        known = self._numbers.get(read.key)
        if known is None:
            known = self._numbers[read.key] = (self._count, read)
            self._count += 1
            while len(self._numbers) > self._kept:
                self._numbers.popitem(last=False)
        self._numbers.move_to_end(read.key)
        # together, and after the host was asked: it may raise
        foreign = self._foreign(read)
        self._scene, self.last = read, (known[0], foreign)
        self._read_since_tick = True
        return self.last

    def _foreign(self, read: Fingerprint) -> str | None:
        vouch = self._recognised
        patches = (p for p in read.patches if vouch is None or not vouch(p.module, p.kind, p.function))
        return next((p.words() for p in patches), None)

    def clear(self) -> None:
        """Forget everything read."""
        self._numbers.clear()
        self.last = self._scene = None
