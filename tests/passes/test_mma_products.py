from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sfast_ext.kernels.attention import attention
from sfast_ext.kernels.conv import mma_conv2d
from sfast_ext.kernels.linear import linear_accumulate as linear_accumulate_kernel
from sfast_ext.kernels.linear import linear_geglu as linear_geglu_kernel
from sfast_ext.kernels.linear import mma_gemm, mma_linear
from sfast_ext.passes import rewrite
from sfast_ext.passes.attention import attention as attention_pass
from sfast_ext.passes.channels_last import channels_last
from sfast_ext.passes.geglu import geglu
from sfast_ext.passes.layer_norm import add_layer_norm
from sfast_ext.passes.linear_accumulate import linear_accumulate
from sfast_ext.passes.linear_geglu import linear_geglu
from sfast_ext.passes.mma_products import mma_products

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
    monkeypatch.setattr(mma_gemm, "supported", lambda device, dtype: dtype in rewrite.HALF)
    monkeypatch.setattr(mma_gemm, "half_sums_profitable", lambda device: True)


TOKENS, IMAGE = randn(2, 40, 32).to(HALF), randn(2, 32, 18, 17).to(HALF)


def rewritten(forward: Callable[..., Any], x: Tensor, chosen: bool = False, **options: Any) -> tuple[Traced, int]:
    traced = Traced(Block(forward, **options).to(x.dtype), x)
    traced.ctx.faster_sums = chosen
    traced.rewrite(channels_last, add_layer_norm, geglu, linear_geglu, linear_accumulate)
    return traced, traced.rewrite(mma_products)


def gated(x: Tensor) -> Tensor:
    value, gate = x.chunk(2, -1)
    return value * F.gelu(gate)


def summed(m: Block, x: Tensor) -> Tensor:
    total = m.linear(x) + x
    return m.back(m.norm(total).sin()) + total


LINEARS: dict[str, tuple[Callable[..., Any], tuple[ModuleType, ...]]] = {
    "with a bias": (lambda m, x: m.linear(x), (mma_linear,)),
    "without": (lambda m, x: m.back(x), (mma_linear,)),
    "before GEGLU": (lambda m, x: gated(m.wide(x)), (linear_geglu_kernel,)),
    "added to a sum": (summed, (mma_linear, linear_accumulate_kernel)),
}
sums = pytest.mark.parametrize("chosen", [False, True], ids=["exact", "faster sums"])


@pytest.mark.parametrize("what", LINEARS)
@sums
def test_linear_layers(what: str, chosen: bool) -> None:
    forward, wanted = LINEARS[what]
    traced, count = rewritten(forward, TOKENS, chosen)
    assert count == sum(chosen or kernel is mma_linear for kernel in wanted) and "linear" not in traced.ops()
    for kernel in wanted:
        (node,) = traced.launches(kernel)
        assert node.kwargs.get("half_sums", False) == chosen
    check(traced)


def check(traced: Traced) -> None:
    assert not HALF_ON_THE_CPU or traced.error() < 2e-3


def test_sums_stay_exact_if_halves_are_no_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mma_gemm, "half_sums_profitable", lambda device: False)
    traced, count = rewritten(summed, TOKENS, chosen=True)
    assert count == 1
    for kernel in (mma_linear, linear_accumulate_kernel):
        (node,) = traced.launches(kernel)
        assert "half_sums" not in node.kwargs


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("bias", [True, False])
@sums
def test_convolutions(stride: int, bias: bool, chosen: bool) -> None:
    traced, count = rewritten(lambda m, x: m.conv(x.sin()), IMAGE, chosen, stride=stride, bias=bias)
    (node,) = traced.launches(mma_conv2d)
    assert count == 1 and node.args[3] == stride and node.kwargs.get("half_sums", False) == chosen
    check(traced)


@pytest.mark.parametrize(
    "options",
    [each for each in OTHER_CONVOLUTIONS if each != {"stride": 2}] + [{"stride": 3}, {"stride": (1, 2)}],
    ids=str,
)
def test_other_convolutions_stay(options: dict[str, Any]) -> None:
    traced, _ = rewritten(lambda m, x: m.conv(x.sin()), IMAGE, **options)
    assert not traced.launches(mma_conv2d)


def test_bfloat16_has_exact_sums_alone() -> None:
    for chosen in (False, True):
        traced, count = rewritten(lambda m, x: m.linear(x), TOKENS.bfloat16(), chosen)
        (node,) = traced.launches(mma_linear)
        assert count == 1 and not node.kwargs


@sums
def test_nothing_changes_if_the_kernel_is_not_for_the_card_or_the_dtype(monkeypatch, chosen: bool) -> None:
    for x, forward in ((TOKENS, lambda m, x: m.linear(x)), (IMAGE, lambda m, x: m.conv(x.sin()))):
        assert rewritten(forward, x.float(), chosen)[1] == 0
        assert rewritten(forward, x, chosen)[1] == 1
    monkeypatch.setattr(mma_gemm, "supported", lambda device, dtype: False)
    assert rewritten(lambda m, x: m.linear(x), TOKENS, chosen)[1] == 0


def test_few_rows_stay() -> None:
    for tokens, wanted in ((63, 0), (64, 1)):
        assert rewritten(lambda m, x: m.linear(x), randn(tokens, 32).to(HALF))[1] == wanted
    for high, wanted in ((7, 0), (8, 1)):  # two images, 4 columns
        assert rewritten(lambda m, x: m.conv(x.sin()), randn(2, 32, 2 * high - 1, 7).to(HALF), stride=2)[1] == wanted


def test_plans_whose_calls_are_rare_stay_unless_sums_are_chosen() -> None:
    traced = Traced(Block(lambda m, x: m.linear(x)).to(HALF), TOKENS)
    traced.ctx.most_bytes = 1 << 30
    assert traced.rewrite(mma_products) == 0
    traced.ctx.faster_sums = True
    assert traced.rewrite(mma_products) == 1


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
    monkeypatch.setattr(mma_gemm, "half_sums_profitable", lambda device: pays)
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
