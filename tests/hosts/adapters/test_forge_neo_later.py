"""Forge Neo 2.27 to 2.30, against a stand-in of what was changed there."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("ldm.modules.diffusionmodules.openaimodel", reason="needs stable-diffusion-sdkit without its pins")
from hosts.adapters import test_forge
from hosts.adapters.test_forge import count, same, status
from hosts.standins import forge_neo_later as standin
from sfast_ext.hosts.forge import adapter


@functools.lru_cache(maxsize=None)
def reference(loras: tuple[tuple[str, float], ...] = (), online: bool = False, apart: bool = False) -> torch.Tensor:
    """The image as the WebUI makes it without us."""
    with standin.running() as other:
        other.load(1)
        other.lora(online=online, **dict(loras))
        adapter.holder_of(other.model_data.sd_model).together = not apart
        return other.generate()


@pytest.fixture
def host() -> Iterator[Any]:
    with standin.running(sfast_allow_cpu=True) as host:
        adapter.start("test")
        host.load(1)
        yield host
        adapter.ForgeSession.stop()
        assert host.errors == []


@pytest.mark.long(but=[0, 7, 8])
@pytest.mark.parametrize("release", ["2.27", "2.28", "2.28.1", "2.29", "2.29.1", "2.29.2", "2.30", "3.0", ""])
def test_a_release_is_served_and_the_report_says_that_it_was_not_tested(host, release):
    host.version.release = release
    adapter.start("test")
    host.load(1)
    assert same(host.generate(), reference()) and count("plans run") > 0
    told = status()["host"]
    # its stand-in has nothing of the memory management
    remarks = [each for each in told["remarks"] if "second copy of the weights" not in each]
    assert told["name"] == "Forge Neo" and "not tested by us" in remarks[0] and len(remarks) == 1


def test_lora_added_weakened_and_removed_is_never_stale(host):
    assert same(host.generate(), reference())
    for loras in ((("a", 1.0),), (("a", 0.3),), (), (("a", 0.3), ("b", 1.0)), (("b", 1.0),), ()):
        host.lora(**dict(loras))
        assert same(host.generate(), reference(loras)), loras
    assert count("captures") == 1 and status()["reasons"] == {}


def test_lora_in_the_layers_is_never_stale_even_if_its_strength_changes_between_steps(host):
    assert same(host.generate(), reference())
    for loras in ((("a", 1.0),), (("a", 0.3),), (("a", 0.3), ("b", 1.0)), (("b", 1.0),)):
        host.lora(online=True, **dict(loras))
        test_forge.bypassed(host, "LoRA is computed inside the layers", reference(loras, online=True))
    host.lora(online=True, a=1.0)
    host.schedule(0.3)
    test_forge.bypassed(host, "LoRA is computed inside the layers", reference((("a", 0.3),), online=True))
    # merged after it was in the layers, and the other way round
    host.lora(a=1.0)
    assert same(host.generate(), reference((("a", 1.0),)))
    host.lora(online=True, a=-1.0)
    test_forge.bypassed(host, "LoRA is computed inside the layers", reference((("a", -1.0),), online=True))
    host.lora()
    before = count("plans run")
    assert same(host.generate(), reference()) and count("plans run") > before and count("captures") == 1


def test_guidance_in_two_calls_has_one_plan_of_its_size(host):
    holder = adapter.holder_of(host.model_data.sd_model)
    for apart in (False, True, False, True):
        holder.together = not apart
        assert same(host.generate(), reference(apart=apart))
    assert count("captures") == 2 and status()["reasons"] == {}


def test_steps_that_a_forecast_leaves_out_change_nothing_for_the_others(host):
    """Spectrum calls the model for some steps alone, and keeps what it gave."""
    holder = adapter.holder_of(host.model_data.sd_model)
    own, kept = holder.apply_model, []

    def some(x: torch.Tensor, t: torch.Tensor, **more: Any) -> torch.Tensor:
        if len(kept) % 3 != 2:
            kept.append(own(x, t, **more))
        else:
            kept.append(2 * kept[-1] - kept[-2])
        return kept[-1]

    class Around:
        """The model's call as the sampler has it, without a change to the model."""

        apply_model = staticmethod(some)

    patcher = host.model_data.sd_model.forge_objects.unet
    with torch.inference_mode():
        x = torch.randn((2, 4, 8, 8), generator=torch.Generator().manual_seed(0))
        context = torch.randn((2, 7, standin.forge.CONTEXT), generator=torch.Generator().manual_seed(1))
        host._load(patcher)
        for accelerated in (False, True):
            host.opts.data["sfast_enabled"] = accelerated
            adapter.ForgeSession.running.follow_loaded()
            kept.clear()
            for step in range(7):
                t = torch.full((2,), 900.0 - 100 * step)
                Around.apply_model(x, t, c_crossattn=context, transformer_options={"sigmas": t})
            if not accelerated:
                expected = [each.clone() for each in kept]
    assert all(same(found, wanted) for found, wanted in zip(kept, expected))
    assert count("plans run") + count("captures") == 5
