"""A linear's residual goes into the product, where the native operation is built."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from torch import fx

from sfast_ext.kernels import add_group_norm, add_layer_norm, cat_group_norm, group_norm
from sfast_ext.kernels import linear_add as kernel

from .bias_add import has_bias
from .layer_norm import is_residual_add
from .layer_norm import match as match_norm
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
    overloads,
    replace,
    shape,
)

if TYPE_CHECKING:
    from . import PassContext

# A sum that is normed next is one kernel with the norm already (add_layer_norm), and it cannot be in both. True
# gives such sums to the product too, and leaves the norm to itself.
BEFORE_NORM = False

PERMUTE = overloads("permute")
CAT = overloads("cat", "concat")
NORMS = frozenset([group_norm.launch])


class Product(NamedTuple):
    linear: fx.Node
    moves: list[fx.Node]  # reshapes and permutes between the linear and the sum, in order


def linear_add(gm: fx.GraphModule, ctx: PassContext) -> int:
    if not ctx.native or not ctx.serves(kernel):
        return 0
    graph, count = gm.graph, 0
    untouchable = mutated(graph)
    normed = set()
    if not BEFORE_NORM and ctx.serves(add_layer_norm):
        norms = [match_norm(node, untouchable) for node in graph.nodes]
        normed = {norm.x for norm in norms if norm is not None}
    for add in list(graph.nodes):
        if add._erased or add in untouchable or add in normed or not is_residual_add(add):
            continue
        if ctx.serves(add_group_norm, cat_group_norm) and goes_to_a_norm(add):
            continue  # made by the norm's kernel (sum_group_norm), which costs less than in the product
        # Of two products the later one is taken: the other is done by then.
        product, residual = match(add.args[1], add, untouchable), add.args[0]
        if product is None:
            product, residual = match(add.args[0], add, untouchable), add.args[1]
        # a convolution's bias and its residual are one kernel already (bias_add)
        if product is None or residual in untouchable or has_bias(residual, add):
            continue
        linear, moves = product
        operands = (*linear.args[:2], argument(linear, 2, "bias"))
        with graph.inserting_before(add):
            new = call(graph, kernel.launch, (*operands, back(graph, residual, moves)), linear)
            for move in moves:
                new = forth(graph, new, move)
        replace(add, new)
        count += 1
    return count


def goes_to_a_norm(total: fx.Node) -> bool:
    """Whether a sum of pictures is normed by groups, alone or beside a skip connection."""
    return len(shape(total) or ()) == 4 and any(is_op(user, NORMS | CAT) for user in total.users)


def match(node: Any, add: fx.Node, untouchable: set[fx.Node]) -> Product | None:
    """The linear in half precision whose product goes, moved about perhaps, into `add` and nowhere else."""
    moves: list[fx.Node] = []
    user = add
    while is_op(node, RESHAPE) or is_op(node, PERMUTE):
        if node in untouchable or only_user(node) is not user:
            return None
        moves.insert(0, node)
        user, node = node, node.args[0]
    if not is_op(node, LINEAR) or node in untouchable or only_user(node) is not user:
        return None
    operands = [*node.args[:2], argument(node, 2, "bias")]
    if add.args[0] is add.args[1] or dtype(node) not in HALF or len(shape(operands[1]) or ()) != 2:
        return None
    for operand in operands:
        if operand is not None and (operand in untouchable or dtype(operand) != dtype(node)):
            return None
    return None if shape(node) is None else Product(node, moves)


def back(graph: fx.Graph, residual: fx.Node, moves: list[fx.Node]) -> fx.Node:
    """The residual as it meets the linear before the moves: in NHWC, where those come from, only views."""
    for move in reversed(moves):
        before = shape(move.args[0]) or ()
        if is_op(move, PERMUTE):
            order = [d % len(before) for d in argument(move, 1, "dims")]
            inverse = [order.index(d) for d in range(len(order))]
            residual = call(graph, aten.permute.default, (residual, inverse), fake(residual, before))
        else:
            residual = call(graph, aten.reshape.default, (residual, list(before)), fake(residual, before))
    return residual


def forth(graph: fx.Graph, node: fx.Node, move: fx.Node) -> fx.Node:
    """The move again, of another value."""
    if is_op(move, PERMUTE):
        return call(graph, aten.permute.default, (node, argument(move, 1, "dims")), move)
    return call(graph, aten.reshape.default, (node, list(shape(move) or ())), move)
