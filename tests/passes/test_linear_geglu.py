from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sfast_ext.passes.geglu import geglu
from sfast_ext.passes.linear_geglu import linear_geglu

from .support import Traced, randn

X = randn(2, 5, 8).to(torch.bfloat16)


class Block(nn.Module):
    def __init__(self, forward: Callable[..., Any], bias: bool = True) -> None:
        super().__init__()
        self.proj = nn.Linear(8, 24, bias=bias)
        self.body = forward

    def forward(self, x: Tensor) -> Any:
        return self.body(self, x)


def gated(x: Tensor, gate_first: bool = False, approximate: str = "none") -> Tensor:
    value, gate = x.chunk(2, -1)
    return gate * F.gelu(value, approximate=approximate) if gate_first else value * F.gelu(gate)


def rewritten(module: nn.Module, x: Tensor = X, triton: bool = True) -> tuple[Traced, int]:
    traced = Traced(module.to(x.dtype), x)
    traced.ctx.triton = triton
    return traced, traced.rewrite(geglu, linear_geglu)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("gate_first", [True, False])
@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_the_linear_and_its_gates_become_one(bias: bool, gate_first: bool, approximate: str) -> None:
    if not gate_first:
        approximate = "none"
    traced, count = rewritten(Block(lambda m, x: gated(m.proj(x), gate_first, approximate), bias))
    assert count == 1
    assert traced.ops() == {"linear_geglu": 1}
    assert traced.find("linear_geglu")[0].kwargs == {"gate_first": gate_first, "approximate": approximate}
    assert traced.error() < 1e-2


def written(m: Block, x: Tensor) -> Any:
    y = m.proj(x)
    z = gated(y)
    y.mul_(2)
    return z, y


STAYS: dict[str, Callable[..., Any]] = {
    "the linear used elsewhere": lambda m, x: (gated(y := m.proj(x)), y),
    "no linear": lambda m, x: gated(x.sin()),
    "moved in between": lambda m, x: gated(m.proj(x).reshape(2, 24, 5).transpose(1, 2)),
    "a matmul of activations": lambda m, x: gated(x @ x.transpose(1, 2) @ x),
    "written": written,
}


@pytest.mark.parametrize("what", STAYS)
def test_others_stay(what: str) -> None:
    traced, count = rewritten(Block(STAYS[what]))
    assert count == 0
    assert traced.error() < 1e-2


def test_without_triton_and_in_float32_nothing_would_gain() -> None:
    assert rewritten(Block(lambda m, x: gated(m.proj(x))), triton=False)[1] == 0
    assert rewritten(Block(lambda m, x: gated(m.proj(x))), X.float())[1] == 0
