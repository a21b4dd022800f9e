"""A layer norm goes into the product that makes its rows, with what is added to that on the way."""

from __future__ import annotations

import math
import operator
from collections import defaultdict
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import fx

from sfast_ext.kernels.linear import linear_layer_norm as kernel
from sfast_ext.kernels.pointwise import add_layer_norm, layer_norm

from .rewrite import (
    HALF,
    LINEAR,
    RESHAPE,
    argument,
    aten,
    call,
    dtype,
    fake,
    is_op,
    mutated,
    only_user,
    replace,
    reshaped,
    shape,
)

if TYPE_CHECKING:
    from . import PassContext


Sizes = tuple[int, int, int]
"""Rows, columns, terms of a sum."""


class Match(NamedTuple):
    linear: fx.Node
    moved: fx.Node  # the linear, or its rows in another shape
    rest: tuple[Any, ...]  # the kernel's operands from the bias on
    sizes: Sizes


def linear_layer_norm(gm: fx.GraphModule, ctx: PassContext) -> int:
    """After linear_onto, which gives the sums of some norms a bias."""
    if not ctx.serves(kernel):
        return 0
    graph = gm.graph
    untouchable = mutated(graph)
    found = [(norm, match) for norm in graph.nodes if (match := operands(norm, untouchable)) is not None]
    quicker = [s for s in dict.fromkeys(match.sizes for _, match in found) if kernel.profitable(*s, ctx.device)]
    if not quicker:
        return 0
    records, count = shared_records(gm, ctx, quicker, found[0][1].linear), 0
    for norm, _ in found:
        match = operands(norm, untouchable)  # anew: what was made so far took the place of others' operands
        if match is None or match.sizes not in records:
            continue  # another norm of the same rows was first, or two kernels are quicker
        linear, moved, rest, sizes = match
        sums = is_op(norm, (add_layer_norm.launch,))
        # Where the sum was made, as others may use it before the norm is due. The norm's weights are at the top.
        with graph.inserting_before(norm if sums else linear):
            size = shape(moved) or ()
            x = reshaped(graph, linear.args[0], (*size[:-1], sizes[2]))
            new = call(graph, kernel.launch, (x, linear.args[1], *rest, records[sizes]), norm)
            if not sums:
                new.meta["val"] = (moved.meta.get("val"), norm.meta.get("val"))
                total, normed = (call(graph, operator.getitem, (new, i), like) for i, like in enumerate((moved, norm)))
        if sums:
            replace(norm, new)
        else:
            replace(norm, normed)
            replace(moved, total)
        count += 1
    return count


def shared_records(gm: fx.GraphModule, ctx: PassContext, found: list[Sizes], like: fx.Node) -> dict[Sizes, fx.Node]:
    """What blocks of the kernel leave for each other: zeros at the start of a call, shared by products whose tiles are
    alike, as they follow each other. `like`: a node with a value on their device."""
    alike: dict[Any, list[Sizes]] = defaultdict(list)
    for rows, columns, depth in found:
        alike[rows, columns, kernel.best(rows, columns, depth, ctx.device)].append((rows, columns, depth))
    counts = [kernel.record_count(*sizes[0], ctx.device) for sizes in alike.values()]
    parts: dict[Sizes, fx.Node] = {}
    head = next(node for node in gm.graph.nodes if node.op == "call_function")
    with gm.graph.inserting_before(head):
        options = {"dtype": torch.int64, "device": ctx.device}
        zeros = call(gm.graph, aten.zeros.default, ([sum(counts)],), fake(like, (sum(counts),), torch.int64), options)
        begin = 0
        for count, sizes in zip(counts, alike.values(), strict=True):
            part = fake(like, (count,), torch.int64)
            node = call(gm.graph, aten.slice.Tensor, (zeros, 0, begin, begin + count), part)
            parts.update(dict.fromkeys(sizes, node))
            begin += count
    return parts


def operands(norm: fx.Node, untouchable: set[fx.Node]) -> Match | None:
    """The product that a norm's rows come from, and what else the kernel is to know."""
    if norm in untouchable:
        return None
    residual = shift = after = None
    if is_op(norm, (add_layer_norm.launch,)):
        x, residual, factor, offset, eps = norm.args
        shift, after = norm.kwargs.get("shift"), norm.kwargs.get("post_bias")
        if only_user(x) is not norm or x is residual or shape(residual) != shape(x):
            return None
        linear = x
    elif is_op(norm, (layer_norm.launch,)):
        x, factor, offset, eps = norm.args
        linear = under_reshape(x)
    else:
        return None
    if not is_op(linear, LINEAR) or x in untouchable or norm.kwargs.get("out_dtype") not in (None, dtype(linear)):
        return None
    rows, weight, bias = linear.args[0], linear.args[1], argument(linear, 2, "bias")
    if bias is not None and shift is not None or dtype(linear) not in HALF or len(shape(weight) or ()) != 2:
        return None
    vectors = [bias if shift is None else shift, factor, offset, after]
    nodes = [n for n in (linear, rows, weight, residual, *vectors) if n is not None]
    if any(n in untouchable or dtype(n) != dtype(linear) for n in nodes):
        return None
    # where the kernel goes others of the graph's values may not be there yet
    if any(n is not None and n.op != "get_attr" for n in vectors):
        return None
    size, terms = shape(linear), shape(rows)
    if size is None or terms is None:
        return None
    rest = (vectors[0], residual, factor, offset, eps, after)
    return Match(linear, x, rest, (math.prod(size[:-1]), size[-1], terms[-1]))


def under_reshape(x: fx.Node) -> Any:
    """What only a reshape sees, whose rows it leaves as they are; or x."""
    source = x.args[0] if is_op(x, RESHAPE) else None
    if not isinstance(source, fx.Node) or only_user(source) is not x:
        return x
    return source if (shape(x) or ())[-1:] == (shape(source) or ())[-1:] else x
