"""Common subexpression elimination and constant folding."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch.utils._python_dispatch import _disable_current_modes

from .rewrite import is_kernel, is_pure, meta_like, mutated, overloads, replace, shape, value

if TYPE_CHECKING:
    from .context import PassContext

LARGEST_CONSTANT = 1 << 20  # elements
UNINITIALISED = overloads(
    "empty.memory_format",
    "empty_like",
    "new_empty",
    "empty_strided",
    "new_empty_strided",
    "empty_permuted",
    "_efficientzerotensor",
)


def cse(gm: fx.GraphModule, ctx: PassContext) -> int:
    """Replaces operations by an earlier one of the same operator on the same inputs.

    Pattern: y = op(x, ...); z = op(x, ...)
    Replacement: y = op(x, ...), read in place of z

    The 22 silu(emb) of a UNet become one. The loop is not that of `fusion`: any pure operator is visited.
    """
    pinned, count = mutated(gm.graph), 0
    seen: dict[Any, fx.Node] = {}
    for node in gm.graph.nodes:
        if node.op not in ("call_function", "get_attr") or not is_pure(node) or node in pinned:
            continue
        if node.target in UNINITIALISED or any(x in pinned for x in node.all_input_nodes):
            continue
        first = seen.setdefault(key(node), node)
        if first is not node:
            replace(node, first)
            count += 1
    return count


def key(node: fx.Node) -> Any:
    if node.op == "get_attr":
        weight = node.meta.get("weight")
        return ("get_attr", node.target if weight is None else weight)
    return node.target, hashable(node.args), hashable(node.kwargs)


def hashable(x: Any) -> Any:
    """Returns a hashable key that is as strict as operators are: 1, 1.0 and True differ, and so do 0.0 and -0.0."""
    if isinstance(x, fx.Node):
        return x
    if isinstance(x, (list, tuple)):
        return tuple(hashable(item) for item in x)
    if isinstance(x, dict):
        return tuple((key, hashable(x[key])) for key in sorted(x))
    if isinstance(x, slice):
        return "slice", hashable((x.start, x.stop, x.step))
    return type(x), repr(x) if isinstance(x, (float, complex)) else x


def fold_constants(gm: fx.GraphModule, ctx: PassContext) -> int:
    """Evaluates operations that depend on no input and no weight, such as the frequencies of the timestep embedding.

    Pattern: op(constant, ...), read by an operation that is not folded
    Replacement: a buffer of the graph module with the result

    Tensors of the graph that are not weights are literals of the forward, such as torch.tensor(0.5): nothing else
    refers to them.
    """
    graph = gm.graph
    pinned = mutated(graph)
    known: dict[fx.Node, torch.Tensor] = {}
    for node in graph.nodes:
        if node in pinned or not is_pure(node) or is_kernel(node.target):
            continue
        if node.op == "get_attr":
            if node.meta.get("weight") is None:
                known[node] = getattr(gm, node.target)
        elif foldable(node) and all(x in known for x in node.all_input_nodes):
            known[node] = evaluate(node, known)
    count = 0
    for node, constant in list(known.items()):
        if node.op == "get_attr" or all(user in known for user in node.users):
            continue  # a constant already, or only read by other folded operations
        name = f"_constant{count}"
        gm.register_buffer(name, constant, persistent=False)
        with graph.inserting_before(node):
            new = graph.create_node("get_attr", name)
        new.meta["val"] = meta_like(node, constant.shape)
        replace(node, new)
        count += 1
    return count


def foldable(node: fx.Node) -> bool:
    val = value(node)
    if val is None or shape(node) is None or node.target in UNINITIALISED:
        return False
    return val.numel() <= LARGEST_CONSTANT and val.device.type != "meta"


def evaluate(node: fx.Node, known: dict[fx.Node, torch.Tensor]) -> torch.Tensor:
    args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), known.__getitem__)
    # Without the caller's fake mode and autocast: casts are nodes of the graph.
    autocast = torch.autocast(node.meta["val"].device.type, enabled=False)
    with _disable_current_modes(), torch.inference_mode(False), torch.no_grad(), autocast:
        return node.target(*args, **kwargs)
