"""Random events over the text encoders and the UNet together, in AUTOMATIC1111's stand-in: each result is that of
untouched twins."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("ldm.modules.diffusionmodules.openaimodel", reason="needs stable-diffusion-sdkit without its pins")
pytest.importorskip("transformers")
from hosts.adapters.test_a1111_text import Running, embedders
from hosts.adapters.test_text_encoders import same
from hosts.standins import a1111 as standin
from hosts.standins import text_encoders as texts
from sfast_ext.hosts.a1111 import adapter as a1111

pytestmark = pytest.mark.usefixtures("text_plans_at_once")

EVENTS = 16 if os.environ.get("SFAST_ALL_CASES") else 8
LORAS: tuple[dict[str, float], ...] = ({}, {"a": 1.0}, {"a": 0.5, "b": -1.0}, {"b": 0.3})


class World(Running):
    """The host, a model of one kind, and its twins."""

    def __init__(self, host: Any, kind: str, seed: int) -> None:
        super().__init__(host, kind)
        self.random, self.log = random.Random(seed), []

    def both(self, change: Callable[[Any], object]) -> None:
        """The same change to the text encoders and to their twins."""
        state = self.random.getstate()
        for each in (self.made, self.twins):
            self.random.setstate(state)
            for embedder in each:
                change(embedder)

    def layer_of(self, embedder: Any, kind: type = nn.LayerNorm) -> Any:
        return self.random.choice([m for m in embedder.modules() if isinstance(m, kind)])

    # what happens

    def checkpoint(self) -> None:
        seed = self.random.randrange(3, 7)
        for each in (self.made, self.twins):
            for embedder, other in zip(each, embedders(self.kind, seed)):
                embedder.load_state_dict({k: v.to(self.dtype) for k, v in other.state_dict().items()}, False)
                for layer in embedder.modules():
                    if isinstance(layer, standin.PATCHED):
                        layer.network_current_names, layer.network_weights_backup = (), None
        self.host.fire("model_loaded", self.model)

    def values_in_place(self) -> None:
        self.both(lambda embedder: self.layer_of(embedder).weight.data.mul_(1.02))

    def values_replaced(self) -> None:
        def change(embedder: Any) -> None:
            norm = self.layer_of(embedder)
            norm.bias = nn.Parameter(norm.bias + 0.02, requires_grad=False)

        self.both(change)

    def embeddings(self) -> None:
        self.both(lambda embedder: self.layer_of(embedder, nn.Embedding).weight.data.mul_(-1))

    def another_dtype(self) -> None:
        dtype = self.random.choice((torch.float32, torch.bfloat16))
        # a Lora's copies stay as they were
        self.host.lora()
        self.read()
        for layer in (m for each in (*self.made, *self.twins) for m in each.modules()):
            layer.__dict__.pop("network_weights_backup", None)
        self.both(lambda embedder: embedder.to(dtype))

    @property
    def dtype(self) -> torch.dtype:
        return next(self.twins[0].parameters()).dtype

    def patched(self) -> None:
        def patch(embedder: Any) -> None:
            layer = self.layer_of(embedder)
            layer.forward = lambda x, layer=layer: -type(layer).forward(layer, x)

        def unpatch(embedder: Any) -> None:
            for layer in embedder.modules():
                if isinstance(layer, nn.LayerNorm):
                    vars(layer).pop("forward", None)

        self.for_a_while(patch, unpatch)

    def hooked(self) -> None:
        def hook(embedder: Any) -> None:
            self.layer_of(embedder).register_forward_hook(lambda module, args, result: 1.1 * result)

        self.for_a_while(hook, lambda embedder: [layer._forward_hooks.clear() for layer in embedder.modules()])

    def for_a_while(self, change: Callable[[Any], object], back: Callable[[Any], object]) -> None:
        self.both(change)
        for _ in range(2):
            self.image()
        self.both(back)

    def another_eps(self) -> None:
        eps = self.random.choice((1e-5, 1e-2))
        self.both(lambda embedder: setattr(self.layer_of(embedder), "eps", eps))

    def a_layer_less(self) -> None:
        def change(embedder: Any) -> None:
            blocks = embedder.model.transformer.resblocks if hasattr(embedder, "model") else None
            blocks = embedder.transformer.text_model.encoder.layers if blocks is None else blocks
            if len(blocks) > 2:
                del blocks[-1]

        self.both(change)

    def lora(self) -> None:
        self.host.lora(**self.random.choice(LORAS))

    def switched(self) -> None:
        key = self.random.choice(("sfast_text_encoders", "sfast_enabled"))
        self.host.opts.data[key] = False
        self.image()
        self.host.opts.data[key] = True

    def dropped(self) -> None:
        self.session.drop_plans()

    def compared(self) -> None:
        self.host.opts.data["sfast_check"] = self.random.choice(("first use", "always", "never"))

    # what is compared

    def image(self) -> None:
        self.session._before_images(lambda: None)
        self.prompt()
        self.host.request()

    def prompt(self) -> None:
        rows = self.random.choice((1, 1, 2))
        fixes = [[(self.random.randrange(70), torch.randn(3, texts.WIDTH))]] * rows
        given = self.random.choice((None, fixes))
        for made, twin in zip(self.made, self.twins):
            tokens = texts.ids(self.random.randrange(9), rows)
            skip = self.random.choice((1, 1, 2, 3))
            found, expected = texts.read(made, tokens, skip, given), texts.read(twin, tokens, skip, given)
            same(found, expected)


HAPPENINGS = [
    World.checkpoint, World.values_in_place, World.values_replaced, World.embeddings, World.another_dtype,
    World.patched, World.hooked, World.another_eps, World.lora, World.lora, World.switched, World.dropped,
    World.compared,
]  # fmt: skip


def play(kind: str, seed: int, events: int = EVENTS) -> World:
    """So many events, each followed by prompts that are compared. More of them than in the tests:
    `PYTHONPATH=.:tests python -c "from hosts.adapters.test_a1111_text_events import play; play('SDXL', 7, 1000)"`."""
    torch.manual_seed(seed)
    with texts.packages(), standin.running(sfast_allow_cpu=True) as host:
        world = World(host, kind, seed)
        try:
            for number in range(events):
                event = World.a_layer_less if number == events // 2 else world.random.choice(HAPPENINGS)
                for action in [event, *world.random.choices([World.image, World.prompt], k=4)]:
                    world.log.append(action.__name__)
                    action(world)
            world.report = world.session.report
        finally:
            a1111.A1111Session.stop()
    return world


@pytest.mark.long(but=[2])
@pytest.mark.parametrize("kind", ["SD 1", "SD 2", "SDXL"])
def test_text_encoders_compute_what_their_twins_do(kind: str) -> None:
    world = play(kind, 1)
    assert world.report.counter("errors") == 0, world.report.as_dict()["last_error"]
    assert world.host.errors == [] and world.report.counter("text_eager_runs") > 5
    assert not any("forward" in vars(m) and "AcceleratedForward" in type(m.forward).__name__
                   for each in world.made for m in each.modules())  # fmt: skip
