"""Convolutions in NHWC: weights and graph inputs are converted once, and 1x1 convolutions become linears."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from .fusion import rewrite_each
from .packed_linear import under_cast
from .rewrite import (
    CONV,
    argument,
    aten,
    call,
    is_cast,
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
    from .context import PassContext

# 4-D in, 4-D out, and NHWC out when NHWC in: they propagate the layout of an image.
KEEPS_LAYOUT = overloads(
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
    """Converts a graph to NHWC. Returns the number of convolutions.

    Pattern: input -> conv2d
    Replacement: contiguous(input, channels_last) -> conv2d, of a weight that the arena converts to channels-last

    Pattern: conv2d(x, weight, bias)  # 1x1, stride 1, padding 0
    Replacement: permute(linear(permute(x, NHWC), weight as (O, C), bias), NCHW)
    """
    if not ctx.channels_last:
        return 0
    pinned = mutated(gm.graph)
    convert_inputs(gm.graph, pinned)
    return rewrite_each(gm.graph, CONV, pinned, lambda conv: rewrite(conv, pinned, ctx))


def rewrite(conv: fx.Node, pinned: set[fx.Node], ctx: PassContext) -> bool:
    if len(shape(conv) or ()) != 4 or not pinned.isdisjoint(conv.all_input_nodes):
        return False
    if is_pointwise(conv):
        return replace_pointwise(conv)
    weight = under_cast(argument(conv, 1, "weight"))
    if not is_weight(weight) or not only_convolutions_read(weight):
        return False
    if ctx.eight_bits is not None and ctx.eight_bits.resident:
        # most of them leave the GPU as the host has them, see `lay_out`
        return True
    return ctx.arena.channels_last(weight.meta["weight"])


def lay_out(graph: fx.Graph, ctx: PassContext) -> None:
    """Convert the weights of the convolutions that are left, whose half-precision values stay on the GPU."""
    weights = (under_cast(argument(node, 1, "weight")) for node in graph.nodes if is_op(node, CONV))
    for weight in weights:
        if ctx.channels_last and len(shape(weight) or ()) == 4 and is_weight(weight) and only_convolutions_read(weight):
            ctx.arena.channels_last(weight.meta["weight"])


def only_convolutions_read(weight: fx.Node) -> bool:
    """Whether a weight, or what it is cast to, is the weight of convolutions and nothing else.

    Other code may call `view` on it, also while no forward runs, as DoRA does.
    """
    for user in weight.users:
        if is_cast(user):
            if not only_convolutions_read(user):
                return False
        elif not is_op(user, CONV) or argument(user, 1, "weight") is not weight:
            return False
    return True


def convert_inputs(graph: fx.Graph, pinned: set[fx.Node]) -> None:
    """Converts images among the inputs (latent, ControlNet residuals) once, before anything reads them."""
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
    """Whether a convolution or a group norm reads the image, or a value computed from it in its layout."""
    stack, seen = [node], {node}
    while stack:
        for user in stack.pop().users:
            if is_op(user, CONV) or is_op(user, (aten.group_norm.default,)):
                return True
            if user not in seen and is_op(user, KEEPS_LAYOUT) and len(shape(user) or ()) == 4:
                seen.add(user)
                stack.append(user)
    return False


def is_pointwise(conv: fx.Node) -> bool:
    """Whether a convolution is 1x1 with stride 1, no padding and one group."""
    weight = shape(argument(conv, 1, "weight"))
    if weight is None or weight[2:] != (1, 1) or argument(conv, 6, "groups", 1) != 1:
        return False
    return all_are(1, argument(conv, 3, "stride", 1)) and all_are(0, argument(conv, 4, "padding", 0))


def all_are(number: int, given: Any) -> bool:
    return all(x == number for x in (given if isinstance(given, (list, tuple)) else [given]))


def replace_pointwise(conv: fx.Node) -> bool:
    """Replaces a 1x1 convolution by a linear over the channels of each pixel. In NHWC both permutes are views."""
    graph, x, weight = conv.graph, conv.args[0], argument(conv, 1, "weight")
    n, out, h, w = shape(conv) or (0, 0, 0, 0)
    size = shape(x)
    if not isinstance(x, fx.Node) or size is None:
        return False
    with graph.inserting_before(conv):
        pixels = call(graph, aten.permute.default, (x, [0, 2, 3, 1]), meta_like(x, (n, h, w, size[1])))
        matrix = call(graph, aten.reshape.default, (weight, [out, size[1]]), meta_like(weight, (out, size[1])))
    replace_with_linear(conv, pixels, matrix)
    return True


def replace_with_linear(conv: fx.Node, pixels: fx.Node, matrix: fx.Node) -> None:
    """Replaces a convolution by a linear over what it reads for each pixel, (N, H, W, K), with its weight as (O, K)."""
    n, out, h, w = shape(conv) or (0, 0, 0, 0)
    with conv.graph.inserting_before(conv):
        args = (pixels, matrix, argument(conv, 2, "bias"))
        linear = call(conv.graph, aten.linear.default, args, meta_like(conv, (n, h, w, out)))
        new = call(conv.graph, aten.permute.default, (linear, [0, 3, 1, 2]), conv)
    replace(conv, new)
