"""GEGLU fused into the GEMM that makes its values and gates."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import fx

from sfast_ext.kernels.linear import linear_geglu as kernel
from sfast_ext.kernels.pointwise import geglu

from .fusion import fusion
from .rewrite import HALF, LINEAR, argument, call, dtype, is_op, only_user, replace, shape

if TYPE_CHECKING:
    from .context import PassContext


@fusion((geglu.launch,), needs=(kernel.launch,))
def linear_geglu(node: fx.Node, pinned: set[fx.Node], ctx: PassContext) -> bool:
    """Replaces GEGLU's kernel and a linear in half precision that only it reads.

    Pattern: geglu.launch(linear(x, weight, bias), ...)
    Replacement: kernel.launch(x, weight, bias, ...)

    Only if the kernel, or Triton, can be used: nothing else would be faster.
    """
    graph, options = node.graph, dict(node.kwargs)
    linear: Any = node.args[0]
    if not is_op(linear, LINEAR) or linear in pinned or only_user(linear) is not node:
        return False
    operands = (*linear.args[:2], argument(linear, 2, "bias"))
    if len(shape(operands[1]) or ()) != 2 or dtype(linear) not in HALF:
        return False
    if any(x is not None and (x in pinned or dtype(x) != dtype(linear)) for x in operands):
        return False
    with graph.inserting_before(node):
        new = call(graph, kernel.launch, operands, node, options)
    replace(node, new)
    return True
