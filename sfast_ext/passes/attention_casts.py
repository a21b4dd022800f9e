"""Casts of an attention's operands and result go to their sources: before heads are taken apart or put together.

Hosts that compute attention in fp32 cast here or there. A copy that puts heads together is one of the smaller dtype,
and the plan is the same whichever host it was.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import fx

from .attention import ATTENTION
from .cleanup import PERMUTE
from .rewrite import RESHAPE, aten, call, dtype, is_op, meta_like, mutated, only_user, replace, shape
from .scaled_dot_product import is_float_cast

if TYPE_CHECKING:
    from . import PassContext

VIEWS = RESHAPE | PERMUTE


def attention_casts(gm: fx.GraphModule, ctx: PassContext) -> int:
    """After attention_heads. Counts the casts that went to their source."""
    pinned, count = mutated(gm.graph), 0
    for node in list(gm.graph.nodes):
        if not is_op(node, ATTENTION) or node in pinned:
            continue
        for operand in node.args[:3]:
            count += hoist_cast(operand_cast(operand, node), pinned)
        count += hoist_cast(result_cast(node), pinned)
    return count


def operand_cast(operand: Any, user: fx.Node) -> fx.Node | None:
    """The cast of an operand that nobody else sees."""
    while isinstance(operand, fx.Node) and only_user(operand) is user:
        if is_float_cast(operand):
            return operand
        if not is_op(operand, VIEWS):
            return None
        user, operand = operand, operand.args[0]
    return None


def result_cast(node: fx.Node) -> fx.Node | None:
    """The cast of a result that nobody sees without."""
    user = only_user(node)
    while user is not None and is_op(user, VIEWS):
        user = only_user(user)
    return user if user is not None and is_float_cast(user) else None


def hoist_cast(cast: fx.Node | None, pinned: set[fx.Node]) -> int:
    """1 where a cast goes before the reshapes and permutations in front of it."""
    count = 0
    while cast is not None and cast not in pinned:
        moved = cast.args[0]
        if not isinstance(moved, fx.Node) or not is_op(moved, VIEWS) or moved in pinned:
            break
        source = moved.args[0]
        if only_user(moved) is not cast or not isinstance(source, fx.Node) or source in pinned:
            break
        graph, kind, rest = moved.graph, dtype(cast), moved.args[1:]
        with graph.inserting_before(moved):
            new = call(graph, aten.to.dtype, (source, kind), meta_like(source, shape(source) or (), kind))
        with graph.inserting_before(cast):
            target: Any = moved.target
            again = call(graph, target, (new, *rest), meta_like(new, shape(moved) or ()), dict(moved.kwargs))
        replace(cast, again)
        cast, count = new, 1
    return count
