"""AUTOMATIC1111 with 8 bits on a card that is small for its model, on a pretended GPU: half-precision weights stay in
system memory."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import eight_bit_kernels
import pytest
import torch

pytest.importorskip("ldm.modules.diffusionmodules.openaimodel", reason="needs stable-diffusion-sdkit without its pins")
from ldm.modules import attention
from pretended_card import GPU, Card, pretended_card
from torch import nn

from hosts.standins import a1111 as standin
from sfast_ext import accelerator_of
from sfast_ext.hosts import gpu_room, system_memory
from sfast_ext.hosts.a1111 import adapter as a1111
from sfast_ext.kernels.backend import health
from sfast_ext.kernels.eight_bits import linear8
from sfast_ext.runtime import plan_builder, verify
from sfast_ext.runtime.verify import relative_error
from sfast_ext.weights import digest

pytestmark = pytest.mark.usefixtures("proportions")
HALF = torch.bfloat16
CHANNELS = 64
SIZE = sum(p.nbytes for p in standin.make_unet(1, CHANNELS, levels=2).parameters()) // 2
MEDVRAM, LOWVRAM, NONE = "--medvram", "--lowvram", "no flag"


def halved(unet: Any) -> nn.Module:
    """As ldm's own `convert_to_fp16` leaves it: what concerns the time, and group norms, stay as they are."""
    for name, module in unet.named_modules():
        if isinstance(module, (nn.Linear, nn.Conv2d, nn.LayerNorm)) and "emb" not in name:
            module.to(HALF)
    unet.dtype = HALF
    return unet


class Running:
    """The host, and a twin of its UNet."""

    def __init__(self, host: Any, card: Card, flag: str) -> None:
        self.host, self.card, self.flag = host, card, flag
        self.seed = 0
        self.load(1)

    def load(self, seed: int) -> None:
        host = self.host
        made = standin.make_unet

        def in_half(*args: Any) -> nn.Module:
            return halved(made(*args))

        standin.make_unet = in_half
        try:
            self.model = host.load(seed, CHANNELS, medvram=self.flag != NONE, blocks=self.flag == LOWVRAM, levels=2)
        finally:
            standin.make_unet = made
        self.twin = in_half(seed, CHANNELS, 2)
        standin.name_layers(self.twin, "diffusion_model")

    @property
    def unet(self) -> nn.Module:
        return self.model.model.diffusion_model

    @property
    def session(self) -> Any:
        return a1111.A1111Session.running

    @property
    def accelerator(self) -> Any:
        return accelerator_of(self.unet)

    def counter(self, name: str) -> int:
        return int(self.session.report.counter(name))

    @property
    def away(self) -> int:
        """How many parameters of linear layers are in system memory."""
        return sum(m.weight.device.type == "cpu" for m in self.unet.modules() if isinstance(m, nn.Linear))

    @torch.no_grad()
    def picture(self, steps: int = 3, networks: tuple[Any, ...] = ()) -> float:
        """Make an image; how far it is from the twin's."""
        host, size = self.host, 16
        self.seed += 1
        host.networks.loaded_networks = list(networks)
        for layer in self.twin.modules():
            if hasattr(layer, "network_layer_name") and hasattr(layer, "weight"):
                host._apply_lora(layer)
        generator = torch.Generator().manual_seed(self.seed)
        x = torch.randn((2, 4, size, size), generator=generator).to(HALF)
        context = torch.randn((2, 7, standin.CONTEXT), generator=generator).to(HALF)
        self.card.peak = 0
        if self.flag != NONE:
            self.model.cond_stage_model(context.to(GPU))
        denoiser = standin.Denoiser()
        denoiser.p, denoiser.step = SimpleNamespace(batch_size=1), 0
        found, wanted, worst = x.to(GPU), x, 0.0
        for step in range(steps):
            event = SimpleNamespace(denoiser=denoiser, sampling_step=max(0, step - 1), sampling_steps=steps)
            host.fire("cfg_denoiser", event)
            denoiser.step += 1
            t = torch.full((2,), 900 - 100 * step)
            wrapper = self.model.model
            call = wrapper if self.model.lowvram else wrapper.diffusion_model
            noise, other = call(found, t.to(GPU), context=context.to(GPU)), self.twin(wanted, t, context=context)
            worst = max(worst, relative_error([noise.cpu()], [other]))
            wanted = wanted - 0.1 * other
            found = wanted.to(GPU)
        if self.flag != NONE:
            self.host.lowvram.send_me_to_gpu(self.model.first_stage_model)
            self.model.first_stage_model.decoder(torch.zeros(1, 4, 8, 8).to(GPU))
            self.host.lowvram.send_everything_to_cpu()
        assert not self.card.faults
        return worst


@pytest.fixture
def on(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
    """A card with room for so many UNets."""
    flag, room = request.param
    monkeypatch.setattr(attention, "_ATTN_PRECISION", "half")
    eight_bit_kernels.available(monkeypatch)
    monkeypatch.setattr(verify, "milliseconds", lambda run, device, times=1: float(run() is None) + 1)
    monkeypatch.setattr(plan_builder, "unsupported", lambda device, dtypes: None)
    monkeypatch.setattr(linear8, "profitable", lambda rows, columns, depth, device: True)
    for name, part in (("IDLE_RESERVE", 1), ("WORKSPACE", 0.1), ("DECODING_RESERVE", 1), ("NEXT_MODEL_RESERVE", 2)):
        monkeypatch.setattr(gpu_room, name, int(part * SIZE))
    monkeypatch.setattr(digest, "COLUMNS", 5)
    monkeypatch.setattr(system_memory, "available_bytes", lambda: 8 << 30)
    options = {"sfast_triton": False, "sfast_eight_bits": True, "sfast_tolerance": 0.1}
    with standin.running(**options) as host, pretended_card(monkeypatch, int(room * SIZE)) as card:
        host.place = host.shared.device = GPU
        a1111.start("test")
        yield Running(host, card, flag)
        a1111.A1111Session.stop()
        assert host.errors == []
    health.clear()


@pytest.mark.parametrize("on", [(MEDVRAM, 1.9), (NONE, 1.9)], indirect=True)
def test_the_unet_stays_in_8_bits(on: Running) -> None:
    for _ in range(5):
        assert on.picture(steps=6) < 0.06
    print(on.session.report.as_dict()["events"], on.session.report.as_dict()["counters"])
    assert on.accelerator.status()["eight_bits"]["layers"] > 5
    assert on.away and on.counter("errors") == 0
