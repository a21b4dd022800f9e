from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from sfast_ext.kernels.conv import upsample_conv2d as kernel
from sfast_ext.passes.bias_add import bias_add
from sfast_ext.passes.channels_last import channels_last
from sfast_ext.passes.conv2d import conv2d
from sfast_ext.passes.group_norm import group_norm
from sfast_ext.passes.group_norm_inputs import group_norm_inputs
from sfast_ext.passes.upsample import upsample
from sfast_ext.passes.upsample_conv2d import upsample_conv2d
from sfast_ext.tools.lib.exact import tf32

from .support import OTHER_CONVOLUTIONS, Traced, randn

HALF = torch.bfloat16
X = randn(2, 128, 5, 7).to(HALF)


class Block(nn.Module):
    def __init__(self, forward: Callable[..., Any], **options: Any) -> None:
        super().__init__()
        self.conv = nn.Conv2d(**({"in_channels": 128, "out_channels": 136, "kernel_size": 3, "padding": 1} | options))
        self.out, self.norm = nn.Linear(128, 128), nn.GroupNorm(4, 136 + 128)
        self.body = forward

    def forward(self, x: Tensor) -> Any:
        return self.body(self, x)


def rewritten(
    forward: Callable[..., Any], triton: bool = True, x: Tensor = X, **options: Any
) -> tuple[Traced, int, Block]:
    module = Block(forward, **options).to(x.dtype)
    traced = Traced(module, x)
    traced.ctx.triton = triton
    count = traced.rewrite(channels_last, group_norm, bias_add, group_norm_inputs, upsample_conv2d)
    return traced, count, module


def twice(x: Tensor, **options: Any) -> Tensor:
    return F.interpolate(x, **(options or {"scale_factor": 2.0}), mode="nearest")


def joined(m: Block, x: Tensor) -> Tensor:
    """As the next level of a UNet begins."""
    return F.silu(m.norm(torch.cat([m.conv(twice(x.sin())), twice(x)], 1)))


PLAIN: Callable[..., Any] = lambda m, x: m.conv(twice(x.sin()))
REWRITTEN: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "with a bias": (PLAIN, {}),
    "without a bias": (PLAIN, {"bias": False}),
    "before a norm": (joined, {}),
    "by a factor for each": (lambda m, x: m.conv(F.interpolate(x.sin(), scale_factor=(2.0, 2.0))), {}),
}


@pytest.mark.parametrize("what", REWRITTEN)
def test_the_convolution_of_an_upsampled_image_is_of_the_small_one(what: str) -> None:
    forward, options = REWRITTEN[what]
    traced, count, module = rewritten(forward, **options)
    (node,) = traced.launches(kernel)
    assert count == 1 and not traced.convolutions()
    assert node.args[0].meta["val"].shape == X.shape and node.args[2] == (0, 0)
    weight = traced.arena.locate(module.conv.weight)
    assert weight is not None and node.args[1].meta["weight"] is weight
    assert weight.tensor.is_contiguous(memory_format=torch.channels_last)
    assert traced.error() < 1e-2
    assert traced.rewrite(conv2d) == 0
    assert traced.rewrite(upsample) == (what == "before a norm")  # of the other image


def test_without_triton(with_nvrtc: None) -> None:
    for forward in (PLAIN, lambda m, x: m.conv(twice(x.sin() + x.cos()))):
        traced, count, _ = rewritten(forward, triton=False)
        assert count == 1 and not traced.convolutions() and traced.ops()["add"] == 0


@pytest.mark.parametrize("size", [(10, 13), (9, 14), (9, 13)], ids=str)
def test_a_row_or_a_column_may_be_left_out(size: tuple[int, int]) -> None:
    traced, count, _ = rewritten(lambda m, x: m.conv(twice(x.sin(), size=size)))
    assert count == 1 and traced.launches(kernel)[0].args[2] == (10 - size[0], 14 - size[1])
    assert traced.error() < 1e-2


def test_what_made_the_image_is_made_by_one_kernel() -> None:
    """A residual and a bias that upsample would have taken."""

    def forward(m: Block, x: Tensor) -> Tensor:
        tokens = m.out(x.sin().permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return m.conv(twice(tokens + x))

    traced, count, module = rewritten(forward)
    assert count == 1 and traced.ops()["add"] == 0
    total = traced.launches(kernel)[0].args[0]
    assert isinstance(total, fx.Node) and total.target.__module__.endswith("bias_add")  # type: ignore[union-attr]
    assert total.args[1].meta["weight"] is traced.arena.locate(module.out.bias)  # type: ignore[union-attr]
    assert traced.error() < 1e-2


@pytest.mark.parametrize("options", [*OTHER_CONVOLUTIONS, {"out_channels": 64}], ids=str)
def test_other_convolutions_stay(options: dict[str, Any]) -> None:
    traced, count, _ = rewritten(PLAIN, **options)
    assert count == 0 and not traced.launches(kernel)
    assert traced.error() < 1e-2


def write_the_image(m: Block, x: Tensor) -> Tensor:
    y = x.sin()
    z = m.conv(twice(y))
    y.add_(1)
    return y.sum() * z


def needed_elsewhere(m: Block, x: Tensor) -> Tensor:
    y = twice(x.sin())
    return m.conv(y).sum(1, keepdim=True) + y


STAYS: dict[str, Callable[..., Any]] = {
    "three times the size": lambda m, x: m.conv(twice(x.sin(), scale_factor=3.0)),
    "half as much again": lambda m, x: m.conv(twice(x.sin(), scale_factor=1.5)),
    "two rows left out": lambda m, x: m.conv(twice(x.sin(), size=(8, 14))),
    "another step": lambda m, x: m.conv(twice(x.sin(), scale_factor=(2.0, 2.1))),
    "upsampled for another too": needed_elsewhere,
    "between pixels": lambda m, x: m.conv(F.interpolate(x.sin(), scale_factor=2.0, mode="bilinear")),
    "a computed weight": lambda m, x: F.conv2d(twice(x.sin()), m.conv.weight * 2, padding=1),
    "an image that is written to": write_the_image,
}


@pytest.mark.parametrize("what", STAYS)
def test_what_must_stay(what: str) -> None:
    traced, count, _ = rewritten(STAYS[what])
    assert count == 0 and not traced.launches(kernel) and len(traced.convolutions()) == 1
    assert traced.error() < 1e-2


@pytest.mark.parametrize("rounded", [False, True])
def test_in_float32_where_products_are_rounded_as_convolutions_are(rounded: bool) -> None:
    with tf32(False, rounded):
        traced, count, _ = rewritten(PLAIN, x=X.float())
        assert count == (not rounded) and len(traced.convolutions()) == rounded
        assert traced.error() < 1e-5


def test_where_neither_triton_nor_nvrtc_is() -> None:
    traced, count, _ = rewritten(PLAIN, False)
    assert count == 0 and len(traced.convolutions()) == 1
    assert traced.error() < 1e-2


def test_a_weight_that_a_plan_reads_in_another_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    traced = Traced(Block(PLAIN, bias=False).to(HALF), X)
    traced.ctx.triton = True
    monkeypatch.setattr(traced.arena, "channels_last", lambda weight: False)
    assert traced.rewrite(upsample_conv2d) == 0 and len(traced.convolutions()) == 1


@pytest.mark.parametrize("lengths", [(1, 2), (1, 1), (64, 128), (65, 129), (97, 193), (1000, 1999)], ids=str)
def test_sizes_that_are_twice_another(lengths: tuple[int, int]) -> None:
    small, large = lengths
    traced, count, _ = rewritten(
        lambda m, x: m.conv(twice(x, size=(large, 4))), x=X[:, :, :1, :2].repeat(1, 1, small, 1)
    )
    assert count == 1 and traced.launches(kernel)[0].args[2] == (2 * small - large, 0)
    assert traced.error() < 1e-2
