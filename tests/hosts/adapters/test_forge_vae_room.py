"""What Forge, Forge Neo and reForge free for a VAE: as much as a plan needs if one serves the call, else what
they estimate."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("ldm.modules.diffusionmodules.openaimodel", reason="needs stable-diffusion-sdkit without its pins")
from pretended_card import GPU, pretended_card

from hosts.standins import forge_neo_memory, forge_old_memory, reforge_memory
from hosts.standins import forge_secondary as secondary
from sfast_ext.accelerator import accelerator_of
from sfast_ext.hosts import gpu_room, vae, vae_memory
from sfast_ext.hosts.forge import adapter as forge

MB = 1 << 20
SIZE = 16
"""Of latents."""
FORGES = 2178 * SIZE * SIZE * 16
"""Bytes that Forge estimates for one image."""
TEXT = 4 * MB
"""A text encoder, which has no room next to that, nor next to what the original takes."""


class Running:
    """The host, whose VAE and text encoder are on a card.

    Args:
        kind: the class of its session.
    """

    def __init__(
        self, host: Any, kind: type[forge.ForgeSession], card: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.host, self.kind, self.card, self.asked = host, kind, card, list[float]()
        objects = host.model_data.sd_model.forge_objects
        self.first = objects.vae.first_stage_model.to(GPU)
        # what is moved for it is another module: the stand-in moves layers of Forge's kinds
        self.vae = objects.vae = secondary.VAE(self.first, host.patcher_of(1), GPU)
        free = host.memory.free_memory

        def counted(memory_required: float, *args: Any, **kwargs: Any) -> None:
            self.asked.append(memory_required)
            free(memory_required, *args, **kwargs)

        monkeypatch.setattr(host.memory, "free_memory", counted)
        host.fire("model_loaded", host.model_data.sd_model)
        host.memory.load_models_gpu([self.vae.patcher])
        self.load_text()

    def load_text(self) -> None:
        self.text = self.host.another(TEXT)
        self.asked.clear()

    @property
    def text_stays(self) -> bool:
        return any(each.model is self.text for each in self.host.current)

    @property
    def session(self) -> Any:
        return self.kind.running

    @torch.inference_mode()
    def decode(self, images: int = 1, size: int = SIZE) -> torch.Tensor:
        self.load_text()
        latent = torch.randn((images, 4, size, size), generator=torch.Generator().manual_seed(5))
        return self.vae.decode(latent.to(GPU)).to("cpu")

    @torch.inference_mode()
    def encode(self, size: int = 4 * SIZE) -> torch.Tensor:
        self.load_text()
        image = torch.rand((1, size, size, 3), generator=torch.Generator().manual_seed(5))
        return self.vae.encode(image.to(GPU)).to("cpu")

    def planned(self, part: str = "decoder") -> float:
        (plan,) = accelerator_of(getattr(self.first, part)).plans.values()
        return plan.peak_bytes + gpu_room.PLANS_WORKSPACE


PROGRAMS = {
    "Forge Neo": (forge_neo_memory, forge.ForgeSession),
    "Forge": (forge_old_memory, forge.OldSession),
    "reForge": (reforge_memory, forge.ReforgeSession),
}


@pytest.fixture(params=PROGRAMS)
def on(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
    standin, kind = PROGRAMS[request.param]
    monkeypatch.setattr(vae, "GAIN", math.inf)
    monkeypatch.setattr(gpu_room, "PLANS_WORKSPACE", MB // 4)
    with standin.running(GPU, sfast_triton=False) as host, pretended_card(monkeypatch, 23 * MB // 2) as card:
        forge.start("test")
        host.load(1)
        yield Running(host, kind, card, monkeypatch)
        assert not card.faults
        kind.stop()
        assert host.errors == []




def short(on: Running) -> None:
    """Forge frees what it estimates, reForge a second time without the VAE itself."""
    assert on.asked[0] == pytest.approx(FORGES, abs=9) and not on.text_stays
    assert len(on.asked) == 1 or on.host.AGAIN and on.asked[1:] == [FORGES]


@pytest.mark.long(but=[0])
def test_with_a_plan_other_models_stay(on: Running) -> None:
    expected = on.decode()
    short(on)
    on.decode()
    short(on)
    for _ in range(2):
        found = on.decode()
        assert on.asked == [pytest.approx(on.planned(), abs=9)] and on.text_stays
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
    assert on.vae.tiled == 0 and on.card.refused == 0


@pytest.mark.long(but=[1])
def test_images_that_are_encoded_as_well(on: Running) -> None:
    expected = [on.encode(), on.encode()][0]
    found = on.encode()
    assert on.asked == [pytest.approx(on.planned("encoder"), abs=9)] and on.text_stays
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.long(but=[2])
def test_what_no_plan_serves_gets_what_forge_estimates(on: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    on.decode(), on.decode(), on.decode()
    assert on.text_stays
    with monkeypatch.context() as patched:
        # of several images Forge makes as many at once as have room, whatever a plan needs
        patched.setattr(gpu_room, "planned_bytes", lambda module, args: float(MB))
        on.decode(2)
        assert on.asked[0] >= FORGES
    on.decode(size=SIZE - 4)
    assert on.asked[0] > on.planned()
    # two calls that are compared with the original
    plan = next(iter(accelerator_of(on.first.decoder).plans.values()))
    plan.compare_again = True
    on.decode()
    short(on)
    on.host.opts.data["sfast_vae"] = False
    on.host.fire("model_loaded", on.host.model_data.sd_model)
    on.decode()
    short(on)
    assert on.vae.tiled == 0


@pytest.mark.long(but=[0])
def test_the_number_holds_for_the_load_of_that_vae_alone(on: Running) -> None:
    on.decode(), on.decode(), on.decode()
    on.load_text()
    on.host.memory.load_models_gpu([on.vae.patcher], memory_required=FORGES)
    short(on)
    assert not on.session._vae_room.gave_way()


@pytest.mark.long(but=[1])
def test_if_the_original_runs_all_the_same_forge_frees_the_rest(
    on: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = [on.decode(), on.decode()][0]
    monkeypatch.setattr(gpu_room, "planned_bytes", lambda module, args: float(MB))
    accelerator = accelerator_of(on.first.decoder)
    for key in list(accelerator.plans):
        accelerator.drop_plan(key)
    accelerator.configure(accelerator.config)
    found = on.decode()
    assert on.card.refused and on.vae.tiled == 0 and not on.text_stays
    assert on.asked == [pytest.approx(MB, abs=9), FORGES]
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.long(but=[2])
def test_an_image_is_made_if_the_plan_cannot_be_asked(on: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> float:
        raise RuntimeError("a module that cannot be read")

    expected = [on.decode(), on.decode()][0]
    with monkeypatch.context() as patched:
        patched.setattr(on.session._vae_room, "_planned_bytes", fail)
        torch.testing.assert_close(on.decode(), expected, rtol=1e-3, atol=1e-4)
        short(on)
    on.decode()
    assert on.text_stays


@pytest.mark.long(but=[0])
def test_next_to_weights_in_8_bits_memory_is_left_to_other_programs(
    on: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[float, bool]] = []
    on.decode(), on.decode()
    monkeypatch.setattr(on.session._vae_room, "_make_room", lambda needed, in_one: made.append((needed, in_one)))
    on.decode()
    monkeypatch.setattr(gpu_room, "left_to_others", lambda needed: 7.0)
    on.decode()
    assert made == [(on.planned(), False), (on.planned() + 7, True)]


@pytest.mark.parametrize("tight", [True, False])
def test_the_original_leaves_memory_to_other_programs_too(
    on: Running, monkeypatch: pytest.MonkeyPatch, tight: bool
) -> None:
    made: list[tuple[float, bool]] = []
    model, widths = on.host.model_data.sd_model, vae_memory.widths_of(on.first)
    monkeypatch.setattr(gpu_room, "is_tight", lambda: tight)
    on.host.fire("model_loaded", model)
    monkeypatch.setattr(on.session._memory, "make_room", lambda needed, in_one=False: made.append((needed, in_one)))
    on.decode()
    # Forge's function asks for what it needs; the VAE itself for nothing more
    assert not any(in_one for _, in_one in made)
    made.clear()
    monkeypatch.setattr(gpu_room, "left_to_others", lambda needed: 7.0)
    on.decode()
    asked = gpu_room.decoder_bytes(widths, torch.empty(1, 4, SIZE, SIZE)) + 7
    assert ((asked, True) in made) == tight
    made.clear()
    on.kind.stop()
    on.decode()
    assert not any(in_one for _, in_one in made)
    forge.start("test")


@pytest.mark.long(but=[1])
def test_a_preview_in_another_thread_takes_nothing_away(on: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    room, alone, seen = on.session._vae_room, on.vae.patcher, list[bool]()
    monkeypatch.setattr(room, "_planned_bytes", lambda *_: float(MB))

    def preview() -> None:
        room._decode(lambda vae, samples: seen.append(room.gave_way()), on.vae, torch.zeros(1, 4, SIZE, SIZE))

    def meanwhile() -> None:
        thread = threading.Thread(target=preview)
        thread.start()
        thread.join()

    def decode(vae: Any, samples: Any) -> None:
        meanwhile()
        on.host.memory.load_models_gpu([alone], memory_required=FORGES)
        meanwhile()
        seen.append(room.gave_way())

    on.load_text()
    room._decode(decode, on.vae, torch.zeros(1, 4, SIZE, SIZE))
    assert seen == [False, False, True]
    assert on.asked == [pytest.approx(MB, abs=9), FORGES]


@pytest.mark.long(but=[2])
def test_a_card_that_is_full_when_the_plan_is_asked(on: Running) -> None:
    on.decode(), on.decode(), on.decode()
    held = torch.empty(int(torch.cuda.mem_get_info()[0]), dtype=torch.uint8, device=GPU)
    assert on.session._vae_room._planned_bytes(on.vae, "decoder", torch.zeros(1, 4, SIZE, SIZE)) is None
    del held
    assert on.session._vae_room._planned_bytes(on.vae, "decoder", torch.zeros(1, 4, SIZE, SIZE)) == on.planned()
