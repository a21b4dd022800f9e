"""3x3 convolutions behind a group norm as products of 8-bit integers.

In a UNet these are all of its residual blocks. Others stay in half precision: the first and the last one, those that
resize, and shortcuts, which nothing quantises where their input is written. `Selection` says which are taken, see
eight_bits.py.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import fx

from sfast_ext import reasons
from sfast_ext.kernels.eight_bits import add_group_norm8, cat_group_norm8, conv2d8, group_norm8, quantise_weights
from sfast_ext.kernels.group_norm import add_group_norm, cat_group_norm, group_norm
from sfast_ext.kernels.pointwise import bias_add

from .channels_last import lay_out
from .eight_bits import bank_nodes
from .eight_bits_conv_match import ConvCandidate, arguments_of, conv_candidates, match
from .eight_bits_match import Candidate, with_weights_to_leave
from .rewrite import (
    argument,
    call,
    dtype,
    hoist_weights,
    is_op,
    meta_like,
    mutated,
    only_user,
    replace,
    same_meta,
    shape,
)

if TYPE_CHECKING:
    from .context import PassContext
    from .eight_bits_selection import Selection

_IN_8_BITS: dict[Any, Any] = {
    group_norm.launch: group_norm8.launch,
    add_group_norm.launch: add_group_norm8.launch,
    cat_group_norm.launch: cat_group_norm8.launch,
}
_SUMS = (bias_add.launch, add_group_norm.launch, cat_group_norm.launch)


class Sum(NamedTuple):
    """What alone reads a convolution, and adds to it."""

    node: fx.Node
    bias: Any
    residual: Any


def eight_bits_conv(gm: fx.GraphModule, ctx: PassContext) -> int:
    """Replaces convolutions, and the norms that they alone read. Returns how many.

    Pattern: conv2d(group_norm.launch(x, ...), weight, bias)  # or the norm of a sum, or of a concatenation
    Replacement: conv2d8.launch(q, scale, rows, scales, bias), (q, scale) = group_norm8.launch(x, ...)

    `rows` and `scales` are those of the weight's bank, which a quantise_weights.launch at the top brings up to date.
    What else is added to the convolution is added by its kernel: see `fold`.
    """
    selection = ctx.eight_bits
    if selection is None:
        return 0
    count = replaced(gm, ctx, selection) if ctx.most_bytes is None else 0
    if selection.resident:
        lay_out(gm.graph, ctx)
    return count


def replaced(gm: fx.GraphModule, ctx: PassContext, selection: Selection) -> int:
    hoist_weights(gm.graph)
    wanted = {name for name in selection.errors if name not in selection.kept}
    found = [c for c in conv_candidates(gm.graph, ctx) if c.name in wanted]
    if selection.resident:
        found = [c for c in with_weights_to_leave(gm.graph, found, ctx.arena) if ctx.arena.resident.has(c.weight)]
    else:
        if selection.room is not None and ctx.arena.banks.missing(c.weight for c in found) > selection.room:
            found = []
        found = [c for c in found if ctx.arena.channels_last(c.weight)]
    if not found:
        if not any(is_op(node, (quantise_weights.launch,)) for node in gm.graph.nodes) and selection.obstacle is None:
            selection.decline(reasons.EIGHT_BITS_LAYERS(), elsewhere_too=False)
        return 0
    get = ctx.arena.resident.bank if selection.resident else ctx.arena.banks.get
    banks = [get(c.weight, 0) for c in found]
    weights = bank_nodes(gm, [Candidate(c.node, c.node, None) for c in found], banks)
    pinned = mutated(gm.graph)
    for node in [c.node for c in found]:
        # again: an earlier turn may have replaced the norm
        candidate = match(node, pinned, ctx)
        assert candidate is not None
        rewrite(candidate, weights[candidate.weight, 0], pinned)
    return len(found)


def rewrite(candidate: ConvCandidate, weight: tuple[fx.Node, fx.Node], pinned: set[fx.Node]) -> None:
    """Replaces a convolution, the norm in front of it, and what is added behind it."""
    conv, norm, stride = candidate
    graph, x = conv.graph, quantised(norm, candidate.x)
    added = sum_of(conv, pinned)
    bias, residual = (argument(conv, 2, "bias"), None) if added is None else added[1:]
    options = {"stride": stride, "dtype": dtype(conv)}
    with graph.inserting_before(conv if added is None else added.node):
        new = call(graph, conv2d8.launch, (*x, *weight, bias, residual), conv, options)
    if added is None:
        replace(conv, new)
    else:
        fold(added.node, new)


def quantised(norm: fx.Node, normed: fx.Node) -> tuple[fx.Node, fx.Node]:
    """Inserts, next to the kernel of a norm, one that quantises its result, and gives others their sum. Returns q and
    its scales and zeros."""
    graph, alone = norm.graph, norm is normed
    size = shape(normed) or ()
    vals = meta_like(normed, size, torch.int8), meta_like(normed, (2, *size[:1]), torch.float32)
    options = {name: norm.kwargs[name] for name in ("shift", "silu") if norm.kwargs.get(name)}
    with graph.inserting_before(norm):
        new = call(graph, _IN_8_BITS[norm.target], norm.args[: arguments_of(norm)], None, options)
        first = 0 if alone else 1
        q, scale = (call(graph, operator.getitem, (new, first + i), val) for i, val in enumerate(vals))
        new.meta["val"] = vals
        if not alone:
            total = call(graph, operator.getitem, (new, 0), norm.meta["val"][0])
            new.meta["val"] = (norm.meta["val"][0], *vals)
    for user in [] if alone else list(norm.users):
        if user is not normed:
            replace(user, total)
    return q, scale


def sum_of(conv: fx.Node, pinned: set[fx.Node]) -> Sum | None:
    """Matches the kernel that alone reads a convolution without a bias, and adds a bias or a residual to it."""
    user: Any = only_user(conv)
    if not is_op(user, _SUMS) or user in pinned or argument(conv, 2, "bias") is not None:
        return None
    args = list(user.args)
    join = is_op(user, (cat_group_norm.launch,))
    scale = 1.0 if join or len(args) < 4 else args[3]
    x, bias, residual = args[:3]
    if x is not conv:
        x, residual = residual, x
    if x is not conv or residual is conv or scale != 1.0 or (join and args[3] is conv):
        return None
    if residual is not None and (residual in pinned or not same_meta(residual, conv)):
        return None
    if bias is not None and (bias in pinned or dtype(bias) != dtype(conv)):
        return None
    return Sum(user, bias, residual)


def fold(node: fx.Node, total: fx.Node) -> None:
    """Replaces what adds to a convolution by the sum that the convolution's kernel makes, and by the norm alone.

    Pattern: bias_add.launch(conv, bias, residual)
    Replacement: total

    Pattern: (sum, normed) = add_group_norm.launch(conv, bias, residual, 1.0, ...)
    Replacement: total, group_norm.launch(total, ...)

    Pattern: cat_group_norm.launch(conv, bias, residual, second, ...)
    Replacement: cat_group_norm.launch(total, None, None, second, ...)
    """
    if is_op(node, (bias_add.launch,)):
        replace(node, total)
    elif is_op(node, (cat_group_norm.launch,)):
        node.args = (total, None, None, *node.args[3:])
    else:
        graph, vals = node.graph, node.meta["val"]
        with graph.inserting_before(node):
            normed = call(graph, group_norm.launch, (total, *node.args[4:8]), vals[1], dict(node.kwargs))
        for user in list(node.users):
            replace(user, (total, normed)[user.args[1]])
