"""A convolution's bias, the residual added to it and the scale of both, in one pass over the picture.

A bias alone goes too: torch adds it to a picture in NHWC by a kernel that reads neither of them in order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import fx

from sfast_ext.kernels.pointwise import bias_add as kernel

from .layer_norm import is_residual_add, split_linear_bias
from .rewrite import (
    ADD,
    CONV,
    HALF,
    KERNEL_DTYPES,
    argument,
    aten,
    call,
    dtype,
    is_number,
    is_op,
    meta_like,
    mutated,
    only_user,
    overloads,
    replace,
    same_meta,
    shape,
    without_bias,
)

if TYPE_CHECKING:
    from . import PassContext

MUL = overloads("mul.Tensor", "mul.Scalar")
DIV = overloads("div.Tensor", "div.Scalar")
LEAST_CHANNELS = 16  # with fewer, a tile of the kernel is mostly empty


def bias_add(gm: fx.GraphModule, ctx: PassContext) -> int:
    if not ctx.serves(kernel):
        return 0
    pinned, count = mutated(gm.graph), 0
    for node in list(gm.graph.nodes):
        if node._erased or not is_op(node, ADD) or node in pinned or argument(node, 2, "alpha", 1) != 1:
            continue
        # Of two convolutions the later one is taken: the other is done by then.
        conv, residual = node.args[1], node.args[0]
        if not is_biased_operand(conv, node):
            conv, residual = residual, conv
        if not is_biased_operand(conv, node) or not same_meta(residual, node) or conv is residual:
            continue
        if conv in pinned or residual in pinned:
            continue
        last, factor = match_scale(node, pinned)
        with gm.graph.inserting_before(conv):
            bare = without_bias(conv)
        with gm.graph.inserting_before(node):
            new = call(gm.graph, kernel.launch, (bare, argument(conv, 2, "bias"), residual, factor), last)
        replace(last, new)
        count += 1
    return count + fuse_bias(gm, pinned) + fuse_token_bias(gm, pinned)


def fuse_token_bias(gm: fx.GraphModule, pinned: set[fx.Node]) -> int:
    """Sums of tokens whose one part is a linear layer: its bias is added with the residual, as without it cuBLAS has
    quicker products."""
    graph, count = gm.graph, 0
    for add in list(graph.nodes):
        size = shape(add) or ()
        if len(size) != 3 or not is_residual_add(add) or dtype(add) not in HALF:
            continue
        if not pinned.isdisjoint([add, *add.args[:2]]):
            continue
        with graph.inserting_before(add):
            x, residual, bias = split_linear_bias(add, pinned)
            if bias is None:
                continue
            # the kernel's channels are the second dimension, and lie last in memory: only views
            outer = meta_like(add, (size[0], size[2], size[1]))
            operands = [call(graph, aten.permute.default, (t, [0, 2, 1]), outer) for t in (x, residual)]
            total = call(graph, kernel.launch, (operands[0], bias, operands[1], 1.0), outer)
            new = call(graph, aten.permute.default, (total, [0, 2, 1]), add)
        replace(add, new)
        count += 1
    return count


def fuse_bias(gm: fx.GraphModule, pinned: set[fx.Node]) -> int:
    """Biases of convolutions that no residual is added to."""
    count = 0
    for conv in list(gm.graph.nodes):
        if not is_biased_conv(conv) or conv in pinned or (shape(conv) or (0, 0))[1] < LEAST_CHANNELS:
            continue
        with gm.graph.inserting_before(conv):
            bare = without_bias(conv)
            new = call(gm.graph, kernel.launch, (bare, argument(conv, 2, "bias"), None, 1.0), conv)
        replace(conv, new)
        count += 1
    return count


def is_biased_operand(conv: Any, add: fx.Node) -> bool:
    """A convolution whose result only `add` sees, in `add`'s shape and dtype."""
    return is_biased_conv(conv) and only_user(conv) is add and same_meta(conv, add)


def is_biased_conv(conv: Any) -> bool:
    """A convolution of pictures with a bias, in a dtype of the kernel's."""
    if not is_op(conv, CONV):
        return False
    bias = argument(conv, 2, "bias")
    return (
        isinstance(bias, fx.Node)
        and len(shape(conv) or ()) == 4
        and dtype(conv) in KERNEL_DTYPES
        and dtype(bias) == dtype(conv)
    )


def match_scale(add: fx.Node, pinned: set[fx.Node]) -> tuple[fx.Node, float]:
    """The product of the sum with a number, if that is all the sum is for, and the factor."""
    user = only_user(add)
    if user is None or user in pinned or not same_meta(user, add) or user.args[0] is not add:
        return add, 1.0
    number = argument(user, 1, "other")
    if not is_number(number):
        return add, 1.0
    if is_op(user, MUL):
        return user, float(number)
    if is_op(user, DIV) and number != 0:
        return user, 1.0 / number
    return add, 1.0
