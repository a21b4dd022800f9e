"""Group norms on a CPU that write to the memory that they are given, as they do on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor, fx

from sfast_ext.kernels.backend.graph_memory import owners
from sfast_ext.kernels.group_norm import add_group_norm, group_norm


def overwriting(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Within a test, norms overwrite what they are given. Returns the bytes of each result that took memory."""
    taken: list[int] = []

    def over(y: Tensor, out: Tensor) -> Tensor:
        assert y.dtype == out.dtype and y.shape == out.shape
        taken.append(y.nbytes)
        return out.copy_(y)

    def plain(*args: Any, out: Tensor | None = None, **options: Any) -> Tensor:
        y = group_norm.reference(*args, **options)
        return y if out is None else over(y, out)

    def pair(*args: Any, out: tuple[None, Tensor] | None = None, **options: Any) -> tuple[Tensor, Tensor]:
        total, y = add_group_norm.reference(*args, **options)
        return total, (y if out is None else over(y, out[1]))

    monkeypatch.setattr(group_norm.launch, "function", plain)
    monkeypatch.setattr(add_group_norm.launch, "function", pair)
    return taken


def largest_value(graph: fx.Graph) -> int:
    """Bytes of the largest value that a graph makes."""
    nodes, sizes = list(graph.nodes), [0]
    for node, owner in owners(nodes).items():
        val = node.meta.get("val")
        if owner is node and node.op == "call_function":
            sizes += [x.nbytes for x in (val if isinstance(val, tuple | list) else [val]) if isinstance(x, Tensor)]
    return max(sizes)
