"""What is known of the types of values: which cannot change, which say nothing, and what the others hold."""

from __future__ import annotations

import array
import contextlib
import contextvars
import datetime
import decimal
import enum
import fractions
import functools
import logging
import operator
import random
import re
import sys
import threading
import types
import uuid
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from pathlib import Path, PurePath
from typing import Any

import torch
from torch import nn

from sfast_ext.behaviour.foreign_code import COMMON, package

MECHANICS = frozenset(nn.Module().__dict__) | {
    "forward", "_old_forward", "_parameters", "_buffers", "_modules", "_is_full_backward_hook", "_version",
    "_forward_hooks", "_forward_pre_hooks", "_hf_hook",
}  # fmt: skip
"""Attributes that every module has, or that a hook adds: read one by one, or without influence on behaviour."""

ATOMS = frozenset(
    {
        int, bool, str, bytes, type(None), type(Ellipsis), type(NotImplemented), range, types.CodeType, re.Pattern,
        types.GenericAlias, types.UnionType, datetime.date, datetime.time, datetime.datetime, datetime.timedelta,
        datetime.timezone, fractions.Fraction, uuid.UUID, torch.dtype, torch.device, torch.memory_format, torch.layout,
        torch.Size,
    }
)  # fmt: skip
"""Types of values that cannot change, and whose equality says that they are the same."""
BY_WORDS = frozenset({float, complex, decimal.Decimal})
"""Types of values that cannot change. Equal ones may differ, such as 0.0 and -0.0, and a NaN equals none."""
BY_WORDS_OF_ALL: tuple[type, ...] = (
    operator.itemgetter, operator.attrgetter, operator.methodcaller, torch.finfo, torch.iinfo, type(sys.flags),
)  # fmt: skip
"""Classes of values that cannot change, and that are told apart by their words."""
OF_MEMBERS = frozenset({"name", "value", "_name_", "_value_", "__objclass__", "_sort_order_"})
"""Attributes that each member of an enumeration has."""
_SILENT: tuple[type, ...] = (
    types.ModuleType, logging.Logger, logging.LoggerAdapter, logging.Handler, threading.Thread, type(threading.Lock()),
    type(threading.RLock()), threading.Condition, threading.Semaphore, contextvars.Token, torch.Generator,
)  # fmt: skip
"""Types without influence on what a forward computes. What it draws from a generator of torch is seen by a capture."""
_CONTAINERS = (list, dict, set, deque, tuple, frozenset)
_BUFFERS = (bytearray, memoryview, array.array)
_VALUES = (int, float, complex, str, bytes, decimal.Decimal, fractions.Fraction, range)
# types written in C whose state is read otherwise
_READ = (
    object, types.SimpleNamespace, *_CONTAINERS, *_BUFFERS, *_VALUES, OrderedDict, defaultdict, types.MappingProxyType,
    functools.partial, threading.local, contextvars.ContextVar, random.Random, random.Random.__base__, BaseException,
    Exception,
)  # fmt: skip
_WRITERS = ("__setitem__", "__delitem__", "__setattr__", "pop", "setdefault", "update")
_WORD = object.__basicsize__ // 2


def _operators() -> tuple[type, ...]:
    """The class of operators that Python code defines. Before torch 2.4 there was none."""
    home = getattr(getattr(torch, "_library", None), "custom_ops", None)
    kind = getattr(home, "CustomOpDef", None)
    return () if kind is None else (kind,)


_OPERATORS: tuple[Any, ...] = _operators()


def plain_key(value: Any) -> Any:
    """A value of ATOMS or BY_WORDS for a key."""
    kind = type(value)
    return (kind, repr(value)) if kind in BY_WORDS else (kind, value)


def is_plain_tuple(value: Any) -> bool:
    """Whether a value is a tuple of values of ATOMS."""
    return type(value) is tuple and ATOMS.issuperset(map(type, value))


def same_value(now: Any, then: Any) -> bool:
    """Whether two values are the same object, equal values that cannot change, or containers that hold the same.

    `then` is one whose contents are compared elsewhere as well: a container in its place is compared with these.
    """
    if now is then:
        return True
    kind = type(now)
    if kind is not type(then):
        return False
    if kind in ATOMS:
        return now == then
    if kind in BY_WORDS:
        return repr(now) == repr(then)
    if kind not in (list, dict, set, tuple, frozenset) or len(now) != len(then):
        return False
    if kind is dict:
        return same_value([*now, *now.values()], [*then, *then.values()])
    return all(map(same_value, now, then))


def is_silent(value: Any) -> bool:
    """Whether a value has no influence on what a forward computes, whatever it holds."""
    if isinstance(value, _SILENT):
        return True
    # streams, events, operators
    return package(type(value).__module__) == "torch" and not isinstance(value, _CONTAINERS)


@functools.lru_cache(maxsize=1024)
def is_own(kind: type) -> bool:
    """Whether a class is the accelerator's own, not an adapter's, which may hold functions of the host. Objects of the
    accelerator change with each call and hold what was read, and no result depends on them."""
    home = kind.__module__
    return package(home) == package(__name__) and not home.startswith(f"{package(__name__)}.hosts.")


def is_buffer(value: Any) -> bool:
    """Whether a value is a block of memory: an array."""
    numpy = sys.modules.get("numpy")
    return isinstance(value, _BUFFERS) or (numpy is not None and isinstance(value, (numpy.ndarray, numpy.void)))


def buffer_size(value: Any) -> int | None:
    """The bytes of a buffer. None if it holds objects."""
    kind = getattr(value, "dtype", None)
    if kind is not None:
        return None if kind.hasobject else value.nbytes
    if isinstance(value, memoryview):
        return value.nbytes
    return len(value) * getattr(value, "itemsize", 1)


def buffer_content(value: Any) -> tuple[Any, ...]:
    """What a buffer holds."""
    kind = getattr(value, "dtype", None)
    if kind is not None:
        # not a subclass's own: that of a masked array writes to it, and fails for numpy.ma.masked
        array = sys.modules["numpy"].ndarray
        return kind, value.shape, array.tobytes(value) if isinstance(value, array) else value.tobytes()
    layout = (value.format, value.shape) if isinstance(value, memoryview) else getattr(value, "typecode", "")
    return layout, bytes(value) if isinstance(value, bytearray) else value.tobytes()


def is_immutable(value: Any) -> bool:
    """Whether a value of a library cannot change, and is told by what it equals."""
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.generic):
        return not isinstance(value, (numpy.void, numpy.object_))
    return isinstance(value, PurePath) or (numpy is not None and isinstance(value, numpy.dtype))


def random_state(value: Any) -> Callable[[], Any] | None:
    """What returns the state of a generator of random numbers. None for another value."""
    if isinstance(value, random.Random):
        return None if isinstance(value, random.SystemRandom) else value.getstate
    numpy = sys.modules.get("numpy")
    made = getattr(numpy, "random", None)
    if made is not None and isinstance(value, made.RandomState):
        return lambda: repr(value.get_state(legacy=False))
    bits = value.bit_generator if made is not None and isinstance(value, made.Generator) else value
    if made is not None and isinstance(bits, made.BitGenerator):
        return lambda: repr(bits.state)
    return None


@functools.lru_cache(maxsize=4096)
def hides_state(kind: type) -> bool:
    """Whether objects of a class have state that neither their dictionary nor their slots contain."""
    base = kind.__base__
    if base is None or kind in _READ:
        return False
    if not kind.__flags__ & 1 << 9 or hides_state(base):
        # not made by a class statement
        return True
    inside = vars(kind)
    slots = sum(isinstance(each, types.MemberDescriptorType) for each in inside.values())
    most = slots + ("__dict__" in inside) + ("__weakref__" in inside)
    return kind.__basicsize__ - base.__basicsize__ > most * _WORD


def parts_of(value: Any) -> tuple[Any, ...] | None:
    """The values that a method, a partial function or a property is made of. None for another value."""
    if isinstance(value, types.MethodType):
        return (value.__self__, value.__func__)
    if isinstance(value, (functools.partial, functools.partialmethod)):
        return (value.func, value.args, value.keywords)
    if isinstance(value, (staticmethod, classmethod)):
        return (value.__func__,)
    if isinstance(value, property):
        return tuple(function for function in (value.fget, value.fset) if function is not None)
    if isinstance(value, _OPERATORS):
        # a plan calls it, but a CUDA graph repeats what it launched
        return (value._init_fn, *value._backend_fns.values())
    return (value.func,) if isinstance(value, functools.cached_property) else None


def slots_of(kind: type) -> Iterator[tuple[str, Any]]:
    """The slots of a class and its bases: (name, descriptor)."""
    for owner in kind.__mro__:
        # types written in C have members that cannot be set
        if owner not in _READ and "__slots__" in vars(owner):
            for name, value in vars(owner).items():
                if isinstance(value, types.MemberDescriptorType):
                    yield name, value


def is_enum(value: Any) -> bool:
    """Whether a value is a member of an enumeration."""
    return isinstance(value, enum.Enum)


def is_common(kind: type) -> bool:
    """Whether a class comes with Python. The names that its methods look up are not collected."""
    return package(kind.__module__) in COMMON


@functools.lru_cache(maxsize=4096)
def in_library(file: str) -> bool:
    """Whether a file belongs to an installed package: by its folder, or by the list that `pip install --target` leaves
    in a folder of `sys.path`."""
    path = PurePath(file)
    if not {"site-packages", "dist-packages"}.isdisjoint(path.parts):
        return True
    folders = {PurePath(each) for each in sys.path if isinstance(each, str)}  # Python passes over others as well
    return any(path.relative_to(each).as_posix() in _installed(each) for each in path.parents if each in folders)


@functools.lru_cache(maxsize=64)
def _installed(folder: PurePath) -> frozenset[str]:
    """The files of Python that packages installed into a folder list, by their paths in it."""
    found: set[str] = set()
    for record in Path(folder).glob("*.dist-info/RECORD"):
        with contextlib.suppress(OSError, UnicodeDecodeError):
            lines = record.read_text(encoding="utf-8").splitlines()
            found.update(name for line in lines if (name := line.partition(",")[0]).endswith(".py"))
    return frozenset(found)


def is_of_library(kind: type) -> bool:
    """Whether a class belongs to an installed package."""
    return in_library(getattr(sys.modules.get(kind.__module__), "__file__", None) or "")


@functools.lru_cache(maxsize=1024)
def is_frozen(kind: type) -> bool:
    """Whether a class of dictionaries overrides all methods that write, as configs of diffusers do, which refuse."""
    return issubclass(kind, dict) and all(getattr(kind, name) is not getattr(dict, name) for name in _WRITERS)
