"""Matches the 3x3 convolutions that several passes replace."""

from __future__ import annotations

from typing import NamedTuple

from torch import fx

from .channels_last import all_are
from .rewrite import CONV, HALF, argument, dtype, is_op, is_weight, shape


class ConvMatch(NamedTuple):
    x: fx.Node
    weight: fx.Node


def match(conv: fx.Node, pinned: set[fx.Node]) -> ConvMatch | None:
    """Matches a plain convolution whose weight belongs to the arena and whose operands and result are not pinned.

    Input, weight and result have one dtype.
    """
    if not is_op(conv, CONV) or not pinned.isdisjoint([conv, *conv.all_input_nodes]) or not is_plain(conv):
        return None
    x, weight = conv.args[0], argument(conv, 1, "weight")
    if not is_weight(weight) or not dtype(x) == dtype(weight) == dtype(conv):
        return None
    return ConvMatch(x, weight)  # type: ignore[arg-type]


def is_plain(conv: fx.Node) -> bool:
    """Whether a convolution is 3x3 with padding 1, stride 1, dilation 1 and one group, in half precision."""
    weight = shape(argument(conv, 1, "weight"))
    if weight is None or weight[2:] != (3, 3) or argument(conv, 6, "groups", 1) != 1 or dtype(conv) not in HALF:
        return False
    ones = (argument(conv, 3, "stride", 1), argument(conv, 4, "padding", 0), argument(conv, 5, "dilation", 1))
    return len(shape(conv) or ()) == 4 and all(all_are(1, given) for given in ones)
