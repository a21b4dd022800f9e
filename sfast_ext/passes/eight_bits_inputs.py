"""Who writes the input of products of 8-bit integers: the kernel of the norm or of the activation in front of them, or
one more."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import fx

from sfast_ext.kernels.backend.registry import Kernel
from sfast_ext.kernels.eight_bits import (
    add_layer_norm8,
    gated_norm8,
    gelu8,
    layer_norm8,
    modulated_norm8,
    quantise_rows,
    swiglu8,
)
from sfast_ext.kernels.pointwise import add_layer_norm, gated_norm, modulated_norm, swiglu

from .eight_bits_match import Candidate
from .norm_rotary import CAT, unchanged
from .rewrite import argument, call, dtype, is_op, meta_like, only_user, overloads, replace, shape

if TYPE_CHECKING:
    from .context import PassContext

GELU = overloads("gelu")


class Writer(NamedTuple):
    """What writes a value in half precision, and the kernel that writes codes in its place."""

    node: fx.Node
    kernel: Kernel[..., Any]
    summed: bool = False
    """Whether the first of its results is a sum, and the value the second."""
    source: fx.Node | None = None
    """What has the kernel's operands, if that is not `node`."""
    joined: fx.Node | None = None
    """What stands in front of the columns of `source`."""


def writer_of(x: fx.Node) -> Writer | None:
    """The kernel of a transformer's norm, of SwiGLU or of GELU, that writes a value; of an activation also behind the
    columns of another value."""
    if is_op(x, CAT):
        return behind_another(x)
    if is_op(x, (operator.getitem,)):
        pair: Any = x.args[0]
        return Writer(pair, gated_norm8.launch, True) if is_op(pair, (gated_norm.launch,)) and x.args[1] == 1 else None
    if is_op(x, (modulated_norm.launch,)):
        return Writer(x, modulated_norm8.launch)
    if is_op(x, (swiglu.launch,)):
        return Writer(x, swiglu8.launch)
    return Writer(x, gelu8.launch) if is_op(x, GELU) and dtype(x.args[0]) == dtype(x) else None


def behind_another(cat: fx.Node) -> Writer | None:
    """The kernel of an activation that only the concatenation of columns reads, as its second part."""
    parts: Any = cat.args[0]
    size = shape(cat) or (0,)
    if len(parts) != 2 or argument(cat, 1, "dim", 0) % len(size) != len(size) - 1:
        return None
    first, second = parts
    writer = writer_of(second) if is_op(second, GELU | {swiglu.launch}) else None
    if writer is None or only_user(second) is not cat or dtype(first) != dtype(cat) or dtype(second) != dtype(cat):
        return None
    # its operands are read at the place of the concatenation
    return Writer(cat, writer.kernel, source=second, joined=first) if unchanged(second, cat) else None


def quantised_by_writer(x: fx.Node, group: int, ctx: PassContext) -> tuple[fx.Node, fx.Node] | None:
    """Replaces the kernel that writes a value by one that quantises it, after a rotation if `group` is not 0. Other
    users read the sum from its results. None if there is none."""
    writer = writer_of(x)
    if writer is None or not ctx.supported(writer.kernel):
        return None
    node, graph, source = writer.node, x.graph, writer.source or writer.node
    options = {**source.kwargs, **({"group": group} if group else {})}
    if writer.joined is not None:
        options["joined"] = writer.joined
    with graph.inserting_before(node):
        new = call(graph, writer.kernel, source.args, None, options)
    return in_place_of(node, new, x, writer.summed)


def quantised(
    x: fx.Node, some: list[Candidate], groups: dict[fx.Node, int], ctx: PassContext
) -> dict[int, tuple[fx.Node, fx.Node]]:
    """Inserts what quantises `x` for the products that read it. Returns (q, scale) by group."""
    norm, turns = some[0].norm, list(dict.fromkeys(groups[c.result] for c in some))
    if len(turns) == 1 and set(x.users) == {c.node for c in some}:
        if norm is None:
            fused = quantised_by_writer(x, turns[0], ctx)
        else:
            fused = None if turns[0] else quantised_by_norm(norm, x)
        if fused is not None:
            return {turns[0]: fused}
    made: dict[int, tuple[fx.Node, fx.Node]] = {}
    graph = x.graph
    for group in turns:
        with graph.inserting_after(x):
            pair = call(graph, quantise_rows.launch, (x,), None, {"group": group} if group else {})
        made[group] = results(pair, x, 0)
    return made


def quantised_by_norm(norm: fx.Node, normed: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """Replaces the kernel of a norm by one that quantises its result. None if that does not take its operands."""
    graph, sums = norm.graph, is_op(norm, (add_layer_norm.launch,))
    kernel: Any = add_layer_norm8 if sums else layer_norm8
    names = ("x", "residual", "weight", "bias", "eps") if sums else ("x", "weight", "bias", "eps")
    operands = [argument(norm, i, name) for i, name in enumerate(names)]
    more = {name: norm.kwargs.get(name) for name in ("shift", "post_bias")} if sums else {}
    tensors = [t for t in (*operands[:-1], *more.values()) if t is not None]
    if len(norm.args) > len(names) or any(dtype(t) != dtype(normed) for t in tensors):
        return None
    options = {name: value for name, value in more.items() if value is not None}
    with graph.inserting_before(norm):
        new = call(graph, kernel.launch, tuple(operands), None, options)
    return in_place_of(norm, new, normed, sums)


def in_place_of(old: fx.Node, new: fx.Node, x: fx.Node, summed: bool) -> tuple[fx.Node, fx.Node]:
    """The nodes of q and scale behind `new`, which is in the place of `old`, the writer of `x`.

    Args:
        summed: whether the first result of both is a sum. Its users read that of `new`.
    """
    if not summed:
        return results(new, x, 0)
    graph = new.graph
    with graph.inserting_after(new):
        total = call(graph, operator.getitem, (new, 0), x)
    pair = results(new, x, 1)
    new.meta["val"] = (total.meta.get("val"), *new.meta["val"])
    for user in list(old.users):
        if user is not x:
            replace(user, total)
    return pair


def results(kernel: fx.Node, like: fx.Node, first: int) -> tuple[fx.Node, fx.Node]:
    """Inserts the nodes of q and scale behind a kernel that returns them at `first` and after. `like` has the shape and
    device of q."""
    size = shape(like) or ()
    vals = meta_like(like, size, torch.int8), meta_like(like, size[:-1], torch.float32)
    kernel.meta["val"] = vals
    graph, after = kernel.graph, kernel
    while is_op(after.next, (operator.getitem,)) and after.next.args[0] is kernel:
        after = after.next
    with graph.inserting_after(after):
        q = call(graph, operator.getitem, (kernel, first), vals[0])
    with graph.inserting_after(q):
        scale = call(graph, operator.getitem, (kernel, first + 1), vals[1])
    return q, scale
