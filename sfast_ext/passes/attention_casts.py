"""Moves the casts of an attention's operands and result to their sources, before heads are split or merged.

Hosts that compute attention in fp32 cast in different places. A copy that merges heads then has the smaller dtype, and
the graph is the same whatever the host.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import fx

from .attention import ATTENTION
from .cleanup import PERMUTE
from .fusion import fusion
from .rewrite import RESHAPE, aten, call, dtype, is_op, meta_like, only_user, replace, shape
from .scaled_dot_product import is_float_cast

if TYPE_CHECKING:
    from .context import PassContext

VIEWS = RESHAPE | PERMUTE


@fusion(ATTENTION)
def attention_casts(node: fx.Node, pinned: set[fx.Node], ctx: PassContext) -> int:
    """Moves casts over reshapes and permutes. Returns the number of casts moved.

    Pattern: scaled_dot_product_attention(cast(view(q)), ...), or cast(view(scaled_dot_product_attention(...)))
    Replacement: scaled_dot_product_attention(view(cast(q)), ...), or view(cast(scaled_dot_product_attention(...)))
    """
    count = 0
    for operand in node.args[:3]:
        count += hoist_cast(operand_cast(operand, node), pinned)
    return count + hoist_cast(result_cast(node), pinned)


def operand_cast(operand: Any, user: fx.Node) -> fx.Node | None:
    """Finds the cast of an operand, if every value from it to the attention has one user."""
    while isinstance(operand, fx.Node) and only_user(operand) is user:
        if is_float_cast(operand):
            return operand
        if not is_op(operand, VIEWS):
            return None
        user, operand = operand, operand.args[0]  # type: ignore[assignment]
    return None


def result_cast(node: fx.Node) -> fx.Node | None:
    """Finds the cast of a result, if every value from the attention to it has one user."""
    user = only_user(node)
    while user is not None and is_op(user, VIEWS):
        user = only_user(user)
    return user if user is not None and is_float_cast(user) else None


def hoist_cast(cast: fx.Node | None, pinned: set[fx.Node]) -> int:
    """Moves a cast before the reshapes and permutes that it reads. Returns 1 if it moved."""
    count = 0
    while cast is not None and cast not in pinned:
        view = cast.args[0]
        if not isinstance(view, fx.Node) or not is_op(view, VIEWS) or view in pinned:
            break
        source = view.args[0]
        if only_user(view) is not cast or not isinstance(source, fx.Node) or source in pinned:
            break
        graph, kind, rest = view.graph, dtype(cast), view.args[1:]
        with graph.inserting_before(view):
            new = call(graph, aten.to.dtype, (source, kind), meta_like(source, shape(source) or (), kind))
        with graph.inserting_before(cast):
            target: Any = view.target
            again = call(graph, target, (new, *rest), meta_like(new, shape(view) or ()), dict(view.kwargs))
        replace(cast, again)
        cast, count = new, 1
    return count
