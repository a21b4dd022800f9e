from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sfast_ext.passes.cse import cse
from sfast_ext.passes.layer_norm import add_layer_norm, layer_norm

from .support import Traced, randn

X = randn(2, 5, 8)


class Block(nn.Module):
    def __init__(self, forward: Callable[..., Any], affine: bool = True) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8, elementwise_affine=affine, eps=1e-3)
        self.body = forward
        if affine:
            nn.init.normal_(self.norm.weight)
            nn.init.normal_(self.norm.bias)

    def forward(self, *inputs: Tensor) -> Any:
        return self.body(self, *inputs)


@pytest.mark.parametrize("affine", [True, False])
def test_norm(affine: bool) -> None:
    traced = Traced(Block(lambda m, x: m.norm(x), affine), X)
    assert traced.rewrite(layer_norm) == 1
    assert traced.ops() == {"layer_norm": 1}
    assert traced.error() < 1e-6


@pytest.mark.parametrize("function", [layer_norm, add_layer_norm])
def test_casts_go_into_the_kernel(function: Any) -> None:
    def forward(m: Block, x: Tensor, y: Tensor) -> Tensor:
        z = x + y
        normed = F.layer_norm(z.float(), (8,), m.norm.weight.float(), m.norm.bias.float())
        return normed.to(torch.bfloat16).sin()

    half = X.to(torch.bfloat16)
    traced = Traced(Block(forward).to(torch.bfloat16), half, half + 1)
    assert traced.rewrite(function) == 1
    assert traced.ops()["to"] == 0
    assert traced.error() < 1e-3


def test_result_stays_wide_if_it_is_used_wide() -> None:
    traced = Traced(Block(lambda m, x: m.norm(x.float())), X.to(torch.bfloat16))
    assert traced.rewrite(layer_norm) == 1
    assert traced.ops() == {"layer_norm": 1}
    assert traced.error() < 1e-6


def test_three_casts_of_one_result() -> None:
    """Q, K and V each cast what they read; equal casts are one before this pass runs."""
    half = torch.bfloat16
    traced = Traced(Block(lambda m, x: [m.norm(x).to(half).sin() for _ in range(3)]), X)
    assert traced.rewrite(cse, layer_norm) == 1
    assert traced.ops() == {"layer_norm": 1, "sin": 1}


def test_a_weight_that_is_computed_after_the_sum_is_waited_for() -> None:
    def forward(m: Block, x: Tensor) -> Any:
        total = x.sin() + x
        return F.layer_norm(total, (8,), None, m.norm.bias + x[0, 0]), total

    traced = Traced(Block(forward), X)
    assert traced.rewrite(add_layer_norm) == 0
    assert traced.rewrite(layer_norm) == 1
    assert traced.error() < 1e-6


@pytest.mark.parametrize("kept", [True, False])
def test_residual_add(kept: bool) -> None:
    def forward(m: Block, x: Tensor, y: Tensor) -> Any:
        total = x.sin() + y
        early = total.cos()  # used before the norm is due
        normed = m.norm(total)
        return (normed, early, total * 2) if kept else normed

    traced = Traced(Block(forward), X, X.flip(0))
    assert traced.rewrite(add_layer_norm) == 1
    assert traced.ops()["add"] == 0 and traced.ops()["add_layer_norm"] == 1
    assert traced.error() < 1e-6


def test_chain_of_residuals() -> None:
    def forward(m: Block, x: Tensor) -> Tensor:
        for _ in range(3):
            x = m.norm(x).sin() + x
        return m.norm(x)

    traced = Traced(Block(forward), X)
    assert traced.rewrite(add_layer_norm) == 3
    assert traced.rewrite(layer_norm) == 1
    assert traced.error() < 1e-6


ADD_STAYS: dict[str, Callable[..., Any]] = {
    "broadcast": lambda m, x, y: m.norm(x + y[:1]),
    "a number": lambda m, x, y: m.norm(x + 1),
    "with a factor": lambda m, x, y: m.norm(torch.add(x, y, alpha=2)),
    "promoted": lambda m, x, y: m.norm(x + y.to(torch.bfloat16)),
}


@pytest.mark.parametrize("what", ADD_STAYS)
def test_other_additions_stay(what: str) -> None:
    traced = Traced(Block(ADD_STAYS[what]), X, X.flip(0))
    assert traced.rewrite(add_layer_norm) == 0
    assert traced.rewrite(layer_norm) == 1
    assert traced.ops()["add"] == 1
    assert traced.error() < 1e-6


def test_cast_that_loses_stays() -> None:
    traced = Traced(Block(lambda m, x, y: m.norm((x + y).to(torch.bfloat16))).to(torch.bfloat16), X, X)
    assert traced.rewrite(add_layer_norm) == 0
    assert traced.rewrite(layer_norm) == 1
    assert traced.ops()["to"] == 1


def test_other_norms_are_left() -> None:
    assert Traced(lambda x: F.layer_norm(x, (5, 8)), X).rewrite(layer_norm) == 0
    assert Traced(lambda x: F.layer_norm(x, (8,)), X.double()).rewrite(layer_norm) == 0


def test_written_values_are_left() -> None:
    def forward(m: Block, x: Tensor, y: Tensor) -> Tensor:
        total = x + y
        normed = m.norm(total)
        total.mul_(2)
        return normed

    for function in (layer_norm, add_layer_norm):
        traced = Traced(Block(forward), X, X)
        assert traced.rewrite(function) == 0
        assert traced.error() == 0


class Projected(Block):
    def __init__(self, forward: Callable[..., Any]) -> None:
        super().__init__(forward)
        self.proj, self.bare = nn.Linear(8, 8), nn.Linear(8, 8, bias=False)


BIASES: dict[str, tuple[Callable[..., Any], bool]] = {
    "first": (lambda m, x: (m.norm(y := m.proj(x) + x), y), True),
    "second": (lambda m, x: (m.norm(y := x + m.proj(x)), y), True),
    "of both, one": (lambda m, x: (m.norm(y := m.proj(x) + m.proj(x.sin())), y), True),
    "without": (lambda m, x: (m.norm(y := x + m.bare(x)), y), False),
    "used elsewhere": (lambda m, x: (m.norm((y := m.proj(x)) + x), y), False),
    "twice": (lambda m, x: m.norm((y := m.proj(x)) + y), False),
    "moved in between": (lambda m, x: m.norm(m.proj(x).flip(0) + x), False),
}


@pytest.mark.parametrize("what", BIASES)
def test_the_bias_of_a_linear_goes_along(what: str) -> None:
    forward, goes = BIASES[what]
    traced = Traced(Projected(forward), X)
    assert traced.rewrite(add_layer_norm) == 1
    (node,) = traced.find("add_layer_norm")
    assert (node.kwargs["shift"] is not None) == goes
    assert traced.error() < 1e-6
