"""Lowers 3x3 convolutions onto a kernel of this project."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import fx

from sfast_ext.kernels.conv import conv2d as kernel

from .conv_match import match
from .fusion import fusion
from .rewrite import CONV, argument, call, replace

if TYPE_CHECKING:
    from .context import PassContext


@fusion(CONV, needs=(kernel.launch,))
def conv2d(conv: fx.Node, pinned: set[fx.Node], ctx: PassContext) -> bool:
    """Replaces a convolution without a bias.

    Pattern: conv2d(x, weight)  # 3x3, half precision, weight channels-last
    Replacement: kernel.launch(x, weight)

    Layouts of input and result stay as they are.
    """
    found = match(conv, pinned)
    if found is None or argument(conv, 2, "bias") is not None:
        return False
    if not ctx.arena.channels_last(found.weight.meta["weight"]):
        return False
    with conv.graph.inserting_before(conv):
        new = call(conv.graph, kernel.launch, (found.x, found.weight), conv)
    replace(conv, new)
    return True
