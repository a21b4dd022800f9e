from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sfast_ext.kernels.attention import attention
from sfast_ext.kernels.conv import faster_conv2d
from sfast_ext.kernels.linear import faster_linear, mma_gemm
from sfast_ext.passes.attention import attention as attention_pass
from sfast_ext.passes.channels_last import channels_last
from sfast_ext.passes.faster_sums import faster_sums
from sfast_ext.passes.geglu import geglu
from sfast_ext.passes.layer_norm import add_layer_norm
from sfast_ext.passes.linear_accumulate import linear_accumulate
from sfast_ext.passes.linear_geglu import linear_geglu

from .support import HALF_ON_THE_CPU, OTHER_CONVOLUTIONS, Traced, randn

HALF = torch.float16


class Block(nn.Module):
    def __init__(self, forward: Callable[..., Any], **options: Any) -> None:
        super().__init__()
        self.linear, self.wide, self.back = nn.Linear(32, 32), nn.Linear(32, 64), nn.Linear(32, 32, bias=False)
        self.norm, self.body = nn.LayerNorm(32), forward
        self.conv = nn.Conv2d(**({"in_channels": 32, "out_channels": 16, "kernel_size": 3, "padding": 1} | options))

    def forward(self, x: Tensor) -> Any:
        return self.body(self, x)


@pytest.fixture(autouse=True)
def geforce(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mma_gemm, "available", lambda device: True)


TOKENS, IMAGE = randn(2, 9, 32).to(HALF), randn(2, 32, 9, 8).to(HALF)


def rewritten(forward: Callable[..., Any], x: Tensor, chosen: bool = True, **options: Any) -> tuple[Traced, int]:
    traced = Traced(Block(forward, **options).to(x.dtype), x)
    traced.ctx.faster_sums = chosen
    traced.rewrite(channels_last, add_layer_norm, geglu, linear_geglu, linear_accumulate)
    return traced, traced.rewrite(faster_sums)


def gated(x: Tensor) -> Tensor:
    value, gate = x.chunk(2, -1)
    return value * F.gelu(gate)


def summed(m: Block, x: Tensor) -> Tensor:
    total = m.linear(x) + x
    return m.back(m.norm(total).sin()) + total


LINEARS: dict[str, tuple[Callable[..., Any], int]] = {
    "with a bias": (lambda m, x: m.linear(x), 1),
    "without": (lambda m, x: m.back(x), 1),
    "before GEGLU": (lambda m, x: gated(m.wide(x)), 1),
    "added to a sum": (summed, 2),
}


@pytest.mark.parametrize("what", LINEARS)
def test_linear_layers(what: str) -> None:
    forward, wanted = LINEARS[what]
    traced, count = rewritten(forward, TOKENS)
    assert count == wanted == len(traced.launches(faster_linear))
    assert not {"linear", "linear_geglu", "linear_accumulate"} & set(traced.ops())
    check(traced)


def check(traced: Traced) -> None:
    assert not HALF_ON_THE_CPU or traced.error() < 2e-3


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("bias", [True, False])
def test_convolutions(stride: int, bias: bool) -> None:
    traced, count = rewritten(lambda m, x: m.conv(x.sin()), IMAGE, stride=stride, bias=bias)
    (node,) = traced.launches(faster_conv2d)
    assert count == 1 and node.args[3] == stride
    check(traced)


@pytest.mark.parametrize(
    "options",
    [each for each in OTHER_CONVOLUTIONS if each != {"stride": 2}] + [{"stride": 3}, {"stride": (1, 2)}],
    ids=str,
)
def test_other_convolutions_stay(options: dict[str, Any]) -> None:
    traced, _ = rewritten(lambda m, x: m.conv(x.sin()), IMAGE, **options)
    assert not traced.launches(faster_conv2d)


def test_nothing_changes_unless_it_is_chosen_and_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    assert rewritten(lambda m, x: m.linear(x), TOKENS, chosen=False)[1] == 0
    for dtype in (torch.bfloat16, torch.float32):
        assert rewritten(lambda m, x: m.linear(x), TOKENS.to(dtype))[1] == 0
        assert rewritten(lambda m, x: m.conv(x.sin()), IMAGE.to(dtype))[1] == 0
    monkeypatch.setattr(mma_gemm, "available", lambda device: False)
    assert rewritten(lambda m, x: m.linear(x), TOKENS)[1] == 0


def attends(m: Block, x: Tensor) -> Tensor:
    heads = x.unflatten(-1, (4, 8)).transpose(1, 2)
    return F.scaled_dot_product_attention(heads, heads, heads)


@pytest.mark.parametrize(
    ("dtype", "chosen", "pays", "wanted"),
    [
        (HALF, True, True, True),
        (HALF, False, True, False),
        (HALF, True, False, False),
        (torch.bfloat16, True, True, False),
        (torch.float32, True, True, False),
    ],
    ids=str,
)
def test_attention(monkeypatch: pytest.MonkeyPatch, dtype, chosen, pays, wanted) -> None:
    monkeypatch.setattr(mma_gemm, "halves_are_faster", lambda device: pays)
    traced = Traced(Block(attends).to(dtype), TOKENS.to(dtype))
    traced.ctx.faster_sums = chosen
    assert traced.rewrite(attention_pass) == 1
    (node,) = traced.launches(attention)
    assert node.kwargs.get("faster_sums", False) is wanted
    check(traced)


def written(m: Block, x: Tensor) -> Tensor:
    y = m.linear(x)
    y.mul_(2)
    return y


def test_what_is_written_to_stays() -> None:
    assert rewritten(written, TOKENS)[1] == 0


def test_a_product_of_activations_stays() -> None:
    assert rewritten(lambda m, x: F.linear(x, x[0]), TOKENS)[1] == 1  # as a linear layer, whoever made its weight
    assert rewritten(lambda m, x: x @ x.transpose(1, 2), TOKENS)[1] == 0
