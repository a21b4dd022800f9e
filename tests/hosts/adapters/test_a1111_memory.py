"""AUTOMATIC1111 on a pretended GPU: what is held while it exchanges its model."""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

pytest.importorskip("ldm.modules.diffusionmodules.openaimodel", reason="needs stable-diffusion-sdkit without its pins")
from pretended_card import GPU, Card, pretended_card, small_reserves

from hosts.standins import a1111 as standin
from sfast_ext.hosts import gpu_room, system_memory
from sfast_ext.hosts.a1111 import adapter as a1111
from sfast_ext.plans.recapture import Recapture
from sfast_ext.weights import digest

pytestmark = pytest.mark.usefixtures("proportions")
SIZE = sum(p.nbytes for p in standin.make_unet(1, levels=2).parameters())
# what torch rounds up, indices, inputs and results of a tiny model
SMALL = SIZE // 20


@dataclass
class Running:
    """The host on a GPU."""

    host: Any
    card: Card

    @property
    def unet(self) -> Any:
        return self.host.model_data.sd_model.model.diffusion_model

    def counter(self, name: str) -> int:
        assert a1111.A1111Session.running is not None
        return int(a1111.A1111Session.running.report.counter(name))

    def image(self, expected: torch.Tensor) -> int:
        """Make an image, which is to be this; how many plans ran."""
        runs = self.counter("replays") + self.counter("eager_runs")
        found = self.host.generate().to("cpu")
        assert not self.card.faults and not self.card.refused
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
        return self.counter("replays") + self.counter("eager_runs") - runs


@functools.lru_cache(maxsize=None)
def of(seed: int, channels: int = 32) -> torch.Tensor:
    """The image of a checkpoint without us, on a CPU."""
    with standin.running() as other:
        other.load(seed, channels)
        return other.generate()


@pytest.fixture
def on(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
    """On a GPU with room for so many UNets; another model is said to take as much as two."""
    small_reserves(monkeypatch, SIZE)
    expected = of(1)
    running = standin.running(sfast_triton=False)
    with running as host, pretended_card(monkeypatch, int(request.param * SIZE)) as card:
        host.place = host.shared.device = GPU
        a1111.start("test")
        host.load(1)
        on = Running(host, card)
        assert on.image(expected) > 0 and card.holds(on.unet.out[2].weight)
        yield on
        a1111.A1111Session.stop()
        assert host.errors == []


@pytest.mark.long
@pytest.mark.parametrize("on", [2.6], indirect=True)
def test_where_memory_is_short_a_checkpoint_takes_no_more_than_without_us(on, monkeypatch):
    expected = of(2)
    host = sys.modules["modules.sd_models"]
    send, held = host.send_model_to_cpu, []

    def sent(model: Any) -> None:
        send(model)
        held.append(on.card.used)
        on.card.peak = 0

    monkeypatch.setattr(host, "send_model_to_cpu", sent)
    on.host.switch(2)
    largest = max(p.nbytes for p in on.unet.parameters())
    assert held[0] < SMALL
    captures = on.counter("captures")
    assert on.image(expected) > 0
    assert on.card.peak < SIZE + 2 * largest + SMALL + on.card.graph_bytes
    assert on.counter("captures") == captures and on.counter("memory_given_back") == 1


@pytest.mark.parametrize("on", [12], indirect=True)
def test_where_there_is_room_graphs_stay(on):
    expected = of(2)
    graphs = on.counter("graph_captures")
    on.host.switch(2)
    assert on.image(expected) > 0
    assert on.counter("memory_given_back") == 0 and on.counter("graph_captures") == graphs


@pytest.mark.long(but=[0])
@pytest.mark.parametrize("on", [2.6], indirect=True)
@pytest.mark.parametrize("channels", [32, 64])
def test_a_model_that_is_thrown_away_leaves_nothing(on, channels, monkeypatch):
    expected = of(3, channels)
    host = sys.modules["modules.sd_models"]
    trash, held = host.send_model_to_trash, []

    def thrown(model: Any) -> None:
        trash(model)
        held.append(on.card.used)

    monkeypatch.setattr(host, "send_model_to_trash", thrown)
    if channels != 32:
        on.card.capacity *= 6
        monkeypatch.setattr(gpu_room, "NEXT_MODEL_RESERVE", 40 * SIZE)
    captures = on.counter("captures")
    on.host.load(3, channels)
    assert held[0] < SMALL
    assert on.image(expected) > 0
    assert on.counter("captures") == captures + (channels != 32)


@pytest.mark.long(but=[0, 3, 4])
@pytest.mark.parametrize("on", [12], indirect=True)
@pytest.mark.parametrize("room", [True, False])
@pytest.mark.parametrize("what", ["decode", "encode", "upscale"])
def test_graphs_go_if_the_host_needs_the_memory(on, what, room, monkeypatch):
    expected = of(1)
    vae = on.host.model_data.sd_model.first_stage_model
    latent, image = torch.zeros(1, 4, 8, 8).to(GPU), torch.zeros(1, 3, 32, 32).to(GPU)
    # of its second width, 32 channels, in the decoder, of the first in the encoder
    needs = {"decode": 1.5 * 3 * 32 * 32 * 32 * 4, "encode": 1.5 * 5 * 16 * 32 * 32 * 4, "upscale": 0}
    needed = int(needs[what] + (gpu_room.IDLE_RESERVE if what == "upscale" else gpu_room.WORKSPACE))
    assert on.card.graph_bytes
    free = needed + (0 if room else -1)
    on.card.capacity = on.card.used - on.card.graph_bytes + free + (on.card.graph_bytes if room else 0)
    with torch.no_grad():
        if what == "upscale":
            sys.modules["modules.upscaler"].Upscaler().upscale(image, 2)
        else:
            vae.decoder(latent) if what == "decode" else vae.encoder(image)
    assert bool(on.card.graph_bytes) == room
    on.card.capacity += 12 * SIZE
    captures = on.counter("captures")
    assert on.image(expected) > 0 and on.counter("captures") == captures and on.card.graph_bytes


@pytest.mark.parametrize("on", [4], indirect=True)
def test_a_vae_of_another_model_is_not_watched(on):
    vae = on.host.model_data.sd_model.first_stage_model
    assert len(vae.decoder._forward_pre_hooks) == 1
    on.host.load(2)
    on.host.generate()
    assert not vae.decoder._forward_pre_hooks and not vae.encoder._forward_pre_hooks
    vae = on.host.model_data.sd_model.first_stage_model
    a1111.A1111Session.running.release()
    assert not vae.decoder._forward_pre_hooks


@pytest.mark.parametrize("on", [4], indirect=True)
def test_the_functions_are_the_hosts_again_after_release(on):
    module = sys.modules["modules.sd_models"]
    originals = [getattr(module, name).__wrapped__ for name in ("send_model_to_cpu", "send_model_to_trash")]
    upscaler = sys.modules["modules.upscaler"].Upscaler
    assert upscaler.upscale is not standin.upscale
    a1111.A1111Session.running.release()
    assert [module.send_model_to_cpu, module.send_model_to_trash] == originals
    assert upscaler.upscale is standin.upscale


class Medvram:
    """The host with --medvram on a GPU of so many UNets, or with `blocks` with --lowvram."""

    def __init__(self, host: Any, card: Card, blocks: bool = False) -> None:
        self.host, self.card = host, card
        self.held: list[int] = []
        """What is in use when the text encoder runs, and when the VAE does."""
        model = host.load(1, medvram=True, blocks=blocks)
        model.first_stage_model.decoder.register_forward_pre_hook(lambda *_: self.held.append(card.used))
        model.cond_stage_model.register_forward_pre_hook(lambda *_: self.held.append(card.used))

    @torch.no_grad()
    def image(self, **job: Any) -> torch.Tensor:
        model = self.host.model_data.sd_model
        self.held, self.card.peak = [], 0
        model.cond_stage_model(torch.zeros(2, 7, standin.CONTEXT).to(GPU))
        found = self.host.generate(**job).to("cpu")
        model.first_stage_model.decode = None
        self.host.lowvram.send_me_to_gpu(model.first_stage_model)
        model.first_stage_model.decoder(torch.zeros(1, 4, 8, 8).to(GPU))
        self.host.lowvram.send_everything_to_cpu()
        assert not self.card.faults and not self.card.refused
        return found

    def counted(self, *names: str) -> list[int]:
        assert a1111.A1111Session.running is not None
        return [a1111.A1111Session.running.report.counter(name) for name in names]


@contextlib.contextmanager
def moving(monkeypatch: pytest.MonkeyPatch, size: float, blocks: bool = False) -> Iterator[Medvram]:
    for name, part in (("IDLE_RESERVE", 1), ("WORKSPACE", 0.1), ("DECODING_RESERVE", 1), ("NEXT_MODEL_RESERVE", 2)):
        monkeypatch.setattr(gpu_room, name, int(part * SIZE))
    monkeypatch.setattr(digest, "COLUMNS", 5)
    monkeypatch.setattr(system_memory, "available_bytes", lambda: system_memory.RESERVE)
    with standin.running(sfast_triton=False) as host, pretended_card(monkeypatch, int(size * SIZE)) as card:
        host.place = host.shared.device = GPU
        a1111.start("test")
        yield Medvram(host, card, blocks)
        a1111.A1111Session.stop()
        assert host.errors == []


@pytest.fixture
def medvram(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Medvram]:
    with moving(monkeypatch, request.param) as found:
        yield found


@pytest.fixture
def lowvram(monkeypatch: pytest.MonkeyPatch) -> Iterator[Medvram]:
    with moving(monkeypatch, 1.2, blocks=True) as found:
        yield found


@pytest.mark.long(but=[0])
@pytest.mark.parametrize(("medvram", "kept"), [(1.7, False), (4, True)], indirect=["medvram"])
def test_with_medvram_every_image_is_accelerated_in_the_memory_it_has(medvram, kept):
    expected, other = of(1), of(1)
    torch.testing.assert_close(medvram.image(), expected, rtol=1e-3, atol=1e-4)
    assert medvram.counted("captures", "graph_captures") == [1, 1]
    for number in range(2, 4):
        before = medvram.counted("replays", "graph_captures")
        torch.testing.assert_close(medvram.image(), other, rtol=1e-3, atol=1e-4)
        runs, graphs = (b - a for a, b in zip(before, medvram.counted("replays", "graph_captures")))
        assert (runs, graphs) == (3, 0 if kept else 1), number
        # the second copy of the weights, which the host would make, is never there
        assert medvram.card.peak < 1.5 * SIZE + SMALL + medvram.card.graph_bytes
    text, vae = medvram.held
    assert (text > SIZE) == kept and (vae > SIZE) == kept
    if not kept:
        assert text < 0.5 * SIZE + SMALL and vae < SMALL and medvram.card.used < SMALL
    assert medvram.counted("captures", "errors") == [1, 0]


@pytest.mark.parametrize("medvram", [1.7], indirect=True)
def test_with_medvram_later_images_need_no_graph_and_no_more_memory(medvram, monkeypatch):
    expected, other = of(1), of(1)
    torch.testing.assert_close(medvram.image(), expected, rtol=1e-3, atol=1e-4)
    monkeypatch.setattr(Recapture, "is_due", lambda self, with_ms: False)
    monkeypatch.setattr(Recapture, "pays_at_once", lambda self, with_ms, runs: False)
    for _ in range(2):
        before = medvram.counted("eager_runs", "replays", "graph_captures")
        torch.testing.assert_close(medvram.image(), other, rtol=1e-3, atol=1e-4)
        after = medvram.counted("eager_runs", "replays", "graph_captures")
        assert [b - a for a, b in zip(before, after)] == [3, 0, 0]
        assert medvram.card.peak < 1.5 * SIZE + SMALL and medvram.card.graph_bytes == 0
    assert medvram.counted("captures", "errors") == [1, 0] and not medvram.card.faults


@pytest.mark.long(but=[1])
@pytest.mark.parametrize("medvram", [1.7, 4], indirect=True)
def test_with_medvram_lora_and_checkpoint_are_followed(medvram):
    expected = [of(1), of(2)]
    medvram.image()
    medvram.host.lora(a=1.0)
    changed = medvram.image()
    assert (changed - expected[0]).abs().max() > 1e-3
    medvram.host.lora()
    torch.testing.assert_close(medvram.image(), expected[0], rtol=1e-3, atol=1e-4)
    model = medvram.host.model_data.sd_model
    unet = model.model.diffusion_model
    unet.load_state_dict(standin.weights(unet, 2))
    for layer in unet.modules():
        if isinstance(layer, standin.LAYERS):
            layer.network_current_names, layer.network_weights_backup = (), None
    medvram.host.fire("model_loaded", model)
    torch.testing.assert_close(medvram.image(), expected[1], rtol=1e-3, atol=1e-4)
    assert medvram.counted("captures") == [1]


@pytest.mark.long(but=[0])
@pytest.mark.parametrize("medvram", [1.7, 4], indirect=True)
def test_with_medvram_what_did_not_change_is_not_copied_back(medvram, monkeypatch):
    expected = of(1)
    model = medvram.host.model_data.sd_model
    moved = (model.model, model.cond_stage_model, model.first_stage_model)
    number = sum(len(list(m.parameters())) for m in moved)

    def copied() -> int:
        """How many weights an image copies on their way back."""
        before = {p: p.data_ptr() for m in moved for p in m.parameters()}
        put_back = medvram.counted("weights_put_back")[0]
        torch.testing.assert_close(medvram.image(), expected, rtol=1e-3, atol=1e-4)
        there = number - (medvram.counted("weights_put_back")[0] - put_back)
        # the memory of one that is copied may be given to another
        assert there >= sum(p.data_ptr() != was for p, was in before.items())
        return there

    medvram.image()
    copied()
    assert copied() == 0 and copied() == 0
    with torch.no_grad():
        # in system memory, where the next arrival takes it from
        model.model.diffusion_model.out[2].bias.add_(1)
    expected = other = medvram.image()
    assert (expected - of(1)).abs().max() > 0.1 and copied() == 0
    medvram.host.lora(a=1.0)
    expected = medvram.image()
    assert copied() == 0
    medvram.host.lora()
    expected = other
    assert 0 < copied() < number and copied() == 0
    monkeypatch.setattr(system_memory, "available_bytes", lambda: system_memory.RESERVE - 1)
    assert copied() == number
    assert medvram.counted("captures", "errors") == [1, 0]


@pytest.mark.long(but=[1])
@pytest.mark.parametrize("medvram", [4], indirect=True)
@pytest.mark.parametrize("way", ["off", "thrown away", "stopped"])
def test_with_medvram_no_copy_outlives_its_model(medvram, way):
    medvram.image()
    model = medvram.host.model_data.sd_model
    medvram.host.lowvram.send_me_to_gpu(model.model)
    medvram.host.generate()
    copies = a1111.A1111Session.running._memory._moves.copies._copies
    assert copies.bytes == SIZE
    if way == "off":
        medvram.host.opts.data["sfast_enabled"] = False
        medvram.host.generate()
    elif way == "thrown away":
        sys.modules["modules.sd_models"].send_model_to_trash(model)
    else:
        a1111.A1111Session.stop()
    assert copies.bytes == 0


@pytest.mark.parametrize("medvram", [4], indirect=True)
def test_without_the_extension_nobody_follows_the_moves(medvram):
    wrapper = type(medvram.host.model_data.sd_model.model)
    medvram.image()
    assert "to" in vars(wrapper)
    medvram.host.opts.data["sfast_enabled"] = False
    away = medvram.counted("weights_away")
    medvram.image()
    gc.collect()
    assert medvram.card.used < SMALL and medvram.counted("weights_away") == away
    a1111.A1111Session.running.release()
    assert "to" not in vars(wrapper)


def test_with_lowvram_blocks_that_did_not_change_are_not_copied_back(lowvram):
    model = lowvram.host.model_data.sd_model
    unet = model.model.diffusion_model
    blocks = [*unet.input_blocks, unet.middle_block, *unet.output_blocks, unet.time_embed]
    steps = 3
    number = steps * sum(len(list(block.parameters())) for block in blocks)
    number += sum(len(list(each.parameters())) for each in (model.cond_stage_model, model.first_stage_model))

    def copied(expected: torch.Tensor) -> int:
        """How many weights an image copies on their way back."""
        before = lowvram.counted("weights_put_back")[0]
        torch.testing.assert_close(lowvram.image(), expected, rtol=1e-3, atol=1e-4)
        assert not any(p.is_cuda for block in blocks for p in block.parameters())
        return number - (lowvram.counted("weights_put_back")[0] - before)

    stock = of(1)
    copied(stock)
    where = [p.data_ptr() for block in blocks for p in block.parameters()]
    assert copied(stock) == 0 and copied(stock) == 0
    assert [p.data_ptr() for block in blocks for p in block.parameters()] == where
    # a block at a time, and what stays
    assert lowvram.card.peak < 0.9 * SIZE
    lowvram.host.lora(a=1.0)
    changed = lowvram.image()
    assert (changed - stock).abs().max() > 1e-3 and copied(changed) == 0
    lowvram.host.lora()
    assert 0 < copied(stock) < number and copied(stock) == 0
    with torch.no_grad():
        unet.middle_block[0].out_layers[-1].bias.add_(1)
    other = lowvram.image()
    assert (other - stock).abs().max() > 1e-3 and copied(other) == 0
    assert lowvram.counted("captures", "errors") == [0, 0]


def test_with_lowvram_classes_are_left_as_they_were(lowvram):
    lowvram.image()
    kinds = {type(m) for m in lowvram.host.model_data.sd_model.model.diffusion_model.modules()}
    assert "to" in vars(torch.nn.Sequential)
    a1111.A1111Session.running.release()
    assert not any("to" in vars(kind) for kind in kinds if kind is not torch.nn.Module)
