"""GEGLU goes into the product that makes its values and gates."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import fx

from sfast_ext.kernels.linear import linear_geglu as kernel
from sfast_ext.kernels.pointwise import geglu

from .rewrite import HALF, LINEAR, argument, call, dtype, is_op, mutated, only_user, replace, shape

if TYPE_CHECKING:
    from . import PassContext


def linear_geglu(gm: fx.GraphModule, ctx: PassContext) -> int:
    """After geglu, whose kernel it takes the place of; only where there is Triton, as nothing else would gain."""
    if not ctx.serves(kernel):
        return 0
    pinned, count = mutated(gm.graph), 0
    for node in list(gm.graph.nodes):
        if not is_op(node, (geglu.launch,)) or node in pinned:
            continue
        product, options = node.args[0], dict(node.kwargs)
        if not is_op(product, LINEAR) or product in pinned or only_user(product) is not node:
            continue
        operands = (*product.args[:2], argument(product, 2, "bias"))
        if len(shape(operands[1]) or ()) != 2 or dtype(product) not in HALF:
            continue
        if any(x is not None and (x in pinned or dtype(x) != dtype(product)) for x in operands):
            continue
        with gm.graph.inserting_before(node):
            new = call(gm.graph, kernel.launch, operands, node, options)
        replace(node, new)
        count += 1
    return count
