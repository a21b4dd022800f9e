"""3x3 convolutions by a kernel of our own; what they read and write stays where it lies."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import fx

from sfast_ext.kernels.conv import conv2d as kernel

from .conv_match import plain_convolutions
from .rewrite import argument, call, mutated, replace

if TYPE_CHECKING:
    from . import PassContext


def conv2d(gm: fx.GraphModule, ctx: PassContext) -> int:
    """After bias_add, which takes the biases, and im2col, which takes what is a product by itself."""
    if not ctx.serves(kernel):
        return 0
    count = 0
    for conv, x, weight in plain_convolutions(gm.graph, mutated(gm.graph)):
        if argument(conv, 2, "bias") is not None or not ctx.arena.channels_last(weight.meta["weight"]):
            continue
        with gm.graph.inserting_before(conv):
            new = call(gm.graph, kernel.launch, (x, weight), conv)
        replace(conv, new)
        count += 1
    return count
