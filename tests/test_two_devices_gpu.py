"""Models on two GPUs in one process, of which one is torch's current one: each is computed on its card, from its
weights, within its budget."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from small_net import no_gradients  # noqa: F401

from sfast_ext import Config, accelerate, environment, host_gpu
from sfast_ext.plans.graph_pool import pool_of
from sfast_ext.report import Report

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.device_count() < 2, reason="need two GPUs"),
]
CARDS = [torch.device("cuda", index) for index in range(2)]
HALF = 0.02


class Model:
    """A UNet with plans, and its untouched twin on the same card. Each card has other weights."""

    def __init__(self, unet: Any, device: torch.device, config: Config) -> None:
        self.device, self.net = device, unet.half().to(device)
        self.twin = copy.deepcopy(self.net)
        self.accelerator = accelerate(self.net, config)

    def off(self, seed: int, side: int = 16) -> float:
        """How far a call of the UNet is off that of its twin."""
        from sfast_ext.tools.lib import models

        args, kwargs = models.unet_inputs(self.net, 8 * side, 8 * side, 1, seed=seed, timestep=900 - 50 * seed)
        ours, theirs = self.net(*args, **kwargs)[0], self.twin(*args, **kwargs)[0]
        assert ours.device == theirs.device == self.device
        return float((ours.float() - theirs.float()).norm() / theirs.float().norm())

    def counter(self, name: str) -> int:
        return self.accelerator.report.counter(name)


Both = Callable[..., list[Model]]


@pytest.fixture
def both(tiny_unet: Any) -> Iterator[Both]:
    """`both(**config)`: a tiny UNet on each card."""
    with ExitStack() as stack:

        def make(**config: Any) -> list[Model]:
            given = Config(drop_slower=False, **config)
            found = [Model(tiny_unet(seed=3 + n), device, given) for n, device in enumerate(CARDS)]
            for each in found:
                stack.callback(each.accelerator.release)
            return found

        stack.callback(host_gpu.use, None)
        yield make


@pytest.mark.parametrize("chosen", [None, *CARDS])
@pytest.mark.parametrize("current", CARDS)
def test_calls_in_turns_are_those_of_their_cards(both, current, chosen):
    host_gpu.use(chosen)
    with torch.cuda.device(current):
        models = both()
        for step in range(5):
            for model in models:
                model.accelerator.new_generation()
                assert model.off(step) < HALF and model.off(step, 24) < HALF
        assert torch.cuda.current_device() == current.index
    for model in models:
        status = model.accelerator.report.as_dict()
        assert status["last_error"] is None and not status["reasons"]
        assert status["counters"]["captures"] == 2 and status["counters"]["replays"] == 8
        assert {plan["state"] for plan in model.accelerator.status()["plans"]} == {"replaying"}


@pytest.mark.parametrize("busy", [0, 1])
def test_a_plan_takes_no_memory_of_the_other_card(both, busy):
    models = both()
    at_work, idle = models[busy], CARDS[1 - busy]
    for card in CARDS:
        torch.cuda.synchronize(card)
        # a graph of an earlier test may go meanwhile
        pool_of(card).make_room(Report())
    before, pools = torch.cuda.memory_allocated(idle), [pool_of(card).size for card in CARDS]
    assert pools == [0, 0]
    torch.cuda.reset_peak_memory_stats(idle)
    for step in range(4):
        assert at_work.off(step) < HALF
    assert torch.cuda.max_memory_allocated(idle) == before
    assert pool_of(idle).size == pools[1 - busy] and pool_of(CARDS[busy]).size > pools[busy]


def test_both_at_once_from_two_threads(both):
    models, found, failed, served = both(), {}, [], {}
    ready = threading.Barrier(2)

    def played(model: Model, steps: int) -> float:
        return max(model.off(step % 9, (16, 24)[step // 20 % 2]) for step in range(steps))

    def run(model: Model) -> None:
        try:
            ready.wait(30)
            with torch.inference_mode():
                # while one makes its plans, calls of the other may run the original
                first = played(model, 40)
                ready.wait(120)
                before = model.counter("replays") + model.counter("eager_runs")
                found[model.device] = max(first, played(model, 80))
                served[model.device] = model.counter("replays") + model.counter("eager_runs") - before
        except BaseException as exc:
            failed.append(exc)

    threads = [threading.Thread(target=run, args=(model,)) for model in models]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert not failed and len(found) == 2 and max(found.values()) < HALF
    for model in models:
        assert model.counter("captures") == 2 and served[model.device] == 80, model.accelerator.report.as_dict()
        assert model.accelerator.report.as_dict()["last_error"] is None


def test_other_weights_on_one_card_are_not_those_of_the_other(both):
    models = both()
    for step, changed in enumerate([0, 1, 1, 0]):
        for net in (models[changed].net, models[changed].twin):
            net.conv_out.weight.mul_(1.5)
            net.down_blocks[0].resnets[0].conv1.weight.neg_()
        for model in models:
            model.accelerator.new_generation()
            assert max(model.off(step), model.off(step + 4)) < HALF
    assert [model.counter("captures") for model in models] == [1, 1]


def test_a_model_that_moves_to_the_other_card_is_computed_there(both):
    first, _ = both()
    for card in (CARDS[0], CARDS[1], CARDS[0]):
        first.device = card
        for net in (first.net, first.twin):
            net.to(card)
        first.accelerator.new_generation()
        assert max(first.off(step) for step in range(3)) < HALF
    assert first.accelerator.report.as_dict()["last_error"] is None and first.counter("replays") >= 5


@pytest.mark.parametrize("small", [0, 1])
def test_a_small_card_s_budget_is_its_own(both, monkeypatch, small):
    # a quarter of it is less than the allocator gives out at once
    monkeypatch.setattr(environment, "gpu_memory", lambda of=None: 1 << 22 if of == CARDS[small] else 64 << 30)
    models = both()
    for step in range(4):
        assert max(model.off(step) for model in models) < HALF
    states = [model.accelerator.status()["plans"][0]["state"] for model in models]
    assert states[1 - small] == "replaying" and states[small] != "replaying", states


@pytest.mark.parametrize("eight_bits", [False, True])
def test_sd15_on_both(eight_bits):
    from sfast_ext.tools.lib import models

    made = [
        Model(models.random_unet("sd15", dtype=torch.float16, device=card), card, Config(eight_bits=eight_bits))
        for card in CARDS
    ]
    for step in range(4):
        for model in made:
            model.accelerator.new_generation()
            assert model.off(step, 64) < (0.1 if eight_bits else HALF)
    for model in made:
        assert model.accelerator.report.as_dict()["last_error"] is None
        assert model.counter("replays") >= 3 and model.accelerator.status()["plans"][0]["state"] == "replaying"
        model.accelerator.release()
