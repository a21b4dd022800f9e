"""Two buffers of pinned system memory, which one copy after another takes.

torch keeps pinned memory for as long as the process runs, and gives a buffer out again only once all that was copied
from it has arrived: a copy that begins before that would pin two more.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

Buffers = Sequence[torch.Tensor]
"""Two tensors of bytes."""


class Arrival(Protocol):
    """What is used of `torch.cuda.Event`."""

    def synchronize(self) -> object:
        """Wait until all that was copied before it has arrived."""


_spare: list[tuple[Buffers, Arrival | None]] = []


def take(size: int) -> Buffers | None:
    """Two buffers of so many bytes. None if no more can be pinned, or if torch was built for another NumPy."""
    with contextlib.suppress(IndexError):
        buffers, arrival = _spare.pop()
        if len(buffers[0]) == size:
            if arrival is not None:
                arrival.synchronize()
            return buffers
    try:
        # whoever takes them later need not be in inference mode
        with torch.inference_mode(False):
            buffers = [_buffer(size) for _ in range(2)]
        # raises without NumPy, by which threads copy
        buffers[0].numpy()
        return buffers
    except RuntimeError:
        return None


def give_back(buffers: Buffers, arrival: Arrival | None = None) -> None:
    """The next copy may take them.

    Args:
        arrival: after it nothing is copied from them any more; None: nothing is now.
    """
    _spare[:] = [(buffers, arrival)]


def free() -> None:
    """Give pinned memory that is not in use back to the system, what torch keeps for others as well. A torch that has
    no function for that keeps it."""
    _spare.clear()
    if torch.cuda.is_initialized():
        # earlier and later versions of torch
        for name in ("_host_emptyCache", "_accelerator_emptyHostCache"):
            empty: Callable[[], None] | None = getattr(torch._C, name, None)
            if empty is not None:
                empty()
                return


def _buffer(size: int) -> torch.Tensor:
    # torch keeps its memory until the last copy from it is done
    return torch.empty(size, dtype=torch.uint8, pin_memory=True)
