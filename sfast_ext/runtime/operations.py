"""A summary of a graph, by which two plans can be compared."""

from __future__ import annotations

import hashlib
import operator
from collections import Counter
from typing import Any

import torch
from torch import fx


def counts(graph: fx.Graph) -> dict[str, int]:
    """The number of occurrences of each operation by name, the most frequent first."""
    return dict(Counter(name(node.target) for node in graph.nodes if node.op == "call_function").most_common())


def digest(graph_module: fx.GraphModule) -> str:
    """A hash of all operations and the data flow between them.

    Equal for two graphs that apply the same operations with the same arguments to the same inputs and weights. The
    order of independent nodes and the names of nodes do not matter. Weights are compared by `Weight.path`, constants by
    dtype and shape.
    """
    marks: dict[fx.Node, str] = {}
    inputs = 0
    for node in graph_module.graph.nodes:
        if node.op == "placeholder":
            what: Any = ("input", inputs)
            inputs += 1
        elif node.op == "get_attr":
            what = _attribute(graph_module, node)
        else:
            what = name(node.target), *fx.node.map_arg((node.args, _sorted(node.kwargs)), marks.__getitem__)
        marks[node] = _hash(repr(what))
    return _hash(" ".join(sorted(marks.values())))


def name(target: Any) -> str:
    """`aten.linear.default` for an operator, module and name for a Python function."""
    if isinstance(target, (str, torch._ops.OpOverload)):
        return str(target)
    return f"{target.__module__}.{target.__qualname__}"


def _attribute(graph_module: fx.GraphModule, node: fx.Node) -> Any:
    weight = node.meta.get("weight")
    if weight is not None:
        return "weight", weight.path
    constant = operator.attrgetter(str(node.target))(graph_module)
    return "constant", str(constant.dtype), tuple(constant.shape)


def _sorted(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {key: kwargs[key] for key in sorted(kwargs)}


def _hash(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
