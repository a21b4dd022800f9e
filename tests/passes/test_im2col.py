from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sfast_ext.passes.bias_add import bias_add
from sfast_ext.passes.channels_last import channels_last
from sfast_ext.passes.group_norm import group_norm
from sfast_ext.passes.group_norm_inputs import group_norm_inputs
from sfast_ext.passes.im2col import im2col
from sfast_ext.passes.rewrite import argument

from .support import Traced, randn

HALF = torch.bfloat16
X = randn(2, 32, 5, 7).to(HALF)


class Block(nn.Module):
    def __init__(self, forward: Callable[..., Any], **options: Any) -> None:
        super().__init__()
        self.first = nn.Conv2d(32, 32, 3, padding=1)
        self.conv = nn.Conv2d(32, 24, **({"kernel_size": 3, "padding": 1} | options))
        self.wide = nn.Conv2d(64, 24, 3, padding=1)
        self.norm, self.norm_of_both = nn.GroupNorm(4, 32), nn.GroupNorm(4, 64)
        self.body = forward

    def forward(self, x: Tensor) -> Any:
        return self.body(self, x)


def rewritten(
    forward: Callable[..., Any], triton: bool = True, x: Tensor = X, **options: Any
) -> tuple[Traced, int, Block]:
    module = Block(forward, **options).to(x.dtype)
    traced = Traced(module, x)
    traced.ctx.triton = triton
    return traced, traced.rewrite(channels_last, group_norm, bias_add, group_norm_inputs, im2col), module


REWRITTEN: dict[str, tuple[Callable[..., Any], str]] = {
    "after a norm": (lambda m, x: m.conv(F.silu(m.norm(x))), "group_norm"),
    "with a shift": (lambda m, x: m.conv(F.silu(m.norm(m.first(x) + x.mean((2, 3))[..., None, None]))), "group_norm"),
    "after a sum": (lambda m, x: (m.conv(F.silu(m.norm(y := m.first(x) + x))), y), "add_group_norm"),
    "after both": (lambda m, x: (m.wide(m.norm_of_both(y := torch.cat([m.first(x), x], 1))), y), "cat_group_norm"),
}


@pytest.mark.parametrize("what", REWRITTEN)
def test_a_convolution_of_few_pixels_is_a_gemm_of_patches(what: str) -> None:
    forward, writer = REWRITTEN[what]
    traced, count, _ = rewritten(forward)
    assert count == 1
    (node,) = traced.find(writer)
    assert node.kwargs["patches"] is True
    (linear,) = traced.find("linear")
    # a bias is added by the kernel that adds biases alone
    assert argument(linear, 2, "bias") is None
    assert traced.error() < 2e-2


def test_the_weight_is_read_where_it_lies() -> None:
    traced, count, module = rewritten(REWRITTEN["after a norm"][0])
    assert count == 1
    weight = traced.arena.locate(module.conv.weight)
    assert weight is not None
    matrix = weight.tensor.permute(0, 2, 3, 1).reshape(24, 288)
    assert matrix.data_ptr() == weight.tensor.data_ptr()


NORMED: Callable[..., Any] = REWRITTEN["after a norm"][0]


@pytest.mark.parametrize(
    "options",
    [
        {"stride": 2},
        {"padding": 0},
        {"dilation": 2, "padding": 2},
        {"groups": 4},
        {"kernel_size": 1, "padding": 0},
        {"kernel_size": (3, 1)},
    ],
    ids=str,
)
def test_other_convolutions_stay(options: dict[str, Any]) -> None:
    traced, count, _ = rewritten(NORMED, **options)
    assert count == 0
    assert traced.error() < 2e-2


STAYS: dict[str, Callable[..., Any]] = {
    "no norm before": lambda m, x: m.conv(F.silu(x)),
    "seen by another": lambda m, x: (m.conv(y := m.norm(x)), y),
    "two convolutions": lambda m, x: m.conv(y := m.norm(x)) + m.conv(y * 2),
    "returned as well": lambda m, x: (y := m.norm(x), m.conv(y)),
    "groups of four": lambda m, x: m.conv(F.group_norm(x, 8)),
    "a weight that is computed": lambda m, x: F.conv2d(m.norm(x), m.conv.weight * 2, padding=1),
}


@pytest.mark.parametrize("what", STAYS)
def test_what_must_stay(what: str) -> None:
    traced, count, _ = rewritten(STAYS[what])
    assert count == 0
    assert traced.error() < 2e-2


@pytest.mark.parametrize(
    ("x", "triton"),
    [
        (randn(2, 32, 5, 7), True),
        (randn(2, 32, 16, 17).to(HALF), True),
        (randn(33, 32, 4, 4).to(HALF), True),
        (X, False),
    ],
    ids=["float32", "many pixels", "many images", "no Triton"],
)
def test_where_nothing_is_gained(x: Tensor, triton: bool) -> None:
    traced, count, _ = rewritten(NORMED, triton, x)
    assert count == 0
    assert traced.error() < 2e-2
