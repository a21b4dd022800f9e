"""Forge and reForge, and what all programs called Forge run in addition to the UNet, against stand-ins."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

pytest.importorskip("ldm.modules.diffusionmodules.openaimodel", reason="needs stable-diffusion-sdkit without its pins")
from pretended_card import GPU, pretended_card, small_reserves

from hosts.adapters.test_forge import INSIDE, same, tomesd_m
from hosts.standins import a1111, forge, forge_classic, forge_old, forge_secondary, reforge
from sfast_ext import accelerator_of
from sfast_ext.hosts.forge import adapter

PROGRAMS: dict[str, tuple[ModuleType, type[adapter.ForgeSession]]] = {
    "Forge": (forge_old, adapter.OldSession),
    "reForge": (reforge, adapter.ReforgeSession),
    "Forge Neo": (forge, adapter.ForgeSession),
    "Forge Classic": (forge_classic, adapter.ClassicSession),
}
NEW = ("Forge", "reForge")


class Running:
    """A WebUI with the extension, and what it told."""

    def __init__(self, name: str, host: Any) -> None:
        self.name, self.host = name, host
        self.standin, self.session = PROGRAMS[name]

    def status(self) -> dict[str, Any]:
        assert self.session.running is not None
        found = self.session.running.status()
        assert found["last_error"] is None, found["last_error"]
        return found

    def count(self, name: str) -> int:
        names = ("replays", "eager_runs") if name == "plans run" else (name,)
        return sum(self.status()["counters"].get(n, 0) for n in names)

    def bypassed(self, words: str, expected: torch.Tensor) -> None:
        before = self.count("plans run")
        assert same(self.host.generate(), expected)
        assert self.count("plans run") == before
        assert any(words in reason for reason in self.status()["reasons"]), self.status()["reasons"]

    def accelerated(self, expected: torch.Tensor) -> None:
        before = self.count("plans run")
        assert same(self.host.generate(), expected)
        assert self.count("plans run") > before


def reference(name: str, seed: int = 1, loras: tuple[tuple[str, float], ...] = (), **more: Any) -> torch.Tensor:
    """The image as the WebUI makes it without us."""
    return _reference(a1111.by_default, name, seed, loras, **more)


@functools.lru_cache(maxsize=None)
def _reference(levels: int, name: str, seed: int, loras: tuple[tuple[str, float], ...], **more: Any) -> torch.Tensor:
    with PROGRAMS[name][0].running() as other:
        other.load(seed)
        other.lora(**more, **dict(loras))
        return other.generate()


@pytest.fixture
def on(request: pytest.FixtureRequest) -> Iterator[Running]:
    standin, session = PROGRAMS[request.param]
    with standin.running(sfast_allow_cpu=True) as host:
        adapter.start("test")
        assert session.running is not None, request.param
        host.load(1)
        yield Running(request.param, host)
        session.stop()
        assert host.errors == []


both = pytest.mark.parametrize("on", NEW, indirect=True)
each = pytest.mark.parametrize("on", PROGRAMS, indirect=True)


@each
def test_the_program_is_known_by_what_it_has(on):
    found = on.status()["host"]
    assert found["name"] == on.name and found["remarks"] == []
    assert all(kind.running is None for kind in adapter.SESSIONS if kind is not on.session)


@pytest.mark.long(but=[1])
@both
def test_plans_are_kept_for_another_lora_and_another_checkpoint(on):
    on.accelerated(reference(on.name))
    for loras in ((("a", 1.0),), (("a", -0.5),), (), (("b", 0.5), ("a", 1.0)), (("a", 0.1),), (("b", 2.0),), ()):
        on.host.lora(**dict(loras))
        on.accelerated(reference(on.name, loras=loras))
    assert not same(reference(on.name, loras=(("a", 1.0),)), reference(on.name))
    on.host.load(2)
    on.accelerated(reference(on.name, 2))
    on.host.lora(a=1.0)
    on.accelerated(reference(on.name, 2, (("a", 1.0),)))
    on.host.load(1)
    on.accelerated(reference(on.name))
    assert on.count("captures") == 1 and on.status()["reasons"] == {}


@pytest.mark.parametrize("on", ["Forge"], indirect=True)
def test_lora_in_the_layers_is_never_stale(on):
    on.accelerated(reference(on.name))
    for loras in ((("a", 1.0),), (("a", 0.4),), (("a", 0.4), ("b", -0.6)), (("b", -0.6),)):
        on.host.lora(online=True, **dict(loras))
        on.bypassed("LoRA is computed inside the layers", reference(on.name, loras=loras, online=True))
    on.host.lora(a=1.0)
    on.accelerated(reference(on.name, loras=(("a", 1.0),)))
    on.host.lora(online=True, a=1.0)
    on.bypassed("LoRA is computed inside the layers", reference(on.name, loras=(("a", 1.0),)))
    on.host.lora()
    on.accelerated(reference(on.name))
    assert on.count("captures") == 1


@pytest.mark.parametrize("on", ["Forge"], indirect=True)
def test_another_lora_in_the_middle_of_a_pass_is_seen(on):
    """As a preview or a script that loads models between two steps."""
    steps = []

    def change(params: Any) -> None:
        steps.append(params)
        if len(steps) == 2:
            on.host.lora(online=True, a=1.0)
            on.host.model_data.sd_model.forge_objects.unet.refresh_loras()

    def played(host: Any) -> torch.Tensor:
        steps.clear()
        host.callbacks["cfg_denoiser"].append(change)
        try:
            return host.generate()
        finally:
            host.callbacks["cfg_denoiser"].remove(change)

    on.accelerated(reference(on.name))
    host = on.host
    with on.standin.running() as other:
        other.load(1)
        on.host = other
        expected = played(other)
        on.host = host
    assert not same(expected, reference(on.name))
    assert same(played(on.host), expected)
    assert any("LoRA is computed inside the layers" in reason for reason in on.status()["reasons"])


@both
def test_what_works_inside_the_unet_is_bypassed_with_its_name(on, monkeypatch):
    with on.standin.running() as other:
        other.load(1)
        other.option(patches=INSIDE)
        expected = other.generate()
    on.host.option(patches=INSIDE)
    on.bypassed("tomesd_m in adapters/test_forge.py works inside the UNet; turn it off", expected)
    monkeypatch.setattr(tomesd_m, "__module__", on.session.PROGRAM.token_merging)
    on.bypassed("token merging is on", expected)
    on.host.lora()
    on.accelerated(reference(on.name))


def stronger(weight: torch.Tensor) -> torch.Tensor:
    return 1.5 * weight


def halved(call: Any, *args: Any) -> torch.Tensor:
    return 0.5 * call(*args)


@pytest.mark.parametrize("on", ["reForge"], indirect=True)
def test_functions_around_the_unet_s_forward_are_bypassed_and_those_around_others_are_not(on):
    with on.standin.running() as other:
        other.load(1)
        other.option(wrappers={"diffusion_model": {"a": [halved]}})
        expected = other.generate()
    assert not same(expected, reference(on.name))
    on.host.option(wrappers={"diffusion_model": {"a": [halved]}})
    on.bypassed("halved in adapters/test_forge_programs.py works inside the UNet", expected)
    on.host.lora()
    on.host.option(wrappers={"outer_sample": {"a": [halved]}, "diffusion_model": {}}, callbacks={"on_load": [halved]})
    on.accelerated(reference(on.name))


UNKNOWN = {
    "function": {"attn_hook": tomesd_m},
    "functions by block": {"my_extension": {"input": [{3: tomesd_m}]}},
    "an object that can be called": {"my_extension": torch.nn.SiLU()},
}
KNOWN = {
    "number": {"my_extension": 3},
    "text": {"my_extension": "fast"},
    "tensor": {"my_extension": torch.ones(3)},
    "tensors": {"my_extension": {"a": [torch.ones(3)]}},
    "what ControlNets call": {"controlnet_model_function_wrapper": tomesd_m},
    "what ControlNets call, in a list": {"controlnet_conditioning_modifiers": [tomesd_m]},
}


@pytest.mark.parametrize("options", UNKNOWN.values(), ids=UNKNOWN)
@each
def test_a_function_among_options_that_nobody_knows_is_bypassed(on, options):
    on.host.option(**options)
    on.bypassed("works inside the UNet; turn it off", reference(on.name))


# each of them in two programs, each program has three
@pytest.mark.long(but=[0, 4, 10, 11])
@pytest.mark.parametrize(
    ("options", "on"),
    [(options, list(PROGRAMS)[(i + j) % 4]) for i, options in enumerate(KNOWN.values()) for j in (0, 2)],
    indirect=["on"],
)
def test_what_the_forward_cannot_read_does_not_stop_plans(on, options):
    on.host.option(**options)
    on.accelerated(reference(on.name))


def read_more(standin: Any) -> torch.nn.Module:
    """A UNet of a release to come, whose forward reads another option and another argument."""
    unet = standin.make_unet(1)
    base = type(unet)

    def forward(self, x, timesteps=None, context=None, y=None, control=None, transformer_options=None, **kwargs):
        weaker = transformer_options.get("weaker", 1.0) * kwargs.get("stronger", 1.0)
        return weaker * base.forward(self, x, timesteps, context, y, control, transformer_options, **kwargs)

    unet.__class__ = type(base.__name__, (base,), {"forward": forward, "__module__": base.__module__})
    return unet


@each
def test_an_option_that_the_unet_s_code_reads_is_bypassed(on):
    with on.standin.running() as other:
        other.load(1, unet=read_more(on.standin))
        other.option(weaker=0.5)
        expected = other.generate()
    assert not same(expected, reference(on.name))
    on.host.load(1, unet=read_more(on.standin))
    on.accelerated(reference(on.name))
    on.host.option(weaker=0.5)
    on.bypassed("weaker, an option that an extension has set, works inside the UNet", expected)


@each
def test_an_argument_that_the_unet_s_code_reads_is_one_of_the_plan(on):
    unet = read_more(on.standin)
    found = on.session.running._hooks_for(unet).arguments
    given = {"context": 1, "stronger": 2.0, "control_model": on, "transformer_options": {"sigmas": [1.0]}}
    assert found(("x",), given) == (("x",), {"context": 1, "stronger": 2.0, "transformer_options": {}})


@both
def test_weights_that_are_cast_or_come_in_parts_are_bypassed_while_they_do(on):
    on.accelerated(reference(on.name))
    on.host.kept = 0
    on.host.memory.unload_all_models()
    on.bypassed("Forge keeps a part of the UNet in system memory", reference(on.name))
    on.host.kept = -1
    on.host.memory.unload_all_models()
    on.accelerated(reference(on.name))
    layer = on.host.unet.time_embed[0]
    if on.name == "reForge":
        with on.standin.running() as other:
            other.load(1)
            # a layer loses what is in its lists when it is loaded
            other.generate()
            other.unet.time_embed[0].weight_function = [stronger]
            expected = other.generate()
        layer.weight_function = [stronger]
        on.bypassed("stronger in adapters/test_forge_programs.py works inside the UNet", expected)
        layer.weight_function = []
    mark = "parameters_manual_cast" if on.name == "Forge" else "ldm_patched_cast_weights"
    setattr(layer, mark, True)
    on.bypassed("the model is quantised or stored in", reference(on.name))
    setattr(layer, mark, False)
    on.accelerated(reference(on.name))
    assert on.count("captures") <= 2


@each
def test_a_compiled_unet_is_left_to_torch_compile(on):
    class OptimizedModule(torch.nn.Module):
        def __init__(self, module):
            super().__init__()
            self._orig_mod = module
            self.forward = module.forward

    holder = adapter.holder_of(on.host.model_data.sd_model)
    own = holder.diffusion_model
    holder.diffusion_model = OptimizedModule(own)
    on.bypassed("torch.compile perhaps", reference(on.name))
    assert accelerator_of(own) is None
    holder.diffusion_model = own
    on.accelerated(reference(on.name))


@pytest.mark.long(but=[0, 2])
@pytest.mark.usefixtures("proportions")
@both
@pytest.mark.parametrize(("room", "kept"), [(1.6, False), (4, True)])
def test_on_a_gpu_what_forge_moves_off_is_held_only_if_there_is_room(on, monkeypatch, room, kept):
    name = on.name
    on.session.stop()
    size = sum(p.nbytes for p in on.host.unet.parameters())
    small_reserves(monkeypatch, size)
    expected = {loras: reference(name, loras=loras, everywhere=True) for loras in ((), (("a", 1.0),))}
    running = on.standin.running(GPU, sfast_triton=False, sfast_vae=False)
    with running as host, pretended_card(monkeypatch, int(room * size)) as card:
        adapter.start("test")
        again = Running(name, host)
        host.load(1)
        for loras, image in (*expected.items(), ((), expected[()])):
            host.lora(everywhere=True, **dict(loras))
            torch.testing.assert_close(host.generate().to("cpu"), image, rtol=1e-3, atol=1e-4)
        # a text encoder as large as the UNet needs the room
        host.memory.free_memory(size, GPU)
        assert not card.holds(host.unet.out[2].weight)
        assert (card.used > 0.9 * size) == kept
        torch.testing.assert_close(host.generate().to("cpu"), expected[()], rtol=1e-3, atol=1e-4)
        assert not card.faults and not card.refused
        assert again.count("captures") == 1 and again.count("errors") == 0 and again.count("plans run") > 8
        on.session.stop()
        assert host.errors == []


@pytest.mark.long(but=[1, 3])
@pytest.mark.usefixtures("proportions")
@each
def test_switched_off_and_stopped_nothing_of_ours_is_left(on):
    on.host.generate()
    forge_secondary.control(on.host, forge_secondary.ControlNet(forge_secondary.network(5)))
    on.host.generate()
    forge_secondary.control(on.host)
    on.host.opts.data["sfast_enabled"] = False
    assert torch.equal(on.host.generate(), reference(on.name))
    on.session.stop()
    for registered in on.host.callbacks.values():
        registered.clear()
    assert torch.equal(on.host.generate(), reference(on.name))
    assert not hasattr(on.host.memory.free_memory, "__wrapped__")
    assert not hasattr(sys.modules["modules.processing"].process_images_inner, "__wrapped__")
    objects = on.host.model_data.sd_model.forge_objects
    modules = (*on.host.unet.modules(), *objects.vae.first_stage_model.modules())
    assert not any("forward" in vars(module) for module in modules)
