"""The VAE in AUTOMATIC1111 with --medvram and --lowvram, on a pretended GPU: it comes for each image and leaves."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("ldm.modules.diffusionmodules.model", reason="needs stable-diffusion-sdkit without its pins")
from pretended_card import GPU, Card, pretended_card

from hosts.standins import a1111 as standin
from hosts.standins import a1111_vae as vaes
from sfast_ext import accelerator_of
from sfast_ext.hosts import gpu_room, system_memory
from sfast_ext.hosts.a1111 import adapter as a1111
from sfast_ext.runtime import plan_runner, verify
from sfast_ext.weights import digest

pytestmark = pytest.mark.usefixtures("vae_plans_at_once", "proportions")

UNET = sum(p.nbytes for p in standin.make_unet(1, levels=2).parameters())
VAE = sum(p.nbytes for p in vaes.make_vae(1).parameters())
# activations, indices, results of tiny models
SMALL = UNET // 5
LATENT = torch.randn((1, 4, 8, 8), generator=torch.Generator().manual_seed(7))
IMAGE = torch.randn((1, 3, 32, 32), generator=torch.Generator().manual_seed(9))


@functools.lru_cache(maxsize=None)
def decoded(seed: int) -> torch.Tensor:
    """By a VAE that nobody moves or accelerates."""
    return vaes.decode(SimpleNamespace(first_stage_model=vaes.make_vae(seed)), LATENT)


@functools.lru_cache(maxsize=None)
def encoded(seed: int) -> torch.Tensor:
    return vaes.encode(SimpleNamespace(first_stage_model=vaes.make_vae(seed)), IMAGE)


class Running:
    """The host on a GPU, and its model."""

    def __init__(self, host: Any, card: Card | None, blocks: bool, dtype: torch.dtype = torch.float32) -> None:
        self.host, self.dtype = host, dtype
        self._card = card
        host.place = host.shared.device = GPU
        a1111.start("test")
        self.model = host.load(1, medvram=True, blocks=blocks, vae=vaes.make_vae(2).to(dtype))
        self.vae = self.model.first_stage_model

    @property
    def card(self) -> Card:
        """That is pretended."""
        assert self._card is not None
        return self._card

    @property
    def session(self) -> Any:
        return a1111.A1111Session.running

    def counter(self, name: str) -> int:
        return int(self.session.report.counter(name))

    @torch.no_grad()
    def image(self, seed: int = 2, from_image: bool = False) -> list[str]:
        """An image, from an image or not, whose VAE has this seed. How that encoded and decoded: "original",
        "prepared", "plan"."""
        if self._card is not None:
            self._card.peak = 0
        did = [self._did(lambda: vaes.encode(self.model, IMAGE.to(GPU)), encoded(seed))] if from_image else []
        self.model.cond_stage_model(torch.zeros(2, 7, standin.CONTEXT).to(GPU))
        self.host.request()
        did.append(self._did(lambda: vaes.decode(self.model, LATENT.to(GPU)), decoded(seed)))
        self.host.lowvram.send_everything_to_cpu()
        assert self._card is None or not self._card.faults and not self._card.refused
        return did

    def check_that_plans_hold_nothing(self) -> None:
        for part in (self.vae.encoder, self.vae.decoder):
            accelerator = accelerator_of(part)
            assert accelerator is not None and accelerator.arena.vacant

    def _did(self, action: Any, expected: torch.Tensor) -> str:
        names = {"vae_captures": "prepared", "vae_eager_runs": "plan"}
        before = {name: self.counter(name) for name in names}
        found = action()
        assert all(p.is_cuda for p in self.vae.parameters())
        limit = 3e-2 if self.dtype == torch.float16 else 2e-3 if self._card is None else 1e-5
        assert float((found - expected).norm() / expected.norm()) < limit
        return next((what for name, what in names.items() if self.counter(name) > before[name]), "original")


FLAGS = ["--medvram", "--medvram, short of memory", "--lowvram"]


@pytest.fixture
def on(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
    for name in ("WORKSPACE", "DECODING_RESERVE", "NEXT_MODEL_RESERVE"):
        monkeypatch.setattr(gpu_room, name, UNET // 10)
    # as a real one, it has room for what comes next: the VAE
    monkeypatch.setattr(gpu_room, "IDLE_RESERVE", VAE + SMALL)
    monkeypatch.setattr(digest, "COLUMNS", 5)
    monkeypatch.setattr(system_memory, "available_bytes", lambda: system_memory.RESERVE)
    capacity = (1.8 if "short" in request.param else 4) * UNET
    with standin.running(sfast_triton=False) as host, pretended_card(monkeypatch, int(capacity)) as card:
        on = Running(host, card, request.param == "--lowvram")
        yield on
        a1111.A1111Session.stop()
        assert host.errors == [] and on.session is None
        assert accelerator_of(on.vae.decoder) is None and "forward" not in vars(on.vae.encoder)


@pytest.mark.long(but=[1])
@pytest.mark.parametrize("on", FLAGS, indirect=True)
def test_both_parts_come_and_leave_together(on: Running) -> None:
    for wanted in ("original", "prepared", "plan", "plan"):
        assert on.image(from_image=True) == [wanted] * 2
    # the second copy of the weights, which the host would make, is never there
    assert on.card.peak < UNET + VAE + 2 * SMALL + on.card.graph_bytes
    assert on.counter("errors") == 0 and on.counter("vae_captures") == 2
    on.check_that_plans_hold_nothing()
    assert not any(p.is_cuda for p in on.vae.parameters())
    # what stays is the UNet's
    assert on.card.allocated < UNET + SMALL


@pytest.mark.long
@pytest.mark.parametrize("on", FLAGS[1:2], indirect=True)
def test_another_vae_is_decoded(on: Running) -> None:
    for _ in range(3):
        on.image()
    on.vae.load_state_dict(vaes.make_vae(3).state_dict())
    on.host.fire("model_loaded", on.model)
    assert [on.image(3) for _ in range(2)] == [["plan"], ["plan"]]
    on.vae.load_state_dict({k: v.clone() for k, v in vaes.make_vae(2).state_dict().items()}, assign=True)
    on.host.fire("model_loaded", on.model)
    assert [on.image() for _ in range(2)] == [["plan"], ["plan"]]
    assert on.counter("vae_captures") == 1 and on.counter("errors") == 0


@pytest.mark.parametrize("on", FLAGS[:1], indirect=True)
def test_it_is_the_webuis_again_if_that_is_wished(on: Running) -> None:
    for _ in range(3):
        on.image()
    on.host.opts.sfast_vae = False
    assert on.image() == ["original"] and accelerator_of(on.vae.decoder) is None
    on.host.opts.sfast_vae = True
    assert [on.image() for _ in range(3)] == [["original"], ["prepared"], ["plan"]]
    assert on.counter("errors") == 0


@pytest.mark.gpu
@pytest.mark.parametrize("blocks", [False, True], ids=["--medvram", "--lowvram"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_on_a_gpu(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, blocks: bool) -> None:
    monkeypatch.setattr(system_memory, "available_bytes", lambda: system_memory.RESERVE)
    monkeypatch.setattr(digest, "COLUMNS", 5)
    # a tiny model's times are those of its launches, and other workers share the GPU
    for module in (verify, plan_runner):
        monkeypatch.setattr(module, "too_slow", lambda *_: None)
    held = []
    with standin.running() as host:
        on = Running(host, None, blocks, dtype)
        try:
            for wanted in ("original", "prepared", "plan", "plan", "plan", "plan", "plan", "plan"):
                assert on.image(from_image=True) == [wanted] * 2
                assert not any(p.is_cuda for p in on.vae.parameters())
                held.append(torch.cuda.memory_allocated())
            on.vae.load_state_dict(vaes.make_vae(3).state_dict())
            host.fire("model_loaded", on.model)
            assert on.image(3, from_image=True) == ["plan"] * 2
            assert on.counter("errors") == 0 and on.counter("weights_put_back") > 0
            # what stays is the workspaces of cuBLAS, which alone are larger than both models
            assert held[-1] == held[-2] == held[-3]
            on.check_that_plans_hold_nothing()
        finally:
            a1111.A1111Session.stop()
        assert host.errors == []
