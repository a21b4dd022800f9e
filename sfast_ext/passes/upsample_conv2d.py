"""A convolution of an enlarged picture is computed of the small one: see kernels/conv/upsample_conv2d.py."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from sfast_ext.kernels.conv import upsample_conv2d as kernel
from sfast_ext.kernels.conv.upsample import places
from sfast_ext.kernels.pointwise import bias_add

from .conv_match import plain_convolutions
from .group_norm_inputs import SUMS, match_sum
from .rewrite import argument, call, is_op, mutated, only_user, replace, shape
from .upsample import NEAREST, steps

if TYPE_CHECKING:
    from . import PassContext


def upsample_conv2d(gm: fx.GraphModule, ctx: PassContext) -> int:
    """After bias_add, which takes the biases; before conv2d and upsample, which take either by itself."""
    if not ctx.serves(kernel):
        return 0
    pinned, count, sums = mutated(gm.graph), 0, ctx.serves(bias_add)
    for conv, large, weight in plain_convolutions(gm.graph, pinned):
        if argument(conv, 2, "bias") is not None or not is_op(large, NEAREST) or only_user(large) is not conv:
            continue
        x, cut = large.args[0], match_doubling(large)
        if cut is None or x in pinned or min((shape(weight) or (0, 0))[:2]) < kernel.LEAST_CHANNELS:
            continue
        if not ctx.arena.channels_last(weight.meta["weight"]):
            continue
        with gm.graph.inserting_before(conv):
            new = call(gm.graph, kernel.launch, (x, weight, cut), conv)
        replace(conv, new)
        if sums:
            materialize_sum(x, pinned)
        count += 1
    return count


def match_doubling(large: fx.Node) -> tuple[int, int] | None:
    """Whether the last row and the last column are left out of a picture that has each pixel of another twice, across
    and down; None for what is enlarged otherwise."""
    before, after = shape(large.args[0]), shape(large)
    if before is None or after is None:
        return None
    cut = 2 * before[2] - after[2], 2 * before[3] - after[3]
    twice = all(
        torch.equal(places(length, target, step), torch.arange(target) // 2)
        for length, target, step in zip(before[2:], after[2:], steps(large))
    )
    return cut if twice and {*cut} <= {0, 1} else None


def materialize_sum(total: Any, pinned: set[fx.Node]) -> None:
    """A sum that nobody makes on the way any more: by one kernel, with a linear layer's bias."""
    operands = None if is_op(total, SUMS) else match_sum(total, pinned)
    if operands is None:
        return
    with total.graph.inserting_before(total):
        replace(total, call(total.graph, bias_add.launch, operands, total))
