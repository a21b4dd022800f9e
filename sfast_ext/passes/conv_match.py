"""Matches the 3x3 convolutions that several passes replace."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import fx

from .channels_last import all_are
from .rewrite import CONV, HALF, argument, dtype, is_op, is_weight, shape


class ConvMatch(NamedTuple):
    x: fx.Node
    weight: fx.Node


def match(conv: fx.Node, pinned: set[fx.Node], dtypes: tuple[torch.dtype, ...] = HALF) -> ConvMatch | None:
    """Matches a 3x3 convolution with padding 1, stride 1, dilation 1 and one group, whose weight belongs to the arena
    and whose operands and result are not pinned.

    Input, weight and result have one dtype, which is one of `dtypes`.
    """
    if not is_op(conv, CONV) or not pinned.isdisjoint([conv, *conv.all_input_nodes]) or stride_of(conv, dtypes) != 1:
        return None
    x, weight = conv.args[0], argument(conv, 1, "weight")
    if not is_weight(weight) or not dtype(x) == dtype(weight) == dtype(conv):
        return None
    return ConvMatch(x, weight)  # type: ignore[arg-type]


def stride_of(conv: fx.Node, dtypes: tuple[torch.dtype, ...] = HALF) -> int | None:
    """1 or 2, the stride of a convolution that is 3x3 with padding 1, dilation 1 and one group, in one of `dtypes`;
    None of any other."""
    weight = shape(argument(conv, 1, "weight"))
    if weight is None or weight[2:] != (3, 3) or argument(conv, 6, "groups", 1) != 1 or dtype(conv) not in dtypes:
        return None
    ones = (argument(conv, 4, "padding", 0), argument(conv, 5, "dilation", 1))
    if len(shape(conv) or ()) != 4 or not all(all_are(1, given) for given in ones):
        return None
    given = argument(conv, 3, "stride", 1)
    return next((stride for stride in (1, 2) if all_are(stride, given)), None)
