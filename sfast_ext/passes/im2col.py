"""A 3x3 convolution over few pixels is one product with the patches that the norm before it writes (im2col).

Of 128 rows cuDNN has too few tiles for a large GPU, and cuts the sum into parts with a kernel of their own;
cuBLAS does the same product sooner, and in NHWC the weight lies as the product reads it.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

from torch import fx

from sfast_ext.kernels.conv import conv2d
from sfast_ext.kernels.group_norm import add_group_norm, cat_group_norm, group_norm

from .channels_last import replace_by_product
from .conv_match import plain_convolutions
from .rewrite import (
    aten,
    call,
    fake,
    is_op,
    mutated,
    only_user,
    shape,
    value,
)

if TYPE_CHECKING:
    from . import PassContext


def im2col(gm: fx.GraphModule, ctx: PassContext) -> int:
    """After sum_group_norm and bias_add; only where there is Triton, as otherwise nobody writes patches for less."""
    if not ctx.serves(group_norm):
        return 0
    graph, count = gm.graph, 0
    for conv, picture, weight in plain_convolutions(graph, mutated(graph)):
        if only_user(picture) is not conv:
            continue
        writer = writes_patches(picture)
        if writer is None or not few(picture) or not ctx.arena.channels_last(weight.meta["weight"]):
            continue
        n, channels, height, width = shape(picture) or (0, 0, 0, 0)
        out = (shape(conv) or (0, 0))[1]
        writer.kwargs = {**writer.kwargs, "patches": True}
        patches = fake(picture, (n, height, width, 9 * channels))
        picture.meta["val"] = patches
        if writer is not picture:
            writer.meta["val"] = (writer.meta["val"][0], patches)
        with graph.inserting_before(conv):
            rows = call(graph, aten.permute.default, (weight, [0, 2, 3, 1]), fake(weight, (out, 3, 3, channels)))
            matrix = call(graph, aten.reshape.default, (rows, [out, 9 * channels]), fake(weight, (out, 9 * channels)))
        replace_by_product(conv, picture, matrix)
        count += 1
    return count


def writes_patches(picture: Any) -> fx.Node | None:
    """The norm that makes `picture`, where its kernel can write patches in its place."""
    val = value(picture)
    if val is None:
        return None
    if is_op(picture, (group_norm.launch,)):
        writer, groups = picture, picture.args[1]
    elif is_op(picture, (operator.getitem,)) and picture.args[1] == 1:
        writer = picture.args[0]
        if not is_op(writer, (add_group_norm.launch, cat_group_norm.launch)):
            return None
        groups = writer.args[4]
    else:
        return None
    return writer if group_norm.supports_patches(val, groups) else None


def few(picture: fx.Node) -> bool:
    n, _, height, width = shape(picture) or (0, 0, 0, 0)
    return n * height * width <= conv2d.MOST_AS_PRODUCT
