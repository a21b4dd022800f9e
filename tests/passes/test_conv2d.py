from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sfast_ext.kernels.conv import conv2d as kernel
from sfast_ext.passes.bias_add import bias_add
from sfast_ext.passes.channels_last import channels_last
from sfast_ext.passes.conv2d import conv2d
from sfast_ext.passes.group_norm import group_norm
from sfast_ext.passes.group_norm_inputs import group_norm_inputs
from sfast_ext.passes.im2col import im2col

from .support import OTHER_CONVOLUTIONS, Traced, randn

HALF = torch.bfloat16
X = randn(2, 32, 9, 11).to(HALF)


class Block(nn.Module):
    def __init__(self, forward: Callable[..., Any], **options: Any) -> None:
        super().__init__()
        self.conv = nn.Conv2d(**({"in_channels": 32, "out_channels": 48, "kernel_size": 3, "padding": 1} | options))
        self.short, self.norm, self.body = nn.Conv2d(32, 48, 1), nn.GroupNorm(4, 32), forward

    def forward(self, x: Tensor) -> Any:
        return self.body(self, x)


def rewritten(
    forward: Callable[..., Any], triton: bool = True, x: Tensor = X, **options: Any
) -> tuple[Traced, int, Block]:
    module = Block(forward, **options).to(x.dtype)
    traced = Traced(module, x)
    traced.ctx.triton = triton
    return traced, traced.rewrite(channels_last, group_norm, bias_add, group_norm_inputs, im2col, conv2d), module


PLAIN: Callable[..., Any] = lambda m, x: m.conv(x.sin())
REWRITTEN: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "a bias alone": (PLAIN, {}),
    "no bias": (PLAIN, {"bias": False}),
    "before a residual": (lambda m, x: m.conv(x.sin()) + m.short(x), {}),
    "before a norm": (lambda m, x: F.silu(m.norm(m.conv(x.sin()))), {"out_channels": 32}),
    "before a sum and a norm": (lambda m, x: (y := m.conv(x.sin()) + x, m.norm(y)), {"out_channels": 32}),
    "after a norm": (lambda m, x: m.conv(F.silu(m.norm(x))), {}),
}


@pytest.mark.parametrize("what", REWRITTEN)
def test_a_plain_convolution_is_ours(what: str) -> None:
    forward, options = REWRITTEN[what]
    traced, count, module = rewritten(forward, **options)
    (node,) = traced.launches(kernel)
    assert count == 1 and len(node.args) == 2
    assert not [conv for conv in traced.convolutions() if conv.args[1].meta["val"].shape[2:] == (3, 3)]
    weight = traced.arena.locate(module.conv.weight)
    assert weight is not None and node.args[1].meta["weight"] is weight
    assert weight.tensor.is_contiguous(memory_format=torch.channels_last)
    assert traced.error() < 1e-2


def test_several_at_once() -> None:
    traced, count, _ = rewritten(lambda m, x: m.conv(m.conv(x.sin()).relu()) + m.conv(x), out_channels=32)
    assert count == 3 == len(traced.launches(kernel)) and not traced.convolutions()
    assert traced.error() < 1e-2


def test_what_is_a_gemm_of_patches_is_no_convolution_any_more() -> None:
    traced, count, _ = rewritten(REWRITTEN["after a norm"][0], x=X[:, :, :5, :7])
    assert count == 0 and not traced.launches(kernel) and not traced.convolutions()
    assert traced.ops()["linear"] == 1


# of 8 channels bias_add leaves the bias
@pytest.mark.parametrize("options", [*OTHER_CONVOLUTIONS, {"out_channels": 8}], ids=str)
def test_other_convolutions_stay(options: dict[str, Any]) -> None:
    traced, count, _ = rewritten(PLAIN, **options)
    assert count == 0 and not traced.launches(kernel)
    assert traced.error() < 1e-2


def write_the_image(m: Block, x: Tensor) -> Tensor:
    y = x.sin()
    z = m.conv(y)
    y.add_(1)
    return y.sum() * z


def write_the_result(m: Block, x: Tensor) -> Tensor:
    y = m.conv(x.sin())
    y[:, :3].mul_(2)
    return y.relu()


STAYS: dict[str, Callable[..., Any]] = {
    "a computed weight": lambda m, x: F.conv2d(x.sin(), m.conv.weight * 2, padding=1),
    "a weight that is an input": lambda m, x: F.conv2d(x.sin(), x[:, :, :3, :3], padding=1),
    "one image alone": lambda m, x: m.conv(x[0].sin()),
    "an image that is written to": write_the_image,
    "a result that is written to": write_the_result,
}


@pytest.mark.parametrize("what", STAYS)
def test_what_must_stay(what: str) -> None:
    traced, count, _ = rewritten(STAYS[what], bias=False)
    assert count == 0 and not traced.launches(kernel) and len(traced.convolutions()) == 1
    assert traced.error() < 1e-2


@pytest.mark.parametrize(("x", "triton"), [(X.float(), True), (X, False)], ids=["float32", "no Triton"])
def test_where_it_is_not_there(x: Tensor, triton: bool) -> None:
    traced, count, _ = rewritten(PLAIN, triton, x)
    assert count == 0 and len(traced.convolutions()) == 1
    assert traced.error() < 1e-2


def test_a_weight_that_a_plan_reads_in_another_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    traced = Traced(Block(PLAIN, bias=False).to(HALF), X)
    traced.ctx.triton = True
    monkeypatch.setattr(traced.arena, "channels_last", lambda weight: False)
    assert traced.rewrite(conv2d) == 0 and len(traced.convolutions()) == 1
