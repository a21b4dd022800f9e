"""Scaled dot product attention through the fastest of the backends that can."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import fx

from sfast_ext.kernels.attention import attention as kernel
from sfast_ext.kernels.backend import health

from .rewrite import argument, call, is_op, mutated, overloads, replace

if TYPE_CHECKING:
    from . import PassContext

ATTENTION = overloads("scaled_dot_product_attention")


def attention(gm: fx.GraphModule, ctx: PassContext) -> int:
    if not health.usable(kernel, ctx.device):
        return 0
    untouchable, count = mutated(gm.graph), 0
    function = kernel.launch if ctx.serves(kernel) else kernel.fallback
    for node in list(gm.graph.nodes):
        if not is_op(node, ATTENTION) or not untouchable.isdisjoint([node, *node.all_input_nodes]):
            continue
        found = options(node)
        if found is None:
            continue
        with gm.graph.inserting_before(node):
            new = call(gm.graph, function, node.args[:3], node, found)
        replace(node, new)
        count += 1
    return count


def options(node: fx.Node) -> dict[str, Any] | None:
    """An attention's options as the kernels take them; None where it has others that say something."""
    if len(node.args) < 3 or argument(node, 4, "dropout_p", 0.0) != 0 or node.kwargs.get("enable_gqa", False):
        return None
    mask, causal = argument(node, 3, "attn_mask"), argument(node, 5, "is_causal", False)
    return {"mask": mask, "is_causal": causal, "scale": node.kwargs.get("scale")}
