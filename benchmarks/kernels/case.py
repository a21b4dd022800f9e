"""A kernel at one shape, with the PyTorch operations that it replaces, on random operands."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sfast_ext import kernels

KERNELS = kernels.registered()


@dataclass
class Case:
    """One kernel at one shape; both calls return a tensor, or a tuple or list of them."""

    kernel: str
    shape: str
    ours: Callable[[], Any]
    torch: Callable[[], Any]
    target: Callable[[], Any]
    """The reference, on the same operands in float64."""
    bytes: int
    """What must be read and written once."""
    composition: tuple[Callable[..., Any], list[Any], dict[str, Any]] | None = None
    """What torch.compile is given: a function and its arguments. None where another case is given the same."""


def case(kernel: str, shape: str, composition: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]) -> Case:
    record = KERNELS[kernel]
    given = [a if isinstance(a, list) else [a] for a in [*args, *kwargs.values()]]
    tensors = [a for each in given for a in each if isinstance(a, Tensor)]
    out = record.reference(*args, **kwargs)
    outputs = out if isinstance(out, (tuple, list)) else (out,)

    def target() -> Any:
        wide = {name: _wide(value) for name, value in kwargs.items() if name != "out_dtype"}
        return record.reference(*map(_wide, args), **wide)

    return Case(
        kernel,
        shape,
        lambda: record(*args, **kwargs),
        lambda: composition(*args, **kwargs),
        target,
        sum(t.numel() * t.element_size() for t in (*tensors, *outputs)),
        (composition, args, kwargs),
    )


def _wide(value: Any) -> Any:
    if isinstance(value, torch.dtype):
        return torch.float64
    return value.double() if isinstance(value, Tensor) else value


class Operands:
    """Random tensors."""

    def __init__(self, dtype: torch.dtype, device: str) -> None:
        self.dtype, self.device = dtype, device

    def randn(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.device, dtype=self.dtype)

    def image(self, channels: int, size: int) -> Tensor:
        return self.randn(2, channels, size, size).to(memory_format=torch.channels_last)

    def filters(self, columns: int, channels: int) -> Tensor:
        weight = self.randn(columns, channels, 3, 3) * (9 * channels) ** -0.5
        return weight.to(memory_format=torch.channels_last)
