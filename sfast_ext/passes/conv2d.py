"""3x3 convolutions by a kernel of our own; what they read and write stays where it lies."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import fx

from sfast_ext.kernels import conv2d as kernel

from .im2col import is_plain
from .rewrite import CONV, argument, call, dtype, is_op, is_weight, mutated, replace

if TYPE_CHECKING:
    from . import PassContext


def conv2d(gm: fx.GraphModule, ctx: PassContext) -> int:
    """After bias_add, which takes the biases, and im2col, which takes what is a product by itself."""
    if not ctx.triton:
        return 0
    untouchable, count = mutated(gm.graph), 0
    for conv in list(gm.graph.nodes):
        if not is_op(conv, CONV) or not untouchable.isdisjoint([conv, *conv.all_input_nodes]) or not is_plain(conv):
            continue
        x, weight = conv.args[0], argument(conv, 1, "weight")
        if argument(conv, 2, "bias") is not None or not is_weight(weight):
            continue
        if not dtype(x) == dtype(weight) == dtype(conv) or not ctx.arena.channels_last(weight.meta["weight"]):
            continue
        with gm.graph.inserting_before(conv):
            new = call(gm.graph, kernel.launch, (x, weight), conv)
        replace(conv, new)
        count += 1
    return count
