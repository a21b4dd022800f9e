"""Random events over the UNet and the VAE together, in AUTOMATIC1111's stand-in: each result is that of untouched
twins."""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("ldm.modules.diffusionmodules.model", reason="needs stable-diffusion-sdkit without its pins")
from ldm.modules.diffusionmodules.model import AttnBlock

from hosts.standins import a1111 as standin
from hosts.standins import a1111_vae as vaes
from sfast_ext.hosts.a1111 import adapter as a1111

pytestmark = pytest.mark.usefixtures("vae_plans_at_once")

EVENTS = 30 if os.environ.get("SFAST_ALL_CASES") else 15
SIZES = ((8, 8), (8, 12), (6, 8))
LORAS: tuple[dict[str, float], ...] = ({}, {"a": 1.0}, {"a": 0.5, "b": 1.0}, {"biased": 0.5})
OWN = AttnBlock.forward


class World:
    """The host, its model, and twins that the extension never sees."""

    def __init__(self, host: Any, seed: int) -> None:
        self.host, self.random, self.log = host, random.Random(seed), []
        self.report: Any = None
        a1111.start("test")
        self.model = host.load(1)
        self.model.first_stage_model = vaes.make_vae(2)
        self.twin = SimpleNamespace(first_stage_model=vaes.make_vae(2))
        self.unet = standin.make_unet(1)
        standin.name_layers(self.unet, "diffusion_model")
        host.fire("model_loaded", self.model)

    def both(self) -> Iterator[Any]:
        return iter((self.model, self.twin))

    # what happens

    def another_vae(self) -> None:
        seed, in_place = self.random.randrange(3), self.random.random() < 0.5
        vaes.load_other(self.host, self.model, seed, in_place)
        # assigned weights bring their dtype
        self.twin.first_stage_model.load_state_dict(vaes.make_vae(seed).state_dict(), assign=not in_place)

    def values_in_place(self) -> None:
        for model in self.both():
            model.first_stage_model.decoder.conv_in.weight.data.mul_(1.01)

    def another_dtype(self) -> None:
        dtype = self.random.choice((torch.float32, torch.bfloat16))
        for model in self.both():
            model.first_stage_model.to(dtype)

    def circular(self) -> None:
        self.host.hijack.circular_enabled = circular = self.random.random() < 0.5
        for model in self.both():
            vaes.set_circular(model, circular)

    def another_attention(self) -> None:
        AttnBlock.forward = self.random.choice((OWN, vaes.doggettx))

    def patched(self) -> None:
        for model in self.both():
            layer = model.first_stage_model.decoder.conv_out
            if "forward" in vars(layer):
                del layer.forward
            else:
                layer.forward = lambda x, layer=layer: -type(layer).forward(layer, x)

    def checkpoint(self) -> None:
        seed = self.random.randrange(1, 4)
        self.host.switch(seed)
        standin.load_weights(self.unet, seed)

    def lora(self) -> None:
        self.host.lora(**self.random.choice(LORAS))

    def switched(self) -> None:
        key = self.random.choice(("sfast_vae", "sfast_enabled"))
        self.host.opts.data[key] = not self.host.opts.data.get(key, True)

    def dropped(self) -> None:
        a1111.A1111Session.running.drop_plans()

    def compared(self) -> None:
        self.host.opts.data["sfast_check"] = self.random.choice(("first use", "always", "never"))

    # what is compared

    def image(self) -> None:
        found = self.host.request().images[0]
        with torch.no_grad(), own_unet(self):
            expected = self.host.generate()
        self.close(found, expected)
        self.decode()

    def decode(self) -> None:
        latent = torch.randn(1, 4, *self.random.choice(SIZES))
        self.close(*(vaes.decode(model, latent) for model in self.both()))

    def encode(self) -> None:
        height, width = self.random.choice(SIZES)
        image = torch.randn(1, 3, 4 * height, 4 * width)
        self.close(*(vaes.encode(model, image) for model in self.both()))

    def close(self, found: torch.Tensor, expected: torch.Tensor) -> None:
        half = self.twin.first_stage_model.dtype == torch.bfloat16
        error = float((found - expected).norm() / expected.norm())
        assert error < (6e-2 if half else 1e-3), (error, self.log)


@contextlib.contextmanager
def own_unet(world: World) -> Iterator[None]:
    """The twin of the UNet in its place, and nothing of ours told of it."""
    wrapper, callbacks = world.model.model, world.host.callbacks
    ours, wrapper.diffusion_model = wrapper.diffusion_model, world.unet
    world.host.callbacks = {name: [] for name in callbacks}
    try:
        yield
    finally:
        wrapper.diffusion_model, world.host.callbacks = ours, callbacks


HAPPENINGS = [
    World.another_vae, World.values_in_place, World.another_dtype, World.circular, World.another_attention,
    World.patched, World.checkpoint, World.lora, World.switched, World.dropped, World.compared,
]  # fmt: skip
COMPARED = [World.image, World.decode, World.decode, World.encode]


def play(seed: int, events: int = EVENTS) -> World:
    """So many events, each followed by four results that are compared. More of them than in the tests:
    `PYTHONPATH=.:tests python -c "from hosts.adapters.test_a1111_vae_events import play; play(7, 1000)"`."""
    torch.manual_seed(seed)
    with standin.running(sfast_allow_cpu=True) as host:
        world = World(host, seed)
        try:
            for _ in range(events):
                event = world.random.choice(HAPPENINGS)
                # the same for a while: plans are made of what stays
                for action in [event, *world.random.choices(COMPARED, k=4)]:
                    world.log.append(action.__name__)
                    action(world)
            world.report = a1111.A1111Session.running.report
        finally:
            AttnBlock.forward = OWN
            a1111.A1111Session.stop()
    return world


def test_unet_and_vae_compute_what_their_twins_do() -> None:
    world = play(0)
    report = world.report
    assert report.counter("errors") == 0, report.as_dict()["last_error"]
    assert world.host.errors == [] and report.counter("vae_eager_runs") > 10
    assert world.log.count("lora") > 0
    parts = (world.model.first_stage_model.decoder, world.model.first_stage_model.encoder)
    assert not any("forward" in vars(part) for part in parts)
