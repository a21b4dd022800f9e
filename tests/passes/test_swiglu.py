from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sfast_ext.kernels.pointwise import swiglu as kernel
from sfast_ext.passes import run_passes
from sfast_ext.passes.cleanup import cleanup
from sfast_ext.passes.silu import silu
from sfast_ext.passes.swiglu import swiglu

from .diffusion_transformers import HALF, available
from .support import Traced, randn

GATE, VALUE = randn(2, 7, 24).to(HALF), randn(2, 7, 24).cos().to(HALF)


@pytest.fixture(autouse=True)
def supported(monkeypatch: pytest.MonkeyPatch) -> None:
    available(monkeypatch)


WRITTEN: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "as Z-Image": lambda g, v: F.silu(g) * v,
    "as Lumina": lambda g, v: F.silu(g.float()).to(g.dtype) * v,
    "value first": lambda g, v: v * F.silu(g),
    "by a sigmoid": lambda g, v: (g * torch.sigmoid(g)) * v,
    "halves": lambda g, v: F.silu(g.chunk(2, -1)[0]) * g.chunk(2, -1)[1],
    "halves, exchanged": lambda g, v: g[..., :12] * F.silu(g[..., 12:]),
    "a value used elsewhere": lambda g, v: (F.silu(g) * v, v.sin()),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("how", WRITTEN)
def test_products_become_one(how: str, dtype: torch.dtype) -> None:
    traced = Traced(lambda g, v: WRITTEN[how](g.sin(), v.sin()), GATE.to(dtype), VALUE.to(dtype))
    assert traced.rewrite(cleanup, silu, swiglu) == 1
    assert len(traced.launches(kernel)) == 1 and not traced.find("silu") and traced.error() < 1e-2


def gate_again(g: Tensor, v: Tensor) -> Any:
    activated = F.silu(g)
    return activated * v, activated


def written(g: Tensor, v: Tensor) -> Any:
    g = g.clone()
    activated = F.silu(g) * v
    g.add_(1)
    return activated


STAYS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "silu used elsewhere": gate_again,
    "written between": written,
    "alone": lambda g, v: F.silu(g),
    "squared": lambda g, v: F.silu(g).square(),
    "times a number": lambda g, v: F.silu(g) * 2,
    "added": lambda g, v: F.silu(g) + v,
    "broadcast": lambda g, v: F.silu(g) * v[:, :1],
    "a gate for all tokens": lambda g, v: F.silu(g[:, :1]) * v,
    "in float32": lambda g, v: F.silu(g.float()) * v.float(),
    "promoted": lambda g, v: F.silu(g) * v.float(),
    "of another dtype": lambda g, v: F.silu(g.float()).half() * v.half(),
}


@pytest.mark.parametrize("what", STAYS)
def test_others_stay(what: str) -> None:
    traced = Traced(STAYS[what], GATE, VALUE)
    traced.rewrite(cleanup, silu)
    before = traced.ops()
    assert traced.rewrite(swiglu) == 0
    assert traced.ops() == before


def test_both_projections_are_one_product() -> None:
    class FeedForward(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w1, self.w2, self.w3 = nn.Linear(24, 40), nn.Linear(40, 24), nn.Linear(24, 40)

        def forward(self, x: Tensor) -> Tensor:
            return self.w2(F.silu(self.w1(x)) * self.w3(x))

    traced = Traced(FeedForward().to(HALF), GATE)
    counts = run_passes(traced.gm, traced.ctx)
    assert counts["swiglu"] == counts["packed_linear"] == 1 and traced.ops()["linear"] == 2
    traced.gm.recompile()
    assert traced.error() < 1e-2
