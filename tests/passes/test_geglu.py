from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from sfast_ext.passes.geglu import geglu

from .support import Traced, randn

X = randn(2, 5, 12)


def halves(x: Tensor, how: str) -> tuple[Tensor, Tensor]:
    if how == "chunk":
        return x.chunk(2, dim=-1)
    if how == "split":
        return x.split(6, 2)
    if how == "sizes":
        return x.split([6, 6], -1)
    return x[..., :6], x[..., 6:]


@pytest.mark.parametrize("how", ["chunk", "split", "sizes", "slices"])
@pytest.mark.parametrize("gate_first", [True, False])
@pytest.mark.parametrize("order", ["value * gelu", "gelu * value"])
@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_halves_become_one(how: str, gate_first: bool, order: str, approximate: str) -> None:
    def forward(x: Tensor) -> Tensor:
        value, gate = halves(x.sin(), how)
        if gate_first:
            value, gate = gate, value
        gate = F.gelu(gate, approximate=approximate)
        return value * gate if order == "value * gelu" else gate * value

    traced = Traced(forward, X)
    assert traced.rewrite(geglu) == 1
    assert traced.ops()["mul"] == traced.ops()["gelu"] == 0
    assert traced.find("geglu")[0].kwargs == {"gate_first": gate_first, "approximate": approximate}
    assert traced.error() < 1e-6


def other_users(x: Tensor) -> Any:
    value, gate = x.chunk(2, -1)
    gate = F.gelu(gate)
    return value * gate, gate


def half_used_again(x: Tensor) -> Any:
    value, gate = x.chunk(2, -1)
    return value * F.gelu(gate) + value


def written(x: Tensor) -> Any:
    x = x.sin()
    value, gate = x.chunk(2, -1)
    gate = F.gelu(gate)
    x.add_(1)
    return value * gate


STAYS: dict[str, Callable[[Tensor], Any]] = {
    "gelu used elsewhere": other_users,
    "half used elsewhere": half_used_again,
    "written between": written,
    "same half": lambda x: x.chunk(2, -1)[0] * F.gelu(x.chunk(2, -1)[0]),
    "halves of others": lambda x: x.sin().chunk(2, -1)[0] * F.gelu(x.cos().chunk(2, -1)[1]),
    "halves of another dimension": lambda x: x[:, :4].chunk(2, 1)[0] * F.gelu(x[:, :4].chunk(2, 1)[1]),
    "three parts": lambda x: x.chunk(3, -1)[0] * F.gelu(x.chunk(3, -1)[1]),
    "times a number": lambda x: F.gelu(x) * 2,
    "added": lambda x: x.chunk(2, -1)[0] + F.gelu(x.chunk(2, -1)[1]),
    "every second": lambda x: x[..., ::2] * F.gelu(x[..., 6:]),
    "not quite halves": lambda x: x[..., 5:11] * F.gelu(x[..., :6]),
    "promoted": lambda x: x.chunk(2, -1)[0].double() * F.gelu(x.chunk(2, -1)[1]),
}


@pytest.mark.parametrize("what", STAYS)
def test_others_stay(what: str) -> None:
    traced = Traced(STAYS[what], X)
    before = traced.ops()
    assert traced.rewrite(geglu) == 0
    assert traced.ops() == before
    assert traced.error() == 0


def test_other_dtypes_are_left() -> None:
    traced = Traced(lambda x: x.chunk(2, -1)[0] * F.gelu(x.chunk(2, -1)[1]), X.to(torch.float64))
    assert traced.rewrite(geglu) == 0
