"""`Streamed` for forwards that ask where a weight is, or write to it. Of the GPU's memory it takes no more than the
layer that has most weights."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torchs

from sfast_ext.weights.digest import digest_of
from sfast_ext.weights.original_layout import live_tensor, set_data
from sfast_ext.weights.streamed import Streamed


class StreamedByLayer(Streamed):
    """`Streamed`, in which the parameters of a layer are on the GPU while it is called: its forward, or a host's around
    it, may ask for their device and write to them. What was written is in system memory afterwards, as is what an
    operation writes elsewhere."""

    def __init__(self, values: Iterable[torch.Tensor], device: torch.device) -> None:
        super().__init__(values, device)
        # for each layer that is being called: parameter, its memory, the digest of its values
        self._called: list[tuple[nn.Module, list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]]] = []
        self._moving = False

    def __enter__(self) -> StreamedByLayer:
        super().__enter__()
        # of all modules: those of the model stay as they are
        self._thread = threading.get_ident()
        self._hooks = (
            torchs.register_module_forward_pre_hook(self._before),
            torchs.register_module_forward_hook(self._after),
        )
        return self

    def __exit__(self, kind: Any, *rest: Any) -> None:
        try:
            for hook in self._hooks:
                hook.remove()
            # after an exception
            while self._called:
                self._leave()
        finally:
            super().__exit__(kind, *rest)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._moving:
            return function(*args, **(kwargs or {}))
        return super().__torch_dispatch__(function, types, args, kwargs)

    def _may_write(self, function: Any) -> bool:
        # it may change values, but no shapes and strides
        return torch.Tag.inplace_view not in function.tags

    def _before(self, layer: nn.Module, _: Any) -> None:
        if threading.get_ident() != self._thread:
            return
        held = [value for value in layer._parameters.values() if value is not None and self._is_held(value)]
        # a layer within its own call has them, and the end of the inner one is not that of the outer one
        if not held and all(each is not layer for each, _ in self._called):
            return
        lent: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        self._called.append((layer, lent))
        self._moving = True
        try:
            with torch.inference_mode(False), torch.no_grad():
                there = [self._on_gpu(value) for value in held]
                self._staging.deliver()
                for value, arrived in zip(held, there):
                    lent.append((value, live_tensor(value), digest_of(arrived)))
                    set_data(value, arrived)
        finally:
            self._moving = False

    def _after(self, layer: nn.Module, *_: Any) -> None:
        # one that raised, and what it is in, have theirs until the end
        if threading.get_ident() == self._thread and self._called and self._called[-1][0] is layer:
            self._leave()

    def _leave(self) -> None:
        _, lent = self._called.pop()
        self._moving = True
        try:
            with torch.inference_mode(False), torch.no_grad():
                for value, source, digest in lent:
                    if value.is_cuda and value.shape == source.shape and value.dtype == source.dtype:
                        now = live_tensor(value)
                        if not _is_same(now, digest, source):
                            source.copy_(now)
                        set_data(value, source)
        finally:
            self._moving = False


def is_hook(hook: object) -> bool:
    """Whether a hook on all modules is one of these. Other threads are as without it."""
    return isinstance(getattr(hook, "__self__", None), StreamedByLayer)


def _is_same(value: torch.Tensor, digest: torch.Tensor, source: torch.Tensor) -> bool:
    """Whether a tensor on the GPU has a digest, or if there is no memory to compute it, the values of its source."""
    try:
        return torch.equal(digest_of(value), digest)
    except torch.cuda.OutOfMemoryError:
        return torch.equal(value.cpu(), source)
