"""SiLU written as x * sigmoid(x), as in ldm's and sgm's VAEs, by PyTorch's one operator, which norms are fused with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import fx

from .fusion import fusion
from .rewrite import aten, call, is_op, only_user, overloads, replace, same_meta

if TYPE_CHECKING:
    from .context import PassContext

MUL = overloads("mul.Tensor")
SIGMOID = overloads("sigmoid", "special_expit")


@fusion(MUL, skip_pinned_inputs=True)
def silu(product: fx.Node, pinned: set[fx.Node], ctx: PassContext) -> bool:
    """Replaces the product of a value and its sigmoid, which nothing else reads.

    Pattern: x * sigmoid(x), or sigmoid(x) * x
    Replacement: silu(x)

    It rounds once, the product twice.
    """
    graph = product.graph
    pairs: Any = (product.args[:2], product.args[1::-1])
    for x, gate in pairs:
        if not isinstance(x, fx.Node) or not is_op(gate, SIGMOID):
            continue
        if gate.args[0] is x and only_user(gate) is product and same_meta(gate, x) and same_meta(product, x):
            with graph.inserting_before(product):
                new = call(graph, aten.silu.default, (x,), product)
            replace(product, new)
            return True
    return False
