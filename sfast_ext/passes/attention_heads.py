"""Attention over (batch * heads, tokens, channels) as attention over (batch, heads, tokens, channels).

The heads lie beside each other where the projections leave them: no copy is needed to take them apart, and kernels read
them there. What a host multiplies queries or keys by beforehand is the attention's scale.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import fx

from .attention import ATTENTION, kernel_options
from .cleanup import PERMUTE, permutation
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
    from . import PassContext

Heads = tuple[int, int, int, int]
"""Batch, heads, tokens, channels."""


def attention_heads(gm: fx.GraphModule, ctx: PassContext) -> int:
    """After sliced_attention. Counts the attentions whose heads were taken apart."""
    pinned, count = mutated(gm.graph), 0
    for node in list(gm.graph.nodes):
        given = kernel_options(node) if is_op(node, ATTENTION) and node not in pinned else None
        if given is None or not pinned.isdisjoint(node.all_input_nodes):
            continue
        fold_scale(node, pinned)
        count += split_heads(node, given["mask"], pinned)
    for node in gm.graph.nodes:
        if node not in pinned and pinned.isdisjoint(node.all_input_nodes):
            canonicalize(node)
    return count


def fold_scale(node: fx.Node, pinned: set[fx.Node]) -> None:
    """Numbers that only this attention's queries or keys are multiplied by become its scale."""
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
    """The product with a number on the way to an operand, where nobody else sees what comes of it."""
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
    """The attention over its operands as they are before batch and heads become one dimension; where they never were
    two, over one head, as few kernels take three dimensions."""
    sources = [unsplit_source(operand, pinned) for operand in node.args[:3]]
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
            apart = split_mask(mask, batch, heads)
            if apart is None:
                return 0
            args = (*args, apart)
        out = call(graph, node.target, args, meta_like(node, (batch, heads, count, before[-1])), dict(node.kwargs))
        together = call(graph, aten.reshape.default, (out, list(before)), node)
    replace(node, together)
    return 1


def reshaped_before(node: fx.Node, x: Any, size: Heads) -> fx.Node:
    with node.graph.inserting_before(node):
        return call(node.graph, aten.reshape.default, (x, list(size)), meta_like(x, size))


def unsplit_source(operand: Any, pinned: set[fx.Node]) -> fx.Node | None:
    """The value (batch, heads, tokens, channels) that an operand (batch * heads, tokens, channels) was made of, or
    (batch * heads, 1, tokens, channels), by reshapes and casts that lose nothing."""
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
    """A permutation that leaves the elements in order, as only dimensions of one element change places."""
    order = permutation(node) if is_op(node, PERMUTE) else None
    size = shape(node.args[0]) if order is not None else None
    if order is None or size is None:
        return False
    wide = [dim for dim in order if size[dim] != 1]
    return wide == sorted(wide)


def split_mask(mask: fx.Node, batch: int, heads: int) -> fx.Node | None:
    """A mask as it meets (batch, heads, queries, keys)."""
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
    """One name for one thing: what exchanges the second and third of four dimensions is a transposition, what keeps the
    order of elements a reshape."""
    size = shape(node)
    if size is None:
        return
    if node.target is aten.permute.default and [d % 4 for d in argument(node, 1, "dims")] == [0, 2, 1, 3]:
        node.target, node.args, node.kwargs = aten.transpose.int, (node.args[0], 1, 2), {}
    elif is_op(node, RESHAPE):
        node.target, node.args, node.kwargs = aten.reshape.default, (node.args[0], list(size)), {}
