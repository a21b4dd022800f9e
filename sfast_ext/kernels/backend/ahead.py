"""Weights whose rows are compared ahead of their use, by products in front of it.

Products of 8-bit integers read weights that were quantised; at each step all rows are read in half precision, to know
which of them changed. Within `following`, while a CUDA graph is captured, `quantise_weights` hands most of them over
(`hand_over`), and blocks of `wgmma_gemm8` for the products of other weights compare them in the meantime, by warps that
have nothing else to do (`carried`). Behind them, in front of the first product that reads such a weight, `join`
launches what quantises the rows that changed, and compares those that no product came to.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from sfast_ext.kernels.backend import health, launch_log
from sfast_ext.kernels.backend.registry import Kernel

ENTRIES = 24
"""Weights that a launch carries, AHEAD in csrc/weight_digest.h."""
MOST_COLUMNS = 5120
"""Of a weight that products carry: a row is compared as a whole, and its warp must not be the last of a block."""
_PARTS = 64
_RATE = 0.6e6
"""Bytes that a product compares in a microsecond."""


class Part:
    """Weights that are compared ahead.

    Attributes:
        entries: their weights and banks, for `quantise_weights`.
        taken: an int32, how many times products took rows.
        size: bytes of the weights.
    """

    def __init__(self, entries: Sequence[Any], taken: Tensor, size: int, rest: Callable[[Part], None]) -> None:
        self.entries, self.taken, self.size, self.rest = entries, taken, size, rest
        self.left = float(size)
        self.owner = launch_log.kernel.get()

    def finish(self) -> None:
        """Launch the rest. What fails there is a fault of the kernel that handed it over."""
        try:
            self.rest(self)
        except Exception as exc:
            health.attribute(exc, self.owner)
            raise


class _Following:
    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.counters: Tensor | None = None
        self.parts: dict[int, list[Part]] = {}
        """By the address of the first rows of those that are joined at once, in the order of their use."""
        self.count = 0

    def finish(self, address: int) -> None:
        for part in self.parts.pop(address, ()):
            part.finish()


_following: ContextVar[_Following | None] = ContextVar("ahead", default=None)


@contextlib.contextmanager
def following(device: torch.device) -> Iterator[None]:
    """Within, in this thread and while it captures, weights are compared ahead. All of them are at the end."""
    state = _Following(device)
    token = _following.set(state)
    try:
        yield
        for address in list(state.parts):
            state.finish(address)
    finally:
        _following.reset(token)


def hand_over(rows: Sequence[Tensor], entries: Sequence[Any], size: int, rest: Callable[[Part], None]) -> bool:
    """Whether products compare these weights, of so many bytes in all, before `join(rows)` calls `rest`."""
    state = _following.get()
    if state is None or state.count == _PARTS or not rows:
        return False
    if state.counters is None:
        state.counters = torch.zeros(_PARTS, dtype=torch.int32, device=state.device)
    part = Part(entries, state.counters[state.count : state.count + 1], size, rest)
    state.count += 1
    state.parts.setdefault(rows[0].data_ptr(), []).append(part)
    return True


def carried(microseconds: float) -> Part | None:
    """What a product that takes so long compares in the meantime."""
    state = _following.get()
    if state is None:
        return None
    for part in (each for some in state.parts.values() for each in some):
        if part.left > 0:
            part.left -= microseconds * _RATE
            return part
    return None


def _joined(rows: Sequence[Tensor]) -> list[Tensor]:
    state = _following.get()
    if state is not None and rows:
        state.finish(rows[0].data_ptr())
    return list(rows)


join: Kernel[[Sequence[Tensor]], list[Tensor]] = Kernel(_joined, _joined, writes=0, needs_triton=False, part=True)
"""The same tensors, once they are written. Without `following` they are, and it launches nothing."""
