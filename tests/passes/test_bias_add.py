from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sfast_ext.passes.bias_add import bias_add

from .support import Traced, randn

X = randn(2, 8, 5, 7)


class Block(nn.Module):
    def __init__(self, forward: Callable[..., Any], bias: bool = True) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 8, 3, padding=1, bias=bias)
        self.other = nn.Conv2d(8, 8, 3, padding=1)
        self.body = forward

    def forward(self, x: Tensor) -> Any:
        return self.body(self, x)


JOINED: dict[str, tuple[Callable[..., Any], float]] = {
    "conv + x": (lambda m, x: m.conv(x) + x, 1.0),
    "x + conv": (lambda m, x: x + m.conv(x), 1.0),
    "divided": (lambda m, x: (x + m.conv(x)) / 2.0, 0.5),
    "multiplied": (lambda m, x: (x + m.conv(x)) * 3, 3.0),
    "two convolutions": (lambda m, x: m.conv(x) + m.other(x.sin()), 1.0),
    "convolution of a convolution": (lambda m, x: m.conv(y := m.other(x)) + y, 1.0),
    "sum used twice": (lambda m, x: (y := m.conv(x) + x) / 2 + y, 1.0),
    "divided by a tensor": (lambda m, x: (m.conv(x) + x) / x.abs().sum(), 1.0),
    # if the sum is near zero, rounding is all that is left of it
    "a number over the sum": (lambda m, x: (2.0 / (m.conv(x) + x)).clamp(-2, 2), 1.0),
}


@pytest.mark.parametrize("what", JOINED)
def test_bias_residual_and_scale_become_one(what: str) -> None:
    forward, scale = JOINED[what]
    traced = Traced(Block(forward), X)
    assert traced.rewrite(bias_add) == 1
    (node,) = traced.find("bias_add")
    assert node.args[0].args[2] is None and node.args[3] == scale
    assert traced.error() < 1e-6


def write_residual(m: Block, x: Tensor) -> Tensor:
    y = x.sin()
    z = y + m.conv(x)
    y.add_(1)
    return y * z


STAYS: dict[str, Callable[..., Any]] = {
    "no residual": lambda m, x: m.conv(x) / 2,
    "broadcast residual": lambda m, x: m.conv(x) + x.mean(1, keepdim=True),
    "broadcast convolution": lambda m, x: m.conv(x[:1]) + x,
    "a number": lambda m, x: m.conv(x) + 1,
    "with a factor": lambda m, x: torch.add(x, m.conv(x), alpha=2),
    "convolution used twice": lambda m, x: (y := m.conv(x)) + x + y.sin(),
    "with itself": lambda m, x: (y := m.conv(x)) + y,
    "promoted": lambda m, x: m.conv(x) + x.double(),
    "unbatched": lambda m, x: m.conv(x[0]) + x[0],
    "written residual": write_residual,
}


@pytest.mark.parametrize("what", STAYS)
def test_others_stay(what: str) -> None:
    traced = Traced(Block(STAYS[what]), X)
    before = traced.ops()
    assert traced.rewrite(bias_add) == 0
    assert traced.ops() == before
    assert traced.error() == 0


def test_convolution_without_bias_stays() -> None:
    assert Traced(Block(lambda m, x: m.conv(x) + x, bias=False), X).rewrite(bias_add) == 0


ALONE: dict[str, tuple[Callable[..., Any], int]] = {
    "used once": (lambda m, x: m.wide(x).sin(), 1),
    "used twice": (lambda m, x: (y := m.wide(x)) + y.sin(), 1),
    "beside a residual": (lambda m, x: m.wide(x + m.conv(x)), 2),
    "few channels": (lambda m, x: m.conv(x).sin(), 0),
    "unbatched": (lambda m, x: m.wide(x[0]), 0),
    "written": (lambda m, x: m.wide(x).mul_(2), 0),
}


@pytest.mark.parametrize("what", ALONE)
def test_a_bias_alone_goes_if_there_is_triton(what: str) -> None:
    forward, wanted = ALONE[what]
    for triton in (True, False):
        module = Block(forward)
        module.wide = nn.Conv2d(8, 24, 3, padding=1)
        traced = Traced(module, X)
        traced.ctx.triton = triton
        assert traced.rewrite(bias_add) == (wanted if triton else 0)
        assert traced.error() < 1e-6


class Tokens(nn.Module):
    def __init__(self, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.proj, self.bare = nn.Linear(7, 7), nn.Linear(7, 7, bias=False)
        self.body = forward

    def forward(self, x: Tensor) -> Any:
        return self.body(self, x)


SUMS: dict[str, tuple[Callable[..., Any], int]] = {
    "first": (lambda m, x: m.proj(x) + x, 1),
    "second": (lambda m, x: (x + m.proj(x)).sin(), 1),
    "without a bias": (lambda m, x: m.bare(x) + x, 0),
    "used elsewhere": (lambda m, x: (y := m.proj(x)) + x + y.sin(), 0),
    "rows": (lambda m, x: m.proj(x[0]) + x[0], 0),
    "with a factor": (lambda m, x: torch.add(m.proj(x), x, alpha=2), 0),
    "written": (lambda m, x: (m.proj(x) + x).mul_(2), 0),
}


@pytest.mark.parametrize("what", SUMS)
def test_the_bias_of_a_linear_of_tokens_goes_with_the_residual(what: str) -> None:
    forward, wanted = SUMS[what]
    for triton in (True, False):
        traced = Traced(Tokens(forward).to(torch.bfloat16), X[0].to(torch.bfloat16))
        traced.ctx.triton = triton
        assert traced.rewrite(bias_add) == (wanted if triton else 0)
        assert traced.error() < 1e-2
    assert Traced(Tokens(forward), X[0]).rewrite(bias_add) == 0


def test_rounds_no_worse_than_the_original() -> None:
    module, x = Block(lambda m, x: (x + m.conv(x)) / 1.7), X.to(torch.bfloat16)
    with torch.no_grad():
        exact = module.double()(x.double())
    traced = Traced(module.to(torch.bfloat16), x)
    assert traced.rewrite(bias_add) == 1
    with torch.no_grad():
        ours, theirs = traced.gm(x).double() - exact, traced.expected.double() - exact
    assert ours.norm() <= 1.05 * theirs.norm()
