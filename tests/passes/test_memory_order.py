from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sfast_ext.kernels.backend.graph_memory import peak_bytes
from sfast_ext.kernels.group_norm import add_group_norm
from sfast_ext.kernels.group_norm import group_norm as kernel
from sfast_ext.passes import rewrite
from sfast_ext.passes.bias_add import bias_add
from sfast_ext.passes.channels_last import channels_last
from sfast_ext.passes.conv2d import conv2d
from sfast_ext.passes.group_norm import group_norm
from sfast_ext.passes.group_norm_inputs import group_norm_inputs
from sfast_ext.passes.in_place import in_place
from sfast_ext.passes.memory_order import _State, memory_order

from .overwriting import overwriting
from .support import Traced, randn

X = randn(1, 8, 40, 40)
IMAGE = 4 * 40 * 40  # bytes of a channel
BEFORE = channels_last, group_norm, bias_add, group_norm_inputs, conv2d, in_place


class Block(nn.Module):
    """A residual block from 32 to 16 channels, whose shortcut is computed last."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.first, self.conv = nn.Conv2d(8, 32, 3, padding=1), nn.Conv2d(32, 16, 3, padding=1)
        self.short, self.last = nn.Conv2d(32, 16, 1), nn.Conv2d(16, 16, 3, padding=1)
        self.norm, self.after = nn.GroupNorm(8, 32), nn.GroupNorm(4, 16)
        self.body = forward

    def forward(self, x: Tensor) -> Any:
        return self.body(self, x)

    def block(self, u: Tensor) -> Tensor:
        y = self.conv(F.silu(self.norm(u)))
        return self.last(F.silu(self.after(y))) + self.short(u)


def traced_until(forward: Callable[..., Any], most: int | None = 1 << 40) -> Traced:
    """All but the pass itself."""
    traced = Traced(Block(forward), X)
    traced.ctx.most_bytes = most
    traced.rewrite(*BEFORE)
    return traced


def plain(m: Block, x: Tensor) -> Tensor:
    return m.block(m.first(x).sin())


def of_a_sum(m: Block, x: Tensor) -> Tensor:
    """A norm with the convolution's bias, which the shortcut reads too."""
    return m.block(m.first(x))


def test_a_shortcut_is_computed_before_the_norm_that_then_takes_its_inputs_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    traced = traced_until(plain)
    before = peak_bytes(traced.graph)
    assert traced.rewrite(memory_order) == 1
    # what was held beside the norm is the shortcut in place of the block's input
    assert before == (32 + 32 + 16) * IMAGE and peak_bytes(traced.graph) == 64 * IMAGE
    order = [node.target for node in traced.graph.nodes]
    assert order.index(rewrite.aten.linear.default) < order.index(kernel.launch)
    taken = overwriting(monkeypatch)
    assert traced.error() < 1e-5 and max(taken) == 32 * IMAGE
    assert traced.rewrite(memory_order) == 0


def test_a_norm_is_taken_apart_from_its_sum_if_the_sum_can_then_go(monkeypatch: pytest.MonkeyPatch) -> None:
    traced = traced_until(of_a_sum)
    sums = len(traced.launches(add_group_norm))
    before = peak_bytes(traced.graph)
    assert traced.rewrite(memory_order) == 1
    assert len(traced.launches(add_group_norm)) == sums - 1 == 0
    assert before == (32 + 32 + 16) * IMAGE and peak_bytes(traced.graph) == 64 * IMAGE
    taken = overwriting(monkeypatch)
    assert traced.error() < 1e-5 and max(taken) == 32 * IMAGE


def late(function: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    def forward(m: Block, x: Tensor) -> Any:
        u = m.first(x).sigmoid()
        y = m.conv(F.silu(m.norm(u)))
        return y.sin() + function(u[:, :16])

    return forward


def written(writes: bool) -> Callable[..., Any]:
    """The shortcut reads a view that was taken before its memory was written to."""

    def forward(m: Block, x: Tensor) -> Any:
        u = m.first(x).sin()
        seen = u[..., :40]
        if writes:
            u.add_(1)
        return m.conv(F.silu(m.norm(m.first(x.cos()).cos()))) + m.short(seen)

    return forward


def written_last(m: Block, x: Tensor) -> Any:
    u = m.first(x).sin()
    y = m.conv(F.silu(m.norm(u)))
    u.add_(1)
    return y.sin() + m.short(u)


def as_large(m: Block, x: Tensor) -> Any:
    u = m.first(x).sin()
    y = m.conv(F.silu(m.norm(u)))
    return y.mean((2, 3), keepdim=True) + u.cos()[:, :16]


def needed_anyway(m: Block, x: Tensor) -> Any:
    """What reads it later needs what comes after the norm."""
    u = m.first(x).sin()
    y = m.conv(F.silu(m.norm(u)))
    return m.short(u * y.mean())


LEFT: dict[str, Callable[..., Any]] = {
    "random numbers": late(torch.bernoulli),
    "a value that is written to before": written(True),
    "a value that is written to behind it": written_last,
    "a reader that needs as much": as_large,
    "a reader that needs what comes later": needed_anyway,
    "no shortcut": lambda m, x: m.conv(F.silu(m.norm(m.first(x)))),
}


@pytest.mark.parametrize("what", LEFT)
def test_what_may_not_move_or_gains_nothing_stays(what: str) -> None:
    traced = traced_until(LEFT[what])
    order = [node.name for node in traced.graph.nodes]
    arguments = [(node.args, node.kwargs) for node in traced.graph.nodes]
    assert traced.rewrite(memory_order) == 0
    assert [node.name for node in traced.graph.nodes] == order
    assert [(node.args, node.kwargs) for node in traced.graph.nodes] == arguments


@pytest.mark.parametrize("forward", [written(False), late(torch.cos)])
def test_without_what_keeps_it_there_it_moves(forward: Callable[..., Any]) -> None:
    assert traced_until(forward).rewrite(memory_order) == 1


def test_plans_whose_calls_are_not_rare_stay() -> None:
    assert traced_until(plain, most=None).rewrite(memory_order) == 0


def test_changes_are_taken_back_as_they_were() -> None:
    traced = traced_until(of_a_sum)
    nodes = list(traced.graph.nodes)
    before = [(n, n.target, n.args, n.kwargs, set(n.users)) for n in nodes]
    vals = [n.meta.get("val") for n in nodes]
    state = _State(traced.graph)
    assert traced.rewrite(memory_order) == 1
    state.restore()
    traced.graph.lint()
    assert before == [(n, n.target, n.args, n.kwargs, set(n.users)) for n in traced.graph.nodes]
    assert all(n.meta.get("val") is val for n, val in zip(nodes, vals, strict=True))
