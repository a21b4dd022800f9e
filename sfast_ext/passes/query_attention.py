"""The linear that makes an attention's queries, fused into the attention, if there are few keys."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from torch import fx

from sfast_ext.kernels.attention import query_attention as kernel

from .attention import ATTENTION, kernel_options
from .fusion import fusion
from .rewrite import (
    HALF,
    LINEAR,
    RESHAPE,
    argument,
    aten,
    call,
    dtype,
    is_op,
    mutated,
    only_user,
    replace,
    reshaped,
    shape,
)

if TYPE_CHECKING:
    from .context import PassContext

_TRANSPOSE = (aten.transpose.int,)


class QueryAttentionMatch(NamedTuple):
    linear: fx.Node
    x: fx.Node
    weight: fx.Node
    k: fx.Node
    v: fx.Node
    size: tuple[int, int, int]  # batch, tokens, K


@fusion(ATTENTION, needs=(kernel.launch,))
def query_attention(node: fx.Node, pinned: set[fx.Node], ctx: PassContext) -> bool:
    """Replaces an attention and the linear, without a bias, that makes its queries, if the kernel is faster.

    Pattern: scaled_dot_product_attention(transpose(reshape(linear(x, weight)), 1, 2), k, v, scale=...)
    Replacement: kernel.launch(x, weight, k, v, scale=...)
    """
    found = match(node, ctx, pinned)
    if found is None:
        return False
    with node.graph.inserting_before(node):
        x = reshaped(node.graph, found.x, found.size)
        operands = (x, found.weight, found.k, found.v)
        new = call(node.graph, kernel.launch, operands, node, {"scale": node.kwargs.get("scale")})
    replace(node, new)
    return True


def match(node: fx.Node, ctx: PassContext, pinned: set[fx.Node]) -> QueryAttentionMatch | None:
    """Matches an attention in half precision without a mask, whose queries have no other user."""
    options = kernel_options(node)
    if options is None or options["mask"] is not None or options["is_causal"]:
        return None
    q: Any
    k: Any
    v: Any
    chain, (q, k, v) = [node], node.args[:3]
    for ops in (_TRANSPOSE, RESHAPE, LINEAR):
        if not is_op(q, ops) or only_user(q) is not chain[-1]:
            return None
        chain.append(q)
        q = q.args[0]
    _, heads, split, linear = chain
    x: Any = linear.args[0]
    weight: Any = linear.args[1]
    if argument(linear, 2, "bias") is not None or sorted(d % 4 for d in heads.args[1:]) != [1, 2]:  # type: ignore[operator]
        return None
    nodes = [*chain, k, v, x, weight]
    if any(n in pinned or dtype(n) not in HALF or dtype(n) != dtype(linear) for n in nodes):
        return None
    size, keys, out, rows = shape(split), shape(k), shape(linear), shape(x)
    if size is None or keys is None or out is None or rows is None or len(size) != 4 or len(keys) != 4:
        return None
    batch, tokens, count, width = size
    if out[-1] != count * width or keys != shape(v) or keys[:2] != (batch, count) or keys[3] != width:
        return None
    if not kernel.profitable(batch, tokens, keys[1:], rows[-1], ctx.device):
        return None
    return QueryAttentionMatch(linear, x, weight, k, v, (batch, tokens, rows[-1]))


def fused_linears(graph: fx.Graph, ctx: PassContext) -> dict[fx.Node, float]:
    """The linears that this pass would fuse, and the microseconds that this saves."""
    if not ctx.supported(kernel.launch):
        return {}
    pinned = mutated(graph)
    found = (match(node, ctx, pinned) for node in graph.nodes if is_op(node, ATTENTION))
    return {each.linear: _saved(each, ctx) for each in found if each is not None}


def _saved(found: QueryAttentionMatch, ctx: PassContext) -> float:
    (images, rows, depth), keys = found.size, shape(found.k) or ()
    return kernel.saved(images, rows, keys[1:], depth, ctx.device)  # type: ignore[arg-type]
