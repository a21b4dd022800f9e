"""The VAE and ControlNets of all programs called Forge, against stand-ins."""

from __future__ import annotations

import functools
import gc
import uuid
import weakref
from typing import Any

import pytest
import torch

pytest.importorskip("ldm.modules.diffusionmodules.openaimodel", reason="needs stable-diffusion-sdkit without its pins")
from pretended_card import GPU, pretended_card, small_reserves

from hosts.adapters.test_forge import same
from hosts.adapters.test_forge_programs import PROGRAMS, Running, each, on, reference
from hosts.standins import forge_secondary as secondary
from sfast_ext import accelerator_of
from sfast_ext.hosts import vae
from sfast_ext.hosts.forge import adapter

__all__ = ["on"]
pytestmark = pytest.mark.usefixtures("proportions")
# two are enough for what the extension does alike in all
one_of_a_kind = pytest.mark.parametrize("on", ["reForge", "Forge Classic"], indirect=True)


@pytest.fixture(autouse=True)
def plans_of_vaes_at_once(monkeypatch):
    monkeypatch.setattr(vae, "GAIN", float("inf"))


def units(*strengths: float, seed: int = 5) -> list[secondary.ControlNet]:
    """Units of one image, which share a network or have others."""
    return [secondary.ControlNet(secondary.network(seed + i), strength) for i, strength in enumerate(strengths)]


@functools.lru_cache(maxsize=None)
def controlled(name: str, *strengths: float) -> torch.Tensor:
    """The image as the WebUI makes it without us."""
    with PROGRAMS[name][0].running() as other:
        other.load(1)
        secondary.control(other, *units(*strengths))
        return other.generate()


def accelerators(found: Running, name: str) -> list[dict[str, Any]]:
    return [each for each in found.status()["accelerators"] if each["name"] == name]


@pytest.mark.long(but=[2, 3])
@each
def test_images_with_controlnets_are_those_without_us_and_plans_of_the_networks_ran(on):
    networks = units(1.0, 0.4)
    for chosen, strengths in ((networks[:1], (1.0,)), (networks, (1.0, 0.4)), ([], ()), (networks[:1], (1.0,))):
        secondary.control(on.host, *chosen)
        assert same(on.host.generate(), controlled(on.name, *strengths) if chosen else reference(on.name))
    assert not same(controlled(on.name, 1.0), reference(on.name))
    assert not same(controlled(on.name, 1.0, 0.4), controlled(on.name, 1.0))
    found = accelerators(on, "controlnet")
    assert len(found) == 2 and all(each["plans"] for each in found)
    # named by the size of the latent, and not by the image that the network gets
    named = accelerator_of(networks[0].control_model).hooks.words
    assert named([(1, 3, 64, 64), (2, 4, 8, 8), (2,), (2, 7, 16)]).startswith("64x64")
    # one of the UNet, and one of it with residuals; one of each network
    assert on.count("captures") == 4


NOTED = {
    "model_loaded_weight_memory": (0, 2**30, 5),
    "lowvram_patch_counter": (0, 1, 7),
    "model_offload_buffer_memory": (0, 2**20, 3),
    "current_weight_patches_uuid": (None, uuid.UUID(int=1), uuid.UUID(int=2)),
}


@pytest.mark.long(but=[0])
@pytest.mark.parametrize("on", ["Forge Neo", "reForge"], indirect=True)
def test_what_a_patcher_notes_on_a_network_that_it_loads_costs_no_plan(on):
    (unit,) = units(1.0)
    for name, values in NOTED.items():
        for value in values:
            setattr(unit.control_model, name, value)
            secondary.control(on.host, unit)
            assert same(on.host.generate(), controlled(on.name, 1.0))
        (found,) = accelerators(on, "controlnet")
        assert len(found["plans"]) == 1 and on.status()["reasons"] == {}, name


@pytest.mark.parametrize("on", ["Forge Neo", "reForge"], indirect=True)
def test_a_network_that_is_loaded_in_parts_is_bypassed_until_it_is_loaded_whole(on):
    (unit,) = units(1.0)
    calls = []
    for in_parts in (False, True, True, False):
        unit.control_model.model_lowvram = in_parts
        secondary.control(on.host, unit)
        assert same(on.host.generate(), controlled(on.name, 1.0))
        calls.append(sum(n for reason, n in on.status()["reasons_since_start"].items() if "keeps a part" in reason))
    assert calls[0] == 0 < calls[1] < calls[2] == calls[3], on.status()["reasons_since_start"]


@each
def test_a_network_that_runs_once_for_an_image_is_left_alone(on):
    network = secondary.network(5)
    unit = secondary.T2IAdapter(network)
    secondary.control(on.host, unit)
    assert same(on.host.generate(), controlled(on.name, 1.0))
    assert accelerators(on, "controlnet") == [] and accelerator_of(network) is None


@pytest.mark.long(but=[1])
@one_of_a_kind
def test_networks_that_the_webui_has_dropped_are_not_held(on):
    on.host.opts.data["control_net_model_cache_size"] = 2
    dropped = []
    for seed in range(3):
        (unit,) = units(1.0, seed=20 + seed)
        dropped.append(weakref.ref(unit.control_model))
        secondary.control(on.host, unit)
        on.host.generate()
        del unit
    secondary.control(on.host)
    on.host.generate()
    gc.collect()
    assert [each() is None for each in dropped] == [True, False, False]
    on.session.stop()
    gc.collect()
    assert all(each() is None for each in dropped)


@each
def test_a_network_whose_weights_are_cast_is_bypassed_and_the_unet_is_not(on):
    (unit,) = units(1.0)
    unit.control_model.zero_convs[0].to(torch.float64)
    unit.control_model.zero_convs[0].register_forward_pre_hook(lambda m, args: (args[0].double(),))
    secondary.control(on.host, unit)
    before = on.count("plans run")
    on.host.generate()
    assert on.count("plans run") > before
    assert accelerators(on, "controlnet")[0]["plans"] == []
    assert any("quantised or stored in" in reason for reason in on.status()["reasons"])


@functools.lru_cache(maxsize=None)
def images(name: str, seed: int = 1) -> tuple[torch.Tensor, ...]:
    """What the WebUI's VAE makes by itself."""
    with PROGRAMS[name][0].running() as other:
        other.load(seed)
        encode, decode = secondary.encode, secondary.decode
        return encode(other), decode(other), decode(other, 12), encode(other, 24)


def made(host: Any) -> tuple[torch.Tensor, ...]:
    return secondary.encode(host), secondary.decode(host), secondary.decode(host, 12), secondary.encode(host, 24)


@pytest.mark.long(but=[0, 1])
@each
def test_the_vae_s_parts_run_plans_and_give_what_the_webui_s_own_give(on):
    for _ in range(3):
        for found, expected in zip(made(on.host), images(on.name)):
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    for part in ("VAE decoder", "VAE encoder"):
        (found,) = accelerators(on, part)
        assert len(found["plans"]) == 2 and found["idle"] is None, found
    on.host.load(2)
    for _ in range(2):
        for found, expected in zip(made(on.host), images(on.name, 2)):
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert not same(images(on.name, 2)[1], images(on.name)[1])


MEMORY = """
signal_empty_cache = told = False

def soft_empty_cache():
    global signal_empty_cache, told
    signal_empty_cache = False
    told = told or False
"""


class Careful(torch.nn.Conv2d):
    """Has the allocator's cache emptied if memory runs out, as the attention of Forge's VAE does."""

    def forward(self, x):
        from backend import memory_management  # type: ignore[import-not-found]

        try:
            return super().forward(x)
        except torch.cuda.OutOfMemoryError:
            memory_management.soft_empty_cache()
            return super().forward(x)


@pytest.mark.long(but=[0])
@pytest.mark.parametrize("on", ["Forge Neo", "Forge"], indirect=True)
def test_what_forge_notes_of_the_allocator_delays_no_plan_of_the_vae_and_another_global_does(on):
    memory = on.host.memory
    exec(MEMORY, vars(memory))
    on.host.model_data.sd_model.forge_objects.vae.first_stage_model.decoder.conv_out.__class__ = Careful
    plans = []
    for name in ("signal_empty_cache", "told"):
        for value in (True, False, True):
            setattr(memory, name, value)
            torch.testing.assert_close(secondary.decode(on.host), images(on.name)[1], rtol=1e-4, atol=1e-4)
            on.host.generate()
            plans.append(on.status()["counters"].get("vae_captures", 0))
    # the first with the second image; of another `told`, with its second image
    assert plans == [0, 1, 1, 1, 1, 2], plans


@one_of_a_kind
def test_without_the_setting_the_vae_is_the_webui_s_own_to_the_last_bit(on):
    on.host.opts.data["sfast_vae"] = False
    for _ in range(3):
        assert all(torch.equal(found, expected) for found, expected in zip(made(on.host), images(on.name)))
    assert accelerators(on, "VAE decoder") == []
    on.host.opts.data["sfast_vae"] = True
    made(on.host), made(on.host)
    assert accelerators(on, "VAE decoder")[0]["plans"]


@pytest.mark.long(but=[1])
@one_of_a_kind
def test_a_vae_in_another_type_gets_plans_of_that_type(on):
    first = on.host.model_data.sd_model.forge_objects.vae.first_stage_model
    made(on.host), made(on.host)
    first.double()
    latent = torch.randn((1, 4, 8, 8), dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    expected = None
    for _ in range(3):
        on.host.fire("model_loaded", on.host.model_data.sd_model)
        with torch.inference_mode():
            found = first.decode(latent)
        expected = found if expected is None else expected
        torch.testing.assert_close(found, expected)


@pytest.mark.long(but=[0])
@one_of_a_kind
def test_what_the_vae_and_controlnets_hold_on_a_gpu_is_freed_for_what_forge_loads(on, monkeypatch):
    name = on.name
    expected = controlled(name, 1.0), images(name)[1]
    size = sum(p.nbytes for p in on.host.unet.parameters())
    on.session.stop()
    small_reserves(monkeypatch, size)
    running = on.standin.running(GPU, sfast_triton=False)
    with running as host, pretended_card(monkeypatch, int(4 * size)) as card:
        adapter.start("test")
        host.load(1)
        first = host.model_data.sd_model.forge_objects.vae.first_stage_model
        (unit,) = units(1.0)
        for _ in range(2):
            unit.control_model.to(GPU)
            secondary.control(host, unit)
            torch.testing.assert_close(host.generate().to("cpu"), expected[0], rtol=1e-3, atol=1e-4)
            first.to(GPU)
            for _ in range(3):
                torch.testing.assert_close(secondary.decode(host), expected[1], rtol=1e-3, atol=1e-4)
            # all leave the GPU for what needs nearly all of it
            first.to("cpu"), unit.control_model.to("cpu")
            host.memory.unload_all_models()
            host.memory.free_memory(4 * size, GPU)
            assert card.used < size // 20
        assert not card.faults and not card.refused
        on.session.stop()
        assert host.errors == []
