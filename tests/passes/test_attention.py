from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from sfast_ext.passes.attention import attention

from .support import Traced, randn

Q, K, V = randn(3, 2, 4, 6, 8)
MASK = randn(6, 6)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_causal": True},
        {"scale": 0.3},
        {"attn_mask": MASK},
        {"attn_mask": MASK.tril().abs() > 0, "dropout_p": 0.0},
    ],
)
def test_attention(options: dict[str, Any]) -> None:
    mask = options.pop("attn_mask", None)

    def forward(q: Tensor, k: Tensor, v: Tensor, *masks: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, *masks, **options)

    traced = Traced(forward, Q, K, V, *([] if mask is None else [mask]))
    assert traced.rewrite(attention) == 1
    assert traced.ops() == {"attention": 1}
    assert traced.error() < 1e-6


def test_dropout_stays() -> None:
    traced = Traced(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, dropout_p=0.5), Q, K, V)
    assert traced.rewrite(attention) == 0


def test_grouped_queries_stay() -> None:
    if "enable_gqa" not in str(torch.ops.aten.scaled_dot_product_attention.default._schema):
        pytest.skip("this torch has no grouped queries")
    traced = Traced(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True), Q, K[:, :2], V[:, :2])
    assert traced.rewrite(attention) == 0


def test_written_values_are_left() -> None:
    def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        y = F.scaled_dot_product_attention(q, k, v)
        y[:, 0] = 0
        return y

    traced = Traced(forward, Q, K, V)
    assert traced.rewrite(attention) == 0
    assert traced.error() == 0
