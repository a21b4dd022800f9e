"""A UNet's first and last convolution, from and to a narrow channels, with their biases, by kernels of our own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import fx

from sfast_ext.kernels.conv import narrow_conv as kernel

from .conv_match import plain_convolutions
from .rewrite import argument, aten, call, dtype, is_op, is_weight, mutated, replace, shape

if TYPE_CHECKING:
    from . import PassContext


def narrow_conv(gm: fx.GraphModule, ctx: PassContext) -> int:
    """After channels_last; before bias_add, which would take the biases."""
    if not ctx.serves(kernel):
        return 0
    count = 0
    for conv, x, weight in plain_convolutions(gm.graph, mutated(gm.graph)):
        bias = argument(conv, 2, "bias")
        if not is_narrow(weight) or not (bias is None or (is_weight(bias) and dtype(bias) == dtype(conv))):
            continue
        if not ctx.arena.channels_last(weight.meta["weight"]):
            continue
        with gm.graph.inserting_before(conv):
            new = call(gm.graph, kernel.launch, (before_copy(x), weight, bias), conv)
        replace(conv, new)
        count += 1
    return count


def is_narrow(weight: fx.Node) -> bool:
    columns, channels = (shape(weight) or (0, 0))[:2]
    return channels <= kernel.MOST_IN or columns in kernel.OUT


def before_copy(x: fx.Node) -> fx.Node:
    """The picture before it was laid out anew for this: narrow channels are read as they lie."""
    narrow = (shape(x) or (0, 0))[1] <= kernel.MOST_IN
    laid_out = is_op(x, (aten.contiguous.default,)) and x.kwargs.get("memory_format") == torch.channels_last
    return x.args[0] if narrow and laid_out else x  # type: ignore[return-value]
