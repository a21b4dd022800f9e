"""Random events in Forge's stand-ins on a pretended GPU: images are those without us, and plans leave Forge the
memory that it asks for."""

from __future__ import annotations

import functools
import os
import random
from types import ModuleType
from typing import Any

import pytest
import torch

pytest.importorskip("ldm.modules.diffusionmodules.openaimodel", reason="needs stable-diffusion-sdkit without its pins")
from pretended_card import GPU, Card, pretended_card, small_reserves

from hosts.standins import a1111
from hosts.standins import forge as neo
from hosts.standins import forge_classic as classic
from sfast_ext.hosts.forge import adapter

EVENTS = 24 if os.environ.get("SFAST_ALL_CASES") else 8
SIZE = sum(p.nbytes for p in neo.make_unet(1, levels=2).parameters())
# inputs, indices and results of a tiny model, and packed weights of which Forge has moved a part
SLACK = 0.2 * SIZE
STANDINS = {"neo": neo, "classic": classic}
CASES = [("neo", 1.6, 5), ("neo", 2.2, 23), ("neo", 4.0, 41), ("classic", 2.6, 27), ("classic", 4.0, 41)]
"""Program, memory of the GPU in UNets, and a seed with which memory is short within a few events. Forge Classic itself
needs two: it holds the weights that it patches."""
LORAS: tuple[dict[str, float], ...] = ({}, {}, {"a": 1.0}, {"a": -0.5, "b": 0.3})


@functools.lru_cache(maxsize=None)
def expected(program: str, seed: int, everywhere: bool, size: int, **loras: float) -> torch.Tensor:
    """The image without us, on a CPU."""
    with STANDINS[program].running() as other:
        other.load(seed)
        other.lora(everywhere=everywhere, **loras)
        return other.generate(size=size)


class World:
    """The host on a GPU, and what it was told."""

    def __init__(self, program: str, host: Any, card: Card, seed: int) -> None:
        self.program, self.host, self.card, self.random = program, host, card, random.Random(seed)
        self.log: list[str] = []
        self.seed, self.loras, self.everywhere = 1, dict[str, float](), False

    @property
    def session(self) -> Any:
        kind = adapter.ForgeSession if self.program == "neo" else adapter.ClassicSession
        return kind.running

    def lora(self) -> None:
        self.loras, self.everywhere = self.random.choice(LORAS), self.random.random() < 0.3
        self.host.lora(everywhere=self.everywhere, **self.loras)

    def checkpoint(self) -> None:
        self.seed = self.random.randrange(1, 4)
        self.host.load(self.seed)
        self.host.lora(everywhere=self.everywhere, **self.loras)

    def another_model(self) -> None:
        """A VAE or text encoders need the room: all of the UNet leaves, or, in Forge Neo, as many layers as needed."""
        needed = self.random.choice((0.2, 0.5, 0.8)) * SIZE
        self.host.smart = self.random.random() < 0.7
        self.host.memory.free_memory(needed, GPU)
        there = sum(p.nbytes for p in self.host.unet.parameters() if self.card.holds(p))
        left = self.card.capacity - self.card.used
        assert left >= needed or self.card.used <= there + SLACK, self.log

    def everything_leaves(self) -> None:
        self.host.memory.unload_all_models()

    def in_parts(self) -> None:
        """For want of memory Forge Classic leaves weights in system memory, from the next image on."""
        if self.program == "classic":
            self.host.kept = self.random.choice((0, SIZE // 2, -1, -1, -1, -1))
            self.host.memory.unload_all_models()

    def dropped(self) -> None:
        self.session.drop_plans()

    def switched(self) -> None:
        self.host.opts.data["sfast_enabled"] = not self.host.opts.data.get("sfast_enabled", True)

    def image(self) -> None:
        size = self.random.choice((8, 8, 8, 12))
        wanted = expected(self.program, self.seed, self.everywhere, size, **self.loras)
        found = self.host.generate(size=size).to("cpu")
        assert not self.card.faults and not self.card.refused, self.log
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-4, msg=lambda said: f"{said}\n{self.log}")


HAPPENINGS = [
    World.lora, World.lora, World.checkpoint, World.another_model, World.another_model, World.another_model,
    World.everything_leaves, World.in_parts, World.dropped, World.switched,
]  # fmt: skip


def play(program: str, memory: float, seed: int, patch: pytest.MonkeyPatch, events: int = EVENTS) -> dict[str, int]:
    """So many events, each followed by images, on a GPU with memory for so many UNets; the report's counters."""
    a1111.two_levels(patch)
    small_reserves(patch, SIZE)
    module: ModuleType = STANDINS[program]
    running = module.running(GPU, sfast_triton=False)
    with running as host, pretended_card(patch, int(memory * SIZE)) as card:
        adapter.start("test")
        host.load(1)
        world = World(program, host, card, seed)
        try:
            world.image()
            for _ in range(events):
                event = world.random.choice(HAPPENINGS)
                for action in (event, *[World.image] * world.random.randint(1, 2)):
                    world.log.append(action.__name__)
                    action(world)
            counters = world.session.status()["counters"]
        finally:
            world.session.stop()
        assert host.errors == [] and counters.get("errors", 0) == 0
    return counters


@pytest.mark.long(but=[0, 3])
@pytest.mark.parametrize(("program", "memory", "seed"), CASES)
def test_images_and_memory_are_those_without_us(
    program: str, memory: float, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    counters = play(program, memory, seed, monkeypatch)
    assert counters.get("replays", 0) + counters.get("eager_runs", 0) > 6
    assert counters["memory_given_back"] > 0
