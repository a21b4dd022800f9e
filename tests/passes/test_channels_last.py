from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sfast_ext.passes.channels_last import channels_last
from sfast_ext.passes.cleanup import cleanup

from .support import Traced, randn

X = randn(2, 6, 5, 7)


def test_convolutions_enter_and_stay_channels_last() -> None:
    module = nn.Sequential(nn.Conv2d(6, 8, 3, padding=1), nn.SiLU(), nn.Conv2d(8, 4, 3, stride=2))
    traced = Traced(module, X)
    assert traced.rewrite(channels_last) == 2
    assert traced.ops() == {"contiguous": 1, "conv2d": 2, "silu": 1}
    assert module[0].weight.is_contiguous(memory_format=torch.channels_last)
    with torch.no_grad():
        assert traced.gm(X).is_contiguous(memory_format=torch.channels_last)
    assert traced.error() < 1e-6


def test_residuals_from_outside_enter_too() -> None:
    class Controlled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(6, 8, 3, padding=1)
            self.out = nn.Conv2d(16, 8, 3)

        def forward(self, x: Tensor, control: Tensor, skip: Tensor) -> Tensor:
            return self.out(torch.cat([self.conv(x) + control, skip], 1))

    traced = Traced(Controlled(), X, randn(2, 8, 5, 7), randn(2, 8, 5, 7))
    assert traced.rewrite(channels_last) == 2
    assert traced.ops()["contiguous"] == 3
    assert traced.error() < 1e-6


def test_masks_do_not_enter() -> None:
    def forward(q: Tensor, mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, q, q, mask + 1)

    traced = Traced(forward, randn(2, 3, 5, 7), randn(2, 3, 5, 5))
    assert traced.rewrite(channels_last) == 0
    assert traced.ops()["contiguous"] == 0


@pytest.mark.parametrize("bias", [True, False])
def test_pointwise_is_linear(bias: bool) -> None:
    module = nn.Conv2d(6, 8, 1, bias=bias)
    traced = Traced(module, X)
    assert traced.rewrite(channels_last) == 1
    assert traced.ops() == {"contiguous": 1, "permute": 2, "reshape": 1, "linear": 1}
    assert traced.error() < 1e-6


@pytest.mark.parametrize("tokens", ["permute", "flatten"])
def test_pointwise_meets_tokens(tokens: str) -> None:
    """proj_in, 'b c h w -> b (h w) c', something, and back to proj_out: no permute is left between."""

    class Projections(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.proj_in, self.proj_out = nn.Conv2d(6, 8, 1), nn.Conv2d(8, 6, 1)

        def forward(self, x: Tensor) -> Tensor:
            n, _, h, w = x.shape
            y = self.proj_in(x)
            y = y.permute(0, 2, 3, 1).reshape(n, h * w, 8) if tokens == "permute" else y.flatten(2).transpose(1, 2)
            y = y.contiguous().sin()
            y = y.reshape(n, h, w, 8).permute(0, 3, 1, 2).contiguous()
            return self.proj_out(y) + x

    traced = Traced(Projections(), X)
    traced.rewrite(cleanup, channels_last, cleanup)
    ops = traced.ops()
    assert ops["linear"] == 2 and ops["conv2d"] == 0
    if tokens == "permute":
        assert ops["permute"] == 2  # in and out, both free
    assert traced.error() < 1e-6


@pytest.mark.parametrize(
    "conv",
    [
        nn.Conv2d(6, 8, 1, stride=2),
        nn.Conv2d(6, 8, 1, padding=1),
        nn.Conv2d(6, 6, 1, groups=2),
        nn.Conv2d(6, 8, (1, 3)),
        nn.Conv2d(6, 8, 3, padding=1, padding_mode="circular"),
    ],
)
def test_not_pointwise(conv: nn.Module) -> None:
    traced = Traced(conv, X)
    assert traced.rewrite(channels_last) == 1
    assert traced.ops()["linear"] == 0
    assert traced.error() < 1e-6


def test_arena_that_refuses() -> None:
    traced = Traced(nn.Conv2d(6, 8, 3), X)
    traced.arena.bind([node.meta["weight"] for node in traced.graph.nodes if node.op == "get_attr"])
    assert traced.rewrite(channels_last) == 0
    assert traced.error() < 1e-6


def test_unbatched_and_written_images_are_left() -> None:
    assert Traced(nn.Conv2d(6, 8, 1), X[0]).rewrite(channels_last) == 0

    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(6, 8, 1)

        def forward(self, x: Tensor) -> Tensor:
            y = self.conv(x)
            y[:, 0] = 0
            return y.sin()

    traced = Traced(Writes(), X)
    assert traced.rewrite(channels_last) == 0
    assert traced.error() < 1e-6
