from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from sfast_ext.passes.attention_casts import attention_casts
from sfast_ext.passes.attention_heads import attention_heads
from sfast_ext.passes.cleanup import cleanup
from sfast_ext.plans.graph_facts import digest, operation_counts

from .attentions import HEADS, WIDTH, apart, together
from .support import Traced, randn

X, Y = randn(2, 13, 24), randn(2, 9, 24)
PASSES = (cleanup, attention_heads, attention_casts)


def heads(x: Tensor) -> Tensor:
    return x.view(2, -1, HEADS, WIDTH).transpose(1, 2)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v)


def put(x: Tensor) -> Tensor:
    return x.transpose(1, 2).reshape(2, -1, HEADS * WIDTH)


# AUTOMATIC1111's in the order of: sdp; xformers; Doggettx, V1 and InvokeAI; sub-quadratic
UPCAST: dict[str, Callable[..., Tensor]] = {
    "after the heads": lambda x, y, z: put(attend(*(heads(t).double() for t in (x, y, z)))).float(),
    "between": lambda x, y, z: put(
        attend(*(t.view(2, -1, HEADS, WIDTH).double().transpose(1, 2) for t in (x, y, z))).float()
    ),
    "before": lambda x, y, z: together(attend(*(apart(t.double()) for t in (x, y, z))).float()),
    "after three dimensions": lambda x, y, z: together(attend(*(apart(t).double() for t in (x, y, z))).float()),
}


@pytest.mark.parametrize("where", UPCAST)
def test_casts_end_at_their_sources_wherever_they_were(where: str) -> None:
    inputs = X, Y, Y.sin()
    expected, traced = Traced(UPCAST["before"], *inputs), Traced(UPCAST[where], *inputs)
    for graph in (expected, traced):
        graph.rewrite(*PASSES, cleanup)
        assert graph.error() < 1e-6
    assert digest(traced.gm) == digest(expected.gm)
    casts = [node for node in traced.graph.nodes if "to.dtype" in str(node.target)]
    (attention,) = traced.find("scaled_dot_product_attention")
    assert sorted(node.args[0].op for node in casts) == ["call_function", *["placeholder"] * 3]
    assert casts[-1].args[0] is attention


def test_what_is_counted() -> None:
    traced = Traced(UPCAST["after the heads"], X, Y, Y.sin())
    assert traced.rewrite(*PASSES) == 4
    assert traced.rewrite(attention_casts) == 0
    assert Traced(lambda x, y: put(attend(*(heads(t) for t in (x, y, y.sin())))), X, Y).rewrite(*PASSES) == 0


def seen_before_its_cast(x: Tensor, y: Tensor) -> Any:
    q = heads(x)
    return put(attend(q.double(), heads(y.double()), heads(y.sin().double()))), q


def a_result_seen_before_its_cast(x: Tensor, y: Tensor) -> Any:
    out = put(attend(heads(x.double()), heads(y.double()), heads(y.sin().double())))
    return out.float(), out


def to_integers(x: Tensor, y: Tensor) -> Tensor:
    return put(attend(heads(x), heads(y), heads(y.sin()))).to(torch.int64)


def written_to(x: Tensor, y: Tensor) -> Tensor:
    q = heads(x).double()
    q.mul_(2)
    return put(attend(q, heads(y.double()), heads(y.sin().double())))


@pytest.mark.parametrize("forward", [seen_before_its_cast, a_result_seen_before_its_cast, to_integers, written_to])
def test_left_where_it_is(forward: Callable[..., Any]) -> None:
    traced = Traced(forward, X, Y)
    traced.rewrite(cleanup, attention_heads)
    before = operation_counts(traced.graph)
    assert traced.rewrite(attention_casts) == 0
    assert operation_counts(traced.graph) == before and traced.error() < 1e-6
