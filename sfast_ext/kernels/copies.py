"""What a call brings, copied to where its graph reads it by one launch: csrc/copies.cu.

torch takes 40 microseconds of the host's time to copy three tensors behind a graph, this 15 (on an NVIDIA H200's host).
Where NVRTC is not there, torch copies one after another.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sfast_ext.kernels import _cuda
from sfast_ext.kernels._triton import INTERPRETED

logger = logging.getLogger("sfast_ext")

_MOST = 16  # tensors
_LARGEST = 1 << 22  # bytes of one: of more torch makes more blocks
_BLOCKS, _THREADS = 32, 256


class Copies:
    """Copies to the same tensors again and again.

    Args:
        targets: tensors of one device.
    """

    def __init__(self, targets: Sequence[Tensor]) -> None:
        self._targets = list(targets)
        self._index = targets[0].get_device() if targets else -1
        some = [i for i, t in enumerate(targets) if t.is_contiguous() and 0 < t.nbytes <= _LARGEST][:_MOST]
        self._kinds = {i: (targets[i].dtype, targets[i].nbytes, targets[i].data_ptr()) for i in some}
        self._table = (ctypes.c_longlong * (3 * _MOST))()
        self._arguments = (ctypes.c_void_p * 1)(ctypes.addressof(self._table))
        self._function = self._found() if self._index >= 0 and some and not INTERPRETED else None

    def _found(self) -> Any:
        with torch.cuda.device(self._index):
            try:
                return _KERNEL.warmup(MOST=_MOST) if _KERNEL.available(self._targets[0].device) else None
            except _cuda.Unavailable:
                return None  # the log has it

    def __call__(self, sources: Sequence[Tensor | None]) -> None:
        """Copies each source, of its target's shape, on the current stream; a target of None stays as it is."""
        taken: list[tuple[Tensor, Tensor]] = []
        ours = self._function is not None and torch.cuda.current_device() == self._index
        for i, (target, source) in enumerate(zip(self._targets, sources)):
            if source is None:
                continue
            kind = self._kinds.get(i) if ours else None
            if kind is not None and (source.dtype, source.nbytes) == kind[:2] and _plain(source, self._index):
                place = 3 * len(taken)
                self._table[place : place + 3] = [kind[2], source.data_ptr(), kind[1]]
                taken.append((target, source))
            else:
                target.copy_(source, non_blocking=True)
        if taken:
            try:
                self._launch(len(taken))
            except _cuda.Unavailable as exc:
                logger.warning("copies.cu is not used any more: %s", exc)
                self._function = None
                for target, source in taken:
                    target.copy_(source, non_blocking=True)

    def _launch(self, count: int) -> None:
        driver = _cuda.bindings()[0]  # type: ignore[index]
        _cuda.bind(self._index)
        stream, table = _cuda.current_stream(self._index), ctypes.addressof(self._arguments)
        _cuda.checked(driver.cuLaunchKernel(self._function, _BLOCKS, count, 1, _THREADS, 1, 1, 0, stream, table, 0))


def _plain(source: Tensor, index: int) -> bool:
    plain = type(source) is Tensor and source.get_device() == index
    return plain and source.is_contiguous() and not source.is_neg()


_KERNEL = _cuda.Source("copies", lambda *args, **constants: ([], _THREADS, 0), ("copies",))
