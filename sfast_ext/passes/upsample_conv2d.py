"""Convolutions of a feature map upsampled by 2, computed from the small map: see kernels/conv/upsample_conv2d.py."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from sfast_ext.kernels.conv import upsample_conv2d as kernel
from sfast_ext.kernels.conv.upsample import places
from sfast_ext.kernels.pointwise import bias_add

from .conv_match import match
from .fusion import fusion
from .group_norm_inputs import SUMS, match_sum
from .rewrite import CONV, argument, call, is_op, only_user, replace, shape, value
from .upsample import NEAREST, steps

if TYPE_CHECKING:
    from .context import PassContext


@fusion(CONV, needs=(kernel.launch,))
def upsample_conv2d(conv: fx.Node, pinned: set[fx.Node], ctx: PassContext) -> bool:
    """Replaces a convolution without a bias and the upsampling that only it reads.

    Pattern: conv2d(upsample_nearest2d(x), weight)  # 3x3, twice the size
    Replacement: kernel.launch(x, weight, crop)

    If `x` is a residual addition, it becomes bias_add.launch: the upsampling's kernel would have added it on the way.
    """
    graph, found = conv.graph, match(conv, pinned, kernel.dtypes())
    if found is None or argument(conv, 2, "bias") is not None:
        return False
    large, weight = found
    if not is_op(large, NEAREST) or only_user(large) is not conv:
        return False
    x, crop = large.args[0], match_doubling(large)
    if crop is None or x in pinned or min((shape(weight) or (0, 0))[:2]) < kernel.MIN_CHANNELS:
        return False
    if ctx.most_bytes is not None and held_bytes(conv, x, weight) > ctx.most_bytes:
        return False
    if not ctx.arena.channels_last(weight.meta["weight"]):
        return False
    with graph.inserting_before(conv):
        new = call(graph, kernel.launch, (x, weight, crop), conv)
    replace(conv, new)
    if ctx.supported(bias_add.launch):
        materialize_sum(x, pinned)
    return True


def held_bytes(conv: fx.Node, x: Any, weight: fx.Node) -> int:
    """Bytes of the operand, the products of all taps and the result."""
    small, result = value(x), value(conv)
    if small is None or result is None:
        return 0
    tensors = (small.numel() + result.numel()) * result.element_size()
    return tensors + kernel.workspace(small, value(weight))  # type: ignore[arg-type]


def match_doubling(large: fx.Node) -> tuple[int, int] | None:
    """Matches an upsampling that repeats each pixel twice in both directions.

    Returns whether the last row and the last column are cropped, each 0 or 1; None for any other upsampling.
    """
    before, after = shape(large.args[0]), shape(large)
    if before is None or after is None:
        return None
    crop = 2 * before[2] - after[2], 2 * before[3] - after[3]
    doubled = all(
        torch.equal(places(length, target, step), torch.arange(target) // 2)
        for length, target, step in zip(before[2:], after[2:], steps(large))
    )
    return crop if doubled and {*crop} <= {0, 1} else None


def materialize_sum(total: Any, pinned: set[fx.Node]) -> None:
    """Computes a sum that no other kernel fuses any more by one kernel, with the bias of a linear layer."""
    found = None if is_op(total, SUMS) else match_sum(total, pinned)
    if found is None:
        return
    with total.graph.inserting_before(total):
        replace(total, call(total.graph, bias_add.launch, (*found,), total))
