"""The rotations of comfy_kitchen 0.2.19 as operators of the same names, which compute what its plain PyTorch does."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

NAMES = ("apply_rope", "apply_rope1", "apply_rope_split_half", "apply_rope_split_half1")
"""Those that end in 1 take one tensor and a table, others two."""


def rotated(x: Tensor, table: Tensor, halves: bool) -> Tensor:
    """x times the matrices of its pairs."""
    wide = x.to(table.dtype)
    pairs = wide.unflatten(-1, (2, -1)).transpose(-1, -2) if halves else wide.unflatten(-1, (-1, 2))
    turned = (table * pairs.unsqueeze(-2)).sum(-1)
    return (turned.transpose(-1, -2) if halves else turned).flatten(-2).to(x.dtype)


def operators() -> Any:
    """`torch.ops.comfy_kitchen`, with stand-ins unless the library has made it."""
    if not hasattr(torch.ops.comfy_kitchen, NAMES[0]):
        library = torch.library.Library("comfy_kitchen", "FRAGMENT")
        _KEPT.append(library)
        for name in NAMES:
            single, halves = name.endswith("1"), "split_half" in name
            given, result = ("Tensor x", "Tensor") if single else ("Tensor xq, Tensor xk", "(Tensor, Tensor)")
            library.define(f"{name}({given}, Tensor freqs_cis) -> {result}")

            def compute(*tensors: Tensor, single: bool = single, halves: bool = halves) -> Any:
                found = tuple(rotated(x, tensors[-1], halves) for x in tensors[:-1])
                return found[0] if single else found

            library.impl(name, compute, "CompositeExplicitAutograd")
    return torch.ops.comfy_kitchen


_KEPT: list[Any] = []


def table(*rows: int, columns: int) -> Tensor:
    """A rotation for each pair of so many columns, as Forge Neo's `rope` makes it."""
    angle = torch.randn(*rows, columns // 2)
    return torch.stack([angle.cos(), -angle.sin(), angle.sin(), angle.cos()], -1).unflatten(-1, (2, 2))
