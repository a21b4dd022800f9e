"""Group norms whose result takes the memory of their operand.

Only if memory counts: in a plan with a CUDA graph the graph pool gives the memory to other values anyway.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import fx

from sfast_ext.kernels.conv import conv2d, mma_conv2d, narrow_conv, upsample_conv2d
from sfast_ext.kernels.group_norm import add_group_norm, group_norm
from sfast_ext.kernels.pointwise import bias_add

from .rewrite import aliased, argument, dtype, inputs, is_op, mutated, value

if TYPE_CHECKING:
    from .context import PassContext

FRESH = frozenset(x.launch for x in (conv2d, mma_conv2d, upsample_conv2d, narrow_conv, bias_add))
"""Kernels whose result is in new memory, whichever way they take."""


def in_place(gm: fx.GraphModule, ctx: PassContext) -> int:
    """Gives norms the memory of an operand that nothing else reads from then on.

    Pattern: group_norm.launch(x, ...), or (sum, normed) = add_group_norm.launch(x, ...)
    Replacement: group_norm.launch(x, ..., out=x), or (sum, normed) = add_group_norm.launch(x, ..., out=(None, x))
    """
    return 0 if ctx.most_bytes is None else len(give_memory(gm.graph, ctx))


def give_memory(graph: fx.Graph, ctx: PassContext) -> list[fx.Node]:
    """Applies `in_place`. Returns the norms that were given memory."""
    norms = [node for node in graph.nodes if is_op(node, (group_norm.launch, add_group_norm.launch))]
    norms = [node for node in norms if takes_memory(node, ctx)]
    if not norms:
        return []
    pinned, group = mutated(graph), memory_groups(graph)
    place = {node: i for i, node in enumerate(graph.nodes)}
    found = []
    for norm in norms:
        x: Any = norm.args[0]
        sharing = group[x]
        later = any(place[user] > place[norm] for node in sharing for user in node.users)
        others = set(norm.all_input_nodes) - {x}
        own = all(node.op == "call_function" and node not in pinned for node in sharing)
        if own and not later and norm not in pinned and others.isdisjoint(sharing):
            norm.kwargs = {**norm.kwargs, "out": x if is_op(norm, (group_norm.launch,)) else (None, x)}
            found.append(norm)
    return found


def takes_memory(norm: fx.Node, ctx: PassContext) -> bool:
    """Whether a norm is written by a launch that follows all reading of its first operand, which is like the result."""
    x: Any = norm.args[0]
    val, plain = value(x), is_op(norm, (group_norm.launch,))
    if val is None or "out" in norm.kwargs or norm.kwargs.get("patches") or len(norm.args) > (5 if plain else 8):
        return False
    alike = norm.kwargs.get("out_dtype") in (None, dtype(x)) and list(inputs(norm.args)).count(x) == 1
    groups: Any = norm.args[1 if plain else 4]
    return alike and group_norm.accepts_out(val, groups, triton=ctx.triton, fused=not plain)


def memory_groups(graph: fx.Graph) -> dict[fx.Node, set[fx.Node]]:
    """For each node those that may share memory with it, itself included."""
    group: dict[fx.Node, set[fx.Node]] = {}
    for node in graph.nodes:
        group[node] = {node}
        if node.op != "call_function" or node.target in FRESH:
            continue
        places = aliased(node.target)
        others = node.all_input_nodes if places is None else [x for p in places for x in inputs(argument(node, *p))]
        for other in others:
            if group[other] is not group[node]:
                joint = group[other] | group[node]
                for each in joint:
                    group[each] = joint
    return group
