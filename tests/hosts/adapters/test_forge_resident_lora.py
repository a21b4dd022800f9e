"""LoRA in a UNet that Forge Neo loads in parts, when it had been loaded as a whole with 8 bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("ldm.modules.diffusionmodules.openaimodel", reason="needs stable-diffusion-sdkit without its pins")
from hosts.adapters.resident_forge import SIZE, SMALL, Running, room, shown
from hosts.adapters.test_forge_resident import on  # noqa: F401
from sfast_ext.runtime.verify import relative_error
from sfast_ext.weights.banks import Bank
from sfast_ext.weights.resident import Resident

pytestmark = pytest.mark.usefixtures("proportions")


@room(1.6)
def test_a_lora_is_right_after_the_extension_was_turned_off(on: Running) -> None:  # noqa: F811
    on.lora(a=-1.0)
    assert on.image(3, 12) < 0.06
    on.host.opts.data["sfast_enabled"] = False
    # in the second one Forge finds more memory, which plans had
    for _ in range(3):
        assert on.image() < 1e-2 and on.in_parts


@room(1.6)
def test_a_lora_is_right_after_forge_had_to_load_in_parts(on: Running) -> None:  # noqa: F811
    on.lora(a=-1.0)
    assert on.image() < 0.06 and on.image() < 0.06
    # another program takes memory, and an extension's hook keeps plans from running
    on.card.outside = int(0.7 * SIZE)
    on.host.unet.middle_block.register_forward_hook(lambda module, given, result: result)
    assert on.image() < 0.06 and on.in_parts
    on.card.outside = int(0.68 * SIZE)
    assert on.image() < 0.06 and on.in_parts


@pytest.mark.long(but=[1])
@room(1.6, 1.45)
def test_if_the_first_forward_with_a_lora_runs_out_of_memory(on: Running) -> None:  # noqa: F811
    on.lora(a=-1.0)
    wanted = on.of(1, a=-1.0)
    conv, real = on.host.unet.out[2], type(on.host.unet.out[2]).forward

    def short(layer: Any, x: torch.Tensor) -> torch.Tensor:
        if layer is conv and not on.in_parts:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        return real(layer, x)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(conv), "forward", short)
        # the weights with LoRA, which Forge replaces, make room for those in parts
        found = shown(on.host.generate().to("cpu"))
    assert relative_error([found], [wanted]) < 1e-2 and on.in_parts
    for _ in range(2):
        assert on.image() < 1e-2 and on.in_parts
    assert on.counter("errors") == 0


@pytest.mark.long(but=[0, 3])
@room(1.6, 1.45)
@pytest.mark.parametrize("returned", [False, True])
def test_if_all_of_it_cannot_be_loaded_it_is_in_parts_at_once(on: Running, returned: bool) -> None:  # noqa: F811
    assert on.image() < 0.06 and on.image() < 0.06
    if returned:
        # an extension's hook keeps plans from running, and all weights are there
        on.host.unet.middle_block.register_forward_hook(lambda module, given, result: result)
        assert on.image() < 0.06 and not on.away
    on.lora(a=1.0)
    wanted = on.of(1, a=1.0)
    with on.without_room_for_all():
        found = shown(on.host.generate().to("cpu"))
    assert relative_error([found], [wanted]) < 1e-2 and on.in_parts
    # as much of it as Forge has room for
    assert on.loaded > getattr(on.standin, "IN_PARTS", 0.7) * SIZE


@room(1.6)
def test_8_bit_weights_that_cannot_be_freed_end_no_image(on: Running, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    assert on.image() < 0.06 and on.image() < 0.06
    real, failed = Bank.vacate, list[Bank]()

    def short(bank: Bank) -> None:
        if not failed:
            failed.append(bank)
            # the card has no room for a number
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        real(bank)

    monkeypatch.setattr(Bank, "vacate", short)
    on.lora(online=True, a=2.0)
    steps, size = 2, 8
    error = on.image(steps, size)
    # layers have kept the layout that plans gave them, which rounds otherwise, as it does without us
    kept = tuple(name for name, p in on.host.unet.named_parameters() if not p.is_contiguous())
    laid, plain = (on.of(on.seed, steps, size, names, **on.loras) for names in (kept, ()))
    assert error == pytest.approx(relative_error([laid], [plain]), abs=1e-6) and failed and on.in_parts
    assert on.image() < 1e-3 and on.in_parts
    on.lora()
    assert on.image() < 0.06 and not on.in_parts


@pytest.mark.long(but=[1])
@pytest.mark.parametrize("times", [1, 2])
@room(1.8)
def test_at_the_end_of_a_session_weights_that_cannot_come_back(
    on: Running,  # noqa: F811
    times: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on.lora(a=1.0)
    assert on.image() < 0.06 and on.image() < 0.06 and on.away
    real, failed = Resident.bring_back, list[int]()

    def short(resident: Resident) -> int:
        if len(failed) < times:
            failed.append(times)
            # what is free is in pieces
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        return real(resident)

    monkeypatch.setattr(Resident, "bring_back", short)
    on.kind.stop()
    there = sum(p.nbytes for p in on.host.unet.parameters() if p.is_cuda)
    assert failed and on.loaded >= there - SMALL and on.card.used < there + SMALL
    assert on.image() < 1e-3


@pytest.mark.long(but=[0, 3])
@pytest.mark.parametrize("mended", [False, True])
@pytest.mark.parametrize("online", [False, True])
@room(1.6)
def test_forges_own_fault(
    on: Running,  # noqa: F811
    online: bool,
    mended: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on.kind.stop()
    monkeypatch.setattr(on.patcher, "MENDED", mended)
    on.lora(online=online, a=-1.0)
    assert on.image() == 0 and on.in_parts
    # another program takes 2 % less
    on.card.outside = int(-0.02 * SIZE)
    assert (on.image() > 0.1) != mended and on.in_parts
