"""GELU by tanh, fused into the GEMM whose result it is applied to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import fx

from sfast_ext.kernels.linear import linear_gelu as kernel

from .fusion import fusion
from .rewrite import HALF, LINEAR, argument, call, dtype, is_op, overloads, replace, same_meta, shape

if TYPE_CHECKING:
    from .context import PassContext

GELU = overloads("gelu")


@fusion(GELU, needs=(kernel.launch,), skip_pinned_inputs=True)
def linear_gelu(gelu: fx.Node, pinned: set[fx.Node], ctx: PassContext) -> bool:
    """Replaces GELU and a linear with a bias in half precision that only it reads.

    Pattern: gelu(linear(x, weight, bias), approximate="tanh")
    Replacement: kernel.launch(x, weight, bias)
    """
    linear: Any = gelu.args[0]
    if not is_op(linear, LINEAR) or list(linear.users) != [gelu] or not same_meta(linear, gelu):
        return False
    if argument(gelu, 1, "approximate", "none") != "tanh" or dtype(linear) not in HALF:
        return False
    x, weight, bias = linear.args[0], argument(linear, 1, "weight"), argument(linear, 2, "bias")
    if bias is None or any(t in pinned or dtype(t) != dtype(linear) for t in (x, weight, bias)):
        return False
    if len(shape(weight) or ()) != 2 or shape(bias) != (shape(linear) or ())[-1:]:
        return False
    with gelu.graph.inserting_before(gelu):
        new = call(gelu.graph, kernel.launch, (x, weight, bias), gelu)
    replace(gelu, new)
    return True
