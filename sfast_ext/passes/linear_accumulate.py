"""The last residual addition of a transformer block, fused into the GEMM that is added to it.

A linear follows it and no norm, so no other kernel of this project adds it on the way. The residual is the sum that a
norm's kernel returns, and the addition is its only user: that kernel adds the bias too, and the GEMM accumulates onto
the sum.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import fx

from sfast_ext.kernels.linear import linear_accumulate as kernel
from sfast_ext.kernels.pointwise import add_layer_norm

from .fusion import fusion
from .layer_norm import is_residual_add
from .rewrite import ADD, HALF, LINEAR, argument, call, dtype, is_op, only_user, replace, shape

if TYPE_CHECKING:
    from .context import PassContext


class AccumulateMatch(NamedTuple):
    linear: fx.Node
    total: fx.Node
    bias: fx.Node | None


@fusion(ADD, needs=(kernel.launch, add_layer_norm.launch), skip_pinned_inputs=True)
def linear_accumulate(add: fx.Node, pinned: set[fx.Node], ctx: PassContext) -> bool:
    """Replaces an addition of a linear and of a sum that add_layer_norm returns.

    Pattern: linear(x, weight, bias) + sum with (sum, _) = add_layer_norm.launch(...)
    Replacement: kernel.launch(x, weight, sum) with (sum, _) = add_layer_norm.launch(..., post_bias=bias)
    """
    found = match(add, pinned)
    if found is None:
        return False
    linear, total, bias = found
    if bias is not None:
        pair: Any = total.args[0]
        pair.kwargs = {**pair.kwargs, "post_bias": bias}
    with add.graph.inserting_before(add):
        new = call(add.graph, kernel.launch, (*linear.args[:2], total), add)
    replace(add, new)
    return True


def match(add: fx.Node, pinned: set[fx.Node]) -> AccumulateMatch | None:
    """Matches an addition of tokens in half precision, (batch, tokens, channels)."""
    if not is_residual_add(add) or dtype(add) not in HALF or len(shape(add) or ()) != 3:
        return None
    for linear, total in (add.args[:2], add.args[1::-1]):
        if is_match(linear, total, add, pinned):
            return AccumulateMatch(linear, total, argument(linear, 2, "bias"))  # type: ignore[arg-type]
    return None


def is_match(linear: Any, total: Any, add: fx.Node, pinned: set[fx.Node]) -> bool:
    """Whether only `add` reads `linear`, and whether add_layer_norm returns `total` and only `add` reads it."""
    if not is_op(linear, LINEAR) or only_user(linear) is not add or only_user(total) is not add:
        return False
    if not is_op(total, (operator.getitem,)) or total.args[1] != 0:
        return False
    pair = total.args[0]
    if not is_op(pair, (add_layer_norm.launch,)) or pair.kwargs.get("post_bias") is not None or pair in pinned:
        return False
    operands = [*linear.args[:2], argument(linear, 2, "bias")]
    if any(x is not None and (x in pinned or dtype(x) != dtype(add)) for x in operands):
        return False
    bias = operands[2]
    # what is computed, as a cast is, may not be known yet at the place of the sum
    return bias is None or (bias.op == "get_attr" and shape(bias) == (shape(add) or ())[-1:])
