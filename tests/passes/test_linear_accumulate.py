from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sfast_ext.kernels.backend import graph_memory
from sfast_ext.passes.layer_norm import add_layer_norm
from sfast_ext.passes.linear_accumulate import linear_accumulate

from .support import Traced, randn

HALF = torch.bfloat16
X = randn(2, 5, 16).to(HALF)


class Block(nn.Module):
    def __init__(self, body: Callable[..., Any], bias: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 16, bias=bias)
        self.norm, self.body = nn.LayerNorm(16), body

    def forward(self, x: Tensor) -> Any:
        return self.body(self, x)


def plain(m: Block, x: Tensor) -> Any:
    total = m.first(x) + x
    return (m.last(m.norm(total)) + total).relu()


def the_other_way_round(m: Block, x: Tensor) -> Any:
    total = x + m.first(x)
    return (total + m.last(m.norm(total))).relu()


def rewritten(body: Callable[..., Any], bias: bool = True, triton: bool = True) -> tuple[Traced, int]:
    traced = Traced(Block(body, bias).to(HALF), X)
    traced.ctx.triton = triton
    return traced, traced.rewrite(add_layer_norm, linear_accumulate)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("body", [plain, the_other_way_round])
def test_the_linear_goes_onto_the_sum(body: Callable[..., Any], bias: bool) -> None:
    traced, count = rewritten(body, bias)
    assert count == 1
    assert traced.ops()["add"] == 0
    (pair,), (onto,) = traced.find("add_layer_norm"), traced.find("linear_accumulate")
    assert ("post_bias" in pair.kwargs) == bias
    assert onto.args[2].args[0] is pair
    assert traced.error() < 1e-2
    # its result is no memory of its own
    assert graph_memory.base_of(onto) is onto.args[2]


def sum_needed_later(m: Block, x: Tensor) -> Any:
    total = m.first(x) + x
    return (m.last(m.norm(total)) + total).relu(), total.sin()


def linear_needed_later(m: Block, x: Tensor) -> Any:
    total = m.first(x) + x
    last = m.last(m.norm(total))
    return (last + total).relu(), last.sin()


def no_norm_before(m: Block, x: Tensor) -> Any:
    return (m.last(x) + x).relu()


def with_a_factor(m: Block, x: Tensor) -> Any:
    total = m.first(x) + x
    return torch.add(m.last(m.norm(total)), total, alpha=2).relu()


@pytest.mark.parametrize("body", [sum_needed_later, linear_needed_later, no_norm_before, with_a_factor])
def test_left_alone(body: Callable[..., Any]) -> None:
    traced, count = rewritten(body)
    assert count == 0
    assert traced.ops()["linear_accumulate"] == 0
    assert traced.error() < 1e-2


def test_not_with_a_bias_that_is_computed_after_the_sum() -> None:
    """As a cast of autocast's is: it cannot be an operand of the kernel that makes the sum."""

    def body(m: Block, x: Tensor) -> Any:
        total = m.first(x) + x
        linear = nn.functional.linear(m.norm(total), m.last.weight, m.last.bias.float().to(HALF) * 2)
        return (linear + total).relu()

    traced, count = rewritten(body)
    assert count == 0
    assert traced.error() < 1e-2


def test_not_without_triton() -> None:
    assert rewritten(plain, triton=False)[1] == 0
