from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sfast_ext.passes.bias_add import bias_add
from sfast_ext.passes.group_norm import group_norm
from sfast_ext.passes.group_norm_inputs import group_norm_inputs
from sfast_ext.passes.rewrite import argument

from .support import Traced, randn

X = randn(2, 8, 5, 7)


class Block(nn.Module):
    def __init__(self, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 8, 3, padding=1)
        self.other = nn.Conv2d(8, 16, 3, padding=1)
        self.norm = nn.GroupNorm(4, 8, eps=1e-3)
        self.wide = nn.GroupNorm(3, 24)
        for norm in (self.norm, self.wide):
            nn.init.normal_(norm.weight)
            nn.init.normal_(norm.bias)
        self.proj = nn.Linear(8, 8)
        self.body = forward

    def forward(self, x: Tensor) -> Any:
        return self.body(self, x)

    def tokens(self, x: Tensor) -> Tensor:
        """What a transformer block does at its end."""
        n, c, h, w = x.shape
        return self.proj(x.permute(0, 2, 3, 1).reshape(n, h * w, c)).reshape(n, h, w, c).permute(0, 3, 1, 2)

    def turned(self, x: Tensor) -> Tensor:
        """A linear whose N is not the channels of the image."""
        n, c, h, w = x.shape
        return self.proj(x.permute(0, 2, 3, 1).reshape(n, h * w, c)).reshape(n, c, h, w)


def rewritten(forward: Callable[..., Any], triton: bool = True, x: Tensor = X) -> tuple[Traced, int]:
    traced = Traced(Block(forward), x)
    traced.ctx.triton = triton  # biases alone are taken if there is a kernel to add them
    return traced, traced.rewrite(group_norm, bias_add, group_norm_inputs)


SUMS: dict[str, Callable[..., Any]] = {
    "normed and used": lambda m, x: (m.norm(y := m.conv(x) + x), y),
    "with SiLU": lambda m, x: F.silu(m.norm(y := x + m.conv(x))) + y,
    "scaled": lambda m, x: (m.norm(y := (m.conv(x) + x) / 2), y),
    "only normed": lambda m, x: m.norm(m.conv(x) + x),
    "of others": lambda m, x: (m.norm(y := x + x.sin()), y),
    "of tokens": lambda m, x: (m.norm(y := m.tokens(x) + x), y),
    "of tokens, turned": lambda m, x: (m.norm(y := x + m.turned(x)), y),
    "with itself": lambda m, x: m.norm((y := x.sin()) + y),
}


@pytest.mark.parametrize("what", SUMS)
def test_a_sum_and_its_norm_become_one(what: str) -> None:
    traced, count = rewritten(SUMS[what])
    assert count == 1
    assert traced.ops()["add_group_norm"] == 1
    assert traced.ops()["bias_add"] == traced.ops()["group_norm"] == 0
    assert traced.error() < 1e-6


@pytest.mark.parametrize(("what", "goes"), [("of tokens", True), ("of tokens, turned", False)])
def test_the_bias_of_a_linear_goes_along_if_it_is_one_of_channels(what: str, goes: bool) -> None:
    module = Block(SUMS[what]).to(torch.bfloat16)
    traced = Traced(module, X.to(torch.bfloat16))
    traced.ctx.triton = True
    assert traced.rewrite(group_norm, bias_add, group_norm_inputs) == 1
    assert traced.error() < 1e-2
    assert (traced.find("add_group_norm")[0].args[1] is not None) == goes
    assert (argument(traced.find("linear")[0], 2, "bias") is None) == goes


CATS: dict[str, tuple[Callable[..., Any], bool]] = {
    "a sum first": (lambda m, x: (m.wide(y := torch.cat([m.other(x) + m.other(x.sin()), x], 1)), y), True),
    "tokens first": (lambda m, x: F.group_norm(torch.cat([m.tokens(x) + x, x], 1), 4), False),
    "normed and used": (lambda m, x: (m.wide(y := torch.cat([m.other(x), x], 1)), y), True),
    "plain first": (lambda m, x: (m.wide(y := torch.cat([x, m.other(x)], 1)), y), False),
    "from the end": (lambda m, x: m.wide(torch.cat([m.other(x), x], -3)), True),
    "first used elsewhere": (lambda m, x: (m.wide(torch.cat([y := m.other(x), x], 1)), y), False),
    "with SiLU": (lambda m, x: F.silu(m.wide(torch.cat([m.other(x), x], 1))), True),
}


@pytest.mark.parametrize("what", CATS)
def test_a_concatenation_and_its_norm_become_one(what: str) -> None:
    forward, biased = CATS[what]
    traced, count = rewritten(forward)
    assert count == 1
    (node,) = traced.find("cat_group_norm")
    assert (node.args[1] is not None) == biased
    assert traced.ops()["cat"] == traced.ops()["group_norm"] == 0
    assert traced.error() < 1e-6


def test_one_that_is_both_halves() -> None:
    def forward(m: Block, x: Tensor) -> Tensor:
        y = m.conv(x)
        return F.group_norm(torch.cat([y, y], 1), 4, eps=1e-3)

    traced, count = rewritten(forward)
    assert count == 1 and traced.find("cat_group_norm")[0].args[1] is None
    assert traced.error() < 1e-6


def test_the_second_norm_of_a_sum_stays() -> None:
    traced, count = rewritten(lambda m, x: m.norm(y := m.conv(x) + x) + F.group_norm(y, 2))
    assert count == 1
    assert traced.ops()["add_group_norm"] == traced.ops()["group_norm"] == 1
    assert traced.error() < 1e-6


def written(m: Block, x: Tensor) -> Any:
    y = torch.cat([m.other(x), x], 1)
    z = m.wide(y)
    y.mul_(2)
    return z, y


STAYS: dict[str, Callable[..., Any]] = {
    "no sum": lambda m, x: m.norm(x.sin()),
    "broadcast": lambda m, x: (m.norm(y := x + x.mean(1, keepdim=True)), y),
    "with a factor": lambda m, x: (m.norm(y := torch.add(x, x.sin(), alpha=2)), y),
    "with a shift": lambda m, x: m.norm(m.conv(x) + x.mean((2, 3))[..., None, None]),
    "rows beside each other": lambda m, x: m.norm(torch.cat([x, x.sin()], 2)),
    "images": lambda m, x: m.norm(torch.cat([x, x.sin()])),
    "three": lambda m, x: m.wide(torch.cat([x, x.sin(), x.cos()], 1)),
    "promoted": lambda m, x: m.wide(torch.cat([m.other(x).double(), x], 1).float()),
    "computed weights": lambda m, x: F.group_norm(m.conv(x) + x, 4, m.norm.weight * 2),
    "written": written,
}


@pytest.mark.parametrize("what", STAYS)
def test_others_stay(what: str) -> None:
    traced, count = rewritten(STAYS[what])
    assert count == 0
    assert traced.error() < 1e-6


def test_in_half_precision() -> None:
    module = Block(lambda m, x: (m.wide(y := torch.cat([m.other(x), m.conv(x) + x], 1)), m.norm(x), y))
    traced = Traced(module.to(torch.bfloat16), X.to(torch.bfloat16))
    assert traced.rewrite(group_norm, bias_add, group_norm_inputs) == 1
    assert traced.error() < 1e-2
