from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from sfast_ext import Config, accelerate
from sfast_ext.call_signature import flatten_call
from sfast_ext.capture.capture import capture
from sfast_ext.plans import graph_facts
from sfast_ext.weights.arena import WeightArena

CPU = torch.device("cpu")
X = torch.ones(2, 4)


class Pair(nn.Module):
    """Two layers, and a forward that a test gives."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.function = function

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.function(self, x, y)


def recorded(function: Callable[..., Any]) -> torch.fx.GraphModule:
    module = Pair(function)
    # the same tensor twice would be one input
    call = flatten_call((X, X.clone()), {}, CPU)
    with torch.no_grad():
        return capture(module.forward, call, call.tensors(CPU), WeightArena(module)).graph_module


def digest(function: Callable[..., Any]) -> str:
    return graph_facts.digest(recorded(function))


def plain(m: Pair, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.softmax(m.a(x), -1) + 2 * m.b(y)


def other_order(m: Pair, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    second = 2 * m.b(y)
    return torch.softmax(m.a(x), dim=-1) + second


def test_the_order_of_independent_operations_does_not_matter():
    first, second = recorded(plain), recorded(other_order)
    assert [n.name for n in first.graph.nodes] != [n.name for n in second.graph.nodes]
    assert graph_facts.digest(first) == graph_facts.digest(second)


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x, y: torch.softmax(m.a(x), -1) + 3 * m.b(y),
        lambda m, x, y: torch.softmax(m.b(x), -1) + 2 * m.b(y),
        lambda m, x, y: torch.softmax(m.a(y), -1) + 2 * m.b(x),
        lambda m, x, y: torch.softmax(m.a(x), 0) + 2 * m.b(y),
        lambda m, x, y: torch.softmax(m.a(x), -1) - 2 * m.b(y),
        lambda m, x, y: torch.softmax(m.a(x), -1) + 2 * m.b(y) + torch.tensor(1.0),
        lambda m, x, y: torch.log_softmax(m.a(x), -1) + 2 * m.b(y),
    ],
    ids=["number", "weight", "input", "argument", "operation", "further operation", "function"],
)
def test_whatever_else_differs_tells(function):
    assert digest(function) != digest(plain)


def test_operations_whose_result_nobody_reads_count_too():
    first, second = recorded(plain), recorded(plain)
    node = next(n for n in second.graph.nodes if n.op == "call_function")
    with second.graph.inserting_after(node):
        second.graph.call_function(torch.ops.aten.add_.Tensor, (node, 1))
    assert graph_facts.digest(first) != graph_facts.digest(second)


def test_counts_by_name():
    assert graph_facts.operation_counts(recorded(plain).graph) == {
        "aten.linear.default": 2,
        "aten.softmax.int": 1,
        "aten.mul.Tensor": 1,
        "aten.add.Tensor": 1,
    }


def test_names_of_functions_tell_their_module():
    assert graph_facts.operation_name(flatten_call) == "sfast_ext.call_signature.flatten_call"


def test_the_status_of_a_plan_tells_both(tiny_unet, unet_inputs):
    plans = []
    for seed in (0, 1):
        unet = tiny_unet(seed=seed)
        args, kwargs = unet_inputs(unet, 96, 96, 1)
        accelerator = accelerate(unet, Config(allow_cpu=True))
        with torch.no_grad():
            unet(*args, **kwargs)
        (plan,) = accelerator.status()["plans"]
        plans.append(plan)
    first, second = plans
    assert first["operations"]["aten.linear.default"] > 0 and first["operations"] == second["operations"]
    assert first["digest"] == second["digest"]
