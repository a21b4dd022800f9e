"""The adapter in Forge Classic, against a stand-in; what it shares with Forge Neo is in test_forge.py."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("ldm.modules.diffusionmodules.openaimodel", reason="needs stable-diffusion-sdkit without its pins")
from pretended_card import GPU, pretended_card, small_reserves

from hosts.adapters.test_forge import INSIDE, patched_inside, same, tomesd_m
from hosts.standins import a1111
from hosts.standins import forge_classic as standin
from sfast_ext import accelerator_of
from sfast_ext.hosts.forge import adapter as forge
from sfast_ext.hosts.forge import programs
from sfast_ext.hosts.forge.adapter import ClassicSession

SIZE = sum(p.nbytes for p in standin.make_unet(1, levels=2).parameters())


def status() -> dict[str, Any]:
    assert ClassicSession.running is not None
    found = ClassicSession.running.status()
    assert found["last_error"] is None, found["last_error"]
    return found


def count(name: str) -> int:
    names = ("replays", "eager_runs") if name == "plans run" else (name,)
    return sum(status()["counters"].get(n, 0) for n in names)


def reference(seed: int = 1, loras: tuple[tuple[str, float], ...] = (), everywhere: bool = False) -> torch.Tensor:
    """The image as the WebUI makes it without us."""
    return _reference(a1111.by_default, seed, loras, everywhere)


@functools.lru_cache(maxsize=None)
def _reference(levels: int, seed: int, loras: tuple[tuple[str, float], ...], everywhere: bool) -> torch.Tensor:
    with standin.running() as other:
        other.load(seed)
        other.lora(everywhere=everywhere, **dict(loras))
        return other.generate()


@pytest.fixture
def host() -> Iterator[Any]:
    with standin.running(sfast_allow_cpu=True) as host:
        forge.start("test")
        host.load(1)
        yield host
        ClassicSession.stop()
        assert host.errors == []


def bypassed(host: Any, words: str, expected: torch.Tensor) -> None:
    before = count("plans run")
    assert same(host.generate(), expected)
    assert count("plans run") == before
    assert any(words in reason for reason in status()["reasons"]), status()["reasons"]


def test_plans_are_kept_for_another_lora_and_another_checkpoint(host):
    assert same(host.generate(), reference())
    assert status()["host"] == {"name": "Forge Classic", "version": "classic", "remarks": []}
    for loras in ((("a", 1.0),), (("a", -0.5),), (), (("b", 0.5), ("a", 1.0)), ()):
        host.lora(**dict(loras))
        assert same(host.generate(), reference(loras=loras)), loras
    assert not same(reference(loras=(("a", 1.0),)), reference())
    host.load(2)
    assert same(host.generate(), reference(2))
    host.lora(a=1.0)
    assert same(host.generate(), reference(2, (("a", 1.0),)))
    assert count("captures") == 1 and count("plans run") > 18 and status()["reasons"] == {}


def test_what_works_inside_the_unet_is_bypassed(host, monkeypatch):
    expected = patched_inside(standin)
    host.option(patches=INSIDE)
    bypassed(host, "works inside the UNet; turn it off", expected)
    monkeypatch.setattr(tomesd_m, "__module__", programs.CLASSIC.token_merging)
    bypassed(host, "token merging is on", expected)
    host.lora()
    assert same(host.generate(), reference()) and count("plans run") > 0


def test_a_unet_that_is_loaded_in_parts_or_cast_is_bypassed_while_it_is(host):
    assert same(host.generate(), reference())
    host.kept = 0
    host.memory.unload_all_models()
    bypassed(host, "Forge keeps a part of the UNet in system memory", reference())
    host.kept = -1
    host.memory.unload_all_models()
    assert same(host.generate(), reference())
    layers = [each for each in host.unet.modules() if isinstance(each, standin.Layer)]
    for layer in layers:
        layer.ldm_patched_cast_weights = True
    bypassed(host, "the model is quantised or stored in float32; load one that is not quantised", reference())
    for layer in layers:
        del layer.ldm_patched_cast_weights
    runs = count("plans run")
    assert same(host.generate(), reference()) and count("plans run") > runs and count("captures") == 1


def test_what_the_forward_reads_is_passed_on_and_nothing_else(host):
    session = ClassicSession.running
    assert isinstance(session, ClassicSession)
    read = {"context": 1, "y": 2, "control": None, "num_video_frames": 14, "image_only_indicator": 3, "time_context": 4}
    given = {**read, "transformer_options": {"sigmas": [1.0]}, "control_model": host}
    found = session._hooks_for(host.unet).arguments
    assert found is not None and found(("x",), given) == (("x",), {**read, "transformer_options": {}})


def test_while_the_checkpoint_is_exchanged_there_is_no_model(host):
    unet = host.unet
    host.generate()
    del host.model_data.sd_model
    running = ClassicSession.running
    assert running is not None and running.loaded() is None and running.model_name() is None
    running.follow_loaded()
    assert accelerator_of(unet) is None


def test_switched_off_and_stopped_nothing_of_ours_is_left(host):
    host.generate()
    host.opts.data["sfast_enabled"] = False
    assert torch.equal(host.generate(), reference())
    ClassicSession.stop()
    for registered in host.callbacks.values():
        registered.clear()
    assert torch.equal(host.generate(), reference())
    found = host.memory.free_memory, host.memory.module_size, standin.LoadedModel.model_load
    assert not any(hasattr(each, "__wrapped__") for each in (*found, standin.ModelPatcher.patch_model))


def test_what_works_in_another_way_gets_its_own_forward_and_one_line(capsys, monkeypatch):
    """As reForge, whose layers are marked elsewhere."""

    class LoadedModel:
        def __init__(self, model):
            self.model, self.device = model, model.load_device

        def model_load(self, lowvram_model_memory=-1):
            self.model.patch_model(self.device)

    monkeypatch.setattr(standin, "LoadedModel", LoadedModel)
    with standin.running(sfast_allow_cpu=True) as host:
        forge.start("test")
        (line,) = capsys.readouterr().out.splitlines()
        assert "does nothing in Forge Classic: ldm_patched.modules.model_management.LoadedModel does not use" in line
        assert ClassicSession.running is None
        host.load(1)
        assert same(host.generate(), reference()) and accelerator_of(host.unet) is None


def test_it_has_no_release(host):
    assert status()["host"] == {"name": "Forge Classic", "version": "classic", "remarks": []}


@pytest.mark.usefixtures("proportions")
@pytest.mark.parametrize(("room", "kept"), [(1.6, False), (4, True)])
def test_on_a_gpu_what_forge_moves_off_is_held_only_if_there_is_room(monkeypatch, room, kept):
    small_reserves(monkeypatch, SIZE)
    expected = {loras: reference(loras=loras, everywhere=True) for loras in ((), (("a", 1.0),))}
    with standin.running(GPU, sfast_triton=False) as host, pretended_card(monkeypatch, int(room * SIZE)) as card:
        forge.start("test")
        host.load(1)
        for loras, image in (*expected.items(), ((), expected[()])):
            host.lora(everywhere=True, **dict(loras))
            torch.testing.assert_close(host.generate().to("cpu"), image, rtol=1e-3, atol=1e-4)
        # a text encoder as large as the UNet needs the room
        host.memory.free_memory(SIZE, GPU)
        assert not card.holds(host.unet.out[2].weight)
        assert (card.used > 0.9 * SIZE) == kept
        torch.testing.assert_close(host.generate().to("cpu"), expected[()], rtol=1e-3, atol=1e-4)
        assert not card.faults and not card.refused
        assert count("captures") == 1 and count("errors") == 0 and count("plans run") > 8
        ClassicSession.stop()
        assert host.errors == []
