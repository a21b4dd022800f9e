"""Memory of plans with 8-bit integers: the second copy of weights comes, goes and comes back."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import eight_bit_kernels
import pytest
import torch
from pretended_card import GPU, Card, pretended_card
from torch import Tensor

from sfast_ext import Config
from sfast_ext.kernels.backend import health
from sfast_ext.kernels.eight_bits import geglu8, linear8, quantise_weights
from sfast_ext.passes import eight_bits_selection
from sfast_ext.plans.graph_pool import MB, pool_of
from sfast_ext.runtime import plan_builder, residency, verify

from .eight_bits import LAYERS, Block, On, changed, net

OOM = torch.cuda.OutOfMemoryError


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    eight_bit_kernels.available(monkeypatch)
    with torch.no_grad():
        yield
    health.clear()


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Iterator[Card]:
    monkeypatch.setattr(verify, "milliseconds", lambda run, device, times=1: float(run() is None) + 1)
    monkeypatch.setattr(plan_builder, "unsupported", lambda device, dtypes: None)
    eight_bit_kernels.pay_everywhere(monkeypatch)
    with pretended_card(monkeypatch, 64 * MB) as found:
        yield found
        assert not found.faults


CARD = Config(triton=False, eight_bits=True, tolerance=0.1)
EXACT = Config(triton=False, tolerance=0.1)


def test_weights_are_quantised_first_in_the_order_of_their_use(card: Card) -> None:
    on = On(CARD, "cuda")
    for _ in range(2):
        assert on.error() < 0.05
    work = [node for node in on.plan._graph_module.graph.nodes if node.op == "call_function"]
    assert [node for node in work if node.target is quantise_weights.launch] == work[:1]
    items = sorted(work[0].users, key=lambda item: item.args[1])
    readers = [product for item in items for product in item.users]
    assert readers == [node for node in work if node.target in (linear8.launch, geglu8.launch)]
    assert len(work[0].args[0]) == len(readers) == LAYERS


def test_memory_that_goes_to_the_host_and_comes_back(card: Card) -> None:
    on = On(CARD, "cuda")
    for _ in range(3):
        on.call()
    assert on.status()["layers"] == LAYERS and on.plan.has_graph
    held = on.status()["bytes"]
    for _ in range(3):
        on.ours.to("cpu")
        before = card.allocated
        assert on.acc.give_memory_back()
        gc.collect()
        assert before - card.allocated > 0.9 * held and on.status()["bytes"] == 0
        assert on.acc.vacant_bytes > held
        on.both(changed("in place", 1.5))
        on.ours.to("cuda")
        for _ in range(3):
            assert on.error() < 0.05
        assert on.status()["bytes"] == held and on.acc.vacant_bytes == 0
    assert on.count("captures") == 1


def test_banks_that_get_memory_have_digests_of_no_row(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    on = On(CARD, "cuda")
    for _ in range(3):
        on.call()
    # what an allocator gives may be anything, as what was there before
    before = [bank.digests.clone() for bank in on.plan.banks]
    pool_of(GPU).make_room(on.acc.report)
    real = torch.empty_like

    def found(x: Tensor, **options: Any) -> Tensor:
        made = real(x, **options)
        like = [digests for digests in before if digests.shape == x.shape and digests.dtype == x.dtype]
        return made.copy_(like[0]) if like else made

    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty_like", found)
        on.acc.arena.banks.occupy()
    assert all(not bank.digests.any() for bank in on.plan.banks)
    assert on.error() < 0.05


def test_what_is_short_of_memory_finds_the_second_copy(card: Card) -> None:
    on = On(CARD, "cuda")
    for _ in range(3):
        on.call()
    held = on.status()["bytes"]
    assert pool_of(GPU).holds_memory
    pool_of(GPU).make_room(on.acc.report)
    assert on.status()["bytes"] == 0 and not pool_of(GPU).holds_memory
    for _ in range(3):
        assert on.error() < 0.05
    assert on.status()["bytes"] == held and on.count("captures") == 1


def test_an_original_that_runs_out_of_memory_gets_that_of_the_second_copy(
    card: Card, monkeypatch: pytest.MonkeyPatch
) -> None:
    on = On(CARD, "cuda")
    on.acc.configure(Config(triton=False, eight_bits=True, tolerance=0.1, cuda_graphs=False))
    for _ in range(2):
        on.call()
    assert on.status()["bytes"] and not len(pool_of(GPU))
    forward, short = Block.forward, [True]

    def once(self: Block, x: Tensor) -> Tensor:
        if short and short.pop():
            raise OOM("CUDA out of memory")
        return forward(self, x)

    monkeypatch.setattr(Block, "forward", once)
    on.call(512)
    assert not short and on.count("out_of_memory") == 1
    for _ in range(2):
        assert on.error() < 0.05


def test_too_little_memory_for_the_second_copy(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = residency.bytes_of(net())
    monkeypatch.setattr(residency, "room", lambda device: 0.7 * weights)
    on = On(CARD, "cuda")
    on.call()
    assert on.error() < 0.01 and on.count("replays") == 1
    assert "too little memory" in on.status()["reason"]["text"] and on.status()["bytes"] == 0
    monkeypatch.setattr(residency, "room", lambda device: 2 * weights)
    for _ in range(4):
        on.acc.new_generation()
        on.call()
    on.call()
    assert on.status()["layers"] == LAYERS


@pytest.mark.parametrize("at", ["bank", "error"])
def test_memory_that_ends_while_the_plan_is_made(card: Card, monkeypatch: pytest.MonkeyPatch, at: str) -> None:
    def short(*operands: Any) -> None:
        raise OOM("CUDA out of memory")

    if at == "bank":
        monkeypatch.setattr(type(On(CARD, "cuda").acc.arena.banks), "get", short)
    else:
        monkeypatch.setattr(eight_bits_selection, "errors_of", short)
    on = On(CARD, "cuda")
    on.call()
    assert on.error() < 0.01 and on.count("errors") == 0
    assert "too little memory" in on.status()["reason"]["text"]


def test_memory_that_is_gone_when_the_weights_come_back(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    on = On(CARD, "cuda")
    for _ in range(2):
        on.call()
    on.ours.to("cpu")
    assert on.acc.give_memory_back()
    on.ours.to("cuda")

    def short(self: Any) -> None:
        raise OOM("CUDA out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(type(on.acc.arena.banks), "occupy", short)
        # the call is bypassed, and the next has a plan without 8 bits
        assert on.error() < 0.01
    for _ in range(3):
        assert on.error() < 0.01
    assert on.count("errors") == 0 and "too little memory" in on.status()["reason"]["text"]


def test_weights_are_quantised_in_each_replay(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    on = On(CARD, "cuda")
    for _ in range(3):
        on.call()
    monkeypatch.setattr(quantise_weights.launch, "function", lambda *operands: 1 / 0)
    on.both(changed("in place", -1.7))
    # by the graph alone
    assert on.error() < 0.05


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> dict[bool, float]:
    """Milliseconds of a plan, by whether it has 8 bits. They can be changed."""
    took = {True: 2.0, False: 1.0}
    real = plan_builder.verify_plan

    def verified(new: Any) -> Any:
        refusal = real(new)
        new.plan.ms_after = took[bool(new.plan.banks)]
        return refusal

    monkeypatch.setattr(plan_builder, "verify_plan", verified)
    return took


def test_a_plan_that_is_slower_than_the_exact_one_is_not_kept(card: Card, timed: dict[bool, float]) -> None:
    on = On(EXACT, "cuda")
    on.call()
    on.acc.configure(CARD)
    for _ in range(4):
        assert on.error() < 0.01
    # the exact plan, the one with 8 bits, which is gone, and one without in its place
    assert on.status()["layers"] == 0 and on.count("captures") == 2 and len(on.acc.plans) == 2
    assert on.status()["bytes"] == 0
    assert "2.00 ms with them and 1.00 ms without" in on.status()["reason"]["text"]
    on.acc.configure(EXACT)
    assert on.error() < 0.01 and on.count("captures") == 2
    # a call of another size has no exact plan
    on.acc.configure(CARD)
    on.call(512)
    assert on.status()["layers"] == LAYERS


def test_a_plan_that_turns_out_slower_than_a_later_exact_one_goes(card: Card, timed: dict[bool, float]) -> None:
    on = On(CARD, "cuda")
    on.call()
    assert on.status()["layers"] == LAYERS
    on.acc.configure(EXACT)
    on.call()
    assert not on.status()["bytes"] and len(on.acc.plans) == 1
    on.acc.configure(CARD)
    assert all(on.error() < 0.01 for _ in range(3)) and on.status()["layers"] == 0


@pytest.mark.parametrize("eight_bits", [1.0, 0.5, None])
def test_a_plan_that_is_no_slower_stays(card: Card, timed: dict[bool, Any], eight_bits: float | None) -> None:
    timed[True] = eight_bits
    for first, second in ((EXACT, CARD), (CARD, EXACT)):
        on = On(first, "cuda")
        on.call()
        on.acc.configure(second)
        on.call()
        assert on.status()["layers"] == LAYERS and on.count("captures") == 2


def test_slower_plans_stay_if_none_is_dropped(card: Card, timed: dict[bool, float]) -> None:
    on = On(replace(EXACT, drop_slower=False), "cuda")
    on.call()
    on.acc.configure(replace(CARD, drop_slower=False))
    on.call()
    assert on.status()["layers"] == LAYERS
