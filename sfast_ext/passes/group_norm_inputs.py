"""Group norm fused into the kernel that makes its input: a residual sum, or the concatenation of a skip connection.

If an operand of the sum is a linear, its bias is added by that kernel too: cuBLAS has faster GEMMs without a bias.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import fx

from sfast_ext.kernels.group_norm import add_group_norm, cat_group_norm, group_norm
from sfast_ext.kernels.pointwise import bias_add

from .fusion import fusion
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
    is_op,
    only_user,
    overloads,
    replace,
    shape,
    without_linear_bias,
)

if TYPE_CHECKING:
    from .context import PassContext

PERMUTE = overloads("permute")
CAT = overloads("cat", "concat")
NORMS = frozenset([group_norm.launch])
SUMS = frozenset([bias_add.launch])


class LinearMatch(NamedTuple):
    linear: fx.Node
    views: list[fx.Node]  # reshapes and permutes between the linear and the sum, in order


class SumMatch(NamedTuple):
    """scale * (x + bias + residual), the operands of bias_add.launch."""

    x: fx.Node
    bias: fx.Node | None
    residual: fx.Node | None
    scale: float


class CatMatch(NamedTuple):
    """cat([x + bias + residual, second], 1)."""

    x: fx.Node
    bias: fx.Node | None
    residual: fx.Node | None
    second: fx.Node


@fusion(NORMS, hoist=True)
def group_norm_inputs(norm: fx.Node, pinned: set[fx.Node], ctx: PassContext) -> bool:
    """Replaces a norm and the sum or concatenation that it reads. Other users read the sum from the pair.

    Pattern: group_norm.launch(x + residual, ...) or group_norm.launch(bias_add.launch(x, bias, residual, scale), ...)
    Replacement: (sum, normed) = add_group_norm.launch(x, bias, residual, scale, ...)

    Pattern: group_norm.launch(cat([x [+ residual], second], 1), ...)
    Replacement: (cat, normed) = cat_group_norm.launch(x, bias, residual, second, ...)
    """
    source: Any = norm.args[0]
    if norm.kwargs.get("shift") is not None or source in pinned or len(shape(source) or ()) != 4:
        return False
    if any(isinstance(x, fx.Node) and x.op != "get_attr" for x in norm.args[2:4]):
        return False  # the pair stands at the place of the sum: weights that are computed may not be known there
    added = match_sum(source, pinned) if ctx.supported(add_group_norm.launch) else None
    if added is not None:
        fuse_pair(source, norm, add_group_norm.launch, added)
        return True
    joined = match_cat(source, pinned) if ctx.supported(cat_group_norm.launch) else None
    if joined is not None:
        fuse_pair(source, norm, cat_group_norm.launch, joined)
        return True
    return False


def match_sum(total: Any, pinned: set[fx.Node]) -> SumMatch | None:
    """Matches bias_add.launch, or a residual addition of feature maps.

    If an operand of the addition is a linear with a bias, the linear without it is inserted before the addition, and
    the match has both.
    """
    if is_op(total, SUMS):
        return SumMatch(*(*total.args, 1.0)[:4])
    if not is_residual_add(total) or len(shape(total) or ()) != 4 or dtype(total) not in KERNEL_DTYPES:
        return None
    if any(x in pinned for x in total.args[:2]):
        return None
    for x, residual in (total.args[1::-1], total.args[:2]):
        found = match_linear(x, total, pinned)
        bias = argument(found.linear, 2, "bias") if found is not None else None
        if found is not None and bias is not None and keeps_channels(found.views):
            with total.graph.inserting_before(total):
                viewed = without_linear_bias(found.linear)
                for view in found.views:
                    viewed = reapply(total.graph, viewed, view)
            return SumMatch(viewed, bias, residual, 1.0)
    return SumMatch(total.args[0], None, total.args[1], 1.0)


def match_linear(node: Any, add: fx.Node, pinned: set[fx.Node]) -> LinearMatch | None:
    """Matches a linear in half precision that only `add` reads, through reshapes and permutes or without."""
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


def reapply(graph: fx.Graph, node: fx.Node, view: fx.Node) -> fx.Node:
    """Applies the reshape or permute `view` to `node`."""
    if is_op(view, PERMUTE):
        return call(graph, aten.permute.default, (node, argument(view, 1, "dims")), view)
    return call(graph, aten.reshape.default, (node, list(shape(view) or ())), view)


def keeps_channels(views: list[fx.Node]) -> bool:
    """Whether the views turn a linear's (..., N) into a feature map (batch, N, height, width)."""
    if not views or not is_op(views[-1], PERMUTE):
        return False
    *reshapes, last = views
    width = (shape(last) or (0, 0))[1]
    if any(is_op(view, PERMUTE) or (shape(view) or (0,))[-1] != width for view in reshapes):
        return False
    return [dim % 4 for dim in argument(last, 1, "dims")] == [0, 3, 1, 2]


def match_cat(cat: Any, pinned: set[fx.Node]) -> CatMatch | None:
    """Matches two feature maps concatenated along their channels, with an addition that only the concatenation reads
    as the first of them."""
    if not is_op(cat, CAT) or argument(cat, 1, "dim", 0) not in (1, -3):
        return None
    parts = cat.args[0]
    if len(parts) != 2 or not all(isinstance(x, fx.Node) and dtype(x) == dtype(cat) for x in parts):
        return None
    if any(len(shape(x) or ()) != 4 or x in pinned for x in parts):
        return None
    first, second = parts
    if only_user(first) is cat and first is not second:
        added = match_sum(first, pinned)
        if added is not None and added.scale == 1.0:
            return CatMatch(*added[:3], second)
    return CatMatch(first, None, None, second)


def fuse_pair(source: fx.Node, norm: fx.Node, function: Any, operands: tuple[Any, ...]) -> None:
    """Replaces `source` and `norm` by the two results of one call at the place of `source`."""
    graph = norm.graph
    options = {"silu": norm.kwargs.get("silu", False), "out_dtype": norm.kwargs.get("out_dtype")}
    with graph.inserting_before(source):
        pair = call(graph, function, (*operands, *norm.args[1:5]), None, options)
        total = call(graph, operator.getitem, (pair, 0), source)
        normed = call(graph, operator.getitem, (pair, 1), norm)
    pair.meta["val"] = (total.meta.get("val"), normed.meta.get("val"))
    replace(norm, normed)
    replace(source, total)
