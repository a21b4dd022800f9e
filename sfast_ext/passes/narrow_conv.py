"""Lowers a UNet's first and last convolution, which have few input or output channels, onto kernels of this project."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import fx

from sfast_ext.kernels.conv import narrow_conv as kernel

from .conv_match import match
from .fusion import fusion
from .rewrite import CONV, argument, aten, call, dtype, is_op, is_weight, replace, shape

if TYPE_CHECKING:
    from .context import PassContext


@fusion(CONV, needs=(kernel.launch,))
def narrow_conv(conv: fx.Node, pinned: set[fx.Node], ctx: PassContext) -> bool:
    """Replaces a convolution from or to few channels, with its bias.

    Pattern: conv2d([contiguous(channels_last)](x), weight, [bias])  # 3x3, half precision
    Replacement: kernel.launch(x, weight, bias)
    """
    found = match(conv, pinned)
    if found is None:
        return False
    bias = argument(conv, 2, "bias")
    if not is_narrow(found.weight) or not (bias is None or (is_weight(bias) and dtype(bias) == dtype(conv))):
        return False
    if not ctx.arena.channels_last(found.weight.meta["weight"]):
        return False
    with conv.graph.inserting_before(conv):
        new = call(conv.graph, kernel.launch, (before_copy(found.x), found.weight, bias), conv)
    replace(conv, new)
    return True


def is_narrow(weight: fx.Node) -> bool:
    channels_out, channels_in = (shape(weight) or (0, 0))[:2]
    return channels_in <= kernel.MAX_IN or channels_out in kernel.OUT


def before_copy(x: fx.Node) -> fx.Node:
    """Returns the image before it was converted to channels-last for this convolution: the kernel reads an image of few
    channels in any layout."""
    narrow = (shape(x) or (0, 0))[1] <= kernel.MAX_IN
    converted = is_op(x, (aten.contiguous.default,)) and x.kwargs.get("memory_format") == torch.channels_last
    return x.args[0] if narrow and converted else x  # type: ignore[return-value]
