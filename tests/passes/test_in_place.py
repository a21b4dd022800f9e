from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sfast_ext.kernels.backend.graph_memory import bytes_at, peak_bytes
from sfast_ext.kernels.group_norm import add_group_norm
from sfast_ext.kernels.group_norm import group_norm as kernel
from sfast_ext.passes.bias_add import bias_add
from sfast_ext.passes.channels_last import channels_last
from sfast_ext.passes.conv2d import conv2d
from sfast_ext.passes.group_norm import group_norm
from sfast_ext.passes.group_norm_inputs import group_norm_inputs
from sfast_ext.passes.im2col import im2col
from sfast_ext.passes.in_place import in_place

from .overwriting import overwriting
from .support import Traced, randn

X = randn(2, 8, 9, 11)
BEFORE = channels_last, group_norm, bias_add, group_norm_inputs, im2col, conv2d
BYTES = 4 * 2 * 16 * 9 * 11  # of a result


class Block(nn.Module):
    def __init__(self, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.conv, self.other = (nn.Conv2d(8, 16, 3, padding=1) for _ in range(2))
        self.norm = nn.GroupNorm(4, 16, eps=1e-3)
        nn.init.normal_(self.norm.weight)
        nn.init.normal_(self.norm.bias)
        self.body = forward

    def forward(self, x: Tensor) -> Any:
        return self.body(self, x)


def traced_until(forward: Callable[..., Any], most: int | None = 1 << 40, x: Tensor = X) -> Traced:
    """All but the pass itself."""
    traced = Traced(Block(forward), x)
    traced.ctx.most_bytes = most
    traced.rewrite(*BEFORE)
    return traced


def with_bias(m: Block, x: Tensor) -> Tensor:
    return F.silu(m.norm(m.conv(x.sin())))


def read_before(m: Block, x: Tensor) -> Tensor:
    y = m.conv(x.sin()) * x.sum()
    early = y.mean((2, 3), keepdim=True)
    return m.norm(y) + early


@pytest.mark.parametrize("forward", [with_bias, read_before])
def test_a_norm_takes_the_memory_of_what_nothing_else_reads(
    forward: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    traced = traced_until(forward)
    (norm,) = traced.launches(kernel)
    at = list(traced.graph.nodes).index(norm)
    before = bytes_at(traced.graph)[at]
    assert traced.rewrite(in_place) == 1
    assert norm.kwargs["out"] is norm.args[0]
    assert before - bytes_at(traced.graph)[at] == BYTES
    taken = overwriting(monkeypatch)
    assert traced.error() < 1e-5 and taken == [BYTES]
    assert traced.rewrite(in_place) == 0


def summed(m: Block, x: Tensor) -> Any:
    y = m.conv(x.sin()) + m.other(x)
    return F.silu(m.norm(y)) + y


def test_of_a_sum_and_its_norm_the_norm_takes_that_of_the_summand(monkeypatch: pytest.MonkeyPatch) -> None:
    traced = traced_until(summed)
    (pair,) = traced.launches(add_group_norm)
    before = peak_bytes(traced.graph)
    assert traced.rewrite(in_place) == 1
    assert pair.kwargs["out"] == (None, pair.args[0])
    # two summands, the sum and its norm were the most
    assert before == 4 * BYTES and peak_bytes(traced.graph) == 3 * BYTES
    taken = overwriting(monkeypatch)
    assert traced.error() < 1e-5 and taken == [BYTES]


def of_a_view(m: Block, x: Tensor) -> Any:
    """A view is read later."""
    y = m.conv(x.sin()) + x.sum()
    first = y[:, :8]
    return m.norm(y), first * 2


def of_a_part(split: Callable[..., Any]) -> Callable[..., Any]:
    """A part is read later, of which the operator's schema does not say that it is a view."""

    def forward(m: Block, x: Tensor) -> Any:
        y = m.conv(x.sin()) * x.sum()
        first = split(y)[0]
        return m.norm(y), first * 2

    return forward


LEFT: dict[str, Callable[..., Any]] = {
    "read later": lambda m, x: m.norm(y := m.conv(x.sin()) * x.sum()) * y,
    "a result": lambda m, x: (m.norm(y := m.conv(x.sin()) * x.sum()), y),
    "an argument": lambda m, x: m.norm(x.reshape(1, 16, 9, 11)),
    "an argument of more dimensions": lambda m, x: m.norm(torch.atleast_3d(x).reshape(1, 16, 9, 11)),
    "a view that is read later": of_a_view,
    "a chunk": of_a_part(lambda y: torch.unsafe_chunk(y, 2, 1)),
    "a split": of_a_part(lambda y: torch.unsafe_split(y, 8, 1)),
    "a view without a check": of_a_part(lambda y: torch.ops.aten._unsafe_view(y, [2, 16, 99])),
    "a summand read later": lambda m, x: m.norm((y := m.conv(x.sin()) * x.sum()) + x.cos().repeat(1, 2, 1, 1)) * y,
    "a view as the other summand": lambda m, x: m.norm((y := m.conv(x.sin()) * x.sum()) + y.expand(2, 16, 9, 11)),
    "a sum with itself": lambda m, x: m.norm((y := m.conv(x.sin()) * x.sum()) + y),
}


@pytest.mark.parametrize("what", LEFT)
def test_memory_that_is_in_use_is_not_taken(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    traced = traced_until(LEFT[what])
    assert len(traced.launches(kernel)) + len(traced.launches(add_group_norm)) == 1
    assert traced.rewrite(in_place) == 0
    overwriting(monkeypatch)
    assert traced.error() < 1e-5


def test_memory_that_something_writes_to_is_not_taken() -> None:
    traced = traced_until(with_bias)
    (norm,) = traced.launches(kernel)
    norm.args[0].meta["mutated"] = True  # type: ignore[union-attr]
    assert traced.rewrite(in_place) == 0


def test_a_result_of_another_dtype_needs_separate_memory() -> None:
    half = X.to(torch.bfloat16)
    traced = Traced(Block(lambda m, x: F.group_norm(m.conv(x.sin()).float(), 4)).to(torch.bfloat16), half)
    traced.ctx.most_bytes = 1 << 40
    traced.rewrite(*BEFORE)
    (norm,) = traced.launches(kernel)
    assert norm.kwargs["out_dtype"] == torch.float32
    assert traced.rewrite(in_place) == 0


def test_plans_whose_calls_are_not_rare_stay() -> None:
    assert traced_until(with_bias, most=None).rewrite(in_place) == 0


@pytest.mark.parametrize("triton", [True, False])
def test_small_images_are_normed_in_one_launch(triton: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    # it reads and writes without an order between threads, as far as its compiler knows
    traced = traced_until(with_bias)
    traced.ctx.triton = triton
    monkeypatch.setattr(kernel, "fitting", lambda *args: ("whole", None))
    assert traced.rewrite(in_place) == 0
    monkeypatch.setattr(kernel, "fitting", lambda *args: ("loop", None))
    monkeypatch.setattr(kernel.portable, "whole", lambda *args: None)
    assert traced.rewrite(in_place) == 1
