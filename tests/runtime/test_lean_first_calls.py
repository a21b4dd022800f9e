"""The first plan of a model is made while half-precision weights stay in system memory, if the host had them there."""

from __future__ import annotations

import gc
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from pretended_card import GPU, Card
from torch import nn

from sfast_ext import Config, accelerate, accelerator_of
from sfast_ext.runtime import lean_calls, plan_builder
from sfast_ext.weights import expected
from sfast_ext.weights.resident import Resident

from . import test_resident_bytes as unets
from .eight_bits import LAYERS, On, changed
from .test_lean_calls import PLACES, once, peak
from .test_resident import CARD, OFF, away, card, halves, kernels  # noqa: F401

FEW = 32


@pytest.fixture(autouse=True)
def least(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expected, "LEAST", 8 << 10)


def moved(config: Config = CARD) -> On:
    """A model that the host has moved to the GPU since it is accelerated."""
    on = On(config)
    on.device = "cuda"
    move(on)
    return on


def move(on: On) -> None:
    with on.acc.keeping_aside(GPU, early=True):
        on.ours.to("cuda")


def test_the_first_call_brings_no_weights(card: Card) -> None:  # noqa: F811
    all_of_them = sum(p.nbytes for p in On().ours.parameters())
    other = On(CARD)
    other.device, before = "cuda", card.used

    def first(on: On) -> None:
        if on is other:
            on.ours.to("cuda")
        else:
            move(on)
        assert away(on) == (0 if on is other else len(halves(on.ours)))
        assert on.error(FEW) < 1e-6

    with_all = peak(lambda: first(other), card)
    other.acc.release()
    other.ours.to("cpu")
    gc.collect()
    assert card.used == before
    on = On(CARD)
    on.device = "cuda"
    # where layers are measured, both have values in float32 in addition
    assert peak(lambda: first(on), card) < with_all - 0.5 * all_of_them
    assert on.count("weights_brought_back") == 0 and on.count("errors") == 0, on.words()
    for rows in (FEW, 256, 256, FEW):
        assert on.error(rows) < 0.05
    assert on.status()["layers"] == LAYERS and away(on) == len(halves(on.ours)) and on.plan.resident
    assert on.count("weights_brought_back") == 0
    on.acc.release()
    assert away(on) == 0 and all(map(torch.equal, (p.cpu() for p in on.ours.parameters()), on.twin.parameters()))


def test_results_are_those_of_a_model_that_came_as_a_whole(card: Card) -> None:  # noqa: F811
    on, other = moved(), On(CARD, "cuda")
    for rows in (FEW, FEW, 256, 256):
        assert torch.equal(on.call(rows)[0], other.call(rows)[0]), rows


def test_what_is_not_in_8_bits_comes(card: Card) -> None:  # noqa: F811
    on = unets.On.__new__(unets.On)
    torch.manual_seed(0)
    on.twin = unets.UNet().to(unets.HALF).eval()
    on.ours = unets.copy.deepcopy(on.twin)
    on.acc, on.seed, on.outlier = accelerate(on.ours, CARD), 0, False
    strides = {n: p.stride() for n, p in on.ours.named_parameters()}
    with on.acc.keeping_aside(GPU, early=True):
        on.ours.to("cuda")
    assert "down" in on.away() and "first" not in on.away()
    for size in (12, 12, 8, 8, 12):
        assert on.error(size) < 0.07
    assert sorted(on.away()) == sorted(unets.IN_8_BITS)
    assert on.acc.report.counter("weights_brought_back") == 0 and on.acc.report.counter("errors") == 0
    # the host moves it as often as it wants
    for _ in range(2):
        on.ours.to("cpu")
        on.acc.give_memory_back()
        with on.acc.keeping_aside(GPU, early=True):
            on.acc.fetch_weights()
            on.ours.to("cuda")
        assert on.error() < 0.07 and on.error() < 0.07
        assert sorted(on.away()) == sorted(unets.IN_8_BITS)
    on.acc.release()
    assert {n: p.stride() for n, p in on.ours.named_parameters()} == strides and not on.away()
    assert on.acc.report.counter("errors") == 0


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", ["an error", "no memory"])
def test_without_success_weights_come(
    card: Card, monkeypatch: pytest.MonkeyPatch, place: str, kind: str  # noqa: F811
) -> None:
    on = moved()
    error = torch.cuda.OutOfMemoryError("CUDA out of memory") if kind == "no memory" else None
    with once(monkeypatch, *PLACES[place], error) as calls:
        assert on.error(FEW) < 1e-6 and calls
    for rows in (FEW, FEW, 256, 256):
        assert on.error(rows) < 0.05
    assert on.plan.resident and away(on) == len(halves(on.ours)) and on.count("errors") == 0, on.words()


def test_what_the_host_does_before_the_first_call(card: Card) -> None:  # noqa: F811
    on = moved()
    on.both(changed("in place", -1.6))
    move(on)
    assert on.error(FEW) < 1e-6 and on.error(FEW) < 0.06 and on.count("weights_brought_back") == 0
    on = moved()
    on.ours.to("cpu")
    move(on)
    on.both(changed("object", -1.6))
    assert on.error(FEW) < 1e-6 and on.error(FEW) < 0.06
    on = moved()
    assert all(torch.equal(v.cpu(), on.twin.state_dict()[k]) for k, v in on.ours.state_dict().items())
    assert away(on) == 0
    on = moved()
    on.acc.release()
    assert away(on) == 0 and accelerator_of(on.ours) is None and not on.acc.arena.resident


def test_a_call_without_a_plan_finds_its_weights(card: Card) -> None:  # noqa: F811
    on = moved()
    hook = on.ours.blocks[0].register_forward_hook(lambda module, given, result: result)
    assert on.error(FEW) < 1e-6 and away(on) == 0
    hook.remove()
    assert on.error(FEW) < 1e-6 and on.error(FEW) < 0.05 and away(on) == len(halves(on.ours))
    on = moved()
    on.acc.configure(OFF)
    assert on.error(FEW) < 0.01 and away(on) == 0 and on.count("errors") == 0
    on = moved()
    forward = type(on.ours).forward.__get__(on.ours)
    on.ours.forward = lambda x: forward(x)  # type: ignore[method-assign]
    on.acc.before_forward()
    assert on.error(FEW) < 1e-6 and away(on) == 0


@pytest.mark.parametrize("why", ["another config", "a large card", "a failure", "a plan", "float32", "8 bits stopped"])
def test_where_no_such_plan_is_expected_the_module_comes(
    card: Card, monkeypatch: pytest.MonkeyPatch, why: str  # noqa: F811
) -> None:
    on = On({"another config": OFF, "a large card": Config(triton=False, eight_bits=True)}.get(why, CARD))
    on.device = "cuda"
    if why == "a failure":
        on.acc._context.model.lean_failed = True
    if why == "8 bits stopped":
        on.acc._context.model.eight_bits.reason = plan_builder.reasons.EIGHT_BITS_NO_GAIN()
    if why == "float32":
        on.ours.float()
        assert not Resident(on.acc.arena._tracked).elsewhere()
    if why == "a plan":
        on.acc.configure(OFF)
        on.ours.to("cuda")
        on.call(FEW)
        on.ours.to("cpu")
        on.acc.configure(CARD)
        on.acc._cache.plans.update({next(iter(on.acc.plans), "k"): next(iter(on.acc.plans.values()), _Plan())})
    move(on)
    assert away(on) == 0


class _Plan:
    resident, banks = False, ()

    def __init__(self, weights: Any = ()) -> None:
        self.weights = weights


def test_layers_alone_are_expected(card: Card) -> None:  # noqa: F811
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)
            self.tied, self.small = nn.Linear(64, 64), nn.Linear(8, 64)
            self.tied.weight = self.second.weight
            self.table = nn.Parameter(torch.zeros(64, 64))
            self.register_buffer("weight", torch.zeros(64, 64))

    odd: Any = Odd().to(torch.bfloat16)
    found = expected.expected(odd)
    assert list(found) == ["first.weight", "second.weight"] and found["second.weight"].now is odd.second.weight
    assert len(found["second.weight"].slots) == 2
    assert not expected.expected(odd.float())


def loaded(config: Config = CARD) -> On:
    """A model that was on the GPU before it is accelerated."""
    on = On(config, "cuda")
    on.acc.leave_early()
    return on


def test_what_is_on_the_gpu_leaves_before_the_first_call(card: Card) -> None:  # noqa: F811
    before = card.used
    on, other = loaded(), moved()
    left = sum(p.nbytes for p in halves(on.ours))
    assert away(on) == len(halves(on.ours)) and on.device == "cuda"
    assert card.used - before < 2 * sum(p.nbytes for p in on.ours.parameters()) - 2 * left + 4096
    for rows in (FEW, FEW, 256, 256):
        assert torch.equal(on.call(rows)[0], other.call(rows)[0]), rows
    assert on.plan.resident and on.count("weights_brought_back") == 0 and on.count("errors") == 0, on.words()
    on.acc.release()
    assert away(on) == 0 and all(map(torch.equal, (p.cpu() for p in on.ours.parameters()), on.twin.parameters()))


def test_what_the_host_moved_again_leaves_before_the_next_call(card: Card) -> None:  # noqa: F811
    on = loaded()
    on.call(FEW)
    on.ours.to("cpu")
    on.both(changed("in place", -1.6))
    on.ours.to("cuda")
    assert away(on) == 0
    on.acc.leave_early()
    assert away(on) == len(halves(on.ours))
    assert on.error(FEW) < 0.06 and on.count("weights_brought_back") == 0 and on.count("errors") == 0


@pytest.mark.parametrize(
    "why", ["another config", "a large card", "a failure", "no 8 bits", "8 bits stopped", "in parts", "half precision"]
)
def test_what_plans_are_not_expected_to_read_stays(
    card: Card, monkeypatch: pytest.MonkeyPatch, why: str  # noqa: F811
) -> None:
    on = On({"another config": OFF, "a large card": Config(triton=False, eight_bits=True)}.get(why, CARD), "cuda")
    model = on.acc._context.model
    if why == "a failure":
        model.lean_failed = True
    if why == "no 8 bits":
        monkeypatch.setattr(lean_calls, "unsupported", lambda *_: plan_builder.reasons.OLD_FOR_EIGHT_BITS("7.0", "7.5"))
    if why == "8 bits stopped":
        model.eight_bits.reason = plan_builder.reasons.EIGHT_BITS_NO_GAIN()
    if why == "in parts":
        on.acc.arena.resident.in_parts = True
    if why == "half precision":
        on.call(FEW)
        on.ours.to("cpu")
        on.ours.to("cuda")
        on.acc._cache.plans["k"] = _Plan(list(on.plan.weights) or list(on.acc.arena._tracked.weights.values()))
        monkeypatch.setattr(Resident, "has", lambda resident, weight: True)
    on.acc.leave_early()
    assert away(on) == 0


def test_what_another_thread_uses_stays(card: Card) -> None:  # noqa: F811
    on = On(CARD, "cuda")
    begun, ended = threading.Event(), threading.Event()

    def forward() -> None:
        # as `ModuleContext.run_forward` begins
        with on.acc.arena.order.host():
            begun.set()
            assert ended.wait(60)

    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(forward)
        assert begun.wait(60)
        on.acc.leave_early()
        assert away(on) == 0 and not on.acc.arena.resident
        ended.set()
        other.result()
    on.acc.leave_early()
    assert away(on) == len(halves(on.ours)) and on.error(FEW) < 1e-6 and on.count("errors") == 0
