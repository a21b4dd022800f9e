"""Lowers 3x3 convolutions over few pixels onto GEMMs (im2col).

With M = 128 rows cuDNN has too few tiles for a large GPU: it splits the reduction over K, and adds the parts in a
separate kernel. cuBLAS computes the same GEMM faster. In NHWC the weight already lies as the GEMM reads it.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

from torch import fx

from sfast_ext.kernels.conv import conv2d
from sfast_ext.kernels.group_norm import add_group_norm, cat_group_norm, group_norm

from .channels_last import replace_with_linear
from .conv_match import match
from .fusion import fusion
from .rewrite import CONV, aten, call, is_op, meta_like, only_user, shape, value

if TYPE_CHECKING:
    from .context import PassContext


@fusion(CONV, needs=(group_norm.launch,))
def im2col(conv: fx.Node, pinned: set[fx.Node], ctx: PassContext) -> bool:
    """Replaces a convolution whose input is made by a group norm's kernel: that kernel writes the im2col matrix.

    Pattern: conv2d(norm.launch(x, ...), weight, [bias])  # 3x3, half precision, few pixels
    Replacement: linear(norm.launch(x, ..., patches=True), weight as (O, 9 * C), bias), permuted to NCHW

    `norm` is group_norm, add_group_norm or cat_group_norm. Without the kernel of group_norm nothing would write the
    matrix for less than it saves.
    """
    graph, found = conv.graph, match(conv, pinned)
    if found is None or only_user(found.x) is not conv:
        return False
    image, weight = found
    writer = patches_writer(image, ctx)
    if writer is None or not few_pixels(image) or not ctx.arena.channels_last(weight.meta["weight"]):
        return False
    n, channels, height, width = shape(image) or (0, 0, 0, 0)
    out = (shape(conv) or (0, 0))[1]
    writer.kwargs = {**writer.kwargs, "patches": True}
    patches = meta_like(image, (n, height, width, 9 * channels))
    image.meta["val"] = patches
    if writer is not image:
        writer.meta["val"] = (writer.meta["val"][0], patches)
    with graph.inserting_before(conv):
        nhwc = call(graph, aten.permute.default, (weight, [0, 2, 3, 1]), meta_like(weight, (out, 3, 3, channels)))
        flat = meta_like(weight, (out, 9 * channels))
        matrix = call(graph, aten.reshape.default, (nhwc, [out, 9 * channels]), flat)
    replace_with_linear(conv, image, matrix)
    return True


def patches_writer(image: Any, ctx: PassContext) -> fx.Node | None:
    """Returns the norm that makes `image`, if its kernel can write the im2col matrix instead."""
    val = value(image)
    if val is None:
        return None
    if is_op(image, (group_norm.launch,)):
        writer, groups = image, image.args[1]
    elif is_op(image, (operator.getitem,)) and image.args[1] == 1:
        writer = image.args[0]
        if not is_op(writer, (add_group_norm.launch, cat_group_norm.launch)):
            return None
        groups = writer.args[4]
    else:
        return None
    return writer if group_norm.accepts_patches(val, groups, triton=ctx.triton) else None


def few_pixels(image: fx.Node) -> bool:
    n, _, height, width = shape(image) or (0, 0, 0, 0)
    return n * height * width <= conv2d.MAX_PIXELS_AS_PRODUCT
