"""The convolutions that several passes look for, each to do another with them."""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from .channels_last import all_are
from .rewrite import CONV, HALF, argument, dtype, is_op, is_weight, shape


def plain_convolutions(graph: fx.Graph, pinned: set[fx.Node]) -> Iterator[tuple[fx.Node, fx.Node, fx.Node]]:
    """Plain ones of a weight of the arena, of which nothing is pinned that they read or give: the convolution, the
    picture and the weight. The convolution may be taken out of the graph while others are still to come."""
    for conv in list(graph.nodes):
        if not is_op(conv, CONV) or not pinned.isdisjoint([conv, *conv.all_input_nodes]) or not is_plain(conv):
            continue
        x, weight = conv.args[0], argument(conv, 1, "weight")
        if is_weight(weight) and dtype(x) == dtype(weight) == dtype(conv):
            yield conv, x, weight


def is_plain(conv: fx.Node) -> bool:
    """3x3, with a row of zeros around, every pixel, all channels, in half precision."""
    weight = shape(argument(conv, 1, "weight"))
    if weight is None or weight[2:] != (3, 3) or argument(conv, 6, "groups", 1) != 1 or dtype(conv) not in HALF:
        return False
    ones = (argument(conv, 3, "stride", 1), argument(conv, 4, "padding", 0), argument(conv, 5, "dilation", 1))
    return len(shape(conv) or ()) == 4 and all(all_are(1, given) for given in ones)
