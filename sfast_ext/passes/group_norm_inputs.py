"""Group norm goes into the kernel that makes its input: a residual sum, or a skip connection's concatenation.

The bias of a linear layer whose result is summed there is added there too: without it cuBLAS has quicker products.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import fx

from sfast_ext.kernels.group_norm import add_group_norm, cat_group_norm, group_norm
from sfast_ext.kernels.pointwise import bias_add

from .layer_norm import is_residual_add
from .rewrite import (
    HALF,
    KERNEL_DTYPES,
    LINEAR,
    RESHAPE,
    argument,
    aten,
    call,
    dtype,
    hoist_weights,
    is_op,
    mutated,
    only_user,
    overloads,
    replace,
    shape,
    without_linear_bias,
)

if TYPE_CHECKING:
    from . import PassContext

PERMUTE = overloads("permute")
CAT = overloads("cat", "concat")
NORMS = frozenset([group_norm.launch])
SUMS = frozenset([bias_add.launch])


class LinearMatch(NamedTuple):
    linear: fx.Node
    views: list[fx.Node]  # reshapes and permutes between the linear and the sum, in order


def group_norm_inputs(gm: fx.GraphModule, ctx: PassContext) -> int:
    """After group_norm and bias_add, whose kernels it joins."""
    adds, joins = ctx.serves(add_group_norm), ctx.serves(cat_group_norm)
    graph, count = gm.graph, 0
    hoist_weights(graph)
    pinned = mutated(graph)
    for norm in list(graph.nodes):
        if norm._erased or not is_op(norm, NORMS) or norm.kwargs.get("shift") is not None:
            continue
        source = norm.args[0]
        if not pinned.isdisjoint([norm, source]) or len(shape(source) or ()) != 4:
            continue
        if any(isinstance(x, fx.Node) and x.op != "get_attr" for x in norm.args[2:4]):
            continue  # the pair stands where the sum is made: weights that are computed may not be known there
        operands = match_sum(source, pinned) if adds else None
        if operands is not None:
            join(source, norm, add_group_norm.launch, operands)
            count += 1
            continue
        operands = match_cat(source, pinned) if joins else None
        if operands is not None:
            join(source, norm, cat_group_norm.launch, operands)
            count += 1
    return count


def match_sum(total: Any, pinned: set[fx.Node]) -> tuple[Any, ...] | None:
    """x, bias, residual and scale of a sum of pictures."""
    if is_op(total, SUMS):
        return (*total.args, 1.0)[:4]
    if not is_residual_add(total) or len(shape(total) or ()) != 4 or dtype(total) not in KERNEL_DTYPES:
        return None
    if any(x in pinned for x in total.args[:2]):
        return None
    for x, residual in (total.args[1::-1], total.args[:2]):
        product = match_linear(x, total, pinned)
        bias = argument(product.linear, 2, "bias") if product is not None else None
        if product is not None and bias is not None and keeps_channels(product.views):
            with total.graph.inserting_before(total):
                moved = without_linear_bias(product.linear)
                for move in product.views:
                    moved = reapply(total.graph, moved, move)
            return moved, bias, residual, 1.0
    return total.args[0], None, total.args[1], 1.0


def match_linear(node: Any, add: fx.Node, pinned: set[fx.Node]) -> LinearMatch | None:
    """The linear in half precision whose product goes, moved about perhaps, into `add` and nowhere else."""
    views: list[fx.Node] = []
    user = add
    while is_op(node, RESHAPE) or is_op(node, PERMUTE):
        if node in pinned or only_user(node) is not user:
            return None
        views.insert(0, node)
        user, node = node, node.args[0]
    if not is_op(node, LINEAR) or node in pinned or only_user(node) is not user:
        return None
    operands = [*node.args[:2], argument(node, 2, "bias")]
    if add.args[0] is add.args[1] or dtype(node) not in HALF or len(shape(operands[1]) or ()) != 2:
        return None
    for operand in operands:
        if operand is not None and (operand in pinned or dtype(operand) != dtype(node)):
            return None
    return None if shape(node) is None else LinearMatch(node, views)


def reapply(graph: fx.Graph, node: fx.Node, move: fx.Node) -> fx.Node:
    """The move again, of another value."""
    if is_op(move, PERMUTE):
        return call(graph, aten.permute.default, (node, argument(move, 1, "dims")), move)
    return call(graph, aten.reshape.default, (node, list(shape(move) or ())), move)


def keeps_channels(views: list[fx.Node]) -> bool:
    """Whether the last dimension of a product becomes the channels of a picture, and its rows the pixels."""
    if not views or not is_op(views[-1], PERMUTE):
        return False
    *reshapes, last = views
    width = (shape(last) or (0, 0))[1]
    if any(is_op(move, PERMUTE) or (shape(move) or (0,))[-1] != width for move in reshapes):
        return False
    return [dim % 4 for dim in argument(last, 1, "dims")] == [0, 3, 1, 2]


def match_cat(cat: Any, pinned: set[fx.Node]) -> tuple[Any, ...] | None:
    """What two pictures are concatenated by their channels: the first, with what is added to it just for this, and
    the second."""
    if not is_op(cat, CAT) or argument(cat, 1, "dim", 0) not in (1, -3):
        return None
    parts = cat.args[0]
    if len(parts) != 2 or not all(isinstance(x, fx.Node) and dtype(x) == dtype(cat) for x in parts):
        return None
    if any(len(shape(x) or ()) != 4 or x in pinned for x in parts):
        return None
    first, second = parts
    if only_user(first) is cat and first is not second:
        sum_ = match_sum(first, pinned)
        if sum_ is not None and sum_[3] == 1.0:
            return (*sum_[:3], second)
    return first, None, None, second


def join(source: fx.Node, norm: fx.Node, function: Any, operands: tuple[Any, ...]) -> None:
    graph = norm.graph
    options = {"silu": norm.kwargs.get("silu", False), "out_dtype": norm.kwargs.get("out_dtype")}
    with graph.inserting_before(source):
        pair = call(graph, function, (*operands, *norm.args[1:5]), None, options)
        total = call(graph, operator.getitem, (pair, 0), source)
        normed = call(graph, operator.getitem, (pair, 1), norm)
    pair.meta["val"] = (total.meta.get("val"), normed.meta.get("val"))
    replace(norm, normed)
    replace(source, total)
