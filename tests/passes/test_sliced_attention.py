from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from sfast_ext.passes.cleanup import cleanup
from sfast_ext.passes.cse import cse
from sfast_ext.passes.scaled_dot_product import scaled_dot_product
from sfast_ext.passes.sliced_attention import sliced_attention

from .support import Traced, randn

Q, K, V = randn(6, 13, 4), randn(6, 9, 4), randn(6, 9, 5)
PASSES = (cleanup, cse, scaled_dot_product, sliced_attention)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v)


def parts(x: Tensor, size: int, dim: int) -> list[Tensor]:
    every = [slice(None)] * dim
    return [x[(*every, slice(at, at + size))] for at in range(0, x.shape[dim], size)]


JOINED: dict[str, tuple[Callable[..., Tensor], int]] = {
    "queries": (lambda q, k, v: torch.cat([attend(x, k, v) for x in parts(q, 5, 1)], 1), 3),
    "heads": (lambda q, k, v: torch.cat([attend(*x) for x in zip(*(parts(y, 4, 0) for y in (q, k, v)))]), 2),
    "from the end": (lambda q, k, v: torch.cat([attend(x, k, v) for x in parts(q, 7, 1)], -2), 2),
    "cast": (lambda q, k, v: torch.cat([attend(x, k, v).double() for x in parts(q, 5, 1)], 1), 3),
    "narrow": (
        lambda q, k, v: torch.cat([attend(q.narrow(1, 0, 6), k, v), attend(q.narrow(1, 6, 7), k, v)], 1), 2
    ),
    "queries of heads": (
        lambda q, k, v: torch.cat(
            [
                torch.cat([attend(x, k[at : at + 3], v[at : at + 3]) for x in parts(q[at : at + 3], 5, 1)], 1)
                for at in (0, 3)
            ]
        ),
        8,
    ),
    "transposed": (lambda q, k, v: torch.cat([attend(x, k, v).transpose(1, 2) for x in parts(q, 5, 1)], 2), 3),
    "turned": (lambda q, k, v: torch.cat([attend(x, k, v).permute(2, 0, 1) for x in parts(q, 5, 1)], -1), 3),
    "a scale": (
        lambda q, k, v: torch.cat([F.scaled_dot_product_attention(x, k, v, scale=0.2) for x in parts(q, 5, 1)], 1), 3
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", JOINED)
def test_becomes_one(what: str) -> None:
    forward, count = JOINED[what]
    traced = Traced(forward, Q, K, V)
    assert traced.rewrite(*PASSES) == count
    assert traced.ops()["scaled_dot_product_attention"] == 1
    assert traced.ops()["cat"] == traced.ops()["slice"] == traced.ops()["narrow"] == 0
    assert traced.error() < 1e-6


def keys_by_the_queries_slices(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Not attention over all keys: SD.Next's dynamic attention by batched matmuls does so."""
    k, v = (torch.cat([x, x[:, :4]], 1) for x in (k, v))
    return torch.cat([attend(*x) for x in zip(*(parts(y, 5, 1) for y in (q, k, v)))], 1)


STAYS: dict[str, Callable[..., Any]] = {
    "keys by the queries' slices": keys_by_the_queries_slices,
    "a gap": lambda q, k, v: torch.cat([attend(q[:, :5], k, v), attend(q[:, 6:], k, v)], 1),
    "another order": lambda q, k, v: torch.cat([attend(x, k, v) for x in parts(q, 5, 1)[::-1]], 1),
    "not to the end": lambda q, k, v: torch.cat([attend(x, k, v) for x in parts(q, 5, 1)[:2]], 1),
    "other scales": lambda q, k, v: torch.cat(
        [F.scaled_dot_product_attention(q[:, :5], k, v, scale=0.2), attend(q[:, 5:], k, v)], 1
    ),
    "causal": lambda q, k, v: torch.cat(
        [F.scaled_dot_product_attention(x, k, v, is_causal=True) for x in parts(q, 5, 1)], 1
    ),
    "masked": lambda q, k, v: torch.cat(
        [F.scaled_dot_product_attention(x, k, v, attn_mask=x[:, :, :1]) for x in parts(q, 5, 1)], 1
    ),
    "a part used elsewhere": lambda q, k, v: (torch.cat([y := attend(q[:, :5], k, v), attend(q[:, 5:], k, v)], 1), y),
    "something else between": lambda q, k, v: torch.cat([attend(q[:, :5], k, v), q[:, 5:, :1].expand(-1, -1, 5)], 1),
    "other values": lambda q, k, v: torch.cat([attend(q[:, :5], k, v), attend(q[:, 5:], k, v * 2)], 1),
    "beside each other's channels": lambda q, k, v: torch.cat([attend(q, k, v), attend(q, k, v)], 2),
    "transposed, another order": lambda q, k, v: torch.cat(
        [attend(x, k, v).transpose(1, 2) for x in parts(q, 5, 1)[::-1]], 2
    ),
    "transposed, a part used elsewhere": lambda q, k, v: (
        torch.cat([y := attend(q[:, :5], k, v).transpose(1, 2), attend(q[:, 5:], k, v).transpose(1, 2)], 2),
        y,
    ),
    "every second": lambda q, k, v: torch.cat([attend(q[:, ::2], k, v), attend(q[:, 1::2], k, v)], 1),
    "of two sources": lambda q, k, v: torch.cat([attend(q[:, :5], k, v), attend(q.sin()[:, 5:], k, v)], 1),
}


@pytest.mark.parametrize("what", STAYS)
def test_stays(what: str) -> None:
    traced = Traced(STAYS[what], Q, K, V)
    assert traced.rewrite(*PASSES) == 0
    assert traced.error() < 1e-6
