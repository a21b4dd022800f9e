"""A forward on the GPU whose weights stay in system memory: each comes for the operation that reads it.

It takes as long as to move all weights once, and of the GPU's memory no more than the largest of them.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sfast_ext.weights.original_layout import live_tensor, reach, set_data
from sfast_ext.weights.staging import Staging


class NotStreamed(Exception):
    """An operation writes to a weight in a way that cannot be followed."""


_COMMON = frozenset({"builtins", "torch", "sfast_ext"})
"""Where classes are of exceptions that may be due to weights in system memory."""


class Streamed(TorchDispatchMode):
    """Within, operations of this thread read some tensors in system memory as if they were on a GPU. What they are on
    is still seen by who asks for their device: what then goes wrong raises.

    Args:
        values: these tensors. What shares their memory counts as well.
    """

    def __init__(self, values: Iterable[torch.Tensor], device: torch.device) -> None:
        super().__init__()
        self._device = device
        # while they are held no other storage has their address
        self._held = {value.untyped_storage()._cdata: value for value in values}
        self._staging = Staging()
        self._views: list[weakref.ref[torch.Tensor]] = []

    def __enter__(self) -> Streamed:
        self._copy = self._staging.__enter__()
        super().__enter__()
        return self

    def __exit__(self, kind: Any, *rest: Any) -> None:
        super().__exit__(kind, *rest)
        try:
            if kind is None:
                self._move_views()
            else:
                # a run after one that failed finds them; what is staged is dropped
                self._copy = torch.Tensor.copy_
                with contextlib.suppress(torch.cuda.OutOfMemoryError):
                    self._move_views()
        finally:
            self._staging.__exit__(kind, *rest)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        read = [x for x in tensors((args, kwargs)) if self._is_held(x)]
        if not read:
            return function(*args, **kwargs)
        if _is_view(function):
            result = function(*args, **kwargs)
            self._views.extend(map(weakref.ref, tensors(result)))
            return result
        written = [x for x in _written(function, args, kwargs) if self._is_held(x)]
        if written and not self._may_write(function):
            raise NotStreamed(str(function))
        there = {id(x): self._on_gpu(x) for x in read}
        self._staging.deliver()
        args, kwargs = _replaced(args, there), _replaced(kwargs, there)
        result = function(*args, **kwargs)
        for x in written:
            x.copy_(there[id(x)])
        return _replaced(result, {id(there[id(x)]): x for x in written}) if written else result

    def _may_write(self, function: Any) -> bool:
        return False

    def _move_views(self) -> None:
        """Views that the forward has kept, or returns, are on the GPU, as they would be if all weights were there."""
        kept = [x for view in self._views if (x := view()) is not None and self._is_held(x)]
        with torch.inference_mode(False), torch.no_grad():
            for x in kept:
                set_data(x, self._on_gpu(x))

    def _is_held(self, x: torch.Tensor) -> bool:
        # others have no storage that can be asked for
        plain = type(x) in (torch.Tensor, torch.nn.Parameter) and x.layout is torch.strided
        return plain and x.untyped_storage()._cdata in self._held

    def _on_gpu(self, x: torch.Tensor) -> torch.Tensor:
        # it may be expanded, or a part
        size = reach(x)
        with torch.inference_mode(False), torch.no_grad():
            source = live_tensor(x).as_strided((size,), (1,))
            there = torch.empty(size, dtype=x.dtype, device=self._device)
            self._copy(there, source)
            return there.as_strided(x.shape, x.stride())


def tensors(structure: Any) -> Iterator[torch.Tensor]:
    """The tensors in tuples, lists and dicts."""
    if isinstance(structure, torch.Tensor):
        yield structure
    elif isinstance(structure, (list, tuple)):
        for x in structure:
            yield from tensors(x)
    elif isinstance(structure, dict):
        yield from tensors(list(structure.values()))


def is_theirs(exc: BaseException | None) -> bool:
    """Whether the model or a host has raised this itself, as to end a call. It may do so once."""
    return exc is None or type(exc).__module__.partition(".")[0] not in _COMMON and is_theirs(exc.__context__)


def _replaced(structure: Any, there: dict[int, torch.Tensor]) -> Any:
    if isinstance(structure, torch.Tensor):
        return there.get(id(structure), structure)
    if isinstance(structure, (list, tuple)):
        return type(structure)([_replaced(x, there) for x in structure])
    if isinstance(structure, dict):
        return {name: _replaced(x, there) for name, x in structure.items()}
    return structure


def _is_view(function: Any) -> bool:
    """Whether an operation gives another view of memory, and reads none of it."""
    schema = function._schema
    aliases = [r.alias_info is not None and not r.alias_info.is_write for r in schema.returns]
    return bool(aliases) and all(aliases) and not schema.is_mutable


def _written(function: Any, args: Any, kwargs: Any) -> Iterator[torch.Tensor]:
    declared = function._schema.arguments
    named = {**dict(zip((a.name for a in declared), args)), **kwargs}
    for argument in declared:
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from tensors(named.get(argument.name))
