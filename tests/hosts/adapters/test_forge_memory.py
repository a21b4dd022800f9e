"""Forge Neo on a pretended GPU: what is held while it moves, patches and exchanges its models."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

pytest.importorskip("ldm.modules.diffusionmodules.openaimodel", reason="needs stable-diffusion-sdkit without its pins")
from pretended_card import GPU, Card, pretended_card, small_reserves

from hosts.standins import forge as standin
from sfast_ext.hosts.forge import adapter as forge

pytestmark = pytest.mark.usefixtures("proportions")
SIZE = sum(p.nbytes for p in standin.make_unet(1, levels=2).parameters())
# what torch rounds up, indices, inputs and results of a tiny model
SMALL = SIZE // 20


@dataclass
class Running:
    """The host on a GPU."""

    host: Any
    card: Card

    def counter(self, name: str) -> int:
        assert forge.ForgeSession.running is not None
        return int(forge.ForgeSession.running.report.counter(name))

    def image(self, expected: torch.Tensor) -> int:
        """Make an image, which is to be this; how many plans ran."""
        runs = self.counter("replays") + self.counter("eager_runs")
        found = self.host.generate().to("cpu")
        assert not self.card.faults and not self.card.refused
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
        return self.counter("replays") + self.counter("eager_runs") - runs


@functools.lru_cache(maxsize=None)
def of(seed: int, everywhere: bool = False, **loras: float) -> torch.Tensor:
    """The image of a checkpoint without us, on a CPU."""
    with standin.running() as other:
        other.load(seed)
        other.lora(everywhere=everywhere, **loras)
        return other.generate()


@pytest.fixture
def on(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
    """On a GPU with room for so many UNets; another model is said to take as much as two."""
    small_reserves(monkeypatch, SIZE)
    expected = of(1)
    running = standin.running(GPU, sfast_triton=False)
    with running as host, pretended_card(monkeypatch, int(request.param * SIZE)) as card:
        forge.start("test")
        host.load(1)
        on = Running(host, card)
        assert on.image(expected) > 0 and card.holds(host.unet.out[2].weight)
        yield on
        forge.ForgeSession.stop()
        assert host.errors == [] and not any(row["stage"] == "memory" for row in on.host.errors)


@pytest.mark.parametrize("on", [3.2], indirect=True)
def test_a_change_of_lora_keeps_graphs_and_takes_no_second_copy_of_the_weights(on):
    captures, graphs = on.counter("captures"), on.counter("graph_captures")
    for loras in ({"a": 1.0}, {"a": -0.5, "b": 0.3}, {}, {"a": 1.0}):
        expected = of(1, **loras)
        on.host.lora(**loras)
        on.card.peak = 0
        assert on.image(expected) == 3
        # the layers that are patched, twice
        assert on.card.peak < 1.5 * SIZE + SMALL + on.card.graph_bytes, on.card.peak / SIZE
    assert (on.counter("captures"), on.counter("graph_captures")) == (captures, graphs)
    assert on.counter("errors") == 0


@pytest.mark.parametrize("on", [1.6], indirect=True)
def test_where_memory_is_short_a_lora_of_all_layers_takes_no_more_than_without_us(on):
    largest = max(p.nbytes for p in on.host.unet.parameters())
    captures, expected = on.counter("captures"), of(1, everywhere=True, a=1.0)
    on.host.lora(everywhere=True, a=1.0)
    on.card.peak = 0
    assert on.image(expected) > 0
    assert on.card.peak < SIZE + 2 * largest + SMALL + on.card.graph_bytes
    assert on.counter("captures") == captures and on.counter("errors") == 0


@pytest.mark.long(but=[0])
@pytest.mark.parametrize(("on", "kept"), [(1.6, False), (4, True)], indirect=["on"])
def test_what_forge_moved_off_the_gpu_is_held_only_if_there_is_room(on, kept):
    expected = of(1)
    captures = on.counter("captures")
    # a text encoder as large as the UNet needs the room
    on.host.memory.free_memory(SIZE, GPU)
    assert not on.card.holds(on.host.unet.out[2].weight)
    assert (on.card.used > 0.9 * SIZE) == kept
    assert kept or on.card.used < SMALL
    assert on.image(expected) > 0
    assert on.counter("captures") == captures and on.counter("errors") == 0


@pytest.mark.parametrize("loras", [{}, {"a": 1.0}], ids=["plain", "lora"])
@pytest.mark.parametrize("on", [1.6], indirect=True)
def test_layers_that_forge_moved_off_the_gpu_hold_no_memory_there(on, loras):
    largest = max(p.nbytes for p in on.host.unet.parameters())
    expected = of(1, **loras)
    on.host.lora(**loras)
    assert on.image(expected) > 0
    captures, on.host.smart = on.counter("captures"), True
    for part in (0.3, 0.6):
        # a text encoder needs the room
        on.host.memory.free_memory(part * SIZE, GPU)
        assert on.card.graph_bytes == 0 and on.card.used < (1 - part) * SIZE + SMALL
        assert on.host.loaded[0].pinned > 0
        on.card.peak = 0
        assert on.image(expected) == 3 and on.host.loaded[0].pinned == 0
        assert on.card.peak < SIZE + 2 * largest + SMALL + on.card.graph_bytes, on.card.peak / SIZE
    assert on.counter("captures") == captures and on.counter("errors") == 0


@pytest.mark.parametrize("on", [2.6], indirect=True)
def test_another_checkpoint_finds_the_gpu_empty_and_the_plans_there(on):
    expected = of(2)
    captures, unload = on.counter("captures"), on.host.memory.unload_all_models
    held: list[int] = []

    def unloaded() -> None:
        unload()
        held.append(on.card.used)

    on.host.memory.unload_all_models = unloaded
    on.host.load(2)
    assert held[0] < SMALL
    assert on.image(expected) > 0 and on.counter("captures") == captures
    on.host.memory.unload_all_models = unload
