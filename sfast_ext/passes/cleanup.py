"""Removes operations that compute nothing, and merges casts, reshapes and permutations.

Values count, not their strides: a copy is needed only if something writes to it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import fx

from .rewrite import (
    CAST,
    RESHAPE,
    argument,
    aten,
    call,
    dtype,
    eliminate_dead,
    enters_autocast,
    erase,
    is_cast,
    is_number,
    is_op,
    mutated,
    overloads,
    replace,
    same_meta,
    shape,
    widens,
)

if TYPE_CHECKING:
    from .context import PassContext

Rule = Callable[[fx.Node, fx.Node], fx.Node | None]
"""Takes a node and its first argument; returns what replaces the node, or None."""

DROPOUT = overloads("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout")
SAME_VALUE = overloads("alias", "detach", "detach_", "lift", "lift_fresh", "lift_fresh_copy", "contiguous", "clone")
SAME_IF_SHAPE = overloads("expand", "slice.Tensor", "expand_as", "repeat", "repeat_interleave.self_int")
CAT = overloads("cat")
SLICE = overloads("slice.Tensor")
FRESH = overloads("clone", "_to_copy", "lift_fresh_copy", "contiguous", "repeat", "repeat_interleave.self_int")
FRESH |= CAST | CAT
PERMUTE = overloads("permute", "transpose.int", "t", "numpy_T", "movedim.int")
COPY = overloads("copy")
SCALE = overloads("mul.Tensor", "mul.Scalar", "div.Tensor", "div.Scalar")
SHIFT = overloads("add.Tensor", "add.Scalar", "sub.Tensor", "sub.Scalar")


def dropout(node: fx.Node, x: fx.Node) -> fx.Node | None:
    """dropout(x, 0 or not training) -> x"""
    off = argument(node, 2, "train") is False or argument(node, 1, "p") == 0
    return x if off else None


def same_value(node: fx.Node, x: fx.Node) -> fx.Node | None:
    """clone(x) -> x"""
    # A layout asked for by name stays; it costs nothing if the value has it.
    return None if node.kwargs.get("memory_format") is torch.channels_last else x


def same_if_shape(node: fx.Node, x: fx.Node) -> fx.Node | None:
    """slice(x, all of it) -> x; repeat(x, once) -> x"""
    # A slice of the whole has the whole's shape only when its step is 1.
    return x if same_meta(node, x) else None


def cast(node: fx.Node, x: fx.Node) -> fx.Node | None:
    """to(x, dtype of x) -> x; to(to(x, wider), dtype) -> to(x, dtype)"""
    if same_meta(node, x):
        return x
    inner = x.args[0] if is_cast(x) else None
    if not is_cast(node) or not isinstance(inner, fx.Node) or not widens(dtype(inner), dtype(x)):
        return None
    # half -> float -> half: the first cast is lossless, so the second may read what the first read.
    if dtype(inner) == dtype(node):
        return inner
    return call(node.graph, aten.to.dtype, (inner, dtype(node)), node)


def reshape(node: fx.Node, x: fx.Node) -> fx.Node | None:
    """reshape(x, shape of x) -> x; reshape(reshape(x, ...), size) -> reshape(x, size)"""
    if same_meta(node, x):
        return x
    size = shape(node)
    if size is None or shape(x) is None:
        return None
    source = x
    while is_op(source, RESHAPE) and isinstance(source.args[0], fx.Node):
        source = source.args[0]
    if same_meta(node, source):
        return source
    if source is x and node.target is not aten.view.default and node.target is not aten._unsafe_view.default:
        return None
    # Reshapes keep the order of elements, so the last one is enough. `view` would require certain strides.
    return call(node.graph, aten.reshape.default, (source, list(size)), node)


def permute(node: fx.Node, x: fx.Node) -> fx.Node | None:
    """permute(x, in order) -> x; permute(permute(x, a), b) -> permute(x, both)"""
    order = permutation(node)
    if order is None:
        return None
    if order == sorted(order):
        return x
    inner = permutation(x) if is_op(x, PERMUTE) else None
    if inner is None:
        return None
    order = [inner[dim] for dim in order]
    source = x.args[0]
    assert isinstance(source, fx.Node)
    return source if order == sorted(order) else call(node.graph, aten.permute.default, (source, order), node)


def permutation(node: fx.Node) -> list[int] | None:
    """Returns the order of a permutation: dimension i of the result is dimension order[i] of the input."""
    size = shape(node)
    if size is None:
        return None
    order = list(range(len(size)))
    if node.target is aten.permute.default:
        return [dim % len(size) for dim in argument(node, 1, "dims")]
    if node.target is aten.transpose.int:
        if order:
            a, b = argument(node, 1, "dim0"), argument(node, 2, "dim1")
            order[a], order[b] = order[b], order[a]
        return order
    if node.target is aten.movedim.int:
        a, b = argument(node, 1, "source") % len(size), argument(node, 2, "destination") % len(size)
        order.insert(b, order.pop(a))
        return order
    return order[::-1]


def copy(node: fx.Node, x: fx.Node) -> fx.Node | None:
    """copy(x, value) -> value"""
    value = argument(node, 1, "src")
    return value if isinstance(value, fx.Node) and same_meta(node, value) else None


def cat(node: fx.Node, x: fx.Node) -> fx.Node | None:
    """cat(all parts of a value, in order) -> the value"""
    parts, size = node.args[0], shape(node)
    if not size or not all(is_op(part, SLICE) for part in parts):  # type: ignore[union-attr]
        return None
    dim, at, source = argument(node, 1, "dim", 0) % len(size), 0, parts[0].args[0]  # type: ignore[union-attr,index]
    for part in parts:  # type: ignore[union-attr]
        start, length = argument(part, 2, "start") or 0, shape(part)
        same = argument(part, 1, "dim", 0) % len(size) == dim and argument(part, 4, "step", 1) == 1
        if part.args[0] is not source or not same or start != at or length is None:
            return None
        at += length[dim]
    # what a forward is given may be what it returns
    computed = isinstance(source, fx.Node) and source.op == "call_function"
    return source if computed and same_meta(node, source) else None


def scale(node: fx.Node, x: fx.Node) -> fx.Node | None:
    """x * 1 -> x"""
    factor = argument(node, 1, "other")
    return x if is_number(factor) and factor == 1 and same_meta(node, x) else None


def shift(node: fx.Node, x: fx.Node) -> fx.Node | None:
    """x + 0 -> x"""
    number = argument(node, 1, "other")
    return x if is_number(number) and number == 0 and same_meta(node, x) else None


RULES: list[tuple[frozenset, Rule]] = [
    (DROPOUT, dropout),
    (SAME_VALUE, same_value),
    (SAME_IF_SHAPE, same_if_shape),
    (CAST, cast),
    (RESHAPE, reshape),
    (PERMUTE, permute),
    (COPY, copy),
    (CAT, cat),
    (SCALE, scale),
    (SHIFT, shift),
]
TABLE: dict[object, Rule] = {op: rule for ops, rule in RULES for op in ops}


def cleanup(gm: fx.GraphModule, ctx: PassContext) -> int:
    """Applies the rules of `RULES` to every node, in the order of the graph, and removes dead nodes.

    Pattern and replacement: see each rule.

    A rule sees what the rules before it made of its operands, so this pass does not list the nodes first.
    """
    graph, count = gm.graph, 0
    count += drop_detach(graph) + drop_autocast(graph)
    pinned = mutated(graph)
    for node in graph.nodes:
        rule = TABLE.get(node.target) if node.op == "call_function" else None
        x = node.args[0] if rule and node.args else None
        if isinstance(x, (list, tuple)):
            x = x[0] if x else None
        if rule is None or not isinstance(x, fx.Node) or node in pinned or x in pinned:
            continue
        if node.target in FRESH and any(user.op == "output" for user in node.users):
            continue  # the caller may write to an output; it must not be an input or a weight
        with graph.inserting_before(node):
            new = rule(node, x)
        if new is None:
            continue
        if new in pinned or any(source in pinned for source in new.all_input_nodes):
            erase(new)
            continue
        replace(node, new)
        count += 1
    return count + eliminate_dead(graph)


def drop_detach(graph: fx.Graph) -> int:
    """Removes `detach_`: its schema says that it writes, but there is no gradient to write to."""
    count = 0
    for node in graph.nodes:
        if is_op(node, (aten.detach_.default,)):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
            count += 1
    return count


def drop_autocast(graph: fx.Graph) -> int:
    """Removes regions that disable autocast: its casts are operations of the graph, and plans run without it."""
    count = 0
    for node in graph.nodes:
        if enters_autocast(node) and argument(node, 2, "enabled") is False:
            for leave in list(node.users):
                graph.erase_node(leave)
            graph.erase_node(node)
            count += 1
    return count
