"""Group norm goes into the kernel that makes its input: a convolution's sum, or a skip connection's concatenation."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

from torch import fx

from sfast_ext import kernels
from sfast_ext.kernels import add_group_norm, bias_add, cat_group_norm, group_norm

from .rewrite import (
    argument,
    call,
    dtype,
    hoist_weights,
    is_op,
    mutated,
    only_user,
    overloads,
    replace,
    shape,
)

if TYPE_CHECKING:
    from . import PassContext

CAT = overloads("cat", "concat")
NORMS = frozenset([group_norm.launch, group_norm.reference])
SUMS = frozenset([bias_add.launch, bias_add.reference])


def sum_group_norm(gm: fx.GraphModule, ctx: PassContext) -> int:
    """After group_norm and bias_add, whose kernels it joins."""
    graph, count = gm.graph, 0
    hoist_weights(graph)
    untouchable = mutated(graph)
    for norm in list(graph.nodes):
        if norm._erased or not is_op(norm, NORMS) or norm.kwargs.get("shift") is not None:
            continue
        source = norm.args[0]
        if not untouchable.isdisjoint([norm, source]) or len(shape(source) or ()) != 4:
            continue
        if any(isinstance(x, fx.Node) and x.op != "get_attr" for x in norm.args[2:4]):
            continue  # the pair stands where the sum is made: weights that are computed may not be known there
        if is_op(source, SUMS):
            # its only users are the sum's: nothing of it is read before
            join(source, norm, kernels.pick(add_group_norm, triton=ctx.triton), source.args)
        else:
            operands = halves(source, untouchable)
            if operands is None:
                continue
            join(source, norm, kernels.pick(cat_group_norm, triton=ctx.triton), operands)
        count += 1
    return count


def halves(cat: Any, untouchable: set[fx.Node]) -> tuple[Any, Any, Any] | None:
    """What two pictures are concatenated by their channels: the first, its bias if that is added just for this, the
    second."""
    if not is_op(cat, CAT) or argument(cat, 1, "dim", 0) not in (1, -3):
        return None
    parts = cat.args[0]
    if len(parts) != 2 or not all(isinstance(x, fx.Node) and dtype(x) == dtype(cat) for x in parts):
        return None
    if any(len(shape(x) or ()) != 4 or x in untouchable for x in parts):
        return None
    first, second = parts
    if is_op(first, SUMS) and only_user(first) is cat and first is not second:
        x, bias, residual, *scale = first.args
        if residual is None and (not scale or scale[0] == 1.0) and x not in untouchable:
            return x, bias, second
    return first, None, second


def join(source: fx.Node, norm: fx.Node, function: Any, operands: tuple[Any, ...]) -> None:
    graph = norm.graph
    options = {"silu": norm.kwargs.get("silu", False), "out_dtype": norm.kwargs.get("out_dtype")}
    if len(operands) == 3 and is_op(source, SUMS):
        operands = (*operands, 1.0)
    with graph.inserting_before(source):
        pair = call(graph, function, (*operands, *norm.args[1:5]), None, options)
        total = call(graph, operator.getitem, (pair, 0), source)
        normed = call(graph, operator.getitem, (pair, 1), norm)
    pair.meta["val"] = (total.meta.get("val"), normed.meta.get("val"))
    replace(norm, normed)
    replace(source, total)
