"""Modules and parameters are those that torch finds, in its order."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sfast_ext.weights.module_walk import modules_of, parameters_of


def tied() -> nn.Module:
    """A module and a parameter in two places each, places without any, and parameters in each kind of container."""
    shared, other = nn.Linear(3, 3), nn.Linear(3, 3, bias=False)
    other.weight = shared.weight
    inner = nn.Sequential(shared, nn.Sequential(other, shared), nn.Identity())
    root = nn.ModuleDict({"a": inner, "b": nn.ModuleList([shared, inner, nn.LayerNorm(3)])})
    root.register_module("none", None)
    root.register_parameter("nothing", None)
    root.list = nn.ParameterList([nn.Parameter(torch.zeros(2)), shared.bias])
    root.register_buffer("buffer", torch.zeros(1))
    return root


def circle() -> nn.Module:
    first, second = nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 2))
    first.append(second)
    # as a wrapper that registers what wraps it
    second.register_module("whole", first)
    return first


@pytest.mark.parametrize("make", [tied, circle, lambda: nn.Linear(2, 2), lambda: torch.jit.script(nn.Linear(2, 2))])
def test_they_are_torchs(make):
    root = make()
    assert [*map(id, modules_of(root))] == [*map(id, root.modules())]
    if not isinstance(root, torch.jit.ScriptModule):
        assert [*map(id, parameters_of(root))] == [*map(id, root.parameters())]
    assert [p.shape for p in parameters_of(root)] == [p.shape for p in root.parameters()]
