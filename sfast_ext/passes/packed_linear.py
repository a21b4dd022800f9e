"""Linears that read the same input, packed into one GEMM whose weight is theirs, concatenated along N.

One rule packs Q, K and V; the keys and values of all cross-attentions, over the prompt (in several parts if one
would be too wide); and the time projections of all residual blocks.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

from torch import fx

from .rewrite import (
    HALF,
    LINEAR,
    argument,
    aten,
    call,
    dtype,
    hoist_weights,
    is_cast,
    is_op,
    is_weight,
    meta_like,
    mutated,
    only_user,
    overloads,
    replace,
    shape,
    weight_node,
)

if TYPE_CHECKING:
    from .context import PassContext

GELU = overloads("gelu")
MAX_N = 81920
"""A wider GEMM's result takes much memory for long: SDXL's keys and values of the prompt have N = 166,400, and 49 MB
for nearly all of a call. Half of those that are 1280 wide, N = 76,800, fill an NVIDIA H200 better than a third. The
limit is not in bytes: plans of all batch sizes share the packed weights."""


def packed_linear(gm: fx.GraphModule, ctx: PassContext) -> int:
    """Replaces groups of linears. Returns the number of groups.

    Pattern: linear(x, w0, [b0]), linear(x, w1, [b1]), ...
    Replacement: slices along N of linear(x, cat([w0, w1, ...]), cat([b0, b1, ...]))

    The weights are concatenated once, in the arena. All linears of a graph are grouped before the first rewrite, so
    this pass is no loop over single nodes.
    """
    hoist_weights(gm.graph)
    pinned, uses = mutated(gm.graph), weight_uses(gm.graph)
    siblings: dict[Any, list[fx.Node]] = defaultdict(list)
    for node in gm.graph.nodes:
        if is_op(node, LINEAR) and pinned.isdisjoint([node, *node.all_input_nodes]):
            key = sibling_key(node, uses)
            if key is not None:
                siblings[key].append(node)
    groups = [part for group in siblings.values() for part in split_wide(group)]
    return sum(pack(gm, ctx, group) for group in groups if len(group) > 1)


def split_wide(group: list[fx.Node]) -> list[list[fx.Node]]:
    """Splits a group that is wider than `MAX_N`.

    Linears of one width stand in one part of a UNet: they are split by width, and then into as few parts as fit.
    """
    widths: dict[int, list[fx.Node]] = defaultdict(list)
    for node in group:
        widths[(shape(node) or (0,))[-1]].append(node)
    if sum(width * len(some) for width, some in widths.items()) <= MAX_N:
        return [group]
    parts = []
    for width, some in widths.items():
        count = -(-width * len(some) // MAX_N)
        each = -(-len(some) // count)
        parts += [some[start : start + each] for start in range(0, len(some), each)]
    return parts


def weight_uses(graph: fx.Graph) -> dict[Any, int]:
    """Returns how many nodes read each weight."""
    uses: dict[Any, int] = defaultdict(int)
    for node in graph.nodes:
        if is_weight(node):
            uses[node.meta["weight"]] += len(node.users)
    return uses


def is_for_linear_gelu(linear: fx.Node) -> bool:
    """Whether GELU by tanh alone reads a linear: its product has an epilogue for it (linear_gelu.py)."""
    gelu = only_user(linear)
    by_tanh = is_op(gelu, GELU) and gelu is not None and argument(gelu, 1, "approximate", "none") == "tanh"
    return by_tanh and dtype(linear) in HALF


def under_cast(node: Any) -> Any:
    return node.args[0] if is_cast(node) else node


def sibling_key(node: fx.Node, uses: dict[Any, int]) -> Any:
    """Returns what two linears must have in common to be packed; None for a linear that cannot be packed."""
    x, weight, bias = node.args[0], argument(node, 1, "weight"), argument(node, 2, "bias")
    key: list[Any] = [x]
    for param in (weight, bias):
        if param is None:
            key.append(None)
            continue
        raw = under_cast(param)
        size = shape(raw)
        if not is_weight(raw) or size is None or uses[raw.meta["weight"]] != 1:
            return None
        key += [size[1:], dtype(raw), dtype(param)]
    if bias is not None and is_for_linear_gelu(node):
        return None
    # A cast weight that is used twice through its cast would be read twice.
    if any(is_cast(param) and len(param.users) != 1 for param in (weight, bias)):
        return None
    return tuple(key) if shape(weight) is not None and len(shape(weight) or ()) == 2 else None


def pack(gm: fx.GraphModule, ctx: PassContext, group: list[fx.Node]) -> int:
    """Packs a group. Returns 1, or 0 if the arena refuses."""
    first = group[0]
    packed: list[fx.Node | None] = []
    for index, name in ((1, "weight"), (2, "bias")):
        params = [argument(node, index, name) for node in group]
        if params[0] is None:
            packed.append(None)
            continue
        raw = [under_cast(param) for param in params]
        weight = ctx.arena.pack([node.meta["weight"] for node in raw])
        if weight is None:
            return 0
        new = weight_node(gm, weight, raw[0])
        if is_cast(params[0]):
            with gm.graph.inserting_before(first):
                size = tuple(weight.tensor.shape)
                new = call(gm.graph, aten.to.dtype, (new, dtype(params[0])), meta_like(params[0], size))
        packed.append(new)
    # At the place of the first sibling the input is known, weights are at the top, and all users follow.
    widths = [(shape(node) or ())[-1] for node in group]
    size = (*(shape(first) or ())[:-1], sum(widths))
    with gm.graph.inserting_before(first):
        linear = call(gm.graph, aten.linear.default, (first.args[0], *packed), meta_like(first, size))
        start, slices = 0, []
        for node, width in zip(group, widths, strict=True):
            args = (linear, len(size) - 1, start, start + width)
            slices.append(call(gm.graph, aten.slice.Tensor, args, node))
            start += width
    for node, part in zip(group, slices, strict=True):
        replace(node, part)
    return 1
