"""The last residual of a transformer block goes into the product that is added to it.

What follows it is a linear layer and no norm, so no kernel of ours adds it on the way. The sum before it is handed out
by the kernel of a norm and needed by nobody else: there the bias is added as well, and the product goes onto it.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING

from torch import fx

from sfast_ext.kernels.linear import linear_accumulate as kernel
from sfast_ext.kernels.pointwise import add_layer_norm

from .layer_norm import is_residual_add
from .rewrite import HALF, LINEAR, argument, call, dtype, is_op, mutated, only_user, replace, shape

if TYPE_CHECKING:
    from . import PassContext


def linear_onto(gm: fx.GraphModule, ctx: PassContext) -> int:
    """After add_layer_norm, whose kernel it gives a bias, and before bias_add, which takes what is left."""
    if not ctx.serves(kernel, add_layer_norm):
        return 0
    untouchable, count = mutated(gm.graph), 0
    for add in list(gm.graph.nodes):
        if add._erased or not is_residual_add(add) or dtype(add) not in HALF or len(shape(add) or ()) != 3:
            continue
        if not untouchable.isdisjoint([add, *add.args[:2]]):
            continue
        for linear, total in (add.args[:2], add.args[1::-1]):
            if fits(linear, total, add, untouchable):
                break
        else:
            continue
        bias = argument(linear, 2, "bias")
        if bias is not None:
            pair = total.args[0]
            pair.kwargs = {**pair.kwargs, "post_bias": bias}
        with gm.graph.inserting_before(add):
            new = call(gm.graph, kernel.launch, (*linear.args[:2], total), add)
        replace(add, new)
        count += 1
    return count


def fits(linear: fx.Node, total: fx.Node, add: fx.Node, untouchable: set[fx.Node]) -> bool:
    """A product that nobody but `add` sees, and a sum that add_layer_norm made and nobody but `add` still needs."""
    if not is_op(linear, LINEAR) or only_user(linear) is not add or only_user(total) is not add:
        return False
    if not is_op(total, (operator.getitem,)) or total.args[1] != 0:
        return False
    pair = total.args[0]
    if not is_op(pair, (add_layer_norm.launch,)) or pair.kwargs.get("post_bias") is not None or pair in untouchable:
        return False
    operands = [*linear.args[:2], argument(linear, 2, "bias")]
    if any(x is not None and (x in untouchable or dtype(x) != dtype(add)) for x in operands):
        return False
    bias = operands[2]
    # what is computed, as a cast is, may not be there yet where the sum is made
    return bias is None or (bias.op == "get_attr" and shape(bias) == (shape(add) or ())[-1:])
