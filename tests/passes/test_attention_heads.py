from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from sfast_ext.passes.attention_heads import attention_heads
from sfast_ext.passes.cleanup import cleanup

from .attentions import HEADS, SCALE, WIDTH, apart, together
from .support import Traced, aten, randn

X, Y = randn(2, 13, 24), randn(2, 9, 24)
MASKS = {
    "of each head": randn(8, 13, 9),
    "of each head, for all queries": randn(8, 1, 9),
    "of all heads": randn(1, 13, 9),
    "of queries and keys": randn(13, 9),
}


def attend(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, **options)


@pytest.mark.parametrize("lone", [False, True], ids=["three dimensions", "a head of its own"])
def test_heads_are_taken_apart(lone: bool) -> None:
    """The second way is how three dimensions look that xformers was given."""

    def forward(x: Tensor, y: Tensor) -> Tensor:
        q, k, v = apart(x), apart(y), apart(y.sin())
        if lone:
            q, k, v = (t.unsqueeze(2).transpose(1, 2) for t in (q, k, v))
            return together(attend(q, k, v).transpose(1, 2).squeeze(2))
        return together(attend(q, k, v))

    traced = Traced(forward, X, Y)
    assert traced.rewrite(cleanup, attention_heads) == 1
    (node,) = traced.find("scaled_dot_product_attention")
    assert [tuple(x.meta["val"].shape) for x in (node, *node.args[:3])] == [
        (2, HEADS, 13, WIDTH), (2, HEADS, 13, WIDTH), (2, HEADS, 9, WIDTH), (2, HEADS, 9, WIDTH)
    ]  # fmt: skip
    assert {x.target for x in node.args[:3]} == {aten.transpose.int}
    assert traced.error() < 1e-6
    traced.rewrite(cleanup)
    assert traced.ops()["permute"] == 0 and traced.error() < 1e-6


@pytest.mark.parametrize("which", MASKS)
def test_masks_go_along(which: str) -> None:
    traced = Traced(
        lambda x, y, m: together(attend(apart(x), apart(y), apart(y.sin()), attn_mask=m)), X, Y, MASKS[which]
    )
    assert traced.rewrite(cleanup, attention_heads) == 1
    assert traced.error() < 1e-6


KEPT: dict[str, Callable[..., Any]] = {
    "heads already": lambda x, y: attend(*(t.view(2, -1, HEADS, WIDTH).transpose(1, 2) for t in (x, y, y.sin()))),
    "two dimensions": lambda x, y: attend(x[0], y[0], y[1]),
    "five": lambda x, y: attend(*(t.view(1, 2, -1, HEADS, WIDTH).transpose(2, 3) for t in (x, y, y.sin()))),
}
ONE: dict[str, Callable[..., Any]] = {
    "no heads": lambda x, y: attend(x, y, y.sin()),
    "heads of another kind": lambda x, y: attend(apart(x), apart(y), apart(y).flip(0)),
    "copied in between": lambda x, y: attend(apart(x).flip(1), apart(y), apart(y.sin())),
    "a mask": lambda x, y: attend(x, y, y.sin(), attn_mask=y[:, None, :, 0]),
}


@pytest.mark.parametrize("what", ONE)
def test_heads_that_cannot_be_taken_apart_are_one(what: str) -> None:
    traced = Traced(ONE[what], X, Y)
    assert traced.rewrite(cleanup, attention_heads) == 1
    (node,) = traced.find("scaled_dot_product_attention")
    assert [tuple(x.meta["val"].shape)[1] for x in node.args[:3]] == [1, 1, 1]
    assert traced.error() < 1e-6


@pytest.mark.parametrize("how", [lambda x: apart(x).double(), lambda x: apart(x.double())], ids=["after", "before"])
def test_heads_are_taken_apart_under_casts(how: Callable[[Tensor], Tensor]) -> None:
    traced = Traced(lambda x, y: together(attend(how(x), how(y), how(y.sin()))), X, Y)
    assert traced.rewrite(cleanup, attention_heads) == 1
    (node,) = traced.find("scaled_dot_product_attention")
    assert node.meta["val"].shape == (2, HEADS, 13, WIDTH) and node.meta["val"].dtype == torch.float64
    assert traced.error() < 1e-6


@pytest.mark.parametrize("what", KEPT)
def test_left_as_it_is(what: str) -> None:
    traced = Traced(KEPT[what], X, Y)
    assert traced.rewrite(cleanup, attention_heads) == 0
    assert traced.error() < 1e-6


def test_heads_that_are_not_those_of_the_keys() -> None:
    def forward(x: Tensor, y: Tensor) -> Tensor:
        two = y.reshape(2, 9, 2, 12).permute(0, 2, 1, 3).reshape(4, 9, 12)
        return attend(two, two, x.reshape(2, 13, 2, 12).permute(0, 2, 1, 3)[:, :, :9].reshape(4, 9, 12))

    traced = Traced(forward, X, Y)
    traced.rewrite(cleanup, attention_heads)
    assert traced.error() < 1e-6


FOLDED: dict[str, tuple[Callable[..., Any], Any]] = {
    "keys": (lambda x, y: attend(apart(x), apart(y * SCALE), apart(y.sin()), scale=1.0), None),
    "queries": (lambda x, y: attend(apart(x * 0.2), apart(y), apart(y.sin())), 0.2 * SCALE),
    "both": (lambda x, y: attend(apart(x * 0.5), apart(y * 0.2), apart(y.sin()), scale=1.0), 0.1),
    "under a cast": (lambda x, y: attend(*(apart(t * 0.5).double() for t in (x, y.cos(), y.sin()))), 0.25 * SCALE),
}


@pytest.mark.parametrize("what", FOLDED)
def test_numbers_become_the_scale(what: str) -> None:
    forward, scale = FOLDED[what]
    traced = Traced(forward, X, Y)
    traced.rewrite(cleanup, attention_heads)
    (node,) = traced.find("scaled_dot_product_attention")
    assert node.kwargs.get("scale") == (None if scale is None else pytest.approx(scale))
    assert traced.ops()["mul"] == (1 if what == "under a cast" else 0)  # that of the values
    assert traced.error() < 1e-6


UNFOLDED: dict[str, Callable[..., Any]] = {
    "seen by others": lambda x, y: (attend(apart(x), apart(z := y * 2), apart(y.sin())), z),
    "of keys that are the values": lambda x, y: attend(apart(x), z := apart(y * 2), z),
    "by a tensor": lambda x, y: attend(apart(x), apart(y * x.sum()), apart(y.sin())),
    "of values": lambda x, y: attend(apart(x), apart(y), apart(y.sin() * 2)),
    "not alone": lambda x, y: attend(apart(x), apart((y * 2) + 1), apart(y.sin())),
}


@pytest.mark.parametrize("what", UNFOLDED)
def test_numbers_that_do_not(what: str) -> None:
    traced = Traced(UNFOLDED[what], X, Y)
    traced.rewrite(cleanup, attention_heads)
    (node,) = traced.find("scaled_dot_product_attention")
    assert "scale" not in node.kwargs
    assert traced.ops()["mul"] == 1
    assert traced.error() < 1e-6
