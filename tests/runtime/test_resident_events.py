"""Random events of weights in system memory: whatever happens, a call gives what its twin gives."""

from __future__ import annotations

import gc
import math
import os

import eight_bit_kernels
import pytest
import torch
from pretended_card import GPU, Card
from torch import nn

from sfast_ext import accelerate
from sfast_ext.plans.graph_pool import pool_of

from .eight_bits import On
from .resident_life import RandomLife
from .test_resident import CARD, CHANGES, WEIGHTS, away, card, halves, kernels  # noqa: F401

EVENTS = 12
FIRST, SEEDS = (int(os.environ.get(name, default)) for name, default in (("SEED", "0"), ("SEEDS", "3")))
"""More of them: SEED=100 SEEDS=40 python -m pytest runtime/test_resident_events.py"""


class Life(RandomLife, On):
    """A model, its twin, and what happens to them."""

    most = 0.07

    def __init__(self, seed: int) -> None:
        super().__init__(CARD, "cuda")
        self.begin(seed)
        self.rows = 64
        self.inaccurate: list[str] = []

    def error_now(self) -> float:
        return self.error(self.rows)

    def hooked(self) -> nn.Module:
        return self.ours.blocks[0]

    def is_whole(self) -> bool:
        return not away(self)

    def change(self) -> None:
        # a host that leaves a weight in system memory has its own error without plans
        how = self.rng.choice([how for how in CHANGES if how != "a tensor in system memory"])
        self.done[-1] += f" {how}"
        # so that values stay of one size
        self.both(CHANGES[how])
        scale = {"in place": 1.6, "data": 1.6, "object": 1.6, "uncounted": 1.5, "a tensor on the gpu": 2.0}.get(how)
        layer = {"uncounted": "blocks.0.ff_out", "a tensor on the gpu": "blocks.1.to_v"}.get(how, "blocks.1.ff_in")
        if scale is not None:
            self.both(lambda m: m.get_submodule(layer).weight.mul_(1 / scale))

    def over(self) -> None:
        ours, plain = self.ours.forward, type(self.ours).forward
        self.ours.forward = lambda x: plain(self.ours, x)
        assert self.error(self.rows) < 1e-6
        self.ours.forward = ours

    def again(self) -> None:
        config = self.acc.config
        self.acc.release()
        assert not away(self) and {p.device.type for p in self.ours.parameters()} == {"cuda"}
        assert not self.acc.arena.resident and not self.acc.arena.resident._copies.bytes
        self.acc = accelerate(self.ours, config)

    def size(self) -> None:
        self.rows = self.rng.choice([32, 64, 256])

    def lend(self) -> None:
        layer = self.rng.choice([m for m in self.ours.blocks[1].modules() if isinstance(m, nn.Linear)])
        name = next(n for n, m in self.ours.named_modules() if m is layer)
        with self.acc.on_gpu(layer):
            assert layer.weight.is_cuda
            layer.weight.mul_(-1.0)
        self.twin.get_submodule(name).weight.mul_(-1.0)

    def selected(self) -> None:
        """As after a comparison: the plan that was used last goes, and other layers are too inaccurate."""
        self.inaccurate[:] = self.rng.sample(WEIGHTS, self.rng.choice([0, 1, 2]))
        self.done[-1] += f" {self.inaccurate}"
        self.acc._context.model.eight_bits._selections.clear()
        if self.acc.plans:
            self.acc.drop_plan(next(reversed(self.acc.plans)))

    def short(self) -> None:
        pool_of(GPU).make_room(self.acc.report, banks=self.rng.choice([0, 1 << 15, 1 << 17, math.inf]))

Life.events = {
    "a change": Life.change,
    "another change": Life.change,
    "it leaves the GPU and comes back": Life.leave,
    "a bypass begins or ends": Life.bypass,
    "a forward over it": Life.over,
    "released and accelerated again": Life.again,
    "another size": Life.size,
    "8 bits off or on": Life.switch,
    "a layer is lent": Life.lend,
    "layers are selected anew": Life.selected,
    "memory is short": Life.short,
    "a generation begins": Life.generation,
}


@pytest.mark.long(but=[2])
@pytest.mark.parametrize("seed", range(FIRST, FIRST + SEEDS))
def test_random_events(card: Card, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    life = Life(seed)
    eight_bit_kernels.too_inaccurate(monkeypatch, life.inaccurate)
    life.error_now()
    for _ in range(EVENTS):
        life.step()
    # all of the module is on the GPU, and no plan needs a weight that another one has in 8 bits
    reasons = []
    for _ in range(3 if life.hook is None else 0):
        for life.rows in (32, 64, 256):
            life.error_now()
        reasons.append(life.acc.report.as_dict()["reasons_since_start"])
    assert reasons[1:2] == reasons[2:] or not life.acc.plans, life.done
    life.acc.release()
    assert {p.device.type for p in life.ours.parameters()} == {"cuda"} and len(halves(life.ours)) == 12
    del life
    gc.collect()
    assert torch.is_tensor(torch.zeros(1)) and card.allocated < 1 << 20
