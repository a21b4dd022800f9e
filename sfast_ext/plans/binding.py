"""Binds the attributes of a rewritten graph to the memory that a plan reads."""

from __future__ import annotations

import torch
from torch import fx

from sfast_ext.weights.banks import Bank
from sfast_ext.weights.weight import Weight


def bind_attributes(graph_module: fx.GraphModule) -> tuple[list[Weight], list[Bank]]:
    """Make the graph's attributes the live tensors of the arena and the tensors of banks. Returns the weights and the
    banks that it reads."""
    weights: dict[int, Weight] = {}
    banks: dict[int, Bank] = {}
    used = set()
    for node in graph_module.graph.nodes:
        if node.op != "get_attr":
            continue
        used.add(node.target)
        weight, bank = node.meta.get("weight"), node.meta.get("bank")
        if weight is not None:
            weights[id(weight)] = weight
            _plain_attribute(graph_module, node.target, weight.tensor)
        elif bank is not None:
            banks[id(bank)] = bank
            _plain_attribute(graph_module, node.target, node.meta["held"])
        else:
            _plain_attribute(graph_module, node.target, getattr(graph_module, node.target).detach())
    for name in [*graph_module._parameters, *graph_module._buffers]:
        if name not in used:
            # a weight that was packed: this reference would keep its old memory
            delattr(graph_module, name)
    for name, value in list(graph_module.__dict__.items()):
        if isinstance(value, torch.Tensor) and name not in used:
            delattr(graph_module, name)
    for node in graph_module.graph.nodes:
        # fake tensors are not needed any more, and keep the whole fake mode alive
        node.meta.clear()
    return list(weights.values()), list(banks.values())


def _plain_attribute(graph_module: fx.GraphModule, name: str, tensor: torch.Tensor) -> None:
    for registry in (graph_module._parameters, graph_module._buffers):
        registry.pop(name, None)
    graph_module.__dict__[name] = tensor
