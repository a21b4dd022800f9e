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


ROWS, KV = randn(2, 6, 8, 16), randn(2, 2, 6, 4, 16)
REPEATED = {
    # Lumina 2, Llama, Chroma's and others' ways to write the same
    "repeat": lambda x: x.unsqueeze(3).repeat(1, 1, 1, 2, 1).flatten(2, 3).transpose(1, 2),
    "expand": lambda x: x.unsqueeze(3).expand(2, 6, 4, 2, 16).reshape(2, 6, 8, 16).permute(0, 2, 1, 3),
    "heads first": lambda x: x.transpose(1, 2)[:, :, None].expand(-1, -1, 2, -1, -1).reshape(2, 8, 6, 16),
    "stacked": lambda x: x[:, :, :, None].expand(-1, -1, -1, 2, -1).flatten(2, 3).transpose(1, 2),
}
OTHERWISE = {
    "in turns": lambda x: x.unsqueeze(2).repeat(1, 1, 2, 1, 1).flatten(2, 3).transpose(1, 2),
    "tokens": lambda x: x.transpose(1, 2).unsqueeze(3).repeat(1, 1, 1, 2, 1).flatten(2, 3).repeat(1, 2, 1, 1),
    "not of one": lambda x: torch.cat([x, x], 2).transpose(1, 2),
    "columns": lambda x: x.unsqueeze(3).repeat(1, 1, 1, 2, 1).flatten(2, 3).transpose(1, 2).flip(3),
}


@pytest.mark.parametrize("name", [*REPEATED, *OTHERWISE])
@pytest.mark.parametrize("masked", [False, True])
def test_heads_that_are_repeated_are_shared(name: str, masked: bool) -> None:
    way = {**REPEATED, **OTHERWISE}[name]
    mask = randn(2, 1, 1, 6 if name != "tokens" else 12) > -1

    def forward(q: Tensor, k: Tensor, v: Tensor, *masks: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q.transpose(1, 2), way(k), way(v), *masks)

    traced = Traced(forward, ROWS, *KV, *([mask] if masked else []))
    assert traced.rewrite(attention) == 1
    shapes = {tuple(x.meta["val"].shape) for x in traced.find("attention")[0].args[1:3]}
    assert shapes == ({(2, 4, 6, 16)} if name in REPEATED else {(2, 8, 12 if name == "tokens" else 6, 16)})
    assert traced.error() < 1e-6


@pytest.mark.parametrize("once", ["k", "v"])
def test_heads_of_which_one_operand_is_repeated_stay(once: str) -> None:
    way = REPEATED["repeat"]
    other = torch.cat([KV[0], KV[1]], 2)

    def forward(q: Tensor, x: Tensor, y: Tensor) -> Tensor:
        some, rest = way(x), y.transpose(1, 2)
        k, v = (some, rest) if once == "k" else (rest, some)
        return F.scaled_dot_product_attention(q.transpose(1, 2), k, v)

    traced = Traced(forward, ROWS, KV[0], other)
    assert traced.rewrite(attention) == 1
    assert {tuple(x.meta["val"].shape) for x in traced.find("attention")[0].args[1:3]} == {(2, 8, 6, 16)}
    assert traced.error() < 1e-6


@pytest.mark.parametrize("counts", [(2, 1), (1, 2)])
def test_keys_and_values_of_other_counts_stay(counts: tuple[int, int]) -> None:
    def forward(q: Tensor, *kv: Tensor) -> Tensor:
        each = (x.unsqueeze(3).repeat(1, 1, 1, 4 // x.shape[2], 1).flatten(2, 3).transpose(1, 2) for x in kv)
        return F.scaled_dot_product_attention(q.transpose(1, 2), *each)

    traced = Traced(forward, ROWS[:, :, :4], *(x[:, :, :count] for x, count in zip(KV, counts)))
    assert traced.rewrite(attention) == 1
    assert {tuple(x.meta["val"].shape) for x in traced.find("attention")[0].args[1:3]} == {(2, 4, 6, 16)}
    assert traced.error() < 1e-6


def test_repeated_heads_that_are_written_are_not_shared() -> None:
    def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k = k.clone()
        heads = REPEATED["repeat"](k)
        k.mul_(2)
        return F.scaled_dot_product_attention(q.transpose(1, 2), heads, REPEATED["repeat"](v)) + k.sum()

    traced = Traced(forward, ROWS, *KV)
    traced.rewrite(attention)
    assert traced.error() < 1e-6


def test_written_values_are_left() -> None:
    def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        y = F.scaled_dot_product_attention(q, k, v)
        y[:, 0] = 0
        return y

    traced = Traced(forward, Q, K, V)
    assert traced.rewrite(attention) == 0
    assert traced.error() == 0
