"""Which self-attentions may be computed with queries and keys in 8 bits."""

from __future__ import annotations

import math
from typing import Any

import eight_bit_kernels
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sfast_ext.kernels.attention import attention
from sfast_ext.passes import eight_bits, eight_bits_attention, eight_bits_selection
from sfast_ext.passes.eight_bits_selection import LIMIT, Selection, relative

from .support import randn
from .transformers import PROMPT, Attention, Block, C, Wrapped, rewritten, traced

MANY = randn(2, 170, C)
LONG_PROMPT = randn(2, 231, 32)


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    eight_bit_kernels.available(monkeypatch, by_triton=True)


def in_8_bits(module: nn.Module, *inputs: Tensor, **more: Any) -> list[bool]:
    """Of each attention, whether the kernel may compute it so."""
    torch.manual_seed(0)
    on = traced(module, *inputs, **more)
    rewritten(on)
    assert on.error() < 0.05
    return [bool(node.kwargs.get("eight_bits", False)) for node in on.launches(attention)]


def test_a_transformer_block() -> None:
    selection = Selection()
    # the prompt is not, however long it is
    assert in_8_bits(Block(), MANY, LONG_PROMPT, selection=selection) == [True, False]
    assert 0 < selection.errors["attn1"].least < LIMIT and "attn2" not in selection.errors
    assert selection.errors["attn1"].work == 2 * 170 * 170 * C


def test_by_bytes_it_is_the_first_that_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """It saves no memory, and its error is as good as that of a layer which does."""
    selection, real = Selection(), eight_bits.measured
    monkeypatch.setattr(eight_bits, "measured", lambda *args, by_bytes: real(*args, by_bytes=True))
    in_8_bits(Block(), MANY, PROMPT, selection=selection)
    selection.excess = 1.01
    assert selection.errors["attn1"].least > 1e-3 and selection.tighten() and "attn1" in selection.kept
    by_work = {name for name in selection.kept if selection.errors[name].work > 1}
    assert len(by_work) < len(selection.errors) - 1


def test_not_of_few_keys() -> None:
    assert in_8_bits(Block(), MANY[:, :160], PROMPT) == [False, False]


@pytest.mark.parametrize("name", ["attn1", "attn1.to_q+to_k+to_v"])
def test_what_is_kept_stays_as_it_is(name: str) -> None:
    selection = Selection()
    module = Block()
    in_8_bits(module, MANY, PROMPT, selection=selection)
    selection.kept.add(name)
    assert in_8_bits(module, MANY, PROMPT, selection=selection) == [name != "attn1", False]


def test_without_8_bits() -> None:
    on = traced(Block(), MANY, PROMPT)
    on.ctx.eight_bits = None
    rewritten(on)
    assert all("eight_bits" not in node.kwargs for node in on.launches(attention))


def test_a_plan_without_products_in_8_bits_has_no_such_attention() -> None:
    """It would be taken for an exact one."""
    selection = Selection()
    module = Block()
    in_8_bits(module, MANY, PROMPT, selection=selection)
    selection.kept.update(name for name in selection.errors if name != "attn1")
    assert in_8_bits(module, MANY, PROMPT, selection=selection) == [False, False]


class Body(nn.Module):
    """An attention by `body`, in front of a product that may be in 8 bits."""

    def __init__(self, body: Any, width: int = C) -> None:
        super().__init__()
        self.body, self.attn, self.other = body, Attention(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        a = self.attn
        return a.to_out(self.body(self, x.sin()).transpose(1, 2).reshape(x.shape)).sin()

    def heads(self, x: Tensor) -> tuple[Tensor, ...]:
        found = self.attn.to_q(x), self.attn.to_k(x), self.attn.to_v(x)
        return tuple(y.unflatten(-1, (self.attn.heads, -1)).transpose(1, 2) for y in found)


def plain(m: Body, x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(*m.heads(x))


def scaled(m: Body, x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(*m.heads(x), scale=0.3)


def of_a_contiguous_copy(m: Body, x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(*(y.contiguous() for y in m.heads(x)))


def of_other_values(m: Body, x: Tensor) -> Tensor:
    q, k, v = m.heads(x)
    return F.scaled_dot_product_attention(q, k, v.cos())


def causal(m: Body, x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(*m.heads(x), is_causal=True)


def masked(m: Body, x: Tensor) -> Tensor:
    mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril(3)
    return F.scaled_dot_product_attention(*m.heads(x), attn_mask=mask)


def of_other_keys(m: Body, x: Tensor) -> Tensor:
    q, _, v = m.heads(x)
    return F.scaled_dot_product_attention(q, m.heads(x.cos())[1], v)


def of_turned_keys(m: Body, x: Tensor) -> Tensor:
    q, k, v = m.heads(x)
    return F.scaled_dot_product_attention(q, k.cos(), v)


def of_no_layer(m: Body, x: Tensor) -> Tensor:
    y = x.unflatten(-1, (m.attn.heads, -1)).transpose(1, 2)
    return F.scaled_dot_product_attention(y, y, m.heads(x)[2])


def of_few_keys(m: Body, x: Tensor) -> Tensor:
    q, k, v = m.heads(x)
    return F.scaled_dot_product_attention(q, k[:, :, :160], v[:, :, :160])


def in_float32(m: Body, x: Tensor) -> Tensor:
    q, k, v = (y.float() for y in m.heads(x))
    return F.scaled_dot_product_attention(q, k.cos(), v).to(x.dtype)


@pytest.mark.parametrize("body", [plain, scaled, of_a_contiguous_copy, of_other_values], ids=lambda b: b.__name__)
def test_self_attentions(body: Any) -> None:
    assert in_8_bits(Body(body), MANY) == [True]


@pytest.mark.parametrize(
    "body",
    [causal, masked, of_other_keys, of_turned_keys, of_no_layer, of_few_keys, in_float32],
    ids=lambda body: body.__name__,
)
def test_others(body: Any) -> None:
    assert not any(in_8_bits(Body(body), MANY))


@pytest.mark.parametrize("width", [72, 384])
def test_heads_that_the_kernel_does_not_take(width: int) -> None:
    assert width // 2 % 8 or width // 2 > 160
    assert not any(in_8_bits(Body(plain, width), randn(2, 170, width)))


def test_a_card_on_which_it_does_not_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eight_bits_attention.gain, "attention_pays", lambda *sizes: False)
    assert in_8_bits(Block(), MANY, PROMPT) == [False, False]


def test_one_with_a_large_error_is_kept() -> None:
    """One column of queries is an outlier, another of the keys, so that both have few codes for what the scores are."""
    module = Block()
    with torch.no_grad():
        for layer, row in ((module.attn1.to_q, 3), (module.attn1.to_k, 5)):
            layer.weight *= 4
            layer.weight[row] *= 300
        module.attn1.to_q.weight[5] = 0
        module.attn1.to_k.weight[3] = 0
    selection = Selection()
    assert in_8_bits(module, MANY, PROMPT, selection=selection) == [False, False]
    assert "attn1" in selection.kept and selection.errors["attn1"].least > LIMIT


def test_the_error_is_that_of_the_kernel() -> None:
    """By other means: all queries, in float64."""
    q, k, v = (randn(1, 2, 200, 32) for _ in range(3))
    k = k + 5 * randn(1, 2, 1, 32)
    exact = F.scaled_dot_product_attention(q.double(), k.double(), v.double())
    mean = k.mean(2, keepdim=True)
    rounded = [eight_bits_selection.rounded(x).double() for x in (q, k - mean)]
    error = (F.scaled_dot_product_attention(*rounded, v.double()) - exact).norm() / exact.norm()
    found = relative(eight_bits_selection.errors_of_attention(q, k, v, None).tolist())
    assert found[0] == found[1]
    assert 0.8 * error < found[0] < 1.25 * error
    assert all(map(math.isnan, relative(eight_bits_selection.errors_of_attention(q, k * math.nan, v, None).tolist())))


def test_the_wrapped_attention_of_other_tests() -> None:
    assert in_8_bits(Wrapped(lambda m, x: m.attention(x.sin()).sin()), MANY) == [True]
