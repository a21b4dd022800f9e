"""Convolutions in NHWC: weights re-laid once, pictures enter so and stay so; 1x1 convolutions are linears."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from .packed_linear import under_cast
from .rewrite import (
    CONV,
    argument,
    aten,
    call,
    is_op,
    is_weight,
    meta_like,
    mutated,
    overloads,
    replace,
    shape,
    value,
)

if TYPE_CHECKING:
    from . import PassContext

# 4-D in, 4-D out, and NHWC out when NHWC in: a picture keeps its layout on its way through them.
CARRIES = overloads(
    "add.Tensor",
    "sub.Tensor",
    "mul.Tensor",
    "div.Tensor",
    "silu",
    "cat",
    "concat",
    "to.dtype",
    "_to_copy",
    "contiguous",
    "clone",
    "upsample_nearest2d.vec",
    "upsample_nearest2d",
    "pad",
    "constant_pad_nd",
    "dropout",
    "slice.Tensor",
    "group_norm",
    "avg_pool2d",
)


def channels_last(gm: fx.GraphModule, ctx: PassContext) -> int:
    """Counts the convolutions."""
    if not ctx.channels_last:
        return 0
    graph, count = gm.graph, 0
    pinned = mutated(graph)
    convs = [node for node in graph.nodes if is_op(node, CONV)]
    convert_inputs(graph, pinned)
    for conv in convs:
        if len(shape(conv) or ()) != 4 or not pinned.isdisjoint([conv, *conv.all_input_nodes]):
            continue
        weight = under_cast(argument(conv, 1, "weight"))
        if is_pointwise(conv):
            count += as_linear(conv)
        elif is_weight(weight) and ctx.arena.channels_last(weight.meta["weight"]):
            count += 1
    return count


def convert_inputs(graph: fx.Graph, pinned: set[fx.Node]) -> None:
    """Pictures from outside (latent, ControlNet residuals) are laid out once, before anything meets them."""
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    for node in placeholders:
        val = value(node)
        if val is None or val.dim() != 4 or not val.is_floating_point() or node in pinned:
            continue
        if not reaches_convolution(node):
            continue
        with graph.inserting_after(placeholders[-1]):
            new = call(graph, aten.contiguous.default, (node,), node, {"memory_format": torch.channels_last})
        node.replace_all_uses_with(new, delete_user_cb=lambda user, new=new: user is not new)


def reaches_convolution(node: fx.Node) -> bool:
    """The picture, or something made from it in its layout, enters a convolution or a group norm."""
    stack, seen = [node], {node}
    while stack:
        for user in stack.pop().users:
            if is_op(user, CONV) or is_op(user, (aten.group_norm.default,)):
                return True
            if user not in seen and is_op(user, CARRIES) and len(shape(user) or ()) == 4:
                seen.add(user)
                stack.append(user)
    return False


def is_pointwise(conv: fx.Node) -> bool:
    weight = shape(argument(conv, 1, "weight"))
    if weight is None or weight[2:] != (1, 1) or argument(conv, 6, "groups", 1) != 1:
        return False
    return all_are(1, argument(conv, 3, "stride", 1)) and all_are(0, argument(conv, 4, "padding", 0))


def all_are(number: int, given: Any) -> bool:
    return all(x == number for x in (given if isinstance(given, (list, tuple)) else [given]))


def as_linear(conv: fx.Node) -> int:
    """Over one pixel a 1x1 convolution is a linear over its channels, and in NHWC both permutes are free."""
    graph, x, weight = conv.graph, conv.args[0], argument(conv, 1, "weight")
    n, out, h, w = shape(conv) or (0, 0, 0, 0)
    size = shape(x)
    if not isinstance(x, fx.Node) or size is None:
        return 0
    with graph.inserting_before(conv):
        pixels = call(graph, aten.permute.default, (x, [0, 2, 3, 1]), meta_like(x, (n, h, w, size[1])))
        matrix = call(graph, aten.reshape.default, (weight, [out, size[1]]), meta_like(weight, (out, size[1])))
    replace_with_linear(conv, pixels, matrix)
    return 1


def replace_with_linear(conv: fx.Node, pixels: fx.Node, matrix: fx.Node) -> None:
    """The convolution as a linear of what it reads for each pixel (N, H, W, K), by its weight (out, K)."""
    n, out, h, w = shape(conv) or (0, 0, 0, 0)
    with conv.graph.inserting_before(conv):
        args = (pixels, matrix, argument(conv, 2, "bias"))
        product = call(conv.graph, aten.linear.default, args, meta_like(conv, (n, h, w, out)))
        new = call(conv.graph, aten.permute.default, (product, [0, 3, 1, 2]), conv)
    replace(conv, new)
