"""Previews by TAESD: those of an untouched twin, in the threads of requests while steps are made."""

from __future__ import annotations

import importlib
import math
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("ldm.modules.diffusionmodules.model", reason="needs stable-diffusion-sdkit without its pins")
from benchmarks import image_networks
from sfast_ext import accelerator_of
from sfast_ext.hosts import previews

LATENT = torch.randn((1, 4, 8, 8), generator=torch.Generator().manual_seed(3))


class Running:
    """A host with the extension."""

    def __init__(self, host: Any, adapter: Any) -> None:
        self.host, self.adapter = host, adapter
        adapter.start("test")
        host.load(1)
        self.twin = image_networks.preview_decoder(8)

    @property
    def session(self) -> Any:
        return next(kind.running for kind in self.adapter.SESSIONS if kind.running is not None)

    @property
    def decoder(self) -> Any:
        return sys.modules["modules.sd_vae_taesd"].loaded["taesd"]

    def count(self, name: str) -> int:
        return self.session.report.counter(name)

    def preview(self, latent: torch.Tensor = LATENT) -> str:
        """Decodes one as the host does, and compares. What it was: "original", "prepared", "plan"."""
        names = {"preview_captures": "prepared", "preview_eager_runs": "plan"}
        before = {name: self.count(name) for name in names}
        found = sys.modules["modules.sd_samplers_common"].samples_to_images_tensor(latent)
        with torch.no_grad():
            expected = self.twin(latent) * 2 - 1
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        assert not found.requires_grad
        return next((what for name, what in names.items() if self.count(name) > before[name]), "original")


def running(name: str) -> Iterator[Running]:
    standin = importlib.import_module(f"hosts.standins.{name}")
    adapter = importlib.import_module(f"sfast_ext.hosts.{name}.adapter")
    with standin.running(sfast_allow_cpu=True) as host:
        on = Running(host, adapter)
        yield on
        for kind in adapter.SESSIONS:
            kind.stop()
        assert host.errors == []
        decoder = sys.modules["modules.sd_vae_taesd"].loaded.get("taesd")
        assert decoder is None or (accelerator_of(decoder) is None and "forward" not in vars(decoder))


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans are made at the second call of their kind: a tiny network's calls never cost as much as a plan."""
    monkeypatch.setattr(previews, "GAIN", math.inf)


@pytest.fixture
def on() -> Iterator[Running]:
    yield from running("a1111")


@pytest.fixture
def on_forge() -> Iterator[Running]:
    yield from running("forge")


def test_previews_are_decoded_by_a_plan_though_the_host_records_gradients(on, at_once):
    with torch.enable_grad():
        assert [on.preview() for _ in range(4)] == ["original", "prepared", "plan", "plan"]
        assert torch.is_grad_enabled()
    assert sys.modules["modules.sd_samplers_common"].recorded == [False] * 4
    status = next(each for each in on.session.status()["accelerators"] if each["name"] == "preview")
    assert status["plans"][0]["label"] == "preview, 64x64" and status["steps"] is False
    assert on.count("captures") == 0


def test_a_forge_decodes_without_gradients_itself(on_forge, at_once):
    with torch.inference_mode():
        assert [on_forge.preview() for _ in range(3)] == ["original", "prepared", "plan"]


def test_a_latent_that_takes_gradients_keeps_them(on, at_once):
    with torch.enable_grad():
        sys.modules["modules.sd_samplers_common"].samples_to_images_tensor(LATENT.clone().requires_grad_(True))
    assert sys.modules["modules.sd_samplers_common"].recorded == [True]


@pytest.mark.long(but=[0])
@pytest.mark.parametrize("setting", ["sfast_enabled", "sfast_vae"])
def test_it_is_off_with_the_setting_from_the_next_image_on(on, at_once, setting):
    with torch.enable_grad():
        for _ in range(3):
            on.preview()
        on.host.opts.data[setting] = False
        on.host.request()
        assert on.preview() == "original" and accelerator_of(on.decoder) is None
        on.host.opts.data[setting] = True
        on.host.request()
        assert [on.preview() for _ in range(3)] == ["original", "prepared", "plan"]


def test_another_size_and_a_batch(on, at_once):
    wide = torch.randn((1, 4, 8, 12), generator=torch.Generator().manual_seed(4))
    with torch.enable_grad():
        for _ in range(3):
            on.preview()
        on.host.request()
        assert [on.preview(wide) for _ in range(3)][-1] == "plan"
        assert on.preview() == "plan"


def test_previews_that_cost_little_get_no_plan(on):
    assert [on.preview() for _ in range(6)] == ["original"] * 6


def test_a_decoder_of_another_kind_is_left_alone(on, at_once):
    taesd = sys.modules["modules.sd_vae_taesd"]
    taesd.loaded["taesd"] = on.twin = torch.nn.Sequential(torch.nn.Conv2d(4, 4, 1), torch.nn.GroupNorm(2, 4)).eval()
    with torch.enable_grad():
        assert [on.preview() for _ in range(3)] == ["original"] * 3
    assert accelerator_of(on.decoder) is None


def test_no_decoder_at_all(on, at_once, monkeypatch):
    taesd = sys.modules["modules.sd_vae_taesd"]
    taesd.loaded["taesd"] = None
    assert taesd.decoder_model() is None
    del taesd.loaded["taesd"]


def test_many_threads_ask_for_previews_while_steps_are_made(on, at_once):
    wrong: list[BaseException] = []

    def ask() -> None:
        try:
            with torch.enable_grad():
                for _ in range(8):
                    on.preview()
        except BaseException as exc:
            wrong.append(exc)

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for each in threads:
        each.start()
    for _ in range(3):
        on.host.generate()
    for each in threads:
        each.join()
    assert not wrong and on.count("errors") == 0
    on.host.request()
    with torch.enable_grad():
        assert [on.preview() for _ in range(3)][-1] == "plan"
