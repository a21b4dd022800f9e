from __future__ import annotations

from collections.abc import Callable
from typing import Any

import eight_bit_kernels
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sfast_ext.kernels.backend import graph_memory
from sfast_ext.kernels.eight_bits import (
    add_layer_norm8,
    geglu8,
    layer_norm8,
    linear8,
    quantise_rows,
    quantise_weights,
)
from sfast_ext.passes.eight_bits import eight_bits, matches
from sfast_ext.passes.eight_bits_match import layer_name
from sfast_ext.passes.geglu import geglu
from sfast_ext.passes.linear_geglu import linear_geglu
from sfast_ext.plans.graph_facts import bind_attributes

from .support import randn
from .transformers import (
    HALF,
    PROMPT,
    TOKENS,
    Block,
    C,
    Wrapped,
    after_a_norm,
    after_an_attention,
    count,
    rewritten,
    traced,
)

EIGHT_BITS = (linear8, geglu8, layer_norm8, add_layer_norm8, quantise_rows, quantise_weights)


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    eight_bit_kernels.available(monkeypatch, by_triton=True)


def test_the_count_is_that_of_products() -> None:
    for body, products in ((after_geglu, 1), (by_another_input, 0)):
        torch.manual_seed(0)
        on = traced(Wrapped(body), TOKENS)
        with torch.no_grad():
            assert on.rewrite(geglu, linear_geglu, eight_bits) == products
    assert on.rewrite(eight_bits) == 0


def test_a_transformer_block() -> None:
    on = traced(Block(), TOKENS, PROMPT)
    ops = rewritten(on)
    # the keys and values of the prompt stay
    assert ops["linear"] == 1 and ops["linear8"] == 5 and ops["geglu8"] == 1
    assert ops["layer_norm8"] == 1 and ops["add_layer_norm8"] == 2 and ops["layer_norm"] == ops["add_layer_norm"] == 0
    assert ops["quantise_weights"] == 1 and ops["quantise_rows"] == 3
    assert on.error() < 2 * exact_error() + 0.02
    assert on.ctx.eight_bits is not None and not on.ctx.eight_bits.kept
    assert sorted(on.ctx.eight_bits.errors) == [
        "attn1.to_out", "attn1.to_q+to_k+to_v", "attn2.to_out", "attn2.to_q", "ff_in", "ff_out",
    ]  # fmt: skip
    assert all(0.003 < error.least < 0.03 for error in on.ctx.eight_bits.errors.values())


def exact_error() -> float:
    torch.manual_seed(0)
    on = traced(Block(), TOKENS, PROMPT)
    on.ctx.eight_bits = None
    assert not rewritten(on)["linear8"]
    return on.error()


def test_the_last_product_goes_onto_the_sum() -> None:
    on = traced(Block(), TOKENS, PROMPT)
    rewritten(on)
    (last,) = [node for node in on.launches(linear8) if node.args[5:]]
    total = last.args[5]
    assert total.args[0].target is add_layer_norm8.launch and total.args[1] == 0
    assert total.args[0].kwargs["post_bias"] is not None


def test_weights_are_quantised_once_at_the_top_and_their_memory_is_no_result() -> None:
    on = traced(Block(), TOKENS, PROMPT)
    rewritten(on)
    (fresh,) = on.launches(quantise_weights)
    calls = [node for node in on.graph.nodes if node.op == "call_function"]
    assert calls[0] is fresh
    assert [len(each) for each in fresh.args] == [6] * 5
    needed = graph_memory.peak_bytes(on.graph)
    # whatever their size
    for rows, taken in zip(fresh.args[1], fresh.users, strict=True):
        rows.meta["val"] = taken.meta["val"] = torch.empty(1 << 20, 1 << 10, dtype=torch.int8, device="meta")
    fresh.meta["val"] = tuple(rows.meta["val"] for rows in fresh.args[1])
    assert graph_memory.peak_bytes(on.graph) == needed



def test_values_that_change_in_place_are_followed() -> None:
    module = Block().to(HALF)
    on = traced(module, TOKENS, PROMPT)
    rewritten(on)
    before = on.outputs()[0]
    for factor, weight in ((3.0, module.ff_out.weight), (-2.0, module.attn1.to_q.weight)):
        with torch.no_grad():
            weight[1::2] *= factor
            on.expected = module(*on.inputs)
        assert on.error() < 0.05
    assert not torch.equal(before, on.outputs()[0])


def after_a_sum(m: Wrapped, x: Tensor) -> Any:
    total = m.two(x.cos()) + x
    return m.one(m.norm(total)).sin(), total.cos()


def after_geglu(m: Wrapped, x: Tensor) -> Any:
    value, gate = m.wide(x.sin()).chunk(2, -1)
    return m.one(value * F.gelu(gate, approximate="tanh")).sin()


def two_readers(m: Wrapped, x: Tensor) -> Any:
    y = m.norm(x)
    return m.one(y).sin(), m.wide(y).cos()


def another_reader_of_the_norm(m: Wrapped, x: Tensor) -> Any:
    y = m.norm(x)
    return m.one(y).sin(), y.cos()


@pytest.mark.parametrize(
    ("body", "products", "fused", "rows"),
    [
        (after_a_norm, 1, 1, 0),
        (after_a_sum, 1, 1, 0),
        (after_geglu, 1, 0, 1),
        (after_an_attention, 1, 0, 1),
        (two_readers, 1, 1, 0),  # packed
        (another_reader_of_the_norm, 1, 0, 1),
    ],
)
def test_what_writes_the_input_quantises_it(body: Callable[..., Any], products: int, fused: int, rows: int) -> None:
    on, ops = count(body)
    assert ops["linear8"] + ops["geglu8"] == products
    assert (ops["layer_norm8"] + ops["add_layer_norm8"], ops["quantise_rows"]) == (fused, rows)
    assert on.error() < 0.04


def by_another_input(m: Wrapped, x: Tensor) -> Any:
    return m.one(x.sin()).sin()


def by_a_group_norm(m: Wrapped, x: Tensor) -> Any:
    return m.one(F.group_norm(x.transpose(1, 2), 2).transpose(1, 2)).sin()


def by_a_computed_weight(m: Wrapped, x: Tensor) -> Any:
    return F.linear(m.norm(x), m.one.weight * 2).sin()


def by_a_cast_weight(m: Wrapped, x: Tensor) -> Any:
    return F.linear(m.norm(x), m.one.weight.float().to(x.dtype)).sin() if False else F.linear(
        m.norm(x).float(), m.one.weight.float()
    ).sin()


def by_a_weight_that_is_written(m: Wrapped, x: Tensor) -> Any:
    y = m.norm(x)
    z = F.linear(y, m.one.weight)
    return y.add_(1).cos(), z.sin()


def a_transposed_weight(m: Wrapped, x: Tensor) -> Any:
    return F.linear(m.norm(x), m.one.weight.t()).sin()


def a_sigmoid_gate(m: Wrapped, x: Tensor) -> Any:
    value, gate = m.wide(x.sin()).chunk(2, -1)
    return m.one(value * gate.sigmoid()).sin()


@pytest.mark.parametrize(
    "body",
    [
        by_another_input, by_a_group_norm, by_a_computed_weight, by_a_cast_weight, by_a_weight_that_is_written,
        a_transposed_weight, a_sigmoid_gate,
    ],
)  # fmt: skip
def test_others_are_left_alone(body: Callable[..., Any]) -> None:
    on, ops = count(body)
    assert not any(ops[kernel.__name__.rpartition(".")[2]] for kernel in EIGHT_BITS)
    assert on.error() < 2e-2
    assert on.ctx.eight_bits is not None and "no layer" in str(on.ctx.eight_bits.obstacle)


@pytest.mark.parametrize(
    ("width", "columns", "taken"),
    [(64, 96, True), (64, 80, False), (80, 64, False), (96, 64, False), (128, 32, True), (48, 64, False)],
)
def test_widths_that_the_kernels_take(width: int, columns: int, taken: bool) -> None:
    module = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, columns), nn.SiLU())
    on = traced(module, randn(2, 160, width))
    assert rewritten(on)["linear8"] == taken


@pytest.mark.parametrize(
    "x",
    [randn(2, 100, C), randn(255, C), randn(2, 160, 48), randn(2, 160, 80), randn(1, 7, C)],
    ids=["200 rows", "255 rows", "48 columns", "80 columns", "7 rows"],
)
def test_sizes_that_the_kernels_do_not_take_or_that_do_not_pay(x: Tensor) -> None:
    assert count(after_a_norm, x)[1]["linear8"] == 0


@pytest.mark.parametrize("x", [randn(256, C), randn(1, 256, 192), randn(2, 2, 64, 64), randn(3, 100, 320)])
def test_sizes_that_they_take(x: Tensor) -> None:
    on, ops = count(after_a_norm, x)
    assert ops["linear8"] == 1 and on.error() < 0.03


def keys_and_values(m: Wrapped, x: Tensor) -> Any:
    return m.attention(x.sin(), x)


def keys_of_half_of_it(m: Wrapped, x: Tensor) -> Any:
    return m.attention(x.sin(), x[:, :80])


def values_that_are_read_elsewhere(m: Wrapped, x: Tensor) -> Any:
    v = m.one(x)
    return F.scaled_dot_product_attention(x.sin(), x.cos(), v), v.sin()


def queries(m: Wrapped, x: Tensor) -> Any:
    return F.scaled_dot_product_attention(m.one(x), x.cos(), x.sin())


def queries_and_keys_in_one(m: Wrapped, x: Tensor) -> Any:
    q, k = m.wide(x).chunk(2, -1)
    return F.scaled_dot_product_attention(q, k, x.sin())


def values_of_what_was_computed(m: Wrapped, x: Tensor) -> Any:
    return F.scaled_dot_product_attention(x.sin(), x.cos(), m.one(x.tan()))


def an_embedding(m: Wrapped, x: Tensor) -> Any:
    return m.one(x).sin()


@pytest.mark.parametrize(
    ("body", "taken"),
    [
        (keys_and_values, 1), (keys_of_half_of_it, 1), (values_that_are_read_elsewhere, 0), (queries, 0),
        (queries_and_keys_in_one, 0), (values_of_what_was_computed, 0), (an_embedding, 0),
    ],
)  # fmt: skip
def test_keys_and_values_of_what_is_given(
    monkeypatch: pytest.MonkeyPatch, body: Callable[..., Any], taken: int
) -> None:
    found: dict[bool, list[str]] = {}

    def noted(graph: Any, *, few_too: bool) -> list[Any]:
        found.update({few: [c.name for c in matches(graph, few_too=few)] for few in (False, True)})
        return []

    monkeypatch.setattr("sfast_ext.passes.eight_bits.matches", noted)
    count(body)
    others = [name for name in found[True] if "to_out" not in name]
    assert len(others) == taken and all("to_k" in name or "to_v" in name for name in others)
    assert not [name for name in found[False] if "to_out" not in name]


def test_full_precision_is_left_alone() -> None:
    assert count(after_a_norm, half=False)[1]["linear8"] == 0


def test_nothing_without_the_setting_without_kernels_or_for_rare_calls() -> None:
    for change in ({"eight_bits": None}, {"triton": False}, {"most_bytes": 1 << 40}):
        on = traced(Wrapped(after_a_norm), TOKENS)
        selection = on.ctx.eight_bits
        for name, value in change.items():
            setattr(on.ctx, name, value)
        assert rewritten(on)["linear8"] == 0
        assert ("no kernels" in str(selection.obstacle)) == ("triton" in change)


def test_too_little_room_for_the_second_copy() -> None:
    needed = C * C + C * 12
    for room, layers in ((needed - 1, 0), (needed, 1)):
        on = traced(Wrapped(after_a_norm), TOKENS)
        on.ctx.eight_bits.room = room
        assert rewritten(on)["linear8"] == layers
        assert ("too little memory" in str(on.ctx.eight_bits.obstacle)) == (not layers)
        assert len(on.arena.banks) == layers


def test_banks_are_shared_and_freed_with_the_last_graph() -> None:
    module = Wrapped(after_a_norm).to(HALF)
    on = traced(module, TOKENS)
    rewritten(on)
    banks = on.arena.banks
    assert len(banks) == 1 and banks.bytes == C * C + C * 12
    assert not matches(on.graph)
    (fresh,) = on.launches(quantise_weights)
    weight = fresh.args[0][0].meta["weight"]
    held = [fresh.args[1][0].meta["bank"]]
    assert banks.get(weight, 0) is held[0] and banks.missing([weight]) == 0
    other = banks.get(weight, 64)
    assert len(banks) == 2 and other is not held[0]
    del other
    assert len(banks) == 1
    bind_attributes(on.gm)
    del fresh, held, weight, on
    assert len(banks) == 0


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("a.b.to_out.0.weight", "a.b.to_out.0"),
        ("a.attn1.to_q.weight+a.attn1.to_k.weight+a.attn1.to_v.weight", "a.attn1.to_q+to_k+to_v"),
        ("proj", "proj"),
    ],
)
def test_names_of_layers(path: str, name: str) -> None:
    assert layer_name(path) == name
