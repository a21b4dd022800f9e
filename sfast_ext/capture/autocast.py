"""Makes the casts of autocast explicit: they become nodes of the graph.

A graph is captured above autocast, but the metadata of a node show the dtype of the real result, also in an autocast
region of the forward's own. An operation under autocast casts all its floating arguments to the dtype of its result: to
half for matrix products, to float for norms, exponentials and concatenations of mixed dtypes.
"""

from __future__ import annotations

import torch
from torch import fx

aten = torch.ops.aten

_DISPATCH_KEY = {"cuda": "AutocastCUDA", "cpu": "AutocastCPU"}
_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
_PRODUCTS = {
    aten.einsum.default, aten.matmul.default, aten.linear.default, aten.mm.default, aten.bmm.default,
    aten.addmm.default, aten.baddbmm.default, aten.conv1d.default, aten.conv2d.default, aten.conv3d.default,
    aten.conv_transpose2d.input, aten.convolution.default, aten.scaled_dot_product_attention.default,
}  # fmt: skip
_BORDERS = ("_enter_autocast", "_exit_autocast")
_CASTS = {
    aten.to.dtype,
    aten.to.dtype_layout,
    aten.to.device,
    aten.to.other,
    aten._to_copy.default,
    aten.type_as.default,
}


def materialize_casts(graph_module: fx.GraphModule, device_type: str) -> int:
    """Insert the casts of autocast on a device, and remove the borders of its regions. Returns the number of casts."""
    key = _DISPATCH_KEY[device_type]
    graph = graph_module.graph
    borders: list[fx.Node] = []
    made: dict[tuple[fx.Node, torch.dtype], fx.Node] = {}
    for node in list(graph.nodes):
        if getattr(node.target, "__name__", "") in _BORDERS:
            borders.append(node)
            continue
        result = _dtype(node)
        if node.op != "call_function" or result not in _FLOATS or node.target in _CASTS:
            continue
        if not _touched(node, key):
            continue

        def cast(argument: fx.Node, result: torch.dtype = result, node: fx.Node = node) -> fx.Node:
            if _dtype(argument) not in _FLOATS or _dtype(argument) == result:
                return argument
            if (argument, result) not in made:
                # after its source, not before its user, so that all users can share it
                anchor = argument if argument.op not in ("placeholder", "get_attr") else _last_head(graph, argument)
                with graph.inserting_after(anchor):
                    new = graph.call_function(aten.to.dtype, (argument, result))
                new.meta["val"] = argument.meta["val"].to(result)
                made[argument, result] = new
            return made[argument, result]

        node.args = fx.node.map_arg(node.args, cast)
        node.kwargs = fx.node.map_arg(node.kwargs, cast)
    for node in reversed(borders):
        graph.erase_node(node)
    if made or borders:
        graph.lint()
        graph_module.recompile()
    return len(made)


def _touched(node: fx.Node, key: str) -> bool:
    if node.target in _PRODUCTS:
        return True
    if _dtype(node) != torch.float32:
        # a norm with half inputs and float weights is not autocast
        return False
    name = getattr(node.target, "name", None)
    return callable(name) and torch._C._dispatch_has_kernel_for_dispatch_key(name(), key)


def _dtype(node: fx.Node) -> torch.dtype | None:
    val = node.meta.get("val")
    if isinstance(val, (list, tuple)) and val:
        val = val[0]
    return val.dtype if isinstance(val, torch.Tensor) else None


def _last_head(graph: fx.Graph, node: fx.Node) -> fx.Node:
    # placeholders must stay at the head of the graph
    if node.op == "placeholder":
        for other in graph.nodes:
            if other.op != "placeholder":
                break
            node = other
    return node
