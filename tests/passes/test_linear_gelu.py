from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sfast_ext.kernels.linear import linear_gelu as kernel
from sfast_ext.passes.cleanup import cleanup
from sfast_ext.passes.linear_gelu import linear_gelu

from .support import HALF_ON_THE_CPU, Traced, randn

X = randn(2, 5, 16)


class Layers(nn.Module):
    def __init__(self, body: Callable[..., Any]) -> None:
        super().__init__()
        self.body, self.one, self.plain = body, nn.Linear(16, 24), nn.Linear(16, 24, bias=False)

    def forward(self, x: Tensor) -> Any:
        return self.body(self, x.sin())


def gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gelu_and_its_product_become_one(dtype: torch.dtype) -> None:
    for body in (lambda m, x: gelu(m.one(x)), lambda m, x: F.dropout(gelu(m.one(x).contiguous()), 0.0)):
        traced = Traced(Layers(body).to(dtype), X.to(dtype))
        assert traced.rewrite(cleanup, linear_gelu) == 1
        assert len(traced.launches(kernel)) == 1 and not traced.find("linear") and not traced.find("gelu")
        assert not HALF_ON_THE_CPU or traced.error() < 1e-2


def product_again(m: Layers, x: Tensor) -> Any:
    y = m.one(x)
    return gelu(y), y


def written(m: Layers, x: Tensor) -> Any:
    y = m.one(x)
    y.add_(1)
    return gelu(y)


STAYS: dict[str, Callable[..., Any]] = {
    "without bias": lambda m, x: gelu(m.plain(x)),
    "by erf": lambda m, x: F.gelu(m.one(x)),
    "product used elsewhere": product_again,
    "written between": written,
    "of a sum": lambda m, x: gelu(m.one(x) + 1),
    "of a part": lambda m, x: gelu(m.one(x)[..., :12]),
    "SiLU": lambda m, x: F.silu(m.one(x)),
    "in float32": lambda m, x: gelu(m.one(x).float()),
    "no product": lambda m, x: gelu(x),
}


@pytest.mark.parametrize("what", STAYS)
def test_others_stay(what: str) -> None:
    traced = Traced(Layers(STAYS[what]).to(torch.bfloat16), X.to(torch.bfloat16))
    traced.rewrite(cleanup)
    before = traced.ops()
    assert traced.rewrite(linear_gelu) == 0
    assert traced.ops() == before


def test_full_precision_stays() -> None:
    assert Traced(Layers(lambda m, x: gelu(m.one(x))), X).rewrite(linear_gelu) == 0
