"""The ceilings that times are held against: FLOPs of a call, the rate of a matrix product, of a copy."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch

TERA = 1e12


def flops(call: Callable[[], Any]) -> int:
    """Floating-point operations of the products, convolutions and attentions in a call of plain PyTorch."""
    from torch.utils.flop_counter import FlopCounterMode

    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


class Product:
    """A large matrix product of random numbers. `work` is in FLOPs."""

    def __init__(self, device: torch.device, size: int | None = None) -> None:
        on_gpu = device.type == "cuda"
        n = size or (8192 if on_gpu else 256)
        dtype = torch.float16 if on_gpu else torch.float32
        self._a, self._b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
        self._out = torch.empty_like(self._a)
        self.work = 2 * n**3

    def __call__(self) -> torch.Tensor:
        return torch.mm(self._a, self._b, out=self._out)


class Copy:
    """A large copy within the device's memory. `work` is in bytes, those read and those written."""

    def __init__(self, device: torch.device, size: int | None = None) -> None:
        n = size or (2 << 30 if device.type == "cuda" else 1 << 20)
        self._from = torch.randint(256, (n,), device=device, dtype=torch.uint8)
        self._to = torch.empty_like(self._from)
        self.work = 2 * n

    def __call__(self) -> torch.Tensor:
        return self._to.copy_(self._from)


def per_second(work: float, milliseconds: float) -> float:
    """Work (FLOPs or bytes) over time, in tera a second; the time is more than zero."""
    return work / milliseconds * 1e3 / TERA


def tera(load: Product | Copy, times: list[float]) -> float:
    """The rate at the median of these milliseconds."""
    return per_second(load.work, statistics.median(times))
