"""What is noted of a UNet that Forge by lllyasviel loads with 8 bits on a small card: what it takes, whether it is in
parts, and whether it is loaded."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pretended_card import pretended_card
from torch import nn

from hosts.standins import forge_old, forge_old_memory
from sfast_ext.hosts import gpu_room
from sfast_ext.hosts.forge import adapter as forge
from sfast_ext.hosts.forge import memory
from sfast_ext.hosts.forge.residence import FORGE
from sfast_ext.report import Report

from .resident_forge import SIZE, SMALL, Running, card_with, room

pytestmark = pytest.mark.usefixtures("proportions")


on = card_with(forge_old_memory, forge.OldSession)


NAMES = ("to_q", "to_k", "to_v")


@pytest.fixture
def merges(monkeypatch: pytest.MonkeyPatch) -> None:
    functions = SimpleNamespace(merge_lora_to_weight=forge_old.merge_lora_to_weight)
    monkeypatch.setitem(sys.modules, "backend.patcher.lora", functions)  # type: ignore[arg-type]


def patcher(**loras: bool) -> forge_old.ModelPatcher:
    """One with LoRAs on two layers, each computed in the layers or not."""
    model = nn.Module()
    for name in NAMES:
        model.add_module(name, forge_old.Linear(8, 8, bias=False))
    found = forge_old.ModelPatcher(model, torch.device("cpu"))
    for name, online in loras.items():
        found.add_patches({"to_q.weight": name, "to_k.weight": name}, online_mode=online)
    return found


def test_weights_that_are_to_get_loras(merges: None) -> None:
    assert set(FORGE.patched(patcher())) == set()
    found = patcher(a=False)
    assert set(FORGE.patched(found)) == {"to_q.weight", "to_k.weight"}
    found.refresh_loras()
    assert set(FORGE.patched(found)) == set()
    # another: those that have one are replaced, and are no more than before
    found.add_patches({"to_k.weight": "b", "to_v.weight": "b"})
    assert set(FORGE.patched(found)) == {"to_v.weight"}
    # in the layers there is none that is next to its weight; it is told before it is loaded
    found = patcher(a=True)
    assert set(FORGE.patched(found)) == {"to_q.weight", "to_k.weight"}
    found.refresh_loras()
    assert set(FORGE.patched(found)) == set()


@pytest.mark.parametrize(
    ("banks", "in_parts", "counted"),
    [
        # a weight that is set aside is made in system memory
        (True, False, {"to_q"}),
        (False, False, {"to_q", "to_k"}),
        (True, True, {"to_q", "to_k"}),
    ],
)
def test_room_for_weights_that_get_loras(
    merges: None, monkeypatch: pytest.MonkeyPatch, banks: bool, in_parts: bool, counted: set[str]
) -> None:
    asked: list[float] = []
    monkeypatch.setattr(gpu_room, "make_room", lambda needed, givers: bool(asked.append(needed)) or True)
    monkeypatch.setattr(memory, "fetch_weights", lambda *_: None)
    with pretended_card(monkeypatch, 1 << 20):
        found = patcher(a=False)
        model = found.model
        aside = {id(model.to_k.weight), id(model.to_v.weight)}
        resident = SimpleNamespace(banks=[1] * banks, in_parts=in_parts, is_aside=lambda value: id(value) in aside)
        accelerator: Any = SimpleNamespace(arena=SimpleNamespace(resident=resident), vacant_bytes=100)
        attachment: Any = SimpleNamespace(accelerators=lambda: [accelerator])
        ours = memory.OldMemory([attachment], Report())

        def needed() -> float:
            ours._prepare(accelerator, found, None)
            return asked[-1] - 100 - gpu_room.WORKSPACE

        assert needed() == sum(getattr(model, name).weight.nbytes for name in counted)
        # what came back to the GPU is made there
        model.to_k.weight.data = model.to_k.weight.data.to("cuda")
        assert needed() == sum(model.to_k.weight.nbytes for _ in range(2))
        found.refresh_loras()
        assert needed() == 0
        found.lora_patches = {}
        # what had one gets its weights without it
        assert needed() > 0


@room(1.6)
def test_memory_that_an_image_reserves_for_a_controlnet(on: Running) -> None:
    # without that it would come as a whole
    on.host._load = lambda patcher: on.host.memory.load_models_gpu([patcher], 0, 0.5 * SIZE)
    for _ in range(2):
        assert on.image(1) < 1e-2 and on.in_parts and on.card.peak < 1.1 * SIZE + SMALL


@room(1.6)
def test_what_a_load_by_forge_leaves(on: Running) -> None:
    on.host.opts.data["sfast_eight_bits"] = False
    assert on.image(1) < 1e-2
    ours, resident = on.session._resident, on.accelerator.arena.resident
    (loaded,) = on.host.current

    def fails(*_: object) -> None:
        raise KeyboardInterrupt

    for kept, in_parts in ((-1, False), (0, True), (5.0, True)):
        resident.in_parts = not in_parts
        ours._load(lambda *_: None, loaded, kept)
        assert resident.in_parts is in_parts
        resident.in_parts = not in_parts
        with pytest.raises(KeyboardInterrupt):
            ours._load(fails, loaded, kept)
        assert resident.in_parts is in_parts


@room(1.6)
def test_a_unet_that_left_for_another_is_loaded_again(on: Running) -> None:
    # no plan is made
    on.host.unet.middle_block.register_forward_hook(lambda module, given, result: result)
    assert on.image(1) < 1e-2 and not on.in_parts
    ours = on.session._resident
    loader = ours.loader(on.host.unet)
    assert loader is not None
    ours._leaves(on.host.unet)
    assert on.off == SIZE and not any(each is loader for each in on.host.current)
    assert on.image(1) < 1e-2 and on.loaded and not on.in_parts
