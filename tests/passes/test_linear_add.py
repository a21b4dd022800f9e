from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sfast_ext
from sfast_ext import Config, native
from sfast_ext.passes import linear_add as module
from sfast_ext.passes.layer_norm import add_layer_norm
from sfast_ext.passes.linear_add import linear_add

from .support import Traced, randn

HALF = torch.bfloat16
X = randn(2, 6, 8).to(HALF)
PICTURE = randn(2, 8, 2, 3).to(HALF).to(memory_format=torch.channels_last)


class Block(nn.Module):
    def __init__(self, forward: Callable[..., Any], bias: bool = True) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8, bias=bias)
        self.other = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.conv = nn.Conv2d(8, 8, 1)
        self.body = forward

    def forward(self, *inputs: Tensor) -> Any:
        return self.body(self, *inputs)


def traced(forward: Callable[..., Any], *inputs: Tensor, dtype: torch.dtype = HALF, **options: Any) -> Traced:
    found = Traced(Block(forward, **options).to(dtype), *(x.to(dtype) for x in inputs or (X,)))
    found.ctx.native = True
    return found


def to_picture(tokens: Tensor) -> Tensor:
    return tokens.reshape(2, 2, 3, 8).permute(0, 3, 1, 2)


JOINED: dict[str, Callable[..., Any]] = {
    "linear + x": lambda m, x: m.linear(x) + x,
    "x + linear": lambda m, x: x + m.linear(x),
    "residual made later": lambda m, x: m.linear(x) + x.sin(),
    "sum used twice": lambda m, x: (y := m.linear(x) + x) * y.sin(),
    "two linears": lambda m, x: m.linear(x) + m.other(x.sin()),
    "linear of the residual": lambda m, x: m.linear(y := m.other(x).sin()) + y,
    "two dimensions": lambda m, x: m.linear(x[0]) + x[1],
    "reshaped": lambda m, x: m.linear(x).reshape(12, 8) + x.sin().reshape(12, 8),
    "transposed": lambda m, x: m.linear(x).permute(2, 0, 1) + x.permute(2, 0, 1),
    "negative dimensions": lambda m, x: m.linear(x).permute(-1, 0, -2) + x.permute(2, 0, 1),
}


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("what", JOINED)
def test_residual_goes_into_the_product(what: str, bias: bool) -> None:
    found = traced(JOINED[what], bias=bias)
    assert found.rewrite(linear_add) == 1
    ops = found.ops()
    assert ops["linear_add"] == 1 and ops["add"] == 0
    assert found.error() == 0


def test_two_in_a_row() -> None:
    found = traced(lambda m, x: m.other(y := m.linear(x) + x) + y)
    assert found.rewrite(linear_add) == 2
    assert found.ops() == {"linear_add": 2}
    assert found.error() == 0


@pytest.mark.parametrize("swapped", [True, False])
def test_tokens_that_become_a_picture(swapped: bool) -> None:
    """The last linear of a transformer: its residual is the picture that went in."""

    def forward(m: Block, x: Tensor, picture: Tensor) -> Tensor:
        tokens = to_picture(m.linear(x))
        return (picture + tokens if swapped else tokens + picture).sin()

    found = traced(forward, X, PICTURE)
    assert found.rewrite(linear_add) == 1
    (node,) = found.find("linear_add")
    assert node.meta["val"].shape == node.args[3].meta["val"].shape == (2, 6, 8)
    assert found.ops()["add"] == 0
    assert found.error() == 0


def write_residual(m: Block, x: Tensor) -> Tensor:
    y = x.sin()
    z = y + m.linear(x)
    y.add_(1)
    return y * z


def write_input(m: Block, x: Tensor) -> Tensor:
    y = x.sin()
    z = m.linear(y)
    y.add_(1)
    return z + x


STAYS: dict[str, Callable[..., Any]] = {
    "no residual": lambda m, x: m.linear(x),
    "broadcast residual": lambda m, x: m.linear(x) + x[:1],
    "broadcast product": lambda m, x: m.linear(x[:1]) + x,
    "a number": lambda m, x: m.linear(x) + 1,
    "with a factor": lambda m, x: torch.add(x, m.linear(x), alpha=2),
    "used twice": lambda m, x: (y := m.linear(x)) + x + y.sin(),
    "used on the way": lambda m, x: (y := m.linear(x)).reshape(12, 8) + x.reshape(12, 8) + y.sum(),
    "with itself": lambda m, x: (y := m.linear(x)) + y,
    "promoted": lambda m, x: m.linear(x) + x.float(),
    "cast between": lambda m, x: m.linear(x).float() + x.float(),
    "something between": lambda m, x: m.linear(x).sin() + x,
    "a part of it": lambda m, x: m.linear(x)[:, :3] + x[:, :3],
    "no linear": lambda m, x: x.sin() + x,
    "a norm of the sum": lambda m, x: m.norm(m.linear(x) + x),
    "written residual": write_residual,
    "written input": write_input,
}


@pytest.mark.parametrize("what", STAYS)
def test_others_stay(what: str) -> None:
    found = traced(STAYS[what])
    before = found.ops()
    assert found.rewrite(linear_add) == 0
    assert found.ops() == before
    assert found.error() == 0


def test_a_convolution_is_left_to_bias_add() -> None:
    found = traced(lambda m, x, picture: m.conv(picture) + to_picture(m.linear(x)), X, PICTURE)
    assert found.rewrite(linear_add) == 0


def test_full_precision_stays() -> None:
    assert traced(lambda m, x: m.linear(x) + x, dtype=torch.float32).rewrite(linear_add) == 0


def test_only_where_it_is_built() -> None:
    found = traced(lambda m, x: m.linear(x) + x)
    found.ctx.native = False
    assert found.rewrite(linear_add) == 0


def test_the_norm_may_be_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BEFORE_NORM", True)
    found = traced(STAYS["a norm of the sum"])
    assert found.rewrite(linear_add) == 1
    assert found.rewrite(add_layer_norm) == 0
    assert found.ops() == {"linear_add": 1, "layer_norm": 1}
    assert found.error() == 0


@pytest.mark.parametrize("kind", ["sd15", "sdxl"])
@pytest.mark.parametrize("built", [True, False])
def test_whole_unet(kind: str, built: bool, tiny_unet: Any, unet_inputs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "available", lambda device: built)
    unet = tiny_unet(kind).to(HALF)
    args, kwargs = unet_inputs(unet)
    accelerator = sfast_ext.accelerate(unet, Config(allow_cpu=True, tolerance=0.1))
    with torch.no_grad():
        unet(*args, **kwargs)
    (plan,) = accelerator.status()["plans"]
    accelerator.release()
    assert plan["error"] < 0.1
    transformers = sum(type(m).__name__ == "Transformer2DModel" for m in unet.modules())
    # of each: the feed-forward that no norm follows, and the projection out
    assert plan["fused"]["linear_add"] >= 2 * transformers if built else plan["fused"]["linear_add"] == 0
