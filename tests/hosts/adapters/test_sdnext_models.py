"""Models that come and go under the SD.Next adapter, by the stand-in's order of events."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from hosts.standins.sdnext import Host, close, hosted, pipeline, tiny_unet
from sfast_ext.hosts import gpu_room

diffusers = pytest.importorskip("diffusers")


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    yield from hosted(monkeypatch)


def test_another_unet_without_a_callback_takes_the_plans_over(host: Host) -> None:
    pipe = pipeline(0)
    host.sd_models.load_model(pipe)
    host.image()
    old, pipe.unet = pipe.unet, tiny_unet(7)
    image = host.image()
    assert host.captures() == 1 and host.adapter.accelerator_of(old) is None
    assert host.adapter.accelerator_of(pipe.unet) is not None
    close(image, host.stock())
    # whoever holds the other one still has its weights
    for (name, left), (_, twin) in zip(old.named_parameters(), tiny_unet(0).named_parameters()):
        assert left.stride() == twin.stride() and torch.equal(left, twin), name


def test_another_unet_without_room_for_both_has_plans_of_its_own(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = pipeline(0)
    host.sd_models.load_model(pipe)
    host.image()
    monkeypatch.setattr(gpu_room, "free_bytes", lambda: 0)
    pipe.unet = tiny_unet(7)
    close(host.image(), host.stock())
    assert host.captures() == 2


def test_a_new_pipeline_object_around_the_same_unet_keeps_its_plans(host: Host) -> None:
    pipe = pipeline()
    host.sd_models.load_model(pipe)
    host.image()
    host.modeldata.model_data.sd_model = SimpleNamespace(**vars(pipe))
    host.image()
    assert host.captures() == 1


def test_unloading_the_model_gives_it_back_first(host: Host) -> None:
    host.sd_models.load_model(pipeline())
    unet = host.modeldata.model_data.sd_model.unet
    host.image()
    host.sd_models.unload_model_weights(op="refiner")
    assert host.adapter.accelerator_of(unet) is not None
    host.sd_models.unload_model_weights()
    assert host.adapter.accelerator_of(unet) is None
    assert all(p.device.type == "meta" for p in unet.parameters())
    assert not host.status()["accelerators"]
    host.sd_models.load_model(pipeline(1))
    close(host.image(), host.stock())


def test_a_switch_to_a_checkpoint_of_the_same_architecture_keeps_the_plans(host: Host) -> None:
    host.sd_models.load_model(pipeline())
    old = host.modeldata.model_data.sd_model.unet
    stock = [host.stock_of(seed) for seed in (0, 1)]
    host.image()
    for seed in (1, 0):
        host.sd_models.reload_model_weights(lambda seed=seed: pipeline(seed))
        close(host.image(), stock[seed])
    assert host.captures() == 1 and host.adapter.accelerator_of(old) is None
    assert "plans are kept for a model of the same architecture" in str(host.status()["events"])


def test_a_switch_without_room_for_both_gives_the_memory_back(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    host.sd_models.load_model(pipeline())
    host.image()
    monkeypatch.setattr(gpu_room, "free_bytes", lambda: 0)
    host.sd_models.reload_model_weights(lambda: pipeline(1))
    close(host.image(), host.stock_of(1))
    assert host.captures() == 2


def test_a_switch_that_fails_leaves_nothing_behind(host: Host) -> None:
    host.sd_models.load_model(pipeline())
    host.image()

    def broken() -> Any:
        raise OSError("no such file")

    with pytest.raises(OSError, match="no such file"):
        host.sd_models.reload_model_weights(broken)
    assert not host.status()["accelerators"]
    host.sd_models.load_model(pipeline(1))
    close(host.image(), host.stock_of(1))


def test_a_controlnet_beside_the_unet_is_accelerated_from_its_second_step_on(host: Host) -> None:
    pipe = pipeline()
    pipe.controlnet = diffusers.ControlNetModel.from_unet(tiny_unet(3), conditioning_embedding_out_channels=(4, 4))
    for parameter in pipe.controlnet.parameters():
        # its zero-initialised ends would hide it
        nn.init.normal_(parameter, std=0.1)
    host.sd_models.load_model(pipe)
    stock = host.stock()
    assert not torch.equal(stock, host.stock_of(0))
    for _ in range(2):
        close(host.image(), stock)
    (beside,) = [a for a in host.status()["accelerators"] if a["name"] == "controlnet"]
    assert [plan["replays"] for plan in beside["plans"]] == [4]
    del pipe.controlnet
    host.image()
    assert [a["name"] for a in host.status()["accelerators"]] == ["unet"]


def test_the_refiner_is_accelerated_beside_the_model(host: Host) -> None:
    host.sd_models.load_model(pipeline())
    host.sd_models.load_refiner(pipeline(5))
    loaded = host.modeldata.model_data
    unet, refiner = loaded.sd_model.unet, loaded.sd_refiner.unet
    plain, stock = host.stock(), host.stock(refine=True)
    assert (stock - plain).abs().max() > 0.01
    for _ in range(2):
        close(host.image(refine=True), stock)
    found = host.status()["accelerators"]
    assert {a["name"]: [plan["replays"] for plan in a["plans"]] for a in found} == {"unet": [5], "refiner": [5]}
    host.sd_models.unload_model_weights(op="refiner")
    assert host.adapter.accelerator_of(refiner) is None and host.adapter.accelerator_of(unet) is not None
    assert all(p.untyped_storage().nbytes() == p.nbytes for p in refiner.parameters())
    close(host.image(), plain)
    assert [a["name"] for a in host.status()["accelerators"]] == ["unet"]


def test_the_refiner_is_given_back_if_the_gpu_has_no_room(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    host.sd_models.load_model(pipeline())
    host.sd_models.load_refiner(pipeline(5))
    host.image(refine=True)
    assert [a["name"] for a in host.status()["accelerators"]] == ["unet", "refiner"]
    monkeypatch.setattr(gpu_room, "free_bytes", lambda: 0)
    host.opts.diffusers_move_refiner = True
    host.image(refine=True)
    assert "the refiner is moved off the GPU" in host.reasons()
    assert [a["name"] for a in host.status()["accelerators"]] == ["unet"]


def test_reloading_the_scripts_leaves_one_registration(host: Host) -> None:
    original = host.sd_models.unload_model_weights.__wrapped__
    host.sd_models.load_model(pipeline())
    host.image()
    host.script_callbacks.fire("script_unloaded")
    assert host.sd_models.unload_model_weights is original
    assert host.adapter.accelerator_of(host.modeldata.model_data.sd_model.unet) is None
    for callbacks in host.script_callbacks.callback_map.values():
        callbacks.clear()
    host.adapter.start("0.0")
    assert host.sd_models.unload_model_weights.__wrapped__ is original
    close(host.image(), host.stock())


def test_another_extensions_function_around_ours_goes_on(host: Host) -> None:
    ours, called = host.sd_models.unload_model_weights, []

    def theirs(*args: Any, **kwargs: Any) -> Any:
        called.append(kwargs)
        return ours(*args, **kwargs)

    host.sd_models.unload_model_weights = theirs
    host.script_callbacks.fire("script_unloaded")
    assert host.sd_models.unload_model_weights is theirs
    host.sd_models.load_model(pipeline())
    host.sd_models.unload_model_weights(op="model")
    assert host.modeldata.model_data.sd_model is None and len(called) == 2
