"""The state that a forward can reach: what it may read at one call and have written at another.

These are the attributes of modules and of the objects that they hold (attention processors, what those hold, to any
depth), the containers among them, closures, wrappers around forwards, and what the code that runs finds by name:
globals, attributes of modules and of classes. What belongs to Python's library, to torch and to libraries of kernels is
left out.
"""

from __future__ import annotations

import functools
import logging
import sys
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable
from types import (
    BuiltinFunctionType,
    CellType,
    CodeType,
    FunctionType,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodWrapperType,
    ModuleType,
)  # fmt: skip
from typing import Any

import torch
from torch import nn

from sfast_ext.behaviour.foreign_code import COMMON, package
from sfast_ext.behaviour.forward_slot import AcceleratedForward
from sfast_ext.behaviour.quick_check import content_of
from sfast_ext.behaviour.reach import Walk, code_names, imported_names, names_within
from sfast_ext.behaviour.value_types import ATOMS, BY_WORDS, parts_of, slots_of
from sfast_ext.capture import counters

# more objects than these are not walked through, the nearest first
MAX_OBJECTS = 40_000
# containers with more items are compared, and their items are not walked through: they are tables
MAX_LENGTH = 4096
# rounds of code that was found by name in other code
_ROUNDS = 4
OURS = package(__name__)
_LIBRARIES = COMMON | {
    OURS, "numpy", "triton", "xformers", "flash_attn", "sageattention", "einops", "scipy", "PIL", "safetensors",
    "huggingface_hub", "omegaconf", "gradio", "fastapi", "starlette", "pydantic", "tqdm", "builtins",
}  # fmt: skip
_ATOMS = ATOMS | BY_WORDS | {
    slice, GetSetDescriptorType, MemberDescriptorType, torch._ops.OpOverload, torch._ops.OpOverloadPacket,
}  # fmt: skip
# what changes without being state of a forward
_LEFT_OUT = (
    logging.Logger, logging.Handler, logging.Formatter, threading.Thread, threading.Event, threading.Condition,
    AcceleratedForward,
)  # fmt: skip
_WEAK = (weakref.WeakValueDictionary, weakref.WeakKeyDictionary, weakref.WeakSet)
_CACHE = type(functools.lru_cache(maxsize=1)(lambda: None))
_EMPTY = frozenset({dict, OrderedDict, list, set})
# with these, code writes to its module by a text
_BY_TEXT = frozenset({"globals", "setattr", "vars", "__dict__", "exec"})
Where = tuple[Any, ...]


class Reachable:
    """Walks through the state that a forward can reach, and calls a method for each thing that can change. `theirs` is
    set while it walks through what the model does not hold itself: other threads may write to that.

    A subclass keeps what it is given.
    """

    def __init__(self) -> None:
        self.theirs = False
        self._seen: set[int] = set()
        self._waiting: deque[tuple[Where, Any]] = deque()
        self._kinds: dict[type, None] = {}
        self._owners: set[type] = set()
        self._functions: dict[int, FunctionType] = {}
        self._left = MAX_OBJECTS
        # what code that runs looks up: all that is followed of objects that the model does not hold
        self._reached: frozenset[str] = frozenset()
        # the names of attributes that it sets, which an object may not have yet
        self._stored: frozenset[str] = frozenset()

    def namespace(self, where: Where, holder: Any, values: dict[str, Any]) -> None:
        """The attributes of an object or a module."""

    def container(self, where: Where, container: Any) -> None:
        """A list, dict, set or deque."""

    def empty(self, where: Where, container: Any) -> None:
        """An empty one."""

    def cell(self, where: Where, cell: CellType) -> None:
        """A cell of a closure."""

    def name(self, where: Where, home: dict[str, Any], name: str) -> None:
        """What code finds under a name, which may be undefined."""

    def slot(self, where: Where, holder: Any, name: str) -> None:
        """An attribute that is a slot."""

    def kind(self, kind: type) -> None:
        """A class, whose attributes can change."""

    def counter(self, where: Where, value: Any, read: Callable[[Any], Any]) -> None:
        """An object of which `read` tells the state."""

    def tensor(self, where: Where, tensor: torch.Tensor) -> None:
        """A tensor that is no parameter or buffer."""

    def weights(self, where: Where, container: dict[str, Any]) -> None:
        """The parameters or the buffers of a module."""

    def walk(self, root: nn.Module, forward: Any) -> None:
        """Walk through what a forward of `root` reaches."""
        for path, module in root.named_modules():
            self._module((path or "the model",), module)
        self._waiting.append((("its forward",), forward))
        self._drain()
        self.theirs = True
        looked_at: set[int] = set()
        known: set[type] = set()
        for _ in range(_ROUNDS):
            new = [kind for kind in self._kinds if kind not in known]
            functions = [f for key, f in self._functions.items() if key not in looked_at]
            if not new and not functions:
                break
            known.update(new)
            walk = Walk()
            self._reached = names_within(list(self._kinds), list(self._functions.values()), walk)
            self._stored = walk.stored()
            for kind in new:
                self._class(kind, self._reached)
            for function in list(self._functions.values()):
                if id(function) not in looked_at:
                    looked_at.add(id(function))
                    self._globals(function)
            self._drain()

    def _module(self, where: Where, module: nn.Module) -> None:
        if id(module) in self._seen:
            return
        self._seen.add(id(module))
        attributes = module.__dict__
        self.namespace(where, module, attributes)
        self._kinds[type(module)] = None
        for name, value in attributes.items():
            kind = type(value)
            if kind in _ATOMS:
                continue
            if kind in _EMPTY and not value:
                self.empty((where, name), value)
            elif name == "_parameters" or name == "_buffers":
                self.weights((where, name), value)
                for tensor in value.values():
                    if tensor is not None:
                        self._weight((where, name), tensor)
            else:
                self._waiting.append(((where, name), value))

    def _weight(self, where: Where, tensor: torch.Tensor) -> None:
        self._seen.add(id(tensor))
        held = tensor.__dict__
        if held:
            self._waiting.append((where, held))
        else:
            self.empty(where, held)

    def _drain(self) -> None:
        waiting, seen = self._waiting, self._seen
        while waiting and self._left > 0:
            where, value = waiting.popleft()
            if type(value) in _ATOMS or id(value) in seen:
                continue
            seen.add(id(value))
            self._left -= 1
            self._visit(where, value)
        waiting.clear()

    def _visit(self, where: Where, value: Any) -> None:
        kind = type(value)
        if isinstance(value, nn.Module):
            self._kinds_of_module(where, value)
        elif isinstance(value, torch.Tensor):
            self.tensor(where, value)
            self._weight(where, value)
        elif isinstance(value, (dict, list, set, deque)):
            self._container(where, value)
        elif isinstance(value, (tuple, frozenset)):
            self._items(where, value)
        elif kind is FunctionType:
            self._function(where, value)
        elif (parts := parts_of(value)) is not None:
            self._waiting += [(where, each) for each in parts]
            if isinstance(value, functools.partial):
                self._object(where, value)
        elif kind is BuiltinFunctionType or kind is MethodWrapperType:
            # as the `append` of a list
            self._waiting.append((where, value.__self__))
        elif isinstance(value, type):
            if package(value.__module__) not in _LIBRARIES:
                self._kinds[value] = None
        elif isinstance(value, AcceleratedForward):
            self._waiting.append((where, value.previous))
        elif isinstance(value, (ModuleType, *_LEFT_OUT)):
            return
        elif isinstance(value, weakref.ref):
            self._waiting.append((where, value()))
        elif isinstance(value, _WEAK):
            self._waiting.append((where, value.data))  # type: ignore[union-attr]
        elif isinstance(value, _CACHE):
            self.counter(where, value, counters.of_cache)
            self._waiting.append((where, value.__wrapped__))
        elif isinstance(value, CellType):
            self._cell(where, value)
        else:
            self._object(where, value)

    def _kinds_of_module(self, where: Where, module: nn.Module) -> None:
        # one that an object holds, and the tree does not
        self._seen.discard(id(module))
        for path, each in module.named_modules():
            self._module((where, path) if path else where, each)

    def _container(self, where: Where, value: Any) -> None:
        if not value and type(value) in _EMPTY:
            self.empty(where, value)
            return
        self.container(where, value)
        if isinstance(value, dict):
            # a subclass may make an object for each look
            self._items(where, dict.values(value), dict.keys(value))
        else:
            self._items(where, value)
        if type(value) not in (dict, list, set, deque, OrderedDict):
            self._object(where, value)

    def _items(self, where: Where, values: Any, keys: Any = ()) -> None:
        if len(values) > MAX_LENGTH:
            return
        for each in values:
            if type(each) not in _ATOMS:
                self._waiting.append((where, each))
        for key in keys:
            if type(key) not in _ATOMS:
                self._waiting.append((where, key))

    def _function(self, where: Where, function: FunctionType) -> None:
        if package(function.__globals__.get("__name__") or "") == OURS:
            return
        self._functions[id(function)] = function
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
            self._cell((function.__qualname__, name), cell)
        if function.__defaults__:
            self._waiting.append(((function.__qualname__, "a default"), function.__defaults__))
        if function.__kwdefaults__:
            self._waiting.append(((function.__qualname__, "a default"), function.__kwdefaults__))
        attributes = function.__dict__
        self.namespace((function.__qualname__,), function, attributes)
        self._waiting += [((function.__qualname__, name), value) for name, value in attributes.items()]

    def _cell(self, where: Where, cell: CellType) -> None:
        self._seen.add(id(cell))
        self.cell(where, cell)
        self._waiting.append((where, content_of(cell)))

    def _object(self, where: Where, value: Any) -> None:
        kind = type(value)
        if package(kind.__module__) == OURS:
            return
        read = counters.reader(value)
        if read is not None:
            self.counter(where, value, read)
            self._waiting += [(where, each) for each in counters.within(value)]
            return
        attributes = getattr(value, "__dict__", None)
        if isinstance(attributes, dict) and self.theirs:
            for name in self._reached & attributes.keys():
                self.name((where, name), attributes, name)
                self._waiting.append(((where, name), attributes[name]))
            for name in self._stored - attributes.keys():
                self.name((where, name), attributes, name)
        elif isinstance(attributes, dict):
            self.namespace(where, value, attributes)
            self._waiting += [((where, name), each) for name, each in attributes.items() if type(each) not in _ATOMS]
        for name, _ in slots_of(kind):
            self.slot((where, name), value, name)
            self._waiting.append(((where, name), getattr(value, name, None)))
        if package(kind.__module__) not in _LIBRARIES:
            self._kinds[kind] = None

    def _class(self, kind: type, names: frozenset[str]) -> None:
        for owner in kind.__mro__:
            if package(owner.__module__) in _LIBRARIES or owner in self._owners:
                continue
            self._owners.add(owner)
            self.kind(owner)
            for name, value in vars(owner).items():
                if type(value) in _ATOMS:
                    continue
                special = name.startswith("__") and name.endswith("__")
                code = isinstance(value, (FunctionType, staticmethod, classmethod, property, functools.cached_property))
                if not code and (special or isinstance(value, type)):
                    continue
                if name in names or special:
                    self._waiting.append(((owner.__qualname__, name), value))

    def _globals(self, function: FunctionType) -> None:
        around, code = function.__globals__, function.__code__
        if package(around.get("__name__") or "") in _LIBRARIES:
            return
        names = code_names(code)
        self._named(around.get("__name__"), around, names, written_by_name(code))
        entered: set[int] = set()
        for name in imported_names(function):
            self._in_module((name,), sys.modules.get(name), names, entered)

    def _named(self, home: Any, around: dict[str, Any], names: frozenset[str], written: frozenset[str]) -> None:
        entered: set[int] = set()
        for name in names:
            if name in around:
                value = around[name]
                if isinstance(value, ModuleType):
                    self._in_module((home, name), value, names, entered)
                    continue
                self.name((home, name), around, name)
                if type(value) not in _ATOMS:
                    self._waiting.append(((home, name), value))
            elif name in written:
                self.name((home, name), around, name)

    def _in_module(self, where: Where, module: Any, names: frozenset[str], entered: set[int], depth: int = 0) -> None:
        """What code finds in a module, and in modules that it finds there."""
        if id(module) in entered:
            return
        if not isinstance(module, ModuleType):
            # an object may be in the place of a module
            self._waiting.append((where, module))
            return
        entered.add(id(module))
        for generator in counters.generators_of(module, names):
            self._waiting.append((where, generator))
        if depth >= _ROUNDS or package(module.__name__) in _LIBRARIES:
            return
        inside = vars(module)
        self._waiting.append(((module.__name__, "__getattr__"), inside.get("__getattr__")))
        if type(module) is not ModuleType:
            self._kinds[type(module)] = None
        for name in (names & self._stored) - inside.keys():
            self.name((module.__name__, name), inside, name)
        for name in names & inside.keys():
            value = inside[name]
            if isinstance(value, ModuleType):
                self._in_module((module.__name__, name), value, names, entered, depth + 1)
                continue
            self.name((module.__name__, name), inside, name)
            if type(value) not in _ATOMS:
                self._waiting.append(((module.__name__, name), value))


@functools.lru_cache(maxsize=4096)
def written_by_name(code: CodeType) -> frozenset[str]:
    """The names that code may bind in its module, including nested functions."""
    inner = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    own = frozenset(code.co_names) if STORES.intersection(code.co_code[::2]) else frozenset()
    if _BY_TEXT.intersection(code.co_names):
        own |= code_names(code)
    return own.union(*map(written_by_name, inner))


def _stores() -> frozenset[int]:
    import opcode

    return frozenset(opcode.opmap[name] for name in ("STORE_GLOBAL", "DELETE_GLOBAL") if name in opcode.opmap)


STORES = _stores()


def words(where: Where) -> str:
    """A place as text."""
    parts: list[str] = []
    rest: Any = where
    while isinstance(rest, tuple):
        parts += [str(part) for part in reversed(rest[1:])]
        rest = rest[0]
    return ".".join([str(rest), *reversed(parts)])
