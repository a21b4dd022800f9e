"""A convolution of an enlarged picture is computed of the small one: see kernels/upsample_conv2d.py."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from sfast_ext.kernels import bias_add
from sfast_ext.kernels import upsample_conv2d as kernel

from .im2col import is_plain
from .rewrite import CONV, argument, call, dtype, is_op, is_weight, mutated, only_user, replace, shape
from .sum_group_norm import SUMS, summands
from .upsample import NEAREST, steps

if TYPE_CHECKING:
    from . import PassContext


def upsample_conv2d(gm: fx.GraphModule, ctx: PassContext) -> int:
    """After bias_add, which takes the biases; before conv2d and upsample, which take either by itself."""
    if not ctx.triton:
        return 0
    untouchable, count = mutated(gm.graph), 0
    for conv in list(gm.graph.nodes):
        if not is_op(conv, CONV) or not is_plain(conv) or argument(conv, 2, "bias") is not None:
            continue
        large, weight = conv.args[0], argument(conv, 1, "weight")
        if not is_op(large, NEAREST) or only_user(large) is not conv or not is_weight(weight):
            continue
        x, cut = large.args[0], cut_of(large)
        if cut is None or not untouchable.isdisjoint([conv, weight, large, x]):
            continue
        if not dtype(x) == dtype(weight) == dtype(conv) or min((shape(weight) or (0, 0))[:2]) < kernel.LEAST_CHANNELS:
            continue
        if not ctx.arena.channels_last(weight.meta["weight"]):
            continue
        with gm.graph.inserting_before(conv):
            new = call(gm.graph, kernel.launch, (x, weight, cut), conv)
        replace(conv, new)
        make(x, untouchable, ctx)
        count += 1
    return count


def cut_of(large: fx.Node) -> tuple[int, int] | None:
    """Whether the last row and the last column are left out of a picture that has each pixel of another twice, across
    and down; None for what is enlarged otherwise."""
    before, after = shape(large.args[0]), shape(large)
    if before is None or after is None:
        return None
    cut = []
    for length, target, step in zip(before[2:], after[2:], steps(large)):
        target_places = torch.arange(target)
        places = (target_places * step).long().clamp(max=length - 1)
        if 2 * length - target not in (0, 1) or not torch.equal(places, target_places // 2):
            return None
        cut.append(2 * length - target)
    return cut[0], cut[1]


def make(total: Any, untouchable: set[fx.Node], ctx: PassContext) -> None:
    """A sum that nobody makes on the way any more: by one kernel, with a linear layer's bias."""
    operands = None if total in untouchable or is_op(total, SUMS) else summands(total, untouchable, ctx)
    if operands is None:
        return
    with total.graph.inserting_before(total):
        replace(total, call(total.graph, bias_add.launch, operands, total))
