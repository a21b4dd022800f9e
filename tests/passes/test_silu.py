from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from sfast_ext.passes.silu import silu

from .support import Traced, randn

X = randn(2, 8, 5, 3)

WRITTEN: dict[str, Callable[[Tensor], Tensor]] = {
    "as ldm writes it": lambda x: x * torch.sigmoid(x),
    "the other way round": lambda x: x.sigmoid() * x,
    "by another name": lambda x: x * torch.special.expit(x),
}


@pytest.mark.parametrize("what", WRITTEN)
def test_becomes_one_operator(what: str) -> None:
    traced = Traced(WRITTEN[what], X)
    assert traced.rewrite(silu) == 1
    assert traced.ops()["silu"] == 1 and traced.ops()["mul"] == traced.ops()["sigmoid"] == 0
    assert traced.error() < 1e-6


def test_rounds_no_worse_than_the_product() -> None:
    x = X.to(torch.bfloat16)
    traced = Traced(WRITTEN["as ldm writes it"], x)
    exact = X.to(torch.bfloat16).double()
    exact = exact * exact.sigmoid()
    before = float((traced.expected.double() - exact).norm())
    assert traced.rewrite(silu) == 1
    assert float((traced.outputs()[0].double() - exact).norm()) <= before


def twice(x: Tensor) -> tuple[Tensor, Tensor]:
    gate = x.sigmoid()
    return x * gate, gate + 1


def written_between(x: Tensor) -> Tensor:
    x = x.clone()
    gate = x.sigmoid()
    x.add_(1)
    return x * gate


LEFT: dict[str, Callable[[Tensor], object]] = {
    "the gate of another value": lambda x: x * (x + 1).sigmoid(),
    "a gate that is read elsewhere": twice,
    "a value that is written in between": written_between,
    "a number": lambda x: 0.5 * x.sigmoid(),
    "a square": lambda x: x * x,
    "a gate of another dtype": lambda x: x * x.double().sigmoid(),
    "a broadcast": lambda x: x[:1].sigmoid() * x,
}


@pytest.mark.parametrize("what", LEFT)
def test_stays(what: str) -> None:
    traced = Traced(LEFT[what], X)  # type: ignore[arg-type]
    assert traced.rewrite(silu) == 0
    assert traced.error() < 1e-6
