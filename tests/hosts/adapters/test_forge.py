"""The adapter of Forge Neo against a stand-in that raises the WebUI's events in its order."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import kitchen_standin
import pytest
import torch

pytest.importorskip("ldm.modules.diffusionmodules.openaimodel", reason="needs stable-diffusion-sdkit without its pins")
from hosts.standins import a1111
from hosts.standins import forge as standin
from sfast_ext import accelerator_of
from sfast_ext.hosts import system_memory
from sfast_ext.hosts.forge import adapter as forge

# relative L2, fp32 against fp32: only the order of additions differs, over three steps of a net with random weights
TOLERANCE = 1e-3


@pytest.fixture
def host() -> Iterator[Any]:
    with standin.running(sfast_allow_cpu=True) as host:
        yield host
        forge.ForgeSession.stop()
        # what a callback raises, the WebUI swallows: here it must not
        assert host.errors == []


@pytest.fixture
def started(host: Any) -> Any:
    forge.start("test")
    host.load(1)
    return host


def status() -> dict[str, Any]:
    assert forge.ForgeSession.running is not None
    found = forge.ForgeSession.running.status()
    assert found["last_error"] is None, found["last_error"]
    return found


def count(name: str) -> int:
    names = ("replays", "eager_runs") if name == "plans run" else (name,)
    return sum(status()["counters"].get(n, 0) for n in names)


def same(image: torch.Tensor, expected: torch.Tensor) -> bool:
    return float((image - expected).norm() / expected.norm()) < TOLERANCE


def reference(seed: int = 1, channels: int = 32, loras: tuple[tuple[str, float], ...] = (), **options: Any) -> Any:
    """The image as the WebUI makes it without us."""
    return _reference(a1111.by_default, seed, channels, loras, **options)


@functools.lru_cache(maxsize=None)
def _reference(
    levels: int, seed: int, channels: int, loras: tuple[tuple[str, float], ...], **options: Any
) -> torch.Tensor:
    with standin.running() as other:
        other.load(seed, channels)
        other.lora(**dict(loras))
        return other.generate(**options)


def bypassed(host: Any, words: str, expected: torch.Tensor) -> None:
    """Check that an image is the WebUI's own, made by no plan, and that `words` say why."""
    before = count("plans run")
    assert same(host.generate(), expected)
    assert count("plans run") == before
    assert any(words in reason for reason in status()["reasons"]), status()["reasons"]


def control() -> dict[str, list[torch.Tensor]]:
    """What a ControlNet adds: residuals of the encoder and the middle; lists that the UNet's forward empties."""
    generator = torch.Generator().manual_seed(3)

    def made(channels: int, size: int) -> torch.Tensor:
        return torch.randn((2, channels, size, size), generator=generator)

    return {"input": [], "middle": [made(64, 4)], "output": [made(32, 8), made(32, 8), made(32, 4), made(64, 4)]}


def test_detects_the_host_and_nothing_else(host):
    assert forge.detect()
    host.callbacks.clear()


def test_does_not_detect_what_is_not_there():
    assert not forge.detect()


@pytest.mark.parametrize("release", ["2.26", "2.26.1", "2.31", None])
def test_any_release_is_served_and_the_report_says_which_are_not_tested(host, capsys, release):
    host.version.release = release
    forge.start("test")
    (line,) = capsys.readouterr().out.splitlines()
    assert "does nothing" not in line
    host.load(1)
    torch.testing.assert_close(host.generate(), reference(), rtol=1e-3, atol=1e-4)
    assert accelerator_of(host.unet) is not None
    told = status()["host"]
    assert told["version"] == f"neo {release}" if release else "neo"
    tested = str(release).startswith("2.26")
    assert told["remarks"] == ([] if tested else [f"Forge Neo {told['version']} was not tested by us"])


def test_a_program_of_another_name_is_served_if_all_that_is_relied_on_is_there(host, capsys):
    host.version.version, host.version.release = "neon", "1"
    forge.start("test")
    assert "does nothing" not in capsys.readouterr().out
    host.load(1)
    torch.testing.assert_close(host.generate(), reference(), rtol=1e-3, atol=1e-4)
    assert status()["host"]["remarks"] == [
        "this WebUI is not known; it is served as Forge Neo, and was not tested by us"
    ]


def test_a_generation_runs_plans_and_gives_the_same_image(host, capsys):
    forge.start("test")
    assert capsys.readouterr().out.count("\n") == 1
    host.load(1)
    assert accelerator_of(host.unet) is not None
    assert same(host.generate(), reference())
    assert count("captures") == 1 and count("plans run") == 2
    assert status()["host"] == {"name": "Forge Neo", "version": "neo 2.26", "remarks": []}
    assert status()["model"] == "seed 1"
    # another number of steps, whose sigmas are among the arguments
    assert same(host.generate(steps=5), reference(steps=5))
    assert count("captures") == 1 and count("plans run") == 7


def test_lines_in_the_console_say_whose_they_are_under_the_webui_s_own_log(host, capsys):
    forge.start("test")
    root = logging.getLogger()
    theirs = logging.StreamHandler(sys.stdout)
    root.addHandler(theirs)
    try:
        logging.getLogger("sfast_ext").warning("a word")
    finally:
        root.removeHandler(theirs)
    said = capsys.readouterr()
    assert "Stable Fast: a word" in said.err and "a word" not in said.out
    forge.ForgeSession.stop()
    assert logging.getLogger("sfast_ext").handlers == [] and logging.getLogger("sfast_ext").propagate


def test_lora_is_followed_and_keeps_the_plans(started):
    assert same(started.generate(), reference())
    captures = count("captures")
    for loras in ((("a", 1.0),), (("a", -0.5),), (), (("a", 1.0),), (("b", 0.5), ("a", 1.0)), ()):
        started.lora(**dict(loras))
        assert same(started.generate(), reference(loras=loras)), loras
    assert not same(reference(loras=(("a", 1.0),)), reference())
    assert count("captures") == captures and status()["reasons"] == {}


def test_a_checkpoint_of_the_same_architecture_keeps_the_plans(started):
    assert same(started.generate(), reference())
    started.load(2)
    assert same(started.generate(), reference(2)) and count("captures") == 1
    started.lora(a=1.0)
    assert same(started.generate(), reference(2, loras=(("a", 1.0),))) and count("captures") == 1
    started.load(1)
    assert same(started.generate(), reference()) and count("captures") == 1
    # if system memory is short, the weights of the checkpoint that is dropped are not held
    started.system_memory = 1000
    started.load(2)
    assert same(started.generate(), reference(2)) and count("captures") == 2


@pytest.mark.usefixtures("proportions")
def test_the_residuals_of_a_controlnet_are_added_once_in_each_run(host):
    host.opts.data["sfast_check"] = "always"
    with standin.running() as other:
        other.load(1)
        other.control = control
        expected = other.generate()
    forge.start("test")
    host.load(1)
    host.control = control
    assert not same(expected, reference())
    # each call runs the plan and then the original
    assert same(host.generate(), expected)
    host.opts.data["sfast_check"] = "first use"
    assert same(host.generate(), expected)
    assert count("captures") == 1
    (plan,) = status()["accelerators"][0]["plans"]
    assert plan["error"] < TOLERANCE
    host.control = lambda: None
    assert same(host.generate(), reference())


@pytest.mark.usefixtures("proportions")
def test_what_sdxl_is_told_beside_the_prompt_is_an_input_of_the_plan(started):
    images = []
    for number in (0.0, 1.0, 2.0):
        started.told = torch.full((2, 128), number)
        with standin.running() as other:
            other.load(1)
            other.told = started.told
            images.append(other.generate())
        assert same(started.generate(), images[-1])
    assert not same(images[1], images[2]) and count("captures") == 1


def tomesd_m(h: torch.Tensor, options: Any) -> torch.Tensor:
    return 0.9 * h


INSIDE = {"input_block_patch": [tomesd_m]}


def patched_inside(standin: ModuleType) -> torch.Tensor:
    """The image with a function inside the UNet, without us."""
    with standin.running() as other:
        other.load(1)
        other.option(patches=INSIDE)
        return other.generate()


def test_what_works_inside_the_unet_is_bypassed_with_its_name(started, monkeypatch):
    expected = patched_inside(standin)
    started.option(patches=INSIDE)
    bypassed(started, "test_forge.tomesd_m in adapters/test_forge.py works inside the UNet; turn it off", expected)
    monkeypatch.setattr(tomesd_m, "__module__", "backend.misc.tomesd")
    bypassed(started, "token merging is on", expected)
    started.lora()
    assert same(started.generate(), reference()) and count("plans run") > 0


def test_every_kind_of_patch_that_the_forward_reads_is_bypassed(started):
    kinds: dict[str, Any] = {
        "patches_replace": {"attn2": {("input", 1): tomesd_m}},
        "block_modifiers": [tomesd_m],
        "block_inner_modifiers": [tomesd_m],
        "group_norm_wrapper": tomesd_m,
    }
    for kind, value in kinds.items():
        started.lora()
        started.option(**{kind: value})
        bypassed(started, "works inside the UNet", reference())
        assert status()["counters"].get("captures", 0) == 0, kind


def test_lora_in_the_layers_is_bypassed_from_one_image_to_the_next(started):
    assert same(started.generate(), reference())
    with standin.running() as other:
        other.load(1)
        other.lora(online=True, a=1.0)
        expected = other.generate()
    started.lora(online=True, a=1.0)
    bypassed(started, "LoRA is computed inside the layers", expected)
    started.lora()
    assert same(started.generate(), reference())
    assert count("captures") == 1


class Quantised(torch.nn.Parameter):
    """A weight of another kind."""


def test_weights_that_are_cast_or_kept_in_system_memory_are_bypassed(started):
    layer = started.unet.time_embed[0]
    layer.parameters_manual_cast = True
    bypassed(started, "the model is quantised or stored in torch.float32", reference())
    layer.parameters_manual_cast = False
    # as a quantised weight, which casts itself
    layer.weight = Quantised(layer.weight.data, requires_grad=False)
    bypassed(started, "the model is quantised", reference())
    # as its layer says it, of a checkpoint in 8 bits
    layer.quant_format = "int8_tensorwise"
    bypassed(started, "the model is quantised (int8_tensorwise)", reference())
    del layer.quant_format
    layer.weight = torch.nn.Parameter(layer.weight.data, requires_grad=False)
    started.model_data.sd_model.original.model.model_lowvram = True
    bypassed(started, "Forge keeps a part of the UNet in system memory", reference())
    started.model_data.sd_model.original.model.model_lowvram = False
    assert same(started.generate(), reference()) and count("plans run") > 0


def of_8_bits(host, scale=1.0, layout=kitchen_standin.FP8):
    """A layer of the UNet as a checkpoint in 8 bits has it."""
    layer = next(module for name, module in host.unet.named_modules() if name.endswith("attn1.to_v"))
    layer.quant_format = "float8_e4m3fn"
    layer.weight = kitchen_standin.quantised(layer.weight.detach() * scale, layout)
    return layer


def expected_of_8_bits(*scales):
    with standin.running() as other:
        other.load(1)
        for scale in scales:
            of_8_bits(other, scale)
        return other.generate()


def test_weights_of_8_bits_are_accelerated_with_a_lora_too(started):
    # the other layers may cast theirs, as in Forge Neo
    started.unet.time_embed[2].parameters_manual_cast = True
    layer = of_8_bits(started)
    before = layer.weight
    plain, merged = expected_of_8_bits(1.0), expected_of_8_bits(1.0, -30.0)
    assert same(started.generate(), plain) and count("plans run") > 0
    # a LoRA is added to the dequantised weight, which is quantised again
    of_8_bits(started, -30.0)
    assert same(started.generate(), merged) and not same(merged, plain)
    layer.weight = before
    assert same(started.generate(), plain) and count("captures") == 1


def test_weights_of_8_bits_of_another_layout_are_bypassed(started):
    layer = of_8_bits(started)
    layer.weight._layout_cls, layer.quant_format = "TensorCoreNVFP4Layout", "nvfp4"
    bypassed(started, "the model is quantised (nvfp4)", expected_of_8_bits(1.0))
    layer.weight._layout_cls, layer.quant_format = kitchen_standin.FP8, "float8_e4m3fn"
    # another weight next to it, of a class that is not known
    other = started.unet.time_embed[2]
    other.weight = Quantised(other.weight.data, requires_grad=False)
    bypassed(started, "the model is quantised (float8_e4m3fn)", expected_of_8_bits(1.0))
    other.weight = torch.nn.Parameter(other.weight.data, requires_grad=False)
    assert same(started.generate(), expected_of_8_bits(1.0)) and count("plans run") > 0


def test_the_forward_is_the_webui_s_own_if_its_torch_compile_is_on(started):
    assert same(started.generate(), reference())
    model = started.model_data.sd_model.original.model
    own = model.apply_model
    model.apply_model = functools.wraps(own)(lambda *args, **kwargs: own(*args, **kwargs))
    bypassed(started, "torch.compile perhaps", reference())
    assert accelerator_of(started.unet) is None and "forward" not in vars(started.unet)
    # as it is switched off
    model.apply_model = own
    assert same(started.generate(), reference()) and accelerator_of(started.unet) is not None


def test_a_network_that_is_no_unet_is_left_alone(host):
    forge.start("test")
    host.load(1, unet=standin.Flux())
    host.generate()
    (reason,) = status()["reasons"]
    assert reason.startswith("Flux has no UNet, and no transformer that is accelerated; load a Stable Diffusion 1")
    assert "forward" not in vars(host.unet)


def test_switched_off_the_image_is_the_webui_s_own_to_the_last_bit(started):
    started.generate()
    started.opts.data["sfast_enabled"] = False
    assert torch.equal(started.generate(), reference())
    started.opts.data["sfast_enabled"] = True
    assert same(started.generate(), reference())
    unet = started.unet
    forge.ForgeSession.stop()
    for registered in started.callbacks.values():
        registered.clear()
    assert torch.equal(started.generate(), reference()) and "forward" not in vars(unet)
    for function in (started.memory.free_memory, started.memory.unload_all_models, standin.ModelPatcher.load):
        assert not hasattr(function, "__wrapped__")


def test_unloading_releases_everything(started, monkeypatch):
    unet, models, trimmed = started.unet, sys.modules["modules.sd_models"], []
    started.generate()
    monkeypatch.setattr(system_memory, "trim", lambda: trimmed.append(vars(models.model_data.sd_model) == {}))
    models.unload_model_weights()
    assert accelerator_of(unet) is None and status()["accelerators"] == [] and status()["model"] is None
    # what Forge itself has freed goes back to the system too
    assert trimmed[-1]
