"""Records a run as a `Repetition`.

What happens is taken down while it happens, so that tensors live no longer than without it.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from sfast_ext.kernels.backend import launch_log
from sfast_ext.kernels.backend.launch_log import CudaLaunch, Entry, TritonLaunch
from sfast_ext.runtime.repetition import (
    ALIGNMENT,
    CannotRepeat,
    Launch,
    Repetition,
    Step,
    allocation,
    operation,
    tensors,
    triton_launch,
    view,
)

EMPTY = frozenset(
    f"aten::{name}" for name in ("empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided")
)
"""Operations that only allocate."""


class _Taken(NamedTuple):
    step: Step
    reads: set[int]
    makes: tuple[int, ...]
    kept: bool
    """Whether it does more than to make values."""


class RunRecorder(TorchDispatchMode):
    """Takes down the operations and launches of a run.

    Args:
        given: the tensors that come from outside.
    """

    def __init__(self, given: Sequence[Tensor]) -> None:
        super().__init__()
        self._places: dict[int, tuple[weakref.ref[Tensor], int]] = {}  # by id
        self._roots: list[tuple[int, int]] = []  # by value: the one whose memory it shares, and bytes behind its start
        self._dtypes: list[torch.dtype] = []  # by value
        self._taken: list[_Taken] = []
        self._refusal: str | None = None
        self._given = len(given)
        for x in given:
            if self._knows(x):
                self._refusal = "two inputs are one tensor"
            self._add(x)
        self._checks = [(x.shape, x.stride(), x.data_ptr() % ALIGNMENT) for x in given]

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Within is the run."""
        with launch_log.listening(self._launched), self:
            yield

    def repetition(self, result: Sequence[Tensor]) -> Repetition:
        """Of the run that was recorded.

        Raises:
            CannotRepeat: see `recorded_run`.
        """
        if self._refusal is not None:
            raise CannotRepeat(self._refusal)
        places = [self._place(x) for x in result]
        return Repetition(self._checks, self._needed(set(places)), len(self._roots) - self._given, places)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        self._append(self._operation, function, args, kwargs or {}, result)
        return result

    def _launched(self, entry: Entry) -> None:
        self._append(self._launch, entry)

    def _append(self, steps: Callable[..., list[_Taken]], *what: Any) -> None:
        # raised here, it would end the run, or be taken for the failure of a kernel
        if self._refusal is None:
            try:
                self._taken += steps(*what)
            except CannotRepeat as exc:
                self._refusal = str(exc)

    def _launch(self, entry: Entry) -> list[_Taken]:
        if isinstance(entry, CudaLaunch):
            launch = Launch(entry, self._root)
            return [_Taken(launch, launch.reads(), (), kept=True)]
        if isinstance(entry, TritonLaunch):
            reads = {self._place(x) for x in tensors((entry.args, entry.constants))}
            return [_Taken(triton_launch(entry, self._place), reads, (), kept=True)]
        raise CannotRepeat(entry.reason)

    def _operation(self, function: Any, args: Any, kwargs: Any, result: Any) -> list[_Taken]:
        given, made = list(tensors((args, kwargs))), list(tensors(result))
        reads = {self._place(x) for x in given}
        if not made and result is not None:
            raise CannotRepeat(f"{function} reads values")  # numbers beside tensors are sizes
        if any(self._root(x)[0] < self._given for x in _written(function, args, kwargs)):
            raise CannotRepeat(f"{function} writes to an input or a weight")
        makes = tuple(self._add(x, given) for x in made if not self._knows(x))
        if function._schema.name in EMPTY:
            return [_Taken(allocation(result, makes[0]), set(), makes, kept=False)]
        if len(makes) == len(made) and not function._schema.is_mutable and all(map(self._is_view, made)):
            return [self._view(x) for x in made]
        return [_Taken(operation(function, args, kwargs, result, self._place), reads, makes, kept=True)]

    def _is_view(self, x: Tensor) -> bool:
        root = self._root(x)[0]
        return root != self._place(x) and self._dtypes[root] == x.dtype

    def _view(self, x: Tensor) -> _Taken:
        at, (root, distance) = self._place(x), self._root(x)
        return _Taken(view(x, at, root, distance // x.element_size()), {root}, (at,), kept=False)

    def _needed(self, result: set[int]) -> list[tuple[Step, tuple[int, ...]]]:
        steps: list[tuple[Step, tuple[int, ...]]] = []
        alive = set(result)
        for step, reads, makes, kept in reversed(self._taken):
            if not kept and not alive.intersection(makes):
                continue
            dead = {place for place in {*reads, *makes} - alive if place >= self._given}
            steps.append((step, tuple(sorted(dead))))
            alive |= reads
        return steps[::-1]

    def _add(self, x: Tensor, among: Sequence[Tensor] = ()) -> int:
        """The place of a new value. It may share memory with one of some tensors."""
        place = len(self._roots)
        self._places[id(x)] = weakref.ref(x), place
        self._dtypes.append(x.dtype)
        memory = x.untyped_storage().data_ptr()
        for other in among:
            if other.untyped_storage().data_ptr() == memory and x.numel():
                root, offset = self._root(other)
                self._roots.append((root, offset + x.data_ptr() - other.data_ptr()))
                return place
        self._roots.append((place, 0))
        return place

    def _knows(self, x: Tensor) -> bool:
        found = self._places.get(id(x))
        return found is not None and found[0]() is x

    def _place(self, x: Tensor) -> int:
        if not self._knows(x):
            raise CannotRepeat("a tensor comes from elsewhere")
        return self._places[id(x)][1]

    def _root(self, x: Tensor) -> tuple[int, int]:
        return self._roots[self._place(x)]


def _written(function: Any, args: Any, kwargs: Any) -> Iterator[Tensor]:
    """The arguments of an operation that it writes to."""
    declared = function._schema.arguments
    named = {**dict(zip((a.name for a in declared), args)), **kwargs}
    for argument in declared:
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from tensors(named.get(argument.name))
