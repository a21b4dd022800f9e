from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from sfast_ext import passes
from sfast_ext.kernels.group_norm import conv_group_norm as kernel
from sfast_ext.passes.bias_add import bias_add
from sfast_ext.passes.channels_last import channels_last
from sfast_ext.passes.conv2d import conv2d
from sfast_ext.passes.conv_group_norm import conv_group_norm
from sfast_ext.passes.group_norm import group_norm
from sfast_ext.passes.group_norm_inputs import group_norm_inputs
from sfast_ext.passes.im2col import im2col
from sfast_ext.passes.rewrite import is_weight, shape

from .support import Traced, randn, relative

HALF = torch.bfloat16
X = randn(2, 32, 9, 11).to(HALF)
BEFORE = channels_last, group_norm, bias_add, group_norm_inputs, im2col, conv2d


class Block(nn.Module):
    def __init__(self, forward: Callable[..., Any], **options: Any) -> None:
        super().__init__()
        self.conv = nn.Conv2d(**({"in_channels": 32, "out_channels": 48, "kernel_size": 3, "padding": 1} | options))
        self.short, self.after = nn.Conv2d(32, 48, 1), nn.Conv2d(48, 48, 3, padding=1)
        self.time, self.proj = nn.Linear(32, 48), nn.Linear(32, 48)
        self.first, self.norm, self.wide = nn.GroupNorm(4, 32), nn.GroupNorm(4, 48, eps=1e-3), nn.GroupNorm(4, 80)
        for norm in (self.first, self.norm, self.wide):
            nn.init.normal_(norm.weight)
            nn.init.normal_(norm.bias)
        self.body = forward

    def forward(self, x: Tensor) -> Any:
        return self.body(self, x)

    def embedded(self, x: Tensor) -> Tensor:
        """Like that of a timestep."""
        return self.time(x.mean((2, 3)))[:, :, None, None]

    def tokens(self, x: Tensor) -> Tensor:
        n, c, h, w = x.shape
        return self.proj(x.permute(0, 2, 3, 1).reshape(n, h * w, c)).reshape(n, h, w, -1).permute(0, 3, 1, 2)

    def resnet(self, x: Tensor) -> Tensor:
        y = self.conv(F.silu(self.first(x))) + self.embedded(x)
        return self.short(x) + self.after(F.silu(self.norm(y)))


def traced_until(forward: Callable[..., Any], triton: bool = True, x: Tensor = X, **options: Any) -> Traced:
    """All but the pass itself."""
    traced = Traced(Block(forward, **options).to(x.dtype), x)
    traced.ctx.triton = triton
    traced.rewrite(*BEFORE)
    return traced


def rewritten(forward: Callable[..., Any], triton: bool = True, x: Tensor = X, **options: Any) -> tuple[Traced, int]:
    traced = traced_until(forward, triton, x, **options)
    return traced, traced.rewrite(conv_group_norm)


NORMED: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "a bias": (lambda m, x: m.norm(m.conv(x.sin())), {}),
    "an embedding": (lambda m, x: F.silu(m.norm(m.conv(x.sin()) + m.embedded(x))), {}),
    "an embedding first": (lambda m, x: F.silu(m.norm(m.embedded(x) + m.conv(x.sin()))), {"bias": False}),
    "one embedding for all": (lambda m, x: m.norm(m.conv(x.sin()) + m.embedded(x[:1])), {}),
    "nothing": (lambda m, x: F.silu(m.norm(m.conv(x.sin()))), {"bias": False}),
    "no weight": (lambda m, x: F.group_norm(m.conv(x.sin()), 4, eps=1e-3), {}),
    "in float32": (lambda m, x: F.silu(F.group_norm(m.conv(x.sin()).float(), 4, eps=1e-3)), {}),
    "in float32 within": (lambda m, x: F.group_norm(m.conv(x.sin()).float(), 4, eps=1e-3).to(HALF), {}),
    "between convolutions": (lambda m, x: m.after(F.silu(m.norm(m.conv(x.sin()) + m.embedded(x)))), {}),
}


@pytest.mark.parametrize("what", NORMED)
def test_a_norm_goes_into_the_convolution_before_it(what: str) -> None:
    forward, options = NORMED[what]
    traced = traced_until(forward, **options)
    assert traced.ops()["group_norm"] == 1
    before, (norm,) = traced.outputs(), traced.find("group_norm")
    given, asked = norm.args, {name: norm.kwargs[name] for name in ("silu", "out_dtype")}
    conv, shift = given[0], norm.kwargs["shift"]
    assert isinstance(conv, fx.Node)
    x, weight = conv.args
    assert traced.rewrite(conv_group_norm) == 1
    (node,) = traced.launches(kernel)
    assert node.args == (x, weight, shift, None, *given[1:]) and node.kwargs == asked
    assert is_weight(weight) and (shift is None) == (what == "nothing")
    # of the two results there is one
    (user,) = node.users
    assert user.args == (node, 1) and node.meta["val"] == (None, user.meta["val"])
    assert traced.ops()["group_norm"] == 0
    assert traced.error() < 1e-2
    assert all(torch.equal(a, b) for a, b in zip(traced.outputs(), before, strict=True))


SUMMED: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "the convolution first": (lambda m, x: (m.norm(y := m.conv(x.sin()) + m.short(x)), y), {}),
    "a shortcut first": (lambda m, x: (F.silu(m.norm(y := m.short(x) + m.conv(x.sin()))), y), {}),
    "a linear with a bias": (lambda m, x: (m.norm(y := m.tokens(x) + m.conv(x.sin())), y), {"bias": False}),
    "no bias": (lambda m, x: (m.norm(y := x.repeat(1, 2, 1, 1)[:, :48] + m.conv(x.sin())), y), {"bias": False}),
    "no bias, first": (lambda m, x: (m.norm(y := m.conv(x.sin()) + x.repeat(1, 2, 1, 1)[:, :48]), y), {"bias": False}),
    "two convolutions": (lambda m, x: (m.norm(y := m.conv(x.sin()) + m.conv(x.cos())), y), {}),
    "only normed": (lambda m, x: m.norm(m.conv(x.sin()) + m.short(x)), {}),
    "in float32": (lambda m, x: (F.group_norm((y := m.conv(x.sin()) + m.short(x)).float(), 4), y), {}),
    "two norms": (lambda m, x: (m.norm(y := m.conv(x.sin()) + m.short(x)), F.group_norm(y, 2), y), {}),
    "a linear before": (lambda m, x: (m.norm(y := m.tokens(x) + m.conv(x.sin())), y), {}),
}
LAST = {"a linear with a bias", "no bias"}  # where the convolution is the second summand


@pytest.mark.parametrize("what", SUMMED)
def test_so_does_the_norm_of_a_sum(what: str) -> None:
    forward, options = SUMMED[what]
    traced = traced_until(forward, **options)
    before, (norm,) = traced.outputs(), traced.find("add_group_norm")
    summands, users = (norm.args[0], norm.args[2]), list(norm.users)
    conv, residual = reversed(summands) if what in LAST else summands
    bias, affine = norm.args[1], norm.args[4:]
    assert isinstance(conv, fx.Node) and isinstance(residual, fx.Node)
    x, weight = conv.args
    assert traced.rewrite(conv_group_norm) == 1
    (node,) = traced.launches(kernel)
    assert node.args == (x, weight, bias, residual, *affine)
    assert list(node.users) == users and (bias is None) == what.startswith("no bias")
    assert [shape(user) for user in users] == [value.shape for value in node.meta["val"]]
    assert traced.ops()["add_group_norm"] == 0
    assert traced.error() < 1e-2
    assert all(relative(a, b) < 1e-3 for a, b in zip(traced.outputs(), before, strict=True))


def test_if_memory_counts_they_stay_apart() -> None:
    # so that the norm takes the convolution's memory
    traced = traced_until(NORMED["a bias"][0])
    traced.ctx.most_bytes = 1 << 40
    assert traced.rewrite(conv_group_norm) == 0
    assert traced.ops()["conv2d"] == traced.ops()["group_norm"] == 1


def resnets(m: Block, x: Tensor) -> tuple[Tensor, Tensor]:
    y = m.resnet(x)
    return F.silu(m.norm(y)), y


def test_both_norms_of_a_residual_block_go_with_all_passes() -> None:
    traced = Traced(Block(resnets).to(HALF), X)
    traced.ctx.triton = True
    counts = passes.run_passes(traced.gm, traced.ctx)
    traced.gm.recompile()
    assert counts["conv2d"] == counts["conv_group_norm"] == 2 == len(traced.launches(kernel))
    within, last = traced.launches(kernel)
    assert within.args[2] is not None and within.args[3] is None
    assert last.args[2] is not None and last.args[3] is not None
    ops = traced.ops()
    assert ops["conv2d"] == ops["add_group_norm"] == ops["bias_add"] == 0
    assert ops["group_norm"] == 1  # of what came in
    assert traced.error() < 2e-2


def write_the_residual(m: Block, x: Tensor) -> Any:
    short = m.short(x)
    y = m.conv(x.sin()) + short
    z = m.norm(y)
    short.add_(1)
    return z, y


def write_the_sum(m: Block, x: Tensor) -> Any:
    y = m.conv(x.sin()) + m.short(x)
    z = m.norm(y)
    y.add_(1)
    return z, y


def write_the_image(m: Block, x: Tensor) -> Any:
    y = x.sin()
    z = m.norm(m.conv(y))
    return z, y.add_(1)


def write_the_result(m: Block, x: Tensor) -> Tensor:
    y = m.norm(m.conv(x.sin()))
    y[:, :3].mul_(2)
    return y.relu()


PLAIN, SUM = NORMED["an embedding"][0], SUMMED["the convolution first"][0]
BARE: dict[str, Any] = {"bias": False}
STAYS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "seen by another": (lambda m, x: (m.norm(y := m.conv(x.sin())), y), {}),
    "seen by another, without a bias": (lambda m, x: (m.norm(y := m.conv(x.sin())), y), BARE),
    "a summand seen by another": (lambda m, x: (m.norm(y := (c := m.conv(x.sin())) + m.short(x)), y, c), {}),
    "as that without a bias": (lambda m, x: (m.norm(y := (c := m.conv(x.sin())) + m.short(x)), y, c), BARE),
    "with itself": (lambda m, x: m.norm((y := m.conv(x.sin())) + y), BARE),
    "two norms of it": (lambda m, x: m.norm(y := m.conv(x.sin())) + F.group_norm(y, 2), BARE),
    "scaled": (lambda m, x: (m.norm(y := (m.conv(x.sin()) + m.short(x)) / 2), y), {}),
    "promoted": (lambda m, x: (F.group_norm(y := m.conv(x.sin()) + m.short(x).float(), 4), y), {}),
    "a residual of three": (lambda m, x: (m.norm(y := m.conv(x.sin()) + m.short(x) + x.mean()), y), {}),
    "in between": (lambda m, x: m.norm(m.conv(x.sin()).relu()), {}),
    "of rows": (lambda m, x: m.norm(m.conv(x.sin()).flatten(2)), {}),
    "a concatenation": (lambda m, x: (m.wide(y := torch.cat([m.conv(x.sin()), x], 1)), y), {}),
    "stride 2": (PLAIN, {"stride": 2}),
    "1x1": (SUM, {"kernel_size": 1, "padding": 0}),
    "a bias that is left": (lambda m, x: (F.group_norm(y := m.conv(x), 4), y), {"out_channels": 8}),
    "the residual is written to": (write_the_residual, {}),
    "the sum is written to": (write_the_sum, {}),
    "the image is written to": (write_the_image, {}),
    "the result is written to": (write_the_result, {}),
}


@pytest.mark.parametrize("what", STAYS)
def test_what_must_stay(what: str) -> None:
    forward, options = STAYS[what]
    traced, count = rewritten(forward, **options)
    assert count == 0 and not traced.launches(kernel)
    assert traced.error() < 1e-2


@pytest.mark.parametrize("residual", [False, True])
def test_a_norm_that_writes_patches_stays(residual: bool) -> None:
    def forward(m: Block, x: Tensor) -> Any:
        y = m.conv(x.sin()) + (m.short(x) if residual else m.embedded(x))
        z = m.after(F.silu(m.norm(y)))
        return (z, y) if residual else z

    traced, count = rewritten(forward, x=X[:, :, :5, :7])
    (norm,) = traced.find("add_group_norm" if residual else "group_norm")
    assert count == 0 and norm.kwargs["patches"] is True and traced.ops()["conv2d"] == 1
    assert traced.error() < 2e-2
    traced, count = rewritten(forward)
    assert count == 1 and traced.ops()["conv2d"] == 1
    assert traced.error() < 2e-2


@pytest.mark.parametrize("forward", [PLAIN, SUM], ids=["norm", "sum"])
@pytest.mark.parametrize("what", ["conv2d", "norm"])
def test_what_is_written_to_by_then_stays(forward: Callable[..., Any], what: str) -> None:
    traced = traced_until(forward)
    (node,) = [n for name in ("group_norm", "add_group_norm", "conv2d") for n in traced.find(name) if what in name]
    node.meta["mutated"] = True
    assert traced.rewrite(conv_group_norm) == 0 and not traced.launches(kernel)
    del node.meta["mutated"]
    assert traced.rewrite(conv_group_norm) == 1


@pytest.mark.parametrize("forward", [PLAIN, SUM], ids=["norm", "sum"])
@pytest.mark.parametrize(("x", "triton"), [(X.float(), True), (X, False)], ids=["float32", "no Triton"])
def test_where_it_is_not_there(x: Tensor, triton: bool, forward: Callable[..., Any]) -> None:
    traced, count = rewritten(forward, triton, x)
    assert count == 0 and not traced.launches(kernel)
    assert traced.error() < 1e-2


def test_no_triton_any_more() -> None:
    traced = traced_until(PLAIN)
    traced.ctx.triton = False
    assert traced.rewrite(conv_group_norm) == 0
