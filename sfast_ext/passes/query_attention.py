"""The linear layer that makes an attention's queries goes into it, where keys are few."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from torch import fx

from sfast_ext.kernels.attention import query_attention as kernel

from .attention import ATTENTION, options
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
    from . import PassContext

_TRANSPOSE = (aten.transpose.int,)


class Match(NamedTuple):
    x: fx.Node
    weight: fx.Node
    k: fx.Node
    v: fx.Node
    size: tuple[int, int, int]  # images, rows, terms


def query_attention(gm: fx.GraphModule, ctx: PassContext) -> int:
    """Before attention, whose nodes it takes, and after what makes use of linear layers in other ways."""
    if not ctx.serves(kernel):
        return 0
    untouchable, count = mutated(gm.graph), 0
    for node in list(gm.graph.nodes):
        match = operands(node, ctx, untouchable)
        if match is None:
            continue
        with gm.graph.inserting_before(node):
            x = reshaped(gm.graph, match.x, match.size)
            operand = (x, match.weight, match.k, match.v)
            new = call(gm.graph, kernel.launch, operand, node, {"scale": node.kwargs.get("scale")})
        replace(node, new)
        count += 1
    return count


def operands(node: fx.Node, ctx: PassContext, untouchable: set[fx.Node]) -> Match | None:
    """Of an attention whose queries nobody else sees, made by a linear layer without a bias; None of others."""
    found = options(node) if is_op(node, ATTENTION) else None
    if found is None or found["mask"] is not None or found["is_causal"]:
        return None
    chain, (q, k, v) = [node], node.args[:3]
    for ops in (_TRANSPOSE, RESHAPE, LINEAR):
        if not is_op(q, ops) or only_user(q) is not chain[-1]:
            return None
        chain.append(q)
        q = q.args[0]
    _, heads, cut, linear = chain
    x, weight = linear.args[0], linear.args[1]
    if argument(linear, 2, "bias") is not None or sorted(d % 4 for d in heads.args[1:]) != [1, 2]:
        return None
    nodes = [*chain, k, v, x, weight]
    if any(n in untouchable or dtype(n) not in HALF or dtype(n) != dtype(linear) for n in nodes):
        return None
    size, keys, out, terms = shape(cut), shape(k), shape(linear), shape(x)
    if size is None or keys is None or out is None or terms is None or len(size) != 4 or len(keys) != 4:
        return None
    images, rows, count, width = size
    if out[-1] != count * width or keys != shape(v) or keys[:2] != (images, count) or keys[3] != width:
        return None
    if not kernel.profitable(images, rows, keys[1:], terms[-1], ctx.device):
        return None
    return Match(x, weight, k, v, (images, rows, terms[-1]))
