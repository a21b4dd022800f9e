"""A small card, emulated on a larger GPU: torch's allocator stops where the card's memory would end, and whoever asks
how much there is, is told of such a card."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

GIB = 1 << 30
CONTEXT = 450 << 20
"""Bytes that the driver and a CUDA context take of a card; with a desktop on it, it is more."""


def usable(gib: float) -> int:
    """Bytes of a card of so many GiB that torch can have."""
    return int(gib * GIB) - CONTEXT


def free(total: int, reserved: int) -> int:
    """Bytes that such a card has left, where torch holds so many."""
    return max(0, total - reserved)


class Properties:
    """The properties of the GPU, with another memory."""

    def __init__(self, own: Any, total: int) -> None:
        self._own, self.total_memory = own, total

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)


@contextlib.contextmanager
def small_card(gib: float) -> Iterator[int]:
    """From now on the GPU has so many GiB. Gives what of them torch can have, in bytes.

    What torch holds already counts: call it when the models are made and the cache is empty.

    Raises:
        ValueError: the GPU is no larger.
    """
    total, own = usable(gib), torch.cuda.mem_get_info()[1]
    if total >= own:
        raise ValueError(f"this GPU has {own / GIB:.1f} GiB: it cannot pass for one of {gib:g}")
    memory: Any = torch.cuda.memory
    properties = torch.cuda.get_device_properties
    asked = torch.cuda.mem_get_info, memory.mem_get_info

    def mem_get_info(device: Any = None) -> tuple[int, int]:
        return free(total, torch.cuda.memory_reserved(device)), total

    def get_device_properties(device: Any = None) -> Any:
        return Properties(properties(torch.cuda.current_device() if device is None else device), total)

    torch.cuda.set_per_process_memory_fraction(total / own)
    try:
        torch.cuda.mem_get_info = memory.mem_get_info = mem_get_info
        torch.cuda.get_device_properties = get_device_properties
        yield total
    finally:
        torch.cuda.mem_get_info, memory.mem_get_info = asked
        torch.cuda.get_device_properties = properties
        torch.cuda.set_per_process_memory_fraction(1.0)
