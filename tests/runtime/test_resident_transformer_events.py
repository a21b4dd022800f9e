"""Random events of transformers whose half-precision weights are in system memory: whatever happens, a call gives what
its twin gives."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
from pretended_card import GPU, Card, apart
from small_transformers import KINDS
from torch import nn

from sfast_ext import accelerate
from sfast_ext.plans.graph_pool import pool_of

from .resident_life import RandomLife
from .test_resident import card, kernels  # noqa: F401
from .test_resident_transformers import HOOKS, On, fused  # noqa: F401

EVENTS = 14
FIRST, SEEDS = (int(os.environ.get(name, default)) for name, default in (("SEED", "0"), ("SEEDS", "2")))
"""More of them: SEED=100 SEEDS=40 python -m pytest runtime/test_resident_transformer_events.py"""
NETWORKS = ("forge", *KINDS)
WAYS: dict[str, Callable[[nn.Module, str], object]] = {
    "in place": lambda m, name: getattr(m, name).neg_(),
    "rows": lambda m, name: getattr(m, name)[::3].neg_(),
    "data": lambda m, name: setattr(getattr(m, name), "data", -getattr(m, name).data),
    "uncounted": lambda m, name: getattr(m, name).data.neg_(),
    "object": lambda m, name: setattr(m, name, nn.Parameter(-getattr(m, name).detach(), requires_grad=False)),
}


class Life(RandomLife, On):
    """A transformer, its twin, and what happens to them."""

    most = 0.09

    def __init__(self, kind: str, seed: int) -> None:
        super().__init__(kind)
        self.begin(seed)
        self.size, self.tokens = (8, 8), 5
        self.layers = sorted(self.leaving())
        self.others = sorted({name for name, _ in self.twin.named_parameters()} - set(self.layers))

    def error_now(self) -> float:
        return self.error(self.size, self.tokens)

    def hooked(self) -> nn.Module:
        return self.ours.get_submodule(self.rng.choice(self.layers).removesuffix(".weight"))

    def is_whole(self) -> bool:
        return not self.away()

    def change(self) -> None:
        how = self.rng.choice(list(WAYS))
        names = self.rng.sample(self.layers, 3) + self.rng.sample(self.others, 2)
        self.done[-1] += f" {how} {names}"
        for path in names:
            home, _, name = path.rpartition(".")
            WAYS[how](self.ours.get_submodule(home), name)
            with apart():
                WAYS[how](self.twin.get_submodule(home), name)
        if how == "uncounted":
            self.acc.new_generation()

    def again(self) -> None:
        config = self.acc.config
        self.acc.release()
        assert not self.away() and not self.acc.arena.resident
        self.acc = accelerate(self.ours, config, hooks=HOOKS)

    def other_size(self) -> None:
        self.size, self.tokens = self.rng.choice([(8, 8), (8, 12), (12, 8)]), self.rng.choice([5, 7])

    def lend(self) -> None:
        path = self.rng.choice(self.layers).removesuffix(".weight")
        layer = self.ours.get_submodule(path)
        with self.acc.on_gpu(layer):
            assert layer.weight.is_cuda
            layer.weight.neg_()
        with apart():
            self.twin.get_submodule(path).weight.neg_()

    def short(self) -> None:
        pool_of(GPU).make_room(self.acc.report)


Life.events = {
    "a change": Life.change,
    "another change": Life.change,
    "it leaves the GPU and comes back": Life.leave,
    "a bypass begins or ends": Life.bypass,
    "released and accelerated again": Life.again,
    "another size": Life.other_size,
    "8 bits off or on": Life.switch,
    "a layer is lent": Life.lend,
    "memory is short": Life.short,
    "a generation begins": Life.generation,
}


@pytest.mark.long(but=[0])
@pytest.mark.parametrize("seed", range(FIRST, FIRST + SEEDS))
def test_random_events(card: Card, seed: int) -> None:  # noqa: F811
    life = Life(NETWORKS[seed % len(NETWORKS)], seed)
    for _ in range(2):
        assert life.error_now() < 0.07
    for _ in range(EVENTS):
        life.step()
    assert life.count("errors") == 0, life.acc.report.as_dict()["last_error"]
    life.acc.release()
    assert not life.away() and not life.acc.arena.resident
