"""Text encoders in AUTOMATIC1111 with --medvram and --lowvram, on a pretended GPU: they come for a prompt and leave."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("ldm.modules.diffusionmodules.openaimodel", reason="needs stable-diffusion-sdkit without its pins")
pytest.importorskip("transformers")
from pretended_card import GPU, pretended_card

from hosts.standins import a1111 as standin
from hosts.standins import text_encoders as texts
from sfast_ext.hosts import gpu_room, system_memory
from sfast_ext.hosts.a1111 import adapter as a1111
from sfast_ext.weights import digest

pytestmark = pytest.mark.usefixtures("text_plans_at_once", "proportions")
UNET = sum(p.nbytes for p in standin.make_unet(1, levels=2).parameters())


class Texts(nn.Module):
    """What the WebUI calls for a prompt: the two text encoders of SDXL."""

    def __init__(self) -> None:
        super().__init__()
        self.clip, self.open_clip = texts.clip_l(3), texts.open_clip(4)

    def forward(self, tokens: torch.Tensor) -> list[torch.Tensor]:
        return [each for part in (self.clip, self.open_clip) for each in texts.read(part, tokens)]


@pytest.mark.long(but=[1])
@pytest.mark.parametrize("flags", ["--medvram", "--medvram, short of memory", "--lowvram"])
def test_they_come_and_leave_and_their_plans_hold_nothing(flags: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with texts.packages():
        for on in running(flags, monkeypatch):
            on.play()


def running(flags: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
    for name in ("WORKSPACE", "DECODING_RESERVE", "NEXT_MODEL_RESERVE", "IDLE_RESERVE"):
        monkeypatch.setattr(gpu_room, name, UNET // 10)
    monkeypatch.setattr(digest, "COLUMNS", 5)
    monkeypatch.setattr(system_memory, "available_bytes", lambda: system_memory.RESERVE)
    capacity = (2.2 if "short" in flags else 5) * UNET
    with standin.running(sfast_triton=False) as host, pretended_card(monkeypatch, int(capacity)) as card:
        yield Running(host, card, flags == "--lowvram")
        a1111.A1111Session.stop()
        assert host.errors == [] and not card.faults


class Running:
    """The host on a GPU, and its model."""

    def __init__(self, host: Any, card: Any, blocks: bool) -> None:
        self.host, self.card, self.twin = host, card, Texts()
        host.place = host.shared.device = GPU
        a1111.start("test")
        self.model = host.load(1, medvram=True, blocks=blocks, text=Texts())

    def counters(self) -> tuple[int, int]:
        report = a1111.A1111Session.running.report
        return report.counter("text_captures"), report.counter("text_eager_runs") + report.counter("text_replays")

    @torch.no_grad()
    def image(self, seed: int) -> None:
        a1111.A1111Session.running._before_images(lambda: None)
        tokens = texts.ids(seed)
        for one, other in zip(self.model.cond_stage_model(tokens.to(GPU)), self.twin(tokens), strict=True):
            assert float((one.to("cpu") - other).norm() / other.norm()) < 1e-5
        self.host.request()
        self.host.lowvram.send_everything_to_cpu()
        assert not any(p.is_cuda for p in self.model.cond_stage_model.parameters())

    def play(self) -> None:
        for seed in range(3):
            self.image(seed)
        assert self.counters() == (2, 2)
        session = a1111.A1111Session.running
        (attachment,) = session._texts.attachments
        assert all(each.arena.vacant for each in attachment.accelerators())
        for both in (self.model.cond_stage_model.wrapped, self.twin):
            both.clip.transformer.text_model.encoder.layers[0].mlp.fc1.weight.data.mul_(1.5)
            both.open_clip.model.transformer.resblocks[0].attn.in_proj_weight.data.mul_(0.5)
        for seed in range(3, 6):
            self.image(seed)
        assert self.counters() == (2, 8) and session.report.counter("errors") == 0
