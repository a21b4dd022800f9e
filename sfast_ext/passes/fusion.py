"""The loop that passes over single nodes share: which nodes are visited and skipped, how rewrites are counted."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

from torch import fx

from sfast_ext.kernels.backend.registry import Kernel

from .rewrite import hoist_weights, is_op, mutated

if TYPE_CHECKING:
    from .context import PassContext

PassFunction = Callable[[fx.GraphModule, "PassContext"], int]
"""Rewrites a graph in place and returns the number of rewrites."""
NodeFunction = Callable[[fx.Node, "set[fx.Node]", "PassContext"], int]
"""Rewrites the graph around one node. Takes the node, the pinned nodes and the context; returns the number of rewrites,
or whether there was one."""


def fusion(
    ops: Collection[Any],
    *,
    needs: tuple[Kernel[..., Any], ...] = (),
    hoist: bool = False,
    skip_pinned_inputs: bool = False,
) -> Callable[[NodeFunction], PassFunction]:
    """Turns a function of one node into a pass over all nodes whose target is in `ops`.

    Args:
        ops: Targets of the nodes that the function is called with.
        needs: The kernels that the function inserts. Unless `PassContext.supported`, the pass does nothing.
        hoist: Moves weights to the top of the graph first, so that a fused node may stand anywhere.
        skip_pinned_inputs: Skips nodes that read a pinned value. Pinned nodes themselves are always skipped.

    The pass has the function's name and documentation.
    """

    def decorate(function: NodeFunction) -> PassFunction:
        @functools.wraps(function)
        def run(gm: fx.GraphModule, ctx: PassContext) -> int:
            if not ctx.supported(*needs):
                return 0
            if hoist:
                hoist_weights(gm.graph)
            pinned = mutated(gm.graph)

            def rewrite(node: fx.Node) -> int:
                if skip_pinned_inputs and not pinned.isdisjoint(node.all_input_nodes):
                    return 0
                return function(node, pinned, ctx)

            return rewrite_each(gm.graph, ops, pinned, rewrite)

        return run

    return decorate


def rewrite_each(graph: fx.Graph, ops: Collection[Any], pinned: set[fx.Node], rewrite: Callable[[fx.Node], int]) -> int:
    """Calls `rewrite` on every node of `ops`, in the order of the graph, and adds up what it returns.

    The nodes are listed before the first call: nodes that a rewrite inserts are not visited. Pinned nodes, and nodes
    that an earlier rewrite erased, are skipped.
    """
    count = 0
    for node in list(graph.nodes):
        if not node._erased and is_op(node, ops) and node not in pinned:
            count += int(rewrite(node))
    return count
