"""Forge by lllyasviel with 8 bits on a card that is small for its model, on a pretended GPU: what Forge Neo's tests do,
and what is Forge's own."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("ldm.modules.diffusionmodules.openaimodel", reason="needs stable-diffusion-sdkit without its pins")
from hosts.adapters import test_forge_resident, test_forge_resident_lora
from hosts.adapters.resident_forge import CHANNELS, SIZE, SMALL, Running, card_with, room, shown
from hosts.standins import forge_old, forge_old_memory
from hosts.standins.a1111 import lora_delta
from sfast_ext.hosts import gpu_room
from sfast_ext.hosts.forge import adapter as forge
from sfast_ext.runtime import lean_calls
from sfast_ext.runtime.verify import relative_error

# what Forge Neo's have in make test as well
pytestmark = [
    pytest.mark.usefixtures("proportions"),
    pytest.mark.long("test_random_scenes", but=[1]),
    pytest.mark.long(
        "test_on_a_large_card_nothing_leaves",
        "test_off_and_on_by_the_settings",
        "test_other_models_find_room_next_to_it_or_in_its_place",
        "test_a_lora_in_the_layers_is_forges",
        "test_at_the_end_of_a_session_after_the_patcher_of_an_image_is_gone",
        "test_a_call_without_a_plan_that_lacks_room_for_all_weights_is_forges",
        "test_another_checkpoint_has_the_plans",
        "test_memory_that_another_program_takes_while_an_image_is_made",
        "test_an_exception_in_the_middle_of_an_image",
        "test_a_lora_is_right_after_the_extension_was_turned_off",
        "test_a_lora_is_right_after_forge_had_to_load_in_parts",
        "test_if_all_of_it_cannot_be_loaded_it_is_in_parts_at_once",
        "test_8_bit_weights_that_cannot_be_freed_end_no_image",
        "test_at_the_end_of_a_session_weights_that_cannot_come_back",
    ),
]
OTHERS_TOO = (
    test_forge_resident.test_the_unet_is_loaded_as_a_whole_and_stays_in_8_bits,
    test_forge_resident.test_without_8_bits_forge_loads_it_in_parts_as_before,
    test_forge_resident.test_on_a_large_card_nothing_leaves,
    test_forge_resident.test_other_models_find_room_next_to_it_or_in_its_place,
    test_forge_resident.test_loras_are_followed_and_made_one_layer_at_a_time,
    test_forge_resident.test_a_lora_in_the_layers_is_forges,
    test_forge_resident.test_off_and_on_by_the_settings,
    test_forge_resident.test_at_the_end_of_a_session_the_weights_are_where_forge_believes,
    test_forge_resident.test_at_the_end_of_a_session_after_the_patcher_of_an_image_is_gone,
    test_forge_resident.test_another_checkpoint_has_the_plans,
    test_forge_resident.test_if_the_first_forward_runs_out_of_memory_forge_loads_it_in_parts,
    test_forge_resident.test_memory_that_another_program_takes_while_an_image_is_made,
    test_forge_resident.test_without_room_for_the_first_image_it_is_loaded_in_parts,
    test_forge_resident.test_an_exception_in_the_middle_of_an_image,
    test_forge_resident.test_random_scenes,
    test_forge_resident_lora.test_a_lora_is_right_after_the_extension_was_turned_off,
    test_forge_resident_lora.test_a_lora_is_right_after_forge_had_to_load_in_parts,
    test_forge_resident_lora.test_if_the_first_forward_with_a_lora_runs_out_of_memory,
    test_forge_resident_lora.test_if_all_of_it_cannot_be_loaded_it_is_in_parts_at_once,
    test_forge_resident_lora.test_8_bit_weights_that_cannot_be_freed_end_no_image,
    test_forge_resident_lora.test_at_the_end_of_a_session_weights_that_cannot_come_back,
)
globals().update({test.__name__: test for test in OTHERS_TOO})


on = card_with(forge_old_memory, forge.OldSession)


def right(on: Running) -> bool:
    """Whether each weight is that of the checkpoint with its LoRAs, each of them once, to the bit."""
    online = any(online for *_, online in on.host.model_data.sd_model.forge_objects.unet.lora_patches)
    made = forge_old_memory.make_unet(on.seed, CHANNELS, dtype=torch.bfloat16)
    layers = {f"{n}.weight" for n, m in made.named_modules() if isinstance(m, forge_old.Layer)}
    for name, value in made.named_parameters():
        wanted = value.float()
        for lora, strength in on.loras.items() if name in layers and not online else ():
            wanted += strength * lora_delta(lora, f"diffusion_model.{name}", wanted)
        found = on.host.unet.get_parameter(name).detach().to("cpu")
        if not torch.equal(found, wanted.to(torch.bfloat16)):
            return False
    return True


def short(on: Running, monkeypatch: pytest.MonkeyPatch, calls: int) -> list[bool]:
    """From then on the original forward, as a whole, runs out of memory after so many calls."""
    conv, real, seen = on.host.unet.out[2], type(on.host.unet.out[2]).forward, list[bool]()

    def forward(layer: Any, x: torch.Tensor) -> torch.Tensor:
        if layer is conv:
            seen.append(on.in_parts)
            if not on.in_parts and len(seen) > calls:
                raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        return real(layer, x)

    monkeypatch.setattr(type(conv), "forward", forward)
    return seen


def reasons(on: Running) -> str:
    return str(on.session.report.as_dict()["reasons"])


@pytest.mark.long(but=[0])
@pytest.mark.parametrize("seed", range(2))
@room(1.6)
def test_each_weight_has_each_lora_once_whatever_happens(on: Running, seed: int) -> None:
    rng, options, done = random.Random(seed), on.host.opts.data, list[str]()
    assert on.image() < 0.06 and on.image() < 0.06 and on.away and right(on)
    for event in rng.sample(range(9), 9):
        done.append(str(event))
        if event < 3:
            on.lora(**{name: rng.choice([1.0, -1.0, 0.5]) for name in rng.sample("ab", rng.randint(0, 2))})
        elif event == 3:
            on.lora(online=True, a=1.0)
        elif event == 4:
            options["sfast_eight_bits"] ^= True
        elif event == 5:
            on.host.memory.unload_all_models()
        elif event == 6:
            # a script's clone, which is loaded anew
            on.host.option(something=1)
        elif event == 7:
            on.host.another(int(0.9 * SIZE))
        else:
            on.card.outside = int(0.6 * SIZE) - on.card.outside
        assert on.image() < 0.2 and right(on), done
    on.kind.stop()
    assert on.image() < 0.03 and right(on)


@room(1.6)
def test_a_lora_that_finds_no_room_on_the_gpu_is_made_in_system_memory(on: Running) -> None:
    assert on.image() < 0.06 and on.image() < 0.06 and on.away
    away, failed, real = on.away, list[torch.device](), forge_old.merged

    def merged(key: str, patches: Any, weight: torch.Tensor) -> torch.Tensor:
        failed.append(weight.device)
        if weight.is_cuda and not on.host.unet.get_parameter(key.partition(".")[2]).is_cuda:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        return real(key, patches, weight)

    on.lora(a=1.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forge_old, "merged", merged)
        assert on.image() < 0.06
    # none of the others had to leave for it
    assert {each.type for each in failed} == {"cpu", "cuda"} and on.away == away and right(on)
    assert on.counter("out_of_memory") == away or on.counter("out_of_memory") > 1


@room(1.6)
def test_weights_that_stay_are_not_counted_as_loaded(on: Running) -> None:
    assert on.image(1) < 0.06 and on.image() < 0.06
    assert on.told == (on.there, 0) and on.there < 0.75 * SIZE
    on.host.memory.free_memory(1.59 * SIZE, on.host.place)
    loaded = forge_old.LoadedModel(on.host.model_data.sd_model.original)
    loaded.compute_inclusive_exclusive_memory()
    assert loaded.inclusive_memory == 0 and loaded.exclusive_memory < 0.75 * SIZE and on.card.used < SMALL
    assert on.image() < 0.06 and on.told == (on.there, 0)


@room(1.6)
def test_8_bit_weights_give_way_before_models_do_and_not_to_the_unet_itself(on: Running) -> None:
    assert on.image() < 0.06 and on.image() < 0.06
    banks = on.accelerator.arena.banks
    held = banks.held
    text = on.host.another(int(0.1 * SIZE))
    on.host.memory.load_models_gpu([text], int(1.1 * SIZE))
    # both are there, and some 8-bit weights have left
    assert banks.held < held and len(on.host.current) == 2 and on.loaded
    assert on.image() < 0.06 and banks.held == held
    with pytest.MonkeyPatch.context() as patch:
        given: list[Any] = []
        patch.setattr(gpu_room, "givers", lambda needed, *args: given.append(needed) or [])
        make = on.session._resident._give
        on.lora(a=1.0)
        on.session._resident._call.patchers = (on.host.model_data.sd_model.forge_objects.unet,)
        make(SIZE, ())
        on.session._resident._call.patchers = ()
        make(SIZE, on.host.current)
        assert not given
        make(1.5 * SIZE, ())
        assert given


@pytest.mark.long
@room(1.6)
def test_a_controlnet_comes_after_it_as_much_as_has_room(on: Running) -> None:
    network = on.host.patcher_of(int(0.55 * SIZE))
    on.host.with_it = (network,)
    assert on.image() < 0.06 and on.image() < 0.06 and on.away and not on.in_parts
    assert len(on.host.current) == 2 and not network.model.layer.weight.is_cuda
    on.lora(a=1.0)
    assert on.image() < 0.06 and on.away and not on.in_parts and right(on)
    on.host.option(something=1)
    assert on.image() < 0.06 and on.away and not on.in_parts and right(on)


@pytest.mark.parametrize("lean", [False, True])
@room(1.6)
def test_memory_runs_out_in_the_middle_of_an_image(on: Running, monkeypatch: pytest.MonkeyPatch, lean: bool) -> None:
    if not lean:
        monkeypatch.setattr(lean_calls, "may_be", lambda *_: False)
    on.lora(a=1.0)
    assert on.image() < 0.06 and on.image() < 0.06 and on.away
    on.session.drop_plans()
    wanted, seen = on.of(1, 4, a=1.0), short(on, monkeypatch, 0)
    steps = on.plan_runs()
    found = shown(on.host.generate(4).to("cpu"))
    assert relative_error([found], [wanted]) < 1e-2 and on.in_parts and right(on)
    # the same step again, and the others, by the original in parts
    assert seen[-4:] == [True] * 4 and on.plan_runs() == steps
    # while weights stayed in system memory; then with all of them on the GPU, if they found room
    assert seen[:-4] in ([[False], [False, False]] if lean else [[False]])
    assert "GPU memory ran out with all of the UNet" in reasons(on)
    for _ in range(2):
        assert on.image() < 1e-2 and on.in_parts
    on.lora()
    assert on.image() < 1e-2 and on.in_parts and right(on) and on.counter("out_of_memory") == 1


@room(1.6)
def test_a_call_without_a_plan_that_lacks_room_for_all_weights_is_forges(on: Running) -> None:
    test_forge_resident.image_in_parts(on)
    # Forge loads nothing again that is loaded
    assert on.image() < 1e-2 and on.in_parts and on.counter("errors") == 0


@room(1.6)
def test_with_more_memory_it_comes_as_a_whole_later(on: Running) -> None:
    on.card.outside = int(0.7 * SIZE)
    for _ in range(2):
        assert on.image() < 1e-3 and on.in_parts
    assert "the first image in 8 bits needs" in reasons(on)
    on.card.outside = 0
    assert on.image() < 0.06 and on.image() < 0.06 and on.away and not on.in_parts and right(on)


def a_lora_in_the_layers(on: Running, patcher: Any) -> None:
    patcher.add_patches({"diffusion_model.out.2.weight": "a"}, 0.0, online_mode=True)


def a_part_of_the_unet(on: Running, patcher: Any) -> None:
    patcher.object_patches["diffusion_model.out"] = on.host.unet.out


def a_cast(on: Running, patcher: Any) -> None:
    on.host.unet.out[2].parameters_manual_cast = True


def weights_of_another_kind(on: Running, patcher: Any) -> None:
    layer = on.host.unet.out[2]
    layer.weight = nn.Parameter(layer.weight.detach().float(), requires_grad=False)


def all_models_on_the_gpu(on: Running, patcher: Any) -> None:
    patcher.offload_device = on.host.place


def another_forward(on: Running, patcher: Any) -> None:
    real = on.host.unet.forward
    on.host.unet.forward = lambda *args, **kwargs: real(*args, **kwargs)


REFUSED = (
    a_lora_in_the_layers, a_part_of_the_unet, a_cast, weights_of_another_kind, all_models_on_the_gpu, another_forward
)  # fmt: skip


@pytest.mark.parametrize("done", REFUSED)
@room(1.6)
def test_what_is_not_known_is_left_to_forge(on: Running, done: Any) -> None:
    assert on.image() < 0.06 and on.image() < 0.06 and on.away
    on.host.memory.unload_all_models()
    patcher = on.host.model_data.sd_model.original.clone()
    done(on, patcher)
    on.host._load(patcher)
    assert on.in_parts and (on.accelerator is None or on.accelerator.arena.banks.held == 0)


@room(1.6)
def test_with_no_weights_on_the_gpu_by_choice(on: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    # --always-no-vram
    real = on.host.memory.compute_model_gpu_memory_when_using_cpu_swap
    monkeypatch.setattr(on.host.memory, "compute_model_gpu_memory_when_using_cpu_swap", lambda free, left: 0)
    assert on.image() < 1e-2 and on.in_parts and on.card.used < SMALL
    monkeypatch.setattr(on.host.memory, "compute_model_gpu_memory_when_using_cpu_swap", real)


@room(1.6)
def test_without_a_function_that_is_wrapped_forge_loads_it_as_it_does_alone(on: Running) -> None:
    assert on.image() < 0.06 and on.image() < 0.06 and on.away
    on.kind.stop()
    with pytest.MonkeyPatch.context() as patch:
        # another version may have it by another name
        patch.delattr(forge_old.ModelPatcher, "forge_patch_model")
        forge.start("test")
        assert on.session is not None and not on.session.follows_residence()
        on.kind.stop()
    forge.start("test")
    assert on.session.follows_residence()
