"""The memory that the values of a graph need while it runs: which of them share memory, and what is alive at once.

Arguments, weights and libraries' workspaces are left out.
"""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from sfast_ext.kernels.backend import registry

LARGE = 64 << 20
"""Bytes of a result from which it matters which block of the allocator holds it."""


def peak_bytes(graph: fx.Graph) -> int:
    """The largest sum of what is alive at one time, in bytes."""
    return max(bytes_at(graph), default=0)


def bytes_at(graph: fx.Graph) -> list[int]:
    """What is alive while each node of a graph runs, in bytes, the node's result and workspace included."""
    nodes = list(graph.nodes)
    owner = owners(nodes)
    last: dict[fx.Node, int] = {}
    for place, node in enumerate(nodes):
        for source in node.all_input_nodes:
            last[owner[source]] = place
        last.setdefault(owner[node], place)
    alive = 0
    found: list[int] = []
    ending: dict[int, int] = {}
    for place, node in enumerate(nodes):
        if owner[node] is node and node.op == "call_function":
            for size, end in _results(node, place, last):
                alive += size
                ending[end] = ending.get(end, 0) + size
        found.append(alive + _workspace(node))
        alive -= ending.pop(place, 0)
    return found


def step_bytes(graph: fx.Graph) -> int:
    """The most that one operation reads and makes, in bytes: no order of a graph's operations needs less."""
    nodes = list(graph.nodes)
    owner, most = owners(nodes), 0
    for node in nodes:
        if node.op == "call_function":
            read = {owner[source] for source in node.all_input_nodes} | {owner[node]}
            most = max(most, sum(_size(each) for each in read if each.op == "call_function"))
    return most


def outgrowing(graph: fx.Graph) -> list[fx.Node]:
    """The nodes with a large result that is larger than all before it: blocks of memory that those have left hold none
    of its size."""
    found, largest = list[fx.Node](), LARGE - 1
    for node in graph.nodes:
        val = node.meta.get("val") if node.op == "call_function" and base_of(node) is None else None
        size = max(map(_bytes, val if isinstance(val, tuple | list) else [val]), default=0)
        if size > largest:
            found.append(node)
            largest = size
    return found


def owners(nodes: Sequence[fx.Node]) -> dict[fx.Node, fx.Node]:
    """For each node of a graph, in order, the one that its memory was allocated for."""
    owner: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        base = base_of(node)
        owner[node] = node if base is None else owner[base]
    return owner


def base_of(node: fx.Node) -> fx.Node | None:
    """The node whose memory this one's result lies in; None if that is its own."""
    sources = node.all_input_nodes
    if node.op != "call_function" or not sources:
        return None
    if node.target is operator.getitem:
        given = given_memory(sources[0])
        if isinstance(given, list | tuple):
            return given[node.args[1]]  # type: ignore[return-value, index]
        # else each result of a kernel has separate memory
        return sources[0] if isinstance(sources[0].target, torch._ops.OpOverload) else None
    given = given_memory(node)
    if given is not None:
        return given if isinstance(given, fx.Node) else next(iter(given), None)
    schema = getattr(node.target, "_schema", None)
    views = schema is not None and any(result.alias_info is not None for result in schema.returns)
    return sources[0] if views or getattr(node.target, "__name__", "").startswith("reshape") else None


def given_memory(node: fx.Node) -> Any:
    """The argument of a kernel whose memory its result takes, or the list of those whose memory its results take, with
    None for a result of separate memory; None if there is none, or it is not given."""
    kernel = registry.of(node.target)
    return None if kernel is None or kernel.writes is None else given_argument(kernel, node, kernel.writes)


def given_argument(kernel: registry.Kernel[..., Any], node: fx.Node, place: int) -> Any:
    """The argument of a call at a place, by position or by name; None if there is none."""
    if place < len(node.args):
        return node.args[place]
    return node.kwargs.get(_parameters(kernel)[place]) if node.kwargs else None


@functools.lru_cache(maxsize=None)
def _parameters(kernel: registry.Kernel[..., Any]) -> list[str]:
    return list(inspect.signature(kernel).parameters)


def _results(node: fx.Node, place: int, last: dict[fx.Node, int]) -> list[tuple[int, int]]:
    """The bytes of what a node makes, and at which node of the graph they are freed."""
    val = node.meta.get("val")
    if node.target is operator.getitem:
        return []  # counted where it was made
    if not isinstance(val, tuple | list):
        return [(_bytes(val), last[node])]
    ends = [place] * len(val)
    for taken in node.users:
        index = taken.args[1]
        ends[index] = max(ends[index], last.get(taken, last[node]))  # type: ignore[index, call-overload]
    given = given_memory(node) or [None] * len(val)
    sizes = [_bytes(x) if memory is None else 0 for x, memory in zip(val, given, strict=True)]
    return list(zip(sizes, ends, strict=True))


def _size(node: fx.Node) -> int:
    val = node.meta.get("val")
    return sum(map(_bytes, val)) if isinstance(val, tuple | list) else _bytes(val)


def _workspace(node: fx.Node) -> int:
    """Bytes that one of our kernels holds while it runs, in addition to its result."""
    kernel = registry.of(node.target)
    if kernel is None or kernel.workspace is None:
        return 0
    return kernel.workspace(*fx.map_arg(node.args, lambda n: n.meta.get("val")))


def _bytes(val: Any) -> int:
    return val.numel() * val.element_size() if isinstance(val, torch.Tensor) else 0
