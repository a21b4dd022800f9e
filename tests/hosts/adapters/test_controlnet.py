"""A forward over the UNet's that runs its blocks, as sd-webui-controlnet lays it; the real one: tests/hosts/live."""

from __future__ import annotations

import functools
import sys
from types import MethodType, ModuleType, SimpleNamespace

import pytest
import torch

pytest.importorskip("ldm.modules.diffusionmodules.openaimodel", reason="needs stable-diffusion-sdkit without its pins")
from ldm.modules.diffusionmodules.util import timestep_embedding

from hosts.adapters.test_a1111 import count, host, same, started, status, unet_of  # noqa: F401
from hosts.standins import a1111 as standin
from sfast_ext.hosts.a1111 import controlnet


class Unit:
    """One unit: a network of the UNet's own kind beside it, and how much of it is added."""

    def __init__(self, seed: int, weight: float) -> None:
        self.control_model = SimpleNamespace(control_model=standin.make_unet(seed))
        self.control_model_type = SimpleNamespace(is_controlnet=True)
        self.seed, self.weight = seed, weight

    def untouched(self) -> Unit:
        """The same again."""
        return Unit(self.seed, self.weight)


class Hook:
    """What the extension makes for each generation, by the names that it has there."""

    def __init__(self, *units: Unit, lowvram: bool = False) -> None:
        self.control_params, self.lowvram = units, lowvram

    def hook(self, model):
        outer = self

        def forward(self, x, timesteps=None, context=None):
            emb = self.time_embed(timestep_embedding(timesteps, self.model_channels, repeat_only=False))
            added = sum(u.weight * u.control_model.control_model(x, timesteps, context) for u in outer.control_params)
            h, hs = x, []
            for module in self.input_blocks:
                h = module(h, emb, context)
                hs.append(h)
            h = self.middle_block(h, emb, context) + added.mean()
            for module in self.output_blocks:
                h = module(torch.cat([h, hs.pop()], dim=1), emb, context)
            return self.out(h)

        forward.__module__ = "scripts.hook"
        self.original, self.model = vars(model).get("forward"), model
        model.forward = MethodType(forward, model)

    def restore(self):
        if self.original is not None:
            self.model.forward = self.original
        else:
            del self.model.forward


def hooked(host, *units, **options):  # noqa: F811
    hook = Hook(*units, lowvram=options.pop("lowvram", False))
    hook.hook(unet_of(host))
    try:
        return host.generate(**options)
    finally:
        hook.restore()


def reference(*units, seed=1):
    return _reference(tuple((unit.seed, unit.weight) for unit in units), seed)


@functools.lru_cache(maxsize=None)
def _reference(units, seed):
    with standin.running() as other:
        other.load(seed)
        return hooked(other, *[Unit(*unit) for unit in units])


@pytest.fixture
def units():
    return Unit(5, 0.5), Unit(6, 1.0)


@pytest.fixture(autouse=True)
def cache(proportions, host, units, monkeypatch):  # noqa: F811
    """The models that the extension keeps loaded."""
    scripts = ModuleType("modules.scripts")
    script = SimpleNamespace(model_cache={i: SimpleNamespace(model=u.control_model) for i, u in enumerate(units)})
    scripts.scripts_data = [SimpleNamespace(script_class=object), SimpleNamespace(script_class=script)]
    monkeypatch.setitem(sys.modules, "modules.scripts", scripts)
    return script.model_cache


def accelerators(name):
    return [a for a in status()["accelerators"] if a["name"] == name]


def test_blocks_and_the_networks_beside_run_on_plans(host, units):  # noqa: F811
    started(host)
    assert same(hooked(host, *units), reference(*units))
    before, captures = count("plans run"), count("captures")
    assert same(hooked(host, *units), reference(*units))
    (unet,) = accelerators("unet")
    assert all(part["plans"] == 1 for part in unet["parts"]) and len(unet["parts"]) > 4
    assert [len(a["plans"]) for a in accelerators("controlnet")] == [1, 1]
    assert count("plans run") == before + 3 * (len(unet["parts"]) + 2) and count("captures") == captures


@pytest.mark.long
def test_other_weights_of_units_and_of_the_model_need_no_new_plans(host, units):  # noqa: F811
    started(host)
    hooked(host, *units)
    captures = count("captures")
    units[0].weight = 2.0
    assert same(hooked(host, *units), reference(*units))
    host.lora(strong=1.0)
    with standin.running() as other:
        other.load(1)
        other.lora(strong=1.0)
        expected = hooked(other, *[unit.untouched() for unit in units])
    assert same(hooked(host, *units), expected)
    host.lora()
    host.switch(2)
    assert same(hooked(host, *units), reference(*units, seed=2))
    assert count("captures") == captures


def test_with_and_without_it_in_turns(host, units):  # noqa: F811
    unet = started(host)
    with standin.running() as other:
        other.load(1)
        plain = other.generate()
    for _ in range(2):
        assert same(host.generate(), plain)
        assert same(hooked(host, *units), reference(*units))
    captures = count("captures")
    for _ in range(2):
        assert same(host.generate(), plain)
        assert same(hooked(host, units[0]), reference(units[0]))
    assert count("captures") == captures and unet.forward is not None


def test_under_low_vram_the_networks_beside_run_as_they_did(host, units):  # noqa: F811
    started(host)
    assert same(hooked(host, *units, lowvram=True), reference(*units))
    assert accelerators("controlnet") == [] and count("captures") > 4
    assert all("forward" not in vars(u.control_model.control_model) for u in units)


def test_networks_that_the_extension_let_go_of_are_given_back(host, units, cache):  # noqa: F811
    started(host)
    hooked(host, *units)
    assert controlnet.cached_networks(unet_of(host)) == [unit.control_model.control_model for unit in units]
    host.generate()
    assert len(accelerators("controlnet")) == 2
    cache.clear()
    host.generate()
    assert accelerators("controlnet") == []
    assert all("forward" not in vars(u.control_model.control_model) for u in units)


@pytest.mark.long
def test_what_it_notes_on_modules_makes_no_new_plans(host, units):  # noqa: F811
    unet = started(host)
    image = host.generate()
    hooked(host, *units)
    captures = count("captures")
    unet.is_in_high_res_fix = False
    for module in unet.modules():
        module.ipadapter_hacks = []
    assert same(host.generate(), image) and count("captures") == captures
    assert same(hooked(host, *units), reference(*units)) and count("captures") == captures
