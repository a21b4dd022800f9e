"""Which linears are matched in a sum, so that the norm's kernel may add their bias."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from sfast_ext.passes.group_norm_inputs import LinearMatch, match_linear, reapply
from sfast_ext.passes.layer_norm import is_residual_add
from sfast_ext.passes.rewrite import LINEAR, is_op, mutated

from .support import Traced, randn

HALF = torch.bfloat16
X = randn(2, 6, 8).to(HALF)
IMAGE = randn(2, 8, 2, 3).to(HALF).to(memory_format=torch.channels_last)


class Block(nn.Module):
    def __init__(self, forward: Callable[..., Any], bias: bool = True) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8, bias=bias)
        self.other = nn.Linear(8, 8)
        self.body = forward

    def forward(self, *inputs: Tensor) -> Any:
        return self.body(self, *inputs)


def traced(forward: Callable[..., Any], *inputs: Tensor, dtype: torch.dtype = HALF, **options: Any) -> Traced:
    return Traced(Block(forward, **options).to(dtype), *(x.to(dtype) for x in inputs or (X,)))


def linears(found: Traced) -> list[tuple[fx.Node, fx.Node, LinearMatch]]:
    """Of each sum: it, its operand, and the linear that this is; the later of two operands first."""
    pinned = mutated(found.graph)
    pairs = [(add, x) for add in found.graph.nodes if is_residual_add(add) for x in add.args[1::-1]]
    matches = [(add, x, match_linear(x, add, pinned)) for add, x in pairs]
    return [(add, x, matched) for add, x, matched in matches if matched is not None]


def reapplied(found: Traced) -> None:
    """Applies the views of each linear again, in the place of those that there were."""
    for add, x, matched in linears(found):
        with found.graph.inserting_before(add):
            viewed = matched.linear
            for view in matched.views:
                viewed = reapply(found.graph, viewed, view)
        add.replace_input_with(x, viewed)
    found.graph.eliminate_dead_code()
    found.graph.lint()
    found.gm.recompile()


def to_image(tokens: Tensor) -> Tensor:
    return tokens.reshape(2, 2, 3, 8).permute(0, 3, 1, 2)


FOUND: dict[str, tuple[Callable[..., Any], int]] = {
    "linear + x": (lambda m, x: m.linear(x) + x, 1),
    "x + linear": (lambda m, x: x + m.linear(x), 1),
    "residual made later": (lambda m, x: m.linear(x) + x.sin(), 1),
    "sum used twice": (lambda m, x: (y := m.linear(x) + x) * y.sin(), 1),
    "two linears": (lambda m, x: m.linear(x) + m.other(x.sin()), 2),
    "linear of the residual": (lambda m, x: m.linear(y := m.other(x).sin()) + y, 1),
    "two in a row": (lambda m, x: m.other(y := m.linear(x) + x) + y, 2),
    "two dimensions": (lambda m, x: m.linear(x[0]) + x[1], 1),
    "reshaped": (lambda m, x: m.linear(x).reshape(12, 8) + x.sin().reshape(12, 8), 1),
    "transposed": (lambda m, x: m.linear(x).permute(2, 0, 1) + x.permute(2, 0, 1), 1),
    "negative dimensions": (lambda m, x: m.linear(x).permute(-1, 0, -2) + x.permute(2, 0, 1), 1),
}


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("what", FOUND)
def test_the_linear_in_a_sum_is_matched(what: str, bias: bool) -> None:
    forward, count = FOUND[what]
    found = traced(forward, bias=bias)
    before = found.ops()
    matches = linears(found)
    assert len(matches) == count and all(is_op(matched.linear, LINEAR) for _, _, matched in matches)
    reapplied(found)
    assert found.ops() == before
    assert found.error() == 0


@pytest.mark.parametrize("swapped", [True, False])
def test_tokens_that_become_an_image(swapped: bool) -> None:
    """The last linear of a transformer: its residual is the image that went in."""

    def forward(m: Block, x: Tensor, image: Tensor) -> Tensor:
        tokens = to_image(m.linear(x))
        return (image + tokens if swapped else tokens + image).sin()

    found = traced(forward, X, IMAGE)
    ((_, x, matched),) = linears(found)
    shapes = [tuple(view.meta["val"].shape) for view in matched.views]
    assert shapes == [(2, 2, 3, 8), (2, 8, 2, 3)] and matched.views[-1] is x
    reapplied(found)
    assert found.error() == 0


def write_input(m: Block, x: Tensor) -> Tensor:
    y = x.sin()
    z = m.linear(y)
    y.add_(1)
    return z + x


NONE: dict[str, Callable[..., Any]] = {
    "no residual": lambda m, x: m.linear(x),
    "used twice": lambda m, x: (y := m.linear(x)) + x + y.sin(),
    "used on the way": lambda m, x: (y := m.linear(x)).reshape(12, 8) + x.reshape(12, 8) + y.sum(),
    "with itself": lambda m, x: (y := m.linear(x)) + y,
    "promoted": lambda m, x: m.linear(x) + x.float(),
    "cast between": lambda m, x: m.linear(x).float() + x.float(),
    "something between": lambda m, x: m.linear(x).sin() + x,
    "a part of it": lambda m, x: m.linear(x)[:, :3] + x[:, :3],
    "no linear": lambda m, x: x.sin() + x,
    "broadcast residual": lambda m, x: m.linear(x) + x[:1],
    "broadcast linear": lambda m, x: m.linear(x[:1]) + x,
    "a number": lambda m, x: m.linear(x) + 1,
    "with a factor": lambda m, x: torch.add(x, m.linear(x), alpha=2),
    "written input": write_input,
}


@pytest.mark.parametrize("what", NONE)
def test_in_others_there_is_none(what: str) -> None:
    assert not linears(traced(NONE[what]))


def test_in_full_precision_there_is_none() -> None:
    assert not linears(traced(lambda m, x: m.linear(x) + x, dtype=torch.float32))
