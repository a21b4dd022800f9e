"""How a model was called last, kept on disk: a later process can be ready for such a call before there is one."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from sfast_ext import cache_folder, environment
from sfast_ext.call_signature import Signature
from sfast_ext.ui.requests import MAX_IMAGES, MAX_SIDE, MIN_SIDE, STEP, Wanted

KEPT = 16
"""Kinds of models on all cards: a user may go from one to another and back."""
LARGEST = 1 << 16
"""Bytes of the file. One call takes a kilobyte."""
_NUMBERS = {"int": int, "float": float}
_CONTAINERS = {"tuple": tuple, "list": list}


class KeptCall(NamedTuple):
    """A call: what of it the user chose, and its arguments without their values."""

    wanted: Wanted
    signature: Signature


class KeptCalls:
    """The last call of each kind of model. No prompt, no name and no value of a tensor is in it.

    Args:
        folder: the cache folder that keeps them.
    """

    def __init__(self, folder: Callable[[], Path] = environment.kept_in) -> None:
        self._folder = folder
        self._lock = threading.Lock()

    def keep(self, kind: str, call: KeptCall) -> None:
        """Keep a call in place of the one before.

        Raises:
            ValueError: it has an argument that is not kept.
            OSError, RuntimeError: the file cannot be written.
        """
        wanted, signature = call
        if signature.shared:
            raise ValueError("a tensor that is several arguments")
        entry = {
            "size": [wanted.width, wanted.height],
            "images": wanted.images,
            "mode": [signature.mode[0], _name(signature.mode[1])] if signature.mode else [],
            "call": _written(signature.tree),
        }
        folder = self._folder()
        with self._lock, cache_folder.turn(folder):
            found = self._read()
            found.pop(kind, None)
            found[kind] = entry
            content = json.dumps(dict(list(found.items())[-KEPT:]), allow_nan=False).encode()
            cache_folder.write(folder / "last_calls.json", folder, content)

    def of(self, kind: str) -> KeptCall | None:
        """The last call of this kind of model; None if there is none, or if it cannot be read."""
        with self._lock:
            entry = self._read().get(kind)
        try:
            return None if entry is None else _call(entry)
        except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
            return None

    def _read(self) -> dict[str, Any]:
        try:
            folder = self._folder()
            content = cache_folder.read(folder / "last_calls.json", folder)
            found = json.loads(content) if len(content) <= LARGEST else None
        except (OSError, RuntimeError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}


def _call(entry: Any) -> KeptCall:
    width, height = entry["size"]
    sides = all(type(side) is int and MIN_SIDE <= side <= MAX_SIDE and side % STEP == 0 for side in (width, height))
    images = entry["images"]
    if not sides or type(images) is not int or not 1 <= images <= MAX_IMAGES:
        raise ValueError("no size that an image can have")
    mode = (_device_type(entry["mode"][0]), _dtype(entry["mode"][1])) if entry["mode"] else ()
    tree = _tree(entry["call"], count := _Count())
    if tree[0] != "call" or not count.tensors:
        raise ValueError("no call")
    return KeptCall(Wanted(width, height, images), Signature(tree, mode))


class _Count:
    """Numbers the leaves of a tree in their order."""

    def __init__(self) -> None:
        self.leaves = self.tensors = 0

    def next(self) -> int:
        self.leaves += 1
        return self.leaves - 1


def _written(tree: Any) -> Any:
    """A signature's tree in what JSON has."""
    tag = tree[0]
    if tag == "tensor":
        order = list(tree[3]) if len(tree) == 5 else []
        return [tag, _name(tree[1]), list(tree[2]), order]
    if tag == "number":
        return [tag, tree[1].__name__]
    if tag == "const":
        if tree[2] is not None and type(tree[2]) not in (bool, int, float, str):
            raise ValueError(f"a constant of the type {type(tree[2]).__name__}")
        return [tag, tree[2]]
    if tag == "call":
        return [tag, [_written(each) for each in tree[1]], [[name, _written(each)] for name, each in tree[2]]]
    if tree[1] is _CONTAINERS.get(tag):
        return [tag, [_written(each) for each in tree[2]]]
    if tag == "dict" and tree[1] is dict:
        return [tag, [[key, _written(each)] for key, each in tree[2]]]
    raise ValueError(f"an argument of the type {tree[1].__name__}")


def _tree(written: Any, count: _Count) -> Any:
    """The inverse of `_written`.

    Raises:
        Exception: it is none.
    """
    tag, *rest = written
    if tag == "tensor":
        dtype, shape, order = rest
        if len(shape) > 8 or not all(type(side) is int and 0 < side <= 1 << 16 for side in shape):
            raise ValueError("no shape")
        if order and sorted(order) != sorted(set(order) & set(range(len(shape)))):
            raise ValueError("no order of dimensions")
        count.tensors += 1
        return (tag, _dtype(dtype), tuple(shape), *((tuple(order),) if order else ()), count.next())
    if tag == "number":
        return (tag, _NUMBERS[rest[0]], count.next())
    if tag == "const":
        (value,) = rest
        if value is not None and type(value) not in (bool, int, float, str):
            raise ValueError("no constant")
        return (tag, type(value), value)
    if tag == "call":
        positional = tuple([_tree(each, count) for each in rest[0]])
        return (tag, positional, tuple([(str(name), _tree(each, count)) for name, each in rest[1]]))
    if tag in _CONTAINERS:
        return (tag, _CONTAINERS[tag], tuple([_tree(each, count) for each in rest[0]]))
    if tag == "dict":
        entries = [(key, _tree(each, count)) for key, each in rest[0]]
        if not all(type(key) in (str, int) for key, _ in entries):
            raise ValueError("no key")
        return (tag, dict, tuple(entries))
    raise ValueError(f"no tree: {tag}")


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"no dtype: {name}")
    return dtype


def _device_type(name: str) -> str:
    if name not in ("cuda", "cpu"):
        raise ValueError(f"no device that autocast is for: {name}")
    return name
