"""Nearest-neighbour upsampling in NHWC: torch's own kernel for that layout is far from the speed of memory.

A sum that is for nothing else is made as it is read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from sfast_ext.kernels.conv import upsample as kernel

from .layer_norm import is_residual_add
from .rewrite import KERNEL_DTYPES, argument, aten, call, dtype, is_op, mutated, only_user, overloads, replace, shape

if TYPE_CHECKING:
    from . import PassContext

NEAREST = overloads("upsample_nearest2d.vec", "upsample_nearest2d")


def upsample(gm: fx.GraphModule, ctx: PassContext) -> int:
    if not ctx.serves(kernel):
        return 0
    pinned, count = mutated(gm.graph), 0
    for node in list(gm.graph.nodes):
        if not is_op(node, NEAREST) or not pinned.isdisjoint([node, node.args[0]]):
            continue
        before, after = shape(node.args[0]), shape(node)
        if before is None or after is None or dtype(node) not in KERNEL_DTYPES:
            continue
        x, options = node.args[0], {}
        if only_user(x) is node and is_residual_add(x) and pinned.isdisjoint(x.args[:2]):
            x, options = x.args[0], {"residual": x.args[1]}
        with gm.graph.inserting_before(node):
            new = call(gm.graph, kernel.launch, (x, tuple(after[2:]), steps(node)), node, options)
        replace(node, new)
        count += 1
    return count


def steps(node: fx.Node) -> tuple[float, ...]:
    """Pixels of the source per pixel of the target, vertical and horizontal, of shapes that are known; as torch has it,
    in float32: what falls between two pixels is decided by its last bit."""
    before, after = shape(node.args[0]) or (), shape(node) or ()
    return tuple(
        float(torch.tensor(1.0 / scale if scale else old / new, dtype=torch.float32))
        for scale, old, new in zip(scales(node), before[2:], after[2:])
    )


def scales(node: fx.Node) -> tuple[float | None, float | None]:
    """The factors that were given by number, vertical and horizontal; None where the sizes alone decide."""
    given: Any
    if node.target is getattr(aten.upsample_nearest2d, "vec", None):
        given = argument(node, 2, "scale_factors") or (None, None)
        return given[0], given[1]
    return argument(node, 2, "scales_h"), argument(node, 3, "scales_w")
