"""How much memory the values of a graph need at once, told by their shapes and by who reads them last."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from sfast_ext.kernels.backend import registry


def peak_bytes(graph: fx.Graph) -> int:
    """The largest sum of what is alive at one time, in bytes; arguments, weights and libraries' workspaces aside."""
    nodes = list(graph.nodes)
    owner: dict[fx.Node, fx.Node] = {}
    last: dict[fx.Node, int] = {}
    for place, node in enumerate(nodes):
        base = _base(node)
        owner[node] = node if base is None else owner[base]
        for source in node.all_input_nodes:
            last[owner[source]] = place
        last.setdefault(owner[node], place)
    alive = peak = 0
    ending: dict[int, int] = {}
    for place, node in enumerate(nodes):
        if owner[node] is node and node.op == "call_function":
            for size, end in _results(node, place, last):
                alive += size
                ending[end] = ending.get(end, 0) + size
        peak = max(peak, alive + _workspace(node))
        alive -= ending.pop(place, 0)
    return peak


def _results(node: fx.Node, place: int, last: dict[fx.Node, int]) -> list[tuple[int, int]]:
    """The bytes of what a node makes, and where in the graph they are let go of."""
    val = node.meta.get("val")
    if node.target is operator.getitem:
        return []  # counted where it was made
    if not isinstance(val, tuple | list):
        return [(_bytes(val), last[node])]
    ends = [place] * len(val)
    for taken in node.users:
        index = taken.args[1]
        ends[index] = max(ends[index], last.get(taken, last[node]))  # type: ignore[index, call-overload]
    return list(zip(map(_bytes, val), ends, strict=True))


def _workspace(node: fx.Node) -> int:
    """Bytes that a kernel of ours holds while it runs, beside its result."""
    kernel = registry.of(node.target)
    if kernel is None or kernel.workspace is None:
        return 0
    return kernel.workspace(*fx.map_arg(node.args, lambda n: n.meta.get("val")))


def _base(node: fx.Node) -> fx.Node | None:
    """The node whose memory this one is a view of."""
    sources = node.all_input_nodes
    if node.op != "call_function" or not sources:
        return None
    if node.target is operator.getitem:
        # a kernel's several results are memory of their own each
        return sources[0] if isinstance(sources[0].target, torch._ops.OpOverload) else None
    kernel = registry.of(node.target)
    if kernel is not None and kernel.writes is not None:
        return node.args[kernel.writes]  # type: ignore[return-value]
    schema = getattr(node.target, "_schema", None)
    views = schema is not None and any(result.alias_info is not None for result in schema.returns)
    return sources[0] if views or getattr(node.target, "__name__", "").startswith("reshape") else None


def _bytes(val: Any) -> int:
    return val.numel() * val.element_size() if isinstance(val, torch.Tensor) else 0
