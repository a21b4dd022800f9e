"""Forge Neo with 8 bits on a small card: in the first image too, half-precision weights of layers stay in system
memory, and Forge is told so."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import eight_bit_kernels
import pytest
import torch

pytest.importorskip("ldm.modules.diffusionmodules.openaimodel", reason="needs stable-diffusion-sdkit without its pins")
from hosts.adapters.resident_forge import SIZE, SMALL, Running, card_with, room, shown
from hosts.standins import forge_neo_memory, forge_neo_patcher
from sfast_ext.capture.capture import CaptureRefused
from sfast_ext.eight_bits import RESIDENT
from sfast_ext.hosts.forge import adapter as forge
from sfast_ext.hosts.forge.residence import needs
from sfast_ext.reasons import SLOWER
from sfast_ext.runtime import plan_builder
from sfast_ext.runtime.model_state import ModuleContext
from sfast_ext.runtime.verify import relative_error
from sfast_ext.weights.resident import Resident

pytestmark = pytest.mark.usefixtures("proportions")
LEAN = int(0.9 * SIZE)
"""More than the peak of an image whose weights are never all on the GPU."""


on = card_with(forge_neo_memory, forge.ForgeSession)


@pytest.fixture
def lean(on: Running, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many weights were in system memory in each call that left them there."""
    return eight_bit_kernels.lean_calls_of(monkeypatch, lambda: on.away)


@pytest.fixture
def told(on: Running) -> list[tuple[int, int]]:
    """What Forge was told before each step; it was what is on the GPU."""
    found: list[tuple[int, int]] = []

    def look(params: Any) -> None:
        found.append(on.told)
        assert on.in_parts or found[-1][0] == pytest.approx(on.there, abs=1)

    on.host.callbacks["cfg_denoiser"].append(look)
    return found


def before_a_step(on: Running, action: Callable[[], object]) -> None:
    """Before the next step, and before the extension looks."""
    steps = on.host.callbacks["cfg_denoiser"]

    def once(params: Any) -> None:
        steps.remove(once)
        action()

    steps.insert(0, once)


def load(on: Running) -> None:
    """The UNet is loaded as before an image, which is not made."""
    on.host._load(on.host.model_data.sd_model.forge_objects.unet)


def leave(on: Running) -> None:
    """All models leave the GPU, as before one that needs all of it. None is dropped."""
    on.host.memory.free_memory(1e30, on.host.place)
    assert on.off == SIZE


def a_hook(on: Running) -> Any:
    """An extension's hook keeps plans from running."""
    return on.host.unet.middle_block.register_forward_hook(lambda module, given, result: result)


def told_truly(on: Running) -> bool:
    """Whether Forge is told what is on the GPU of a UNet that it has loaded."""
    current = on.host.current
    # as Forge does before it looks
    current[:] = [each for each in current if each.model is not None]
    known = any(each.model.model is on.model for each in current)
    return bool((on.told[0] if known else 0) == pytest.approx(on.there, abs=1))


@room(1.6)
def test_its_weights_wait_for_the_first_plan(on: Running, lean: list[int], told: list[tuple[int, int]]) -> None:
    load(on)
    # of 8 bits there is nothing yet
    assert on.there < SMALL and on.off > 0.95 * SIZE and told_truly(on)
    assert on.told[1] == pytest.approx(RESIDENT * SIZE, abs=SMALL)
    assert on.image(3) < 0.06 and on.card.peak < LEAN
    assert len(lean) == 1 and lean[0] > 5 and told[0][1] > 0.5 * SIZE
    # afterwards it is what it takes
    assert told[1:] == 2 * [(on.there, 0)] and on.away and not on.in_parts
    for size in (8, 8, 12, 8):
        assert on.image(2, size) < 0.06 and on.card.peak < LEAN
    assert len(lean) == 2 and on.counter("weights_brought_back") == on.counter("errors") == 0


def on_any_card(on: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """On which memory may run out in the first image."""
    resident = on.session._resident
    monkeypatch.setattr(resident, "_residence", dataclasses.replace(resident._residence, least=0.0))


@room(1.05)
def test_there_need_not_be_room_for_all_of_it(
    on: Running, lean: list[int], told: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_any_card(on, monkeypatch)
    on.host.reserve = int(0.4 * SIZE)
    for _ in range(3):
        assert on.image() < 0.06 and not on.in_parts and on.card.peak < LEAN
    assert len(lean) == 1 and on.counter("out_of_memory") == on.card.refused == 0


@room(1.05)
def test_there_must_be_room_for_8_bits_and_a_forward(
    on: Running, lean: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    on_any_card(on, monkeypatch)
    for part, in_parts in ((0.55, True), (0.4, False)):
        on.host.reserve = int(part * SIZE)
        assert on.image() < 0.06 and on.in_parts == in_parts
        assert ("the first image in 8 bits needs" in str(on.session._resident.why_in_parts(on.host.unet))) == in_parts
    assert len(lean) == 1


@room(1.6)
def test_with_a_lora_at_once(on: Running, lean: list[int], told: Any) -> None:
    on.lora(a=1.0)
    load(on)
    assert on.there < SMALL and on.off > 0.95 * SIZE and told_truly(on)
    stale = relative_error([on.of(1)], [on.of(1, a=1.0)])
    assert on.image() < min(0.15, stale / 2) and on.card.peak < LEAN and len(lean) == 1
    for loras in ({"a": -1.0, "b": 1.0}, {}, {"b": 1.0}):
        on.lora(**loras)
        assert on.image() < 0.15
    assert len(lean) == 1 and on.counter("weights_brought_back") == on.counter("errors") == 0


@room(1.6)
def test_another_lora_before_the_first_step(on: Running, lean: list[int], told: Any) -> None:
    for loras in ({"a": 1.0}, {"b": 1.0}, {}, {"a": -1.0}):
        on.lora(**loras)
        load(on)
        assert told_truly(on) and on.off > 0.95 * SIZE
    assert on.image() < 0.06 and on.card.peak < LEAN and len(lean) == 1
    assert on.counter("weights_brought_back") == on.counter("errors") == 0


def refused(*_: Any, **__: Any) -> Any:
    raise CaptureRefused(SLOWER(2.0, 1.0))


@pytest.mark.parametrize("room_for_all", [True, False])
@room(1.8)
def test_if_no_plan_is_made(on: Running, lean: list[int], told: Any, room_for_all: bool) -> None:
    if not room_for_all:
        on.card.outside = int(0.85 * SIZE)
        on.host.reserve = int(0.3 * SIZE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan_builder, "capture", refused)
        for _ in range(2):
            # the first step without weights on the GPU, the others with them
            assert on.image() < 1e-2 and on.in_parts != room_for_all
            assert (on.away == 0 and on.told == (SIZE, 0)) if room_for_all else on.off > 0
    assert len(lean) == 1 and on.counter("captures") == on.counter("errors") == 0


@room(1.8)
def test_if_8_bits_are_too_inaccurate(on: Running, lean: list[int], told: list[tuple[int, int]]) -> None:
    on.host.opts.data["sfast_tolerance"] = 1e-4
    for _ in range(3):
        assert on.image(3) < 1e-2 and not on.in_parts
    assert len(lean) == 1 and told[0][0] < SMALL
    assert on.away == 0 and on.told == (SIZE, 0) and on.counter("errors") == 0


@pytest.mark.parametrize("room_for_all", [True, False])
@room(1.8)
def test_a_first_image_without_a_plan(
    on: Running, lean: list[int], told: list[tuple[int, int]], room_for_all: bool
) -> None:
    if not room_for_all:
        on.card.outside = int(0.85 * SIZE)
        on.host.reserve = int(0.3 * SIZE)
    hook = a_hook(on)
    for _ in range(2):
        assert on.image() < 1e-2 and on.in_parts != room_for_all and not lean
        assert (on.away == 0 and on.told == (SIZE, 0)) if room_for_all else on.off > 0
    assert told[0][0] < SMALL
    # another model takes room, and Forge knows how much there is to get
    other = on.host.another(int(0.6 * SIZE))
    assert other.model.layer.weight.is_cuda and (on.in_parts or told_truly(on))
    assert on.image() < 1e-2
    hook.remove()
    assert on.image() < 0.06 and on.image() < 0.06 and on.counter("errors") == 0
    assert on.in_parts != room_for_all


@room(1.8)
def test_all_of_it_is_there_and_another_program_takes_memory(on: Running, lean: list[int], told: Any) -> None:
    hook, on.host.reserve = a_hook(on), int(0.3 * SIZE)
    assert on.image() < 1e-2 and on.told == (SIZE, 0)
    # it would have room if its weights had not come
    on.card.outside = int(0.75 * SIZE)
    assert on.image() < 1e-2 and on.in_parts
    hook.remove()
    on.host.memory.unload_all_models()
    assert on.image() < 0.06 and not on.in_parts and len(lean) == 1
    assert on.counter("out_of_memory") == on.counter("errors") == 0


@pytest.mark.parametrize("room_for_all", [True, False])
@room(1.6)
def test_memory_runs_out_in_the_first_step(
    on: Running, lean: list[int], monkeypatch: pytest.MonkeyPatch, room_for_all: bool
) -> None:
    on.lora(a=1.0)
    wanted, whole = on.of(1, a=1.0), list[bool]()
    run, bring = ModuleContext.run_forward, Resident.bring_back

    def out_of_memory(*_: Any, **__: Any) -> Any:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    def forward(where: ModuleContext, original: Any, /, *args: Any, **kwargs: Any) -> Any:
        def short(*args: Any, **kwargs: Any) -> Any:
            return (original if on.in_parts else out_of_memory)(*args, **kwargs)

        return run(where, short, *args, **kwargs)

    def brought_back(resident: Resident) -> int:
        whole.append(room_for_all)
        return bring(resident) if room_for_all else out_of_memory()

    monkeypatch.setattr(ModuleContext, "run_by_layer", out_of_memory)
    monkeypatch.setattr(ModuleContext, "run_forward", forward)
    monkeypatch.setattr(Resident, "bring_back", brought_back)
    found = shown(on.host.generate().to("cpu"))
    assert relative_error([found], [wanted]) < 1e-2 and on.in_parts
    # first while they stayed, then with all of them, for which there is room or not
    assert len(lean) == 1 and lean[0] > 5 and whole == [room_for_all]
    for _ in range(2):
        assert on.image() < 1e-2 and on.in_parts
    assert len(lean) == 1 and on.counter("captures") == on.counter("errors") == 0


@room(1.6)
def test_an_image_that_ends_before_its_first_step(on: Running, lean: list[int], told: Any) -> None:
    def stop() -> None:
        raise KeyboardInterrupt

    for _ in range(2):
        before_a_step(on, stop)
        with pytest.raises(KeyboardInterrupt):
            on.host.generate()
        assert told_truly(on) and on.there < SMALL and on.off
    # what Forge moves meanwhile leaves room for it
    text = on.host.another(int(0.2 * SIZE))
    assert told_truly(on) and len(on.host.current) == 2
    large = on.host.another(int(0.9 * SIZE))
    assert told_truly(on) and large.model.layer.weight.is_cuda
    del text, large
    assert on.image() < 0.06 and len(lean) == 1 and on.counter("errors") == 0
    on.host.memory.unload_all_models()
    assert on.card.used < SMALL and on.loaded == 0


@pytest.mark.parametrize("dropped", [True, False])
@room(1.6)
def test_all_models_leave_before_the_first_step(on: Running, lean: list[int], told: Any, dropped: bool) -> None:
    for _ in range(2):
        load(on)
        assert on.loaded and 0 < on.off < SIZE
        on.host.memory.unload_all_models() if dropped else leave(on)
        assert on.card.used < SMALL and on.loaded == 0 and on.off == SIZE
    assert on.image() < 0.06 and on.card.peak < LEAN and len(lean) == 1 and on.counter("errors") == 0


@pytest.mark.parametrize("name", ["sfast_eight_bits", "sfast_enabled"])
@room(1.6)
def test_it_is_switched_off_before_the_first_step(on: Running, lean: list[int], name: str) -> None:
    options, wanted, off = on.host.opts.data, on.of(1, 2), list[int]()

    def switch() -> None:
        off.append(on.off)
        options[name] = False

    before_a_step(on, switch)
    found = shown(on.host.generate(2).to("cpu"))
    assert relative_error([found], [wanted]) < 1e-2 and not lean and off[0] > 0.95 * SIZE
    there = sum(p.nbytes for p in on.host.unet.parameters() if p.is_cuda)
    assert on.loaded == there or on.in_parts
    options[name] = True
    assert on.image() < 0.06 and on.image() < 0.06 and on.away and on.counter("errors") == 0


@room(1.6)
def test_other_settings_before_the_first_step(on: Running, lean: list[int], told: Any) -> None:
    before_a_step(on, lambda: on.host.opts.data.update({"sfast_tolerance": 0.2}))
    assert on.image() < 0.06 and on.card.peak < LEAN and len(lean) == 1 and on.counter("errors") == 0


SWITCHED_ON = [(1.8, "sfast_enabled"), (1.45, "sfast_enabled"), (1.45, "sfast_eight_bits")]
"""As a whole and in parts. If it was on without 8 bits, there are plans that read a whole one."""


@pytest.mark.parametrize(("on", "name"), SWITCHED_ON, indirect=["on"])
def test_it_is_switched_on_after_forge_has_loaded_it(on: Running, lean: list[int], name: str) -> None:
    options = on.host.opts.data
    options[name] = False
    on.load(1)
    assert on.image() < 1e-2 and on.loaded > 0.5 * SIZE
    on.host.model_data.sd_model.forge_objects.unet = on.host.model_data.sd_model.original.clone()
    options[name] = True
    first: list[tuple[int, int]] = []
    before_a_step(on, lambda: first.append((on.there, on.told[0])))
    assert on.image() < 0.06 and len(lean) == 1
    # it left the GPU, and came back without weights that may be in 8 bits
    assert first[0][0] < SMALL and first[0][1] == pytest.approx(first[0][0], abs=1)
    assert on.image() < 0.06 and on.away and not on.in_parts and told_truly(on) and on.counter("errors") == 0


@room(1.6)
def test_another_checkpoint_before_the_first_step(on: Running, lean: list[int], told: Any) -> None:
    load(on)
    other = on.host.model_data.sd_model
    with pytest.MonkeyPatch.context() as patch:
        # somebody holds the one before
        patch.setattr(on.host, "_drop", lambda: None)
        on.load(2)
    assert all(not p.is_cuda for p in other.original.model.parameters())
    assert on.image() < 0.06 and on.card.peak < LEAN and on.away
    on.load(3)
    assert on.image() < 0.06 and on.card.peak < LEAN
    # plans went to the others
    assert len(lean) == 1 and on.counter("captures") == 1 and on.counter("errors") == 0


@room(1.6)
def test_weights_of_another_type_before_the_first_step(on: Running, lean: list[int], told: Any) -> None:
    load(on)
    leave(on)
    on.host.unet.half()
    on.model.computation_dtype = on.model.storage_dtype = torch.float16
    on.host.unet.dtype = torch.float16
    assert on.image() < 0.06 and on.card.peak < LEAN and len(lean) == 1
    assert on.image() < 0.06 and on.away and on.counter("captures") == 1 and on.counter("errors") == 0


def replace_layers(on: Running, place: str) -> None:
    """An extension puts other linear layers, with the same weights, in the place of all of them. Those that it took out
    are of no use any more."""
    for module in on.host.unet.modules():
        for name, old in list(module.named_children()):
            if isinstance(old, torch.nn.Linear):
                made = type(old)(old.in_features, old.out_features, old.bias is not None, dtype=old.weight.dtype)
                made.load_state_dict(old.state_dict())
                made.parameters_manual_cast = False
                with torch.no_grad():
                    old.weight.zero_()
                setattr(module, name, made.requires_grad_(False).to(place))


@room(1.6)
def test_layers_are_replaced_before_they_come_again(on: Running, lean: list[int], told: Any) -> None:
    load(on)
    leave(on)
    replace_layers(on, "cpu")
    load(on)
    # what is known of the layers before is nothing of these
    assert on.there < SMALL and on.off > 0.95 * SIZE and told_truly(on)
    assert on.image() < 0.06 and len(lean) == 1 and on.image() < 0.06 and on.away and on.counter("errors") == 0


@pytest.mark.parametrize("planned", [False, True])
@room(1.6)
def test_layers_are_replaced_on_the_gpu(on: Running, planned: bool) -> None:
    # a comparison would not find it
    on.host.opts.data["sfast_check"] = "never"
    load(on)
    assert not planned or on.image() < 0.06 and on.image() < 0.06
    sizes = set()
    for _ in range(2):
        replace_layers(on, "cuda")
        for _ in range(3):
            assert on.image() < 0.06
        # what plans of the layers before have in 8 bits spares the UNet nothing, and gives way
        sizes.add(needs(on.accelerator, on.model))
        assert told_truly(on) and not on.in_parts
    assert len(sizes) == 1 and 0.5 * SIZE < min(sizes) < 0.8 * SIZE
    assert on.away and on.counter("errors") == 0


@room(1.6)
def test_plans_are_dropped(on: Running, lean: list[int], told: Any) -> None:
    assert on.image() < 0.06 and on.image() < 0.06
    on.session.drop_plans()
    assert told_truly(on) and on.there < 0.3 * SIZE and on.told[1] + on.told[0] > 0.5 * SIZE
    assert on.image() < 0.06 and on.card.peak < LEAN and len(lean) == 2
    assert on.counter("weights_brought_back") == on.counter("errors") == 0


@room(1.6)
def test_memory_that_forge_has_pinned_is_found(on: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: dict[int, int] = {}
    monkeypatch.setattr(forge_neo_patcher, "PINNED", pinned)
    on.host.opts.data["sfast_eight_bits"] = False
    assert on.image() < 1e-2 and on.in_parts and pinned
    on.host.opts.data["sfast_eight_bits"] = True
    assert on.image() < 0.06 and not on.in_parts and not pinned
    # with plans, and without a change of LoRA
    on.host.memory.unload_all_models()
    on.card.outside = int(0.7 * SIZE)
    for _ in range(2):
        assert on.image() < 1e-2 and on.in_parts and pinned
    on.card.outside = 0
    assert on.image() < 0.06 and not on.in_parts and on.away and not pinned


def for_others(*in_make_test: Callable[..., None]) -> tuple[dict[str, Callable[..., None]], list[pytest.MarkDecorator]]:
    """The tests that hold for other Forges as well, by name, and their marks. The others pin nothing, and take nothing
    back from a UNet that is there as a whole.

    Args:
        in_make_test: those that are not long there.
    """
    alone = (test_memory_that_forge_has_pinned_is_found, test_all_of_it_is_there_and_another_program_takes_memory)
    found = {name: each for name, each in globals().items() if name.startswith("test_") and each not in alone}
    long = (name for name, each in found.items() if each not in in_make_test)
    return found, [pytest.mark.usefixtures("proportions"), pytest.mark.long(*long)]
