"""State that a forward leaves: what it can reach, before and after a run of it.

After a capture it would be fake tensors, and after a run that nobody asked for it would be a step too far. So it is
compared, and put back. A forward that changes state has no plan, as a replay changes nothing.
"""

from __future__ import annotations

import operator
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from types import CellType, FunctionType
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from sfast_ext.behaviour.quick_check import content_of
from sfast_ext.capture import counters
from sfast_ext.capture.reachable import Reachable, Where, words
from sfast_ext.preparation import is_shown

_absent: Any = object()
# nesting to which new values are compared with old ones
_MAX_DEPTH = 4
# of tensors that are put back; others are only compared
_KEPT_BYTES = 1 << 20


class State(Reachable):
    """A copy of the state that a forward can reach.

    Args:
        root: the module.
        forward: its original forward, which may be a wrapper.
        ignored: attributes of modules without influence on behaviour, and parameters in whose defaults forwards only
            note where they are. They may change.
        contents: whether the contents of tensors are put back as well, up to a size.
    """

    def __init__(
        self,
        root: nn.Module,
        forward: Callable[..., Any],
        ignored: frozenset[str] = frozenset(),
        *,
        contents: bool = False,
    ) -> None:
        super().__init__()
        self._ignored, self._contents = ignored, contents
        self._noted: set[int] = set()
        self._namespaces: list[tuple[Where, Any, dict, dict, bool]] = []
        self._containers: list[tuple[Where, Any, Any, bool]] = []
        # most containers are the empty dictionaries of hooks
        self._empty: list[tuple[Where, Any, bool]] = []
        self._weights: list[tuple[Where, dict, dict]] = []
        self._cells: list[tuple[Where, CellType, Any, bool]] = []
        self._names: list[tuple[Where, dict, str, Any]] = []
        self._slots: list[tuple[Where, Any, str, Any, bool]] = []
        self._classes: list[tuple[type, dict[str, Any]]] = []
        self._counters: list[tuple[Where, Any, Callable[[Any], Any], Any, bool]] = []
        self._tensors: list[tuple[Where, torch.Tensor, int, Any, bool]] = []
        self.walk(root, forward)

    def namespace(self, where: Where, holder: Any, values: dict[str, Any]) -> None:
        """See `Reachable`."""
        self._namespaces.append((where, holder, values, dict(values), self.theirs))

    def container(self, where: Where, container: Any) -> None:
        """See `Reachable`."""
        self._containers.append((where, container, _copy(container), self.theirs))

    def empty(self, where: Where, container: Any) -> None:
        """See `Reachable`."""
        self._empty.append((where, container, self.theirs))

    def _function(self, where: Where, function: FunctionType) -> None:
        self._noted.update(map(id, _defaults_of(function, self._ignored)))
        super()._function(where, function)

    def weights(self, where: Where, container: dict[str, Any]) -> None:
        """See `Reachable`."""
        self._weights.append((where, container, dict(container)))

    def cell(self, where: Where, cell: CellType) -> None:
        """See `Reachable`."""
        self._cells.append((where, cell, content_of(cell), self.theirs))

    def name(self, where: Where, home: dict[str, Any], name: str) -> None:
        """See `Reachable`."""
        self._names.append((where, home, name, home.get(name, _absent)))

    def slot(self, where: Where, holder: Any, name: str) -> None:
        """See `Reachable`."""
        self._slots.append((where, holder, name, getattr(holder, name, _absent), self.theirs))

    def kind(self, kind: type) -> None:
        """See `Reachable`."""
        self._classes.append((kind, dict(vars(kind))))

    def counter(self, where: Where, value: Any, read: Callable[[Any], Any]) -> None:
        """See `Reachable`."""
        self._counters.append((where, value, read, read(value), self.theirs))

    def tensor(self, where: Where, tensor: torch.Tensor) -> None:
        """See `Reachable`."""
        if not tensor.is_inference():
            small = self._contents and tensor.numel() * tensor.element_size() <= _KEPT_BYTES
            kept = tensor.detach().clone() if small and type(tensor) is torch.Tensor else None
            self._tensors.append((where, tensor, tensor._version, kept, self.theirs))

    def weights_replaced(self, *, for_good: bool = False) -> None:
        """The parameters have been replaced by us since; `for_good` if they are going to be again."""
        self._weights = [] if for_good else [(where, now, dict(now)) for where, now, _ in self._weights]

    def changed(self) -> str | None:
        """The place of the first change, or None. A result that is kept in a cache is no change. Nor are parameters and
        buffers that were replaced: an offload does that, and the weight arena follows them."""
        changes = self._changes(weights=False)
        return next((words(where) for where, _, counts, _ in changes if counts), None)

    def only_filled(self) -> bool:
        """Whether all that changed was empty before, as what a forward computes at its first use and keeps."""
        return all(undo.was_empty for _, undo, counts, _ in self._changes(weights=False) if counts)

    def put_back(self, *, ignored_too: bool = False) -> tuple[str | None, bool]:
        """Put everything back; ignored attributes if that is asked for.

        What the model does not hold itself is left as it is if other threads run, which may have written to it, unless
        fake tensors are in it.

        Returns:
            The place of the first change, or None; and whether all changes may be the work of another thread.
        """
        alone = threading.active_count() == 1
        first, others = None, True
        for where, undo, counts, theirs in list(self._changes()):
            maybe_others = theirs and not alone and not _has_fake(undo.now)
            if not maybe_others and (ignored_too or not undo.ignored):
                undo()
            if counts:
                first = first or words(where)
                others = others and maybe_others
        return first, first is not None and others

    def _changes(self, *, weights: bool = True) -> Iterator[tuple[Where, _Undo, bool, bool]]:
        """For each change: the place, what takes it back, whether it is state, and whether another thread may write
        there."""
        for where, holder, now, was, theirs in self._namespaces:
            if not _same(now, was):
                names = [n for n in {**now, **was} if now.get(n, _absent) is not was.get(n, _absent)]
                names = [n for n in names if not is_shown(holder, n)]
                module = isinstance(holder, nn.Module)
                for name in names:
                    a, b = now.get(name, _absent), was.get(name, _absent)
                    ignored = module and name in self._ignored
                    undo = _Undo(_set_item, now, name, b, was, now=a, ignored=ignored)
                    yield (where, name), undo, not ignored and not _equal(a, b), theirs
        for where, container, was, theirs in self._containers:
            if not _same(container, was) and not _only_dead(container, was):
                counts = id(container) not in self._noted and not _alike(container, was)
                yield where, _Undo(_refill, container, was, now=container), counts, theirs
        if any(container for _, container, _ in self._empty):
            for where, container, theirs in self._empty:
                if container:
                    counts = id(container) not in self._noted
                    yield where, _Undo(_refill, container, (), now=container), counts, theirs
        for where, now, was in self._weights if weights else ():
            if not _same(now, was):
                yield where, _Undo(_refill, now, was, now=now), True, False
        for where, cell, was, theirs in self._cells:
            now = content_of(cell)
            if now is not was:
                yield where, _Undo(_set_cell, cell, was, now=now), not _equal(now, was), theirs
        for where, home, name, was in self._names:
            now = home.get(name, _absent)
            if now is not was and not is_shown(home, name):
                yield where, _Undo(_set_item, home, name, was, now=now), not _equal(now, was), True
        for where, holder, name, was, theirs in self._slots:
            now = getattr(holder, name, _absent)
            if now is not was and not is_shown(holder, name):
                yield where, _Undo(_set_attribute, holder, name, was, now=now), not _equal(now, was), theirs
        for kind, before in self._classes:
            attributes = vars(kind)
            if not _same(attributes, before):
                for name in {*attributes, *before}:
                    now, was = attributes.get(name, _absent), before.get(name, _absent)
                    if now is not was:
                        undo = _Undo(_set_attribute, kind, name, was, now=now)
                        yield (kind.__qualname__, name), undo, not _equal(now, was), True
        for where, value, read, was, theirs in self._counters:
            if not _equal(read(value), was, -_MAX_DEPTH * 4):
                counts = read is not counters.of_cache
                # what is in a cache is not seen
                yield where, _Undo(counters.put_back, value, was, now=None), counts, theirs and counts
        for where, tensor, version, kept, theirs in self._tensors:
            if tensor._version != version:
                yield where, _Undo(_set_contents, tensor, kept, now=None), True, theirs


def _defaults_of(function: FunctionType, names: frozenset[str]) -> list[Any]:
    """The defaults of parameters of these names."""
    code, values = function.__code__, function.__defaults__ or ()
    positional = code.co_varnames[code.co_argcount - len(values) : code.co_argcount]
    defaults = {**dict(zip(positional, values)), **(function.__kwdefaults__ or {})}
    return [value for name, value in defaults.items() if name in names]


class _Undo:
    def __init__(self, function: Callable[..., Any], *args: Any, now: Any, ignored: bool = False) -> None:
        self._function, self._args = function, args
        self.now, self.ignored = now, ignored

    @property
    def was_empty(self) -> bool:
        """Whether there was nothing before in the place that was changed."""
        was = self._args[_BEFORE[self._function]] if self._function in _BEFORE else self
        return was is None or was is _absent or (isinstance(was, (tuple, list, dict, set)) and not was)

    def __call__(self) -> None:
        self._function(*self._args)


def _set_item(home: dict[str, Any], name: str, value: Any, order: Iterable[str] = ()) -> None:
    if value is _absent:
        dict.pop(home, name, None)
        return
    removed = name not in home
    dict.__setitem__(home, name, value)
    for each in [*order] if removed else ():
        if each in home:
            dict.__setitem__(home, each, dict.pop(home, each))


def _set_attribute(holder: Any, name: str, value: Any) -> None:
    setter = type if isinstance(holder, type) else object
    if value is not _absent:
        setter.__setattr__(holder, name, value)
    elif hasattr(holder, name):
        setter.__delattr__(holder, name)


def _set_cell(cell: CellType, value: Any) -> None:
    cell.cell_contents = value


def _set_contents(tensor: torch.Tensor, kept: torch.Tensor | None) -> None:
    if kept is not None:
        with torch.no_grad():
            tensor.detach().copy_(kept)


# which argument is the value of before
_BEFORE: dict[Any, int] = {_set_item: 2, _set_attribute: 2, _set_cell: 1}


def _plain(container: Any) -> Any:
    """The class whose methods tell what is in a dictionary. A subclass of it may make an object for each look."""
    return next((kind for kind in (OrderedDict, dict) if isinstance(container, kind)), type(container))


def _copy(container: Any) -> Any:
    if isinstance(container, dict):
        plain = _plain(container)
        return dict(zip(plain.keys(container), plain.values(container)))
    return set(container) if isinstance(container, set) else list(container)


def _items(container: Any) -> Iterable[Any]:
    if not isinstance(container, dict):
        return container
    plain = _plain(container)
    return (*plain.keys(container), *plain.values(container))


def _same(now: Any, was: Any) -> bool:
    if len(now) != len(was):
        return False
    if isinstance(now, set):
        return now <= was
    if isinstance(was, dict):
        # in their order: it is what a forward sees that goes through one
        plain = _plain(now)
        same = all(map(operator.is_, plain.values(now), was.values()))
        return same and all(map(operator.is_, plain.keys(now), was))
    return all(map(operator.is_, now, was))


def _alike(now: Any, was: Any) -> bool:
    return _equal(_copy(now), was)


def _only_dead(now: Any, was: Any) -> bool:
    """Whether all that is missing are entries of weak references whose objects are gone."""
    if isinstance(was, dict):
        now = _copy(now)
        missing = [key for key in was if key not in now]
        gone = all(_dead(key) or _dead(was[key]) for key in missing)
        return bool(missing) and gone and all(was.get(key, _absent) is value for key, value in now.items())
    return isinstance(was, set) and now < was and all(map(_dead, was - now))


def _dead(value: Any) -> bool:
    return isinstance(value, weakref.ref) and value() is None


def _equal(a: Any, b: Any, depth: int = 0) -> bool:
    """Whether two values are the same, or new objects of equal value."""
    if a is b:
        return True
    if type(a) is not type(b) or depth > _MAX_DEPTH:
        return False
    if isinstance(a, (bool, int, float, complex, str, bytes, range, torch.dtype, torch.device)):
        return bool(a == b) or (a != a and b != b)
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(_equal(x, y, depth + 1) for x, y in zip(a, b))
    if isinstance(a, dict):
        a, b = _copy(a), _copy(b)
        return list(a) == list(b) and all(_equal(a[key], b[key], depth + 1) for key in a)
    return False


def _has_fake(value: Any, depth: int = 0) -> bool:
    if isinstance(value, FakeTensor):
        return True
    if depth > _MAX_DEPTH:
        return False
    if isinstance(value, (dict, list, set, deque, tuple, frozenset)):
        return any(_has_fake(item, depth + 1) for item in _items(value))
    held = getattr(value, "__dict__", None)
    return isinstance(held, dict) and not isinstance(value, type) and _has_fake(list(held.values()), depth + 1)


def _refill(container: Any, was: Any) -> None:
    # by the methods of the base class: a subclass may refuse writes
    if isinstance(container, list):
        list.__setitem__(container, slice(None), list(was))
    elif isinstance(container, dict):
        plain = _plain(container)
        plain.clear(container)
        for key, value in dict(was).items():
            plain.__setitem__(container, key, value)
    elif isinstance(container, set):
        set.clear(container)
        set.update(container, was)
    else:
        deque.clear(container)
        deque.extend(container, was)
