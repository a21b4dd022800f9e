"""Attention over (batch * heads, tokens, channels), rewritten as one over (batch, heads, tokens, channels).

The projections leave the heads next to each other: splitting them needs no copy, and kernels read them in place. A
number by which a host multiplies queries or keys first becomes the attention's scale.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import fx

from .attention import ATTENTION, kernel_options
from .cleanup import PERMUTE, permutation
from .fusion import rewrite_each
from .rewrite import (
    RESHAPE,
    argument,
    aten,
    call,
    dtype,
    is_cast,
    is_number,
    is_op,
    meta_like,
    mutated,
    only_user,
    replace,
    reshaped,
    shape,
    strip_lossless_casts,
)
from .scaled_dot_product import MUL, cast, scale_option

if TYPE_CHECKING:
    from .context import PassContext

Heads = tuple[int, int, int, int]
"""Batch, heads, tokens, channels."""


def attention_heads(gm: fx.GraphModule, ctx: PassContext) -> int:
    """Splits heads, and gives equal views equal operators. Returns the number of attentions whose heads were split.

    Pattern: scaled_dot_product_attention(merge(q) * number, merge(k), merge(v), ...)
    Replacement: merge(scaled_dot_product_attention(q, k, v, ..., scale=number * ...))

    `merge` makes (batch * heads, tokens, channels) of (batch, heads, tokens, channels).
    """
    pinned = mutated(gm.graph)
    count = rewrite_each(gm.graph, ATTENTION, pinned, lambda node: rewrite(node, pinned))
    for node in gm.graph.nodes:
        if node not in pinned and pinned.isdisjoint(node.all_input_nodes):
            canonicalize(node)
    return count


def rewrite(node: fx.Node, pinned: set[fx.Node]) -> int:
    options = kernel_options(node)
    if options is None or not pinned.isdisjoint(node.all_input_nodes):
        return 0
    fold_scale(node, pinned)
    return split_heads(node, options["mask"], pinned)


def fold_scale(node: fx.Node, pinned: set[fx.Node]) -> None:
    """Folds numbers by which only this attention's queries or keys are multiplied into its scale."""
    size = shape(node.args[0])
    if size is None:
        return
    given = node.kwargs.get("scale")
    scale = size[-1] ** -0.5 if given is None else given
    if not is_number(scale):
        return
    for operand in node.args[:2] if len(set(node.args[:3])) == 3 else ():
        factor = match_scale(operand, node, pinned)
        if factor is not None:
            scale *= argument(factor, 1, "other")
            replace(factor, factor.args[0])  # type: ignore[arg-type]
    others = {name: value for name, value in node.kwargs.items() if name != "scale"}
    node.kwargs = {**others, **scale_option(scale, size[-1])}


def match_scale(operand: Any, user: fx.Node, pinned: set[fx.Node]) -> fx.Node | None:
    """Matches a multiplication by a number under views and casts of an operand, all with one user."""
    node = operand
    while isinstance(node, fx.Node) and node not in pinned and only_user(node) is user:
        source = node.args[0] if node.args else None
        if is_op(node, MUL) and is_number(argument(node, 1, "other")) and isinstance(source, fx.Node):
            return node if dtype(node) == dtype(source) and source not in pinned else None
        if not (is_op(node, RESHAPE | PERMUTE) or is_cast(node)):
            return None
        user, node = node, source
    return None


def split_heads(node: fx.Node, mask: Any, pinned: set[fx.Node]) -> int:
    """Replaces an attention by one over the operands before batch and heads were merged.

    If they never were two dimensions, it becomes one over a single head: few kernels take three dimensions.
    """
    sources = [unmerged_source(operand, pinned) for operand in node.args[:3]]
    sizes: list[Any] = [shape(x) for x in sources]
    graph, before = node.graph, shape(node) or ()
    if None in sources or len({size[:2] for size in sizes}) != 1:
        sizes = [shape(x) for x in node.args[:3]]
        if any(size is None or len(size) != 3 for size in sizes) or len({size[0] for size in sizes}) != 1:
            return 0
        sizes = [(size[0], 1, *size[1:]) for size in sizes]
        sources = [reshaped_before(node, x, size) for x, size in zip(node.args[:3], sizes)]
    batch, heads, count, _ = sizes[0]
    with graph.inserting_before(node):
        args: tuple[Any, ...] = tuple(cast(x, dtype(like)) for x, like in zip(sources, node.args[:3]))
        if mask is not None:
            split = split_mask(mask, batch, heads)
            if split is None:
                return 0
            args = (*args, split)
        out = call(graph, node.target, args, meta_like(node, (batch, heads, count, before[-1])), dict(node.kwargs))
        merged = call(graph, aten.reshape.default, (out, list(before)), node)
    replace(node, merged)
    return 1


def reshaped_before(node: fx.Node, x: Any, size: Heads) -> fx.Node:
    with node.graph.inserting_before(node):
        return call(node.graph, aten.reshape.default, (x, list(size)), meta_like(x, size))


def unmerged_source(operand: Any, pinned: set[fx.Node]) -> fx.Node | None:
    """Finds the value (batch, heads, tokens, channels) under reshapes and lossless casts of an operand.

    The operand is (batch * heads, tokens, channels) or (batch * heads, 1, tokens, channels).
    """
    size = shape(operand)
    if size is None or len(size) not in (3, 4) or (len(size) == 4 and size[1] != 1):
        return None
    node = strip_lossless_casts(operand)
    while True:
        found = shape(node)
        if found is None or node in pinned:
            return None
        if len(found) == 4 and found[1] > 1 and found[0] * found[1] == size[0] and found[2:] == size[-2:]:
            return node
        if not is_op(node, RESHAPE) and not is_trivial_permute(node):
            return None
        node = strip_lossless_casts(node.args[0])


def is_trivial_permute(node: Any) -> bool:
    """Whether a permutation keeps the order of elements, because it moves only dimensions of size 1."""
    order = permutation(node) if is_op(node, PERMUTE) else None
    size = shape(node.args[0]) if order is not None else None
    if order is None or size is None:
        return False
    wide = [dim for dim in order if size[dim] != 1]
    return wide == sorted(wide)


def split_mask(mask: fx.Node, batch: int, heads: int) -> fx.Node | None:
    """Returns a mask that broadcasts to (batch, heads, queries, keys); None if there is no such view."""
    size = shape(mask) or ()
    if len(size) <= 2:
        return mask
    rows = (size[-2], size[-1])
    if len(size) == 4 and size[1] != 1 or len(size) > 4:
        return None
    if size[0] == batch * heads:
        return reshaped(mask.graph, mask, (batch, heads, *rows))
    return reshaped(mask.graph, mask, (1, 1, *rows)) if size[0] == 1 else None


def canonicalize(node: fx.Node) -> None:
    """Gives equal views equal operators.

    Pattern: permute(x, [0, 2, 1, 3])
    Replacement: transpose(x, 1, 2)

    Pattern: any view that keeps the order of elements
    Replacement: reshape(x, size)
    """
    size = shape(node)
    if size is None:
        return
    if node.target is aten.permute.default and [d % 4 for d in argument(node, 1, "dims")] == [0, 2, 1, 3]:
        node.target, node.args, node.kwargs = aten.transpose.int, (node.args[0], 1, 2), {}
    elif is_op(node, RESHAPE):
        node.target, node.args, node.kwargs = aten.reshape.default, (node.args[0], list(size)), {}
