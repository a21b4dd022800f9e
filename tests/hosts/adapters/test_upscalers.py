"""Upscalers of convolutions: images are those of an untouched twin, and no plan is made that is not earned back."""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("ldm.modules.diffusionmodules.model", reason="needs stable-diffusion-sdkit without its pins")
from benchmarks import image_networks
from sfast_ext import accelerator_of
from sfast_ext.hosts import convolution_networks, upscalers
from sfast_ext.plans import payback
from sfast_ext.tools.lib import models

HOSTS = ["a1111", "forge"]


class Running:
    """A host with the extension, upscaling with one network, and an untouched twin of it."""

    def __init__(self, host: Any, adapter: Any) -> None:
        self.host, self.adapter = host, adapter
        adapter.start("test")
        host.load(1)
        self.network = image_networks.esrgan(1, 8, 8)
        self.twin = models.copied(self.network)

    @property
    def session(self) -> Any:
        return next(kind.running for kind in self.adapter.SESSIONS if kind.running is not None)

    def count(self, name: str) -> int:
        return self.session.report.counter(name)

    def upscale(self, width: int = 48, height: int = 48, tile: int = 24, seed: int = 0) -> str:
        """Upscales an image as the host does, and compares. How many tiles each way: "original", "plan"."""
        image = torch.rand((1, 3, height, width), generator=torch.Generator().manual_seed(seed))
        before = self.count("upscaler_eager_runs")
        utils = sys.modules["modules.upscaler_utils"]
        # as spandrel gives it
        descriptor = type("Descriptor", (), {"model": self.network, "__call__": lambda self, x: self.model(x)})()
        sys.modules["modules.upscaler"].Upscaler().upscale(image, 1)
        found = utils.upscale_with_model(descriptor, image, tile_size=tile)
        expected = utils.upscale_with_model(SimpleTwin(self.twin), image, tile_size=tile)
        for one, other in zip(found, expected):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
        ran = self.count("upscaler_eager_runs") - before
        return f"{len(found) - ran} original, {ran} plan"


class SimpleTwin:
    """Calls the twin past the wrapped functions' notice: its network is no module of theirs."""

    model = None

    def __init__(self, network: nn.Module) -> None:
        self._network = network

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._network(x)  # type: ignore[no-any-return]


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans are made at the second call of their kind: a tiny network's calls never cost as much as a plan."""
    monkeypatch.setattr(upscalers, "GAIN", math.inf)


@pytest.fixture(params=HOSTS)
def on(request: pytest.FixtureRequest) -> Iterator[Running]:
    standin = importlib.import_module(f"hosts.standins.{request.param}")
    adapter = importlib.import_module(f"sfast_ext.hosts.{request.param}.adapter")
    with standin.running(sfast_allow_cpu=True) as host:
        on = Running(host, adapter)
        yield on
        network = on.network
        for kind in adapter.SESSIONS:
            kind.stop()
        assert host.errors == []
        assert accelerator_of(network) is None and "forward" not in vars(network)


def test_the_tiles_of_an_image_are_upscaled_by_one_plan(on, at_once):
    assert on.upscale() == "2 original, 2 plan"
    assert on.upscale(seed=1) == "0 original, 4 plan"
    assert on.count("upscaler_captures") == 1 and on.count("captures") == 0
    status = next(each for each in on.session.status()["accelerators"] if each["name"] == "upscaler")
    assert status["plans"][0]["label"] == "upscaler, 24x24" and status["steps"] is False


def test_the_same_upscaler_loaded_anew_keeps_its_plan(on, at_once):
    on.upscale()
    for seed in (1, 2, 3):
        before = on.network
        on.network = image_networks.esrgan(1, 8, 8, seed=seed)
        on.twin = models.copied(on.network)
        assert on.upscale(seed=seed) == "0 original, 4 plan"
        assert accelerator_of(before) is None and "forward" not in vars(before)
    assert on.count("upscaler_captures") == 1


def test_another_upscaler_has_plans_of_its_kind_and_nothing_of_the_first_stays(on, at_once):
    on.upscale()
    first = on.network
    on.network = image_networks.esrgan(2, 8, 8)
    on.twin = models.copied(on.network)
    assert on.upscale() == "2 original, 2 plan"
    assert accelerator_of(first) is None


def test_one_plan_is_made_for_each_image_whatever_sizes_its_tiles_have(on, at_once):
    # the last tiles of a row are narrower: three sizes in this image
    assert on.upscale(60, 60, 24).endswith("plan")
    assert on.count("upscaler_captures") == 1
    on.upscale(60, 60, 24)
    assert on.count("upscaler_captures") == 2


@pytest.mark.long(but=[0])
@pytest.mark.parametrize("setting", ["sfast_enabled", "sfast_vae"])
def test_it_is_off_with_the_setting_and_on_again(on, at_once, setting):
    opts = getattr(on.host, "opts", None) or sys.modules["modules.shared"].opts
    on.upscale()
    opts.data[setting] = False
    assert on.upscale() == "4 original, 0 plan" and accelerator_of(on.network) is None
    opts.data[setting] = True
    on.upscale()
    assert on.upscale() == "0 original, 4 plan"


def test_its_sums_stay_in_full_precision_whatever_the_steps_have(on, at_once):
    opts = getattr(on.host, "opts", None) or sys.modules["modules.shared"].opts
    opts.data.update(sfast_faster_sums=True, sfast_eight_bits=True)
    on.upscale()
    config = accelerator_of(on.network).config
    assert not config.faster_sums and not config.eight_bits and not config.cuda_graphs
    assert config.rare_calls and config.max_plans == convolution_networks.MAX_PLANS


class Attention(nn.Module):
    """Of a network that does not consist of convolutions alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.query = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(8, 8)
        self.last = nn.Conv2d(8, 3, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return self.last(self.query(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2))


class Free(nn.Module):
    """A weight that belongs to no layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.scale = nn.Conv2d(3, 3, 3, padding=1), nn.Parameter(torch.ones(1, 3, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x) * self.scale


@pytest.mark.parametrize("make", [Attention, Free, lambda: nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)).eval()])
def test_another_kind_of_upscaler_is_left_alone(on, at_once, make):
    on.network = make().requires_grad_(False)
    on.twin = models.copied(on.network)
    assert on.upscale() == "4 original, 0 plan" == on.upscale()
    assert accelerator_of(on.network) is None and on.count("fallbacks") == 0


def test_a_large_one_is_left_alone(on, at_once, monkeypatch):
    monkeypatch.setattr(convolution_networks, "MAX_BYTES", 1000)
    assert on.upscale() == "4 original, 0 plan" == on.upscale()


def test_what_is_no_module_runs_as_it_did(on, at_once):
    utils = sys.modules["modules.upscaler_utils"]
    tiles = utils.upscale_with_model(lambda x: x.sum() * 0 + 3, torch.ones(1, 1, 2, 4), tile_size=2)
    assert [float(each) for each in tiles] == [3, 3]


def test_a_patch_by_somebody_else_is_bypassed_by_name_and_the_host_s_is_not(on, at_once, monkeypatch):
    on.upscale()

    def brighter(self: Any, x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    monkeypatch.setattr(image_networks.DenseBlock, "forward", brighter)
    assert on.upscale() == "4 original, 0 plan" == on.upscale()
    status = next(each for each in on.session.status()["accelerators"] if each["name"] == "upscaler")
    assert "brighter" in status["idle"]
    monkeypatch.undo()


def test_which_networks_are_known():
    layers = [nn.Conv2d(3, 8, 3, padding=1), nn.PReLU(8), nn.Conv2d(8, 12, 3, padding=1), nn.PixelShuffle(2)]
    assert convolution_networks.is_known(nn.Sequential(*layers))
    assert convolution_networks.is_known(image_networks.preview_decoder(8))
    assert not convolution_networks.is_known(nn.Sequential()) and not convolution_networks.is_known(nn.Linear(2, 2))
    assert not convolution_networks.is_known(nn.Sequential(nn.Conv3d(3, 3, 1)))


def test_it_is_lost_alone_in_a_host_without_it():
    standin = importlib.import_module("hosts.standins.a1111")
    adapter = importlib.import_module("sfast_ext.hosts.a1111.adapter")
    with standin.running(sfast_allow_cpu=True) as host:
        del sys.modules["modules.upscaler_utils"], sys.modules["modules"].upscaler_utils
        adapter.start("test")
        try:
            session = adapter.A1111Session.running
            assert any("upscalers are not accelerated" in line for line in session.lost())
            host.load(1)
            host.generate()
            assert session.report.counter("eager_runs") > 0
        finally:
            adapter.A1111Session.stop()


class Watch:
    """A clock that only work moves: a stopwatch of what ran since it was made."""

    now = 0.0

    def __init__(self, device: torch.device) -> None:
        self._began = self._ended = Watch.now

    def stop(self) -> None:
        self._ended = Watch.now

    def elapsed(self) -> float:
        return self._ended - self._began


def test_sizes_that_never_repeat_get_no_plan():
    calls = payback.RareCalls()
    for key in range(400):
        watch = Watch(torch.device("cpu"))
        Watch.now += 2000.0
        watch.stop()
        assert not calls.take(key, upscalers.GAIN)
        calls.ran(key, watch)  # type: ignore[arg-type]


def test_all_in_all_a_plan_costs_at_most_what_going_without_it_has_lost():
    for build in (300.0, 1500.0, 4000.0):
        for tile_ms in (5.0, 40.0, 300.0):
            for tiles in (1, 4, 9, 40, 400):
                calls, lost, paid = payback.RareCalls(), 0.0, 0.0
                calls.built(build)
                for _ in range(tiles):
                    if calls.take("tile", upscalers.GAIN):
                        paid += build
                        break
                    watch = Watch(torch.device("cpu"))
                    Watch.now += tile_ms
                    watch.stop()
                    calls.ran("tile", watch)  # type: ignore[arg-type]
                    lost += tile_ms * upscalers.GAIN
                assert paid == 0 or lost >= paid, (build, tile_ms, tiles)
