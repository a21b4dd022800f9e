"""State that a forward leaves in its modules. After a capture it would be fake tensors, so it is detected and
undone."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

_CONTAINERS = (list, dict, set, deque)
# containers with more items are not searched: they are tables, not state of a forward
_LONGEST = 4096
# containers in containers, as in {"down": [], "up": []}
_DEEPEST = 2
_NO_HOLDERS = (nn.Module, torch.Tensor, type, FunctionType, MethodType, ModuleType)
_Record = tuple[str, Any, Any]


class ModuleState:
    """A copy of the attributes of all modules below `root`, and of the items of containers in them.

    In other objects that modules hold, such as attention processors, only fake tensors are detected: other changes may
    be the work of another thread.

    Args:
        ignored: attributes without influence on behaviour. They may change, and are restored as well.
    """

    def __init__(self, root: nn.Module, ignored: frozenset[str] = frozenset()) -> None:
        self._ignored = ignored
        self._attributes: list[_Record] = []
        self._containers: list[_Record] = []
        self._holders: list[_Record] = []
        # most containers are the empty dictionaries of hooks
        self._empty: list[tuple[str, Any]] = []
        seen: set[int] = set()
        for path, module in root.named_modules():
            here = path or "the model"
            self._attributes.append((here, module.__dict__, dict(module.__dict__)))
            for name, value in module.__dict__.items():
                if isinstance(value, _CONTAINERS):
                    self._look_into(value, f"{here}.{name}", 0, seen)
                elif id(value) not in seen and hasattr(value, "__dict__") and not isinstance(value, _NO_HOLDERS):
                    seen.add(id(value))
                    self._holders.append((f"{here}.{name}", value.__dict__, dict(value.__dict__)))

    def restore(self) -> str | None:
        """Restore everything. Returns the path of the first attribute whose value changed, or None."""
        changed: list[str] = []
        for where, now, was in self._attributes:
            if not _same(now, was):
                keys = [k for k in {**now, **was} if now.get(k, now) is not was.get(k, was)]
                read = [k for k in keys if k not in self._ignored]
                changed += [f"{where}.{k}" for k in read if not _equal(now.get(k), was.get(k))]
                now.clear()
                now.update(was)
        for where, container, was in self._containers:
            if not _same(container, was):
                if not _alike(container, was):
                    changed.append(where)
                _refill(container, was)
        if any(container for _, container in self._empty):
            for where, container in self._empty:
                if container:
                    changed.append(where)
                    _refill(container, {})
        for where, now, was in self._holders:
            for key in [k for k, value in now.items() if value is not was.get(k) and _is_fake(value)]:
                changed.append(f"{where}.{key}")
                if key in was:
                    now[key] = was[key]
                else:
                    del now[key]
        return changed[0] if changed else None

    def _look_into(self, container: Any, where: str, depth: int, seen: set[int]) -> None:
        if id(container) in seen or len(container) > _LONGEST:
            return
        seen.add(id(container))
        if not container:
            self._empty.append((where, container))
            return
        self._containers.append((where, container, _copy(container)))
        if depth < _DEEPEST:
            for item in _items(container):
                if isinstance(item, _CONTAINERS):
                    self._look_into(item, where, depth + 1, seen)


def _copy(container: Any) -> Any:
    if isinstance(container, dict):
        return dict(container)
    return set(container) if isinstance(container, set) else list(container)


def _items(container: Any) -> Iterable[Any]:
    return container.values() if isinstance(container, dict) else container


def _pairs(now: Any, was: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(now, dict):
        return ((now.get(key, now), value) for key, value in was.items())
    return zip(now, was)


def _same(now: Any, was: Any) -> bool:
    if len(now) != len(was):
        return False
    if isinstance(now, set):
        return now <= was
    return all(a is b for a, b in _pairs(now, was))


def _alike(now: Any, was: Any) -> bool:
    if len(now) != len(was) or isinstance(now, set):
        return False
    return all(_equal(a, b) for a, b in _pairs(now, was))


def _equal(a: Any, b: Any) -> bool:
    # a new object of equal value is not state
    if a is b:
        return True
    if isinstance(a, tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(_equal, a, b))
    return type(a) is type(b) and isinstance(a, (bool, int, float, str)) and a == b


def _is_fake(value: Any) -> bool:
    if isinstance(value, _CONTAINERS + (tuple,)):
        return len(value) <= _LONGEST and any(isinstance(item, FakeTensor) for item in _items(value))
    return isinstance(value, FakeTensor)


def _refill(container: Any, was: Any) -> None:
    # by the methods of the base class: a subclass may refuse writes
    if isinstance(container, list):
        list.__setitem__(container, slice(None), list(was))
    elif isinstance(container, dict):
        plain: Any = OrderedDict if isinstance(container, OrderedDict) else dict
        plain.clear(container)
        for key, value in was.items():
            plain.__setitem__(container, key, value)
    elif isinstance(container, set):
        set.clear(container)
        set.update(container, was)
    else:
        deque.clear(container)
        deque.extend(container, was)
