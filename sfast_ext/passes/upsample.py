"""Nearest-neighbour upsampling in NHWC. PyTorch's kernel for that layout runs far below the memory bandwidth."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from sfast_ext.kernels.conv import upsample as kernel

from .fusion import fusion
from .layer_norm import is_residual_add
from .rewrite import KERNEL_DTYPES, argument, aten, call, dtype, only_user, overloads, replace, shape

if TYPE_CHECKING:
    from .context import PassContext

NEAREST = overloads("upsample_nearest2d.vec", "upsample_nearest2d")


@fusion(NEAREST, needs=(kernel.launch,), skip_pinned_inputs=True)
def upsample(node: fx.Node, pinned: set[fx.Node], ctx: PassContext) -> bool:
    """Replaces an upsampling, with a residual addition that only it reads.

    Pattern: upsample_nearest2d(x) or upsample_nearest2d(x + residual)
    Replacement: kernel.launch(x, size, steps, residual=residual)
    """
    before, after = shape(node.args[0]), shape(node)
    if before is None or after is None or dtype(node) not in KERNEL_DTYPES:
        return False
    x: Any = node.args[0]
    options = {}
    if only_user(x) is node and is_residual_add(x) and pinned.isdisjoint(x.args[:2]):
        x, options = x.args[0], {"residual": x.args[1]}
    with node.graph.inserting_before(node):
        new = call(node.graph, kernel.launch, (x, tuple(after[2:]), steps(node)), node, options)
    replace(node, new)
    return True


def steps(node: fx.Node) -> tuple[float, ...]:
    """Returns the source pixels per target pixel, vertical and horizontal. Both shapes must be known.

    Computed in float32, as PyTorch does: the last bit decides which pixel is the nearest if two are equally near.
    """
    before, after = shape(node.args[0]) or (), shape(node) or ()
    return tuple(
        float(torch.tensor(1.0 / scale if scale else old / new, dtype=torch.float32))
        for scale, old, new in zip(scales(node), before[2:], after[2:])
    )


def scales(node: fx.Node) -> tuple[float | None, float | None]:
    """Returns the scale factors given as numbers, vertical and horizontal; None if only the sizes decide."""
    given: Any
    if node.target is getattr(aten.upsample_nearest2d, "vec", None):
        given = argument(node, 2, "scale_factors") or (None, None)
        return given[0], given[1]
    return argument(node, 2, "scales_h"), argument(node, 3, "scales_w")
