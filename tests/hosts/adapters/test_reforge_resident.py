"""reForge with 8 bits on a card that is small for its model, on a pretended GPU: what Forge Neo's tests do, and what is
reForge's own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("ldm.modules.diffusionmodules.openaimodel", reason="needs stable-diffusion-sdkit without its pins")
from hosts.adapters import test_forge_resident, test_forge_resident_lora
from hosts.adapters.resident_forge import Running, card_with, room
from hosts.standins import reforge_memory
from sfast_ext.hosts.forge import adapter as forge

# what Forge Neo's have in make test as well
pytestmark = [
    pytest.mark.usefixtures("proportions"),
    pytest.mark.long("test_random_scenes", but=[2]),
    pytest.mark.long("test_at_the_end_of_a_session_after_the_patcher_of_an_image_is_gone", but=[1]),
    pytest.mark.long(
        "test_other_models_find_room_next_to_it_or_in_its_place",
        "test_loras_are_followed_and_made_one_layer_at_a_time",
        "test_off_and_on_by_the_settings",
        "test_at_the_end_of_a_session_the_weights_are_where_forge_believes",
        "test_on_a_large_card_nothing_leaves",
        "test_a_lora_is_right_after_the_extension_was_turned_off",
        "test_without_room_for_the_first_image_it_is_loaded_in_parts",
        "test_a_call_without_a_plan_that_lacks_room_for_all_weights_is_forges",
        "test_a_lora_is_right_after_forge_had_to_load_in_parts",
        "test_if_all_of_it_cannot_be_loaded_it_is_in_parts_at_once",
        "test_memory_that_another_program_takes_while_an_image_is_made",
    ),
]
OTHERS_TOO = (
    test_forge_resident.test_the_unet_is_loaded_as_a_whole_and_stays_in_8_bits,
    test_forge_resident.test_without_8_bits_forge_loads_it_in_parts_as_before,
    test_forge_resident.test_on_a_large_card_nothing_leaves,
    test_forge_resident.test_other_models_find_room_next_to_it_or_in_its_place,
    test_forge_resident.test_loras_are_followed_and_made_one_layer_at_a_time,
    test_forge_resident.test_off_and_on_by_the_settings,
    test_forge_resident.test_at_the_end_of_a_session_the_weights_are_where_forge_believes,
    test_forge_resident.test_at_the_end_of_a_session_after_the_patcher_of_an_image_is_gone,
    test_forge_resident.test_another_checkpoint_has_the_plans,
    test_forge_resident.test_if_the_first_forward_runs_out_of_memory_forge_loads_it_in_parts,
    test_forge_resident.test_a_call_without_a_plan_that_lacks_room_for_all_weights_is_forges,
    test_forge_resident.test_memory_that_another_program_takes_while_an_image_is_made,
    test_forge_resident.test_without_room_for_the_first_image_it_is_loaded_in_parts,
    test_forge_resident.test_random_scenes,
    test_forge_resident_lora.test_a_lora_is_right_after_the_extension_was_turned_off,
    test_forge_resident_lora.test_a_lora_is_right_after_forge_had_to_load_in_parts,
    test_forge_resident_lora.test_if_all_of_it_cannot_be_loaded_it_is_in_parts_at_once,
    test_forge_resident_lora.test_at_the_end_of_a_session_weights_that_cannot_come_back,
)
globals().update({test.__name__: test for test in OTHERS_TOO})


on = card_with(reforge_memory, forge.ReforgeSession)


@room(1.6)
def test_of_two_checkpoints_that_are_kept_each_has_its_own_weights(on: Running) -> None:
    assert on.image() < 0.06 and on.image() < 0.06 and on.away
    models = {1: on.host.model_data.sd_model}
    with pytest.MonkeyPatch.context() as patch:
        # reForge keeps so many checkpoints as are allowed, and moves none of them
        patch.setattr(on.host, "_drop", lambda: None)
        on.load(2)
    models[2] = on.host.model_data.sd_model
    # nothing of the other one is taken for loaded that is in system memory
    assert not models[1].original.model.model_loaded_weight_memory
    for seed in (2, 2, 1, 1, 2, 1, 1):
        on.seed, on.host.model_data.sd_model = seed, models[seed]
        on.lora(**({"a": 1.0} if seed == 2 else {}))
        assert on.image() < 0.06, seed
    assert on.away and not on.model.model_lowvram and on.counter("errors") == 0


@room(1.6)
def test_without_room_for_all_of_it_and_a_forward_it_is_in_parts_once_8_bits_are_off(on: Running) -> None:
    # reForge takes nothing back from a UNet that is there as a whole, and does not say how little room there is
    # an extension's hook keeps plans from running, and all weights are there
    hook = on.host.unet.middle_block.register_forward_hook(lambda module, given, result: result)
    assert on.image() < 1e-2 and not on.away and not on.model.model_lowvram
    hook.remove()
    on.host.opts.data["sfast_eight_bits"] = False
    assert on.image() < 1e-2 and on.model.model_lowvram
    on.host.opts.data["sfast_eight_bits"] = True
    assert on.image() < 0.06 and on.image() < 0.06 and on.away and not on.model.model_lowvram
    on.kind.stop()
    assert on.model.model_lowvram and on.image() < 1e-2


@room(1.3)
def test_on_a_card_without_room_for_a_forward_next_to_all_weights_it_stays_in_parts(on: Running) -> None:
    on.host.opts.data["sfast_eight_bits"] = False
    assert on.session is not None and not on.session.follows_residence()
    assert on.session.eight_bits.status(on.session.config(), [])["note"] is None
    on.host.opts.data["sfast_eight_bits"] = True
    for _ in range(3):
        assert on.image() < 1e-2 and on.model.model_lowvram
    assert on.counter("captures") == on.counter("out_of_memory") == on.card.refused == 0


def hook_patches(patcher: Any) -> None:
    patcher.hook_patches["a hook"] = {}


def injections(patcher: Any) -> None:
    patcher.injections["an extension"] = [SimpleNamespace(inject=lambda each: None, eject=lambda each: None)]


def callbacks(patcher: Any) -> None:
    patcher.callbacks.setdefault("on_load", {})["an extension"] = [lambda *args: None]


def a_wrapper_of_a_weight(patcher: Any) -> None:
    patcher.weight_wrapper_patches["diffusion_model.out.2.weight"] = [lambda weight: weight]


def a_cast(patcher: Any) -> None:
    patcher.model.manual_cast_dtype = torch.float32


@pytest.mark.parametrize("done", [hook_patches, injections, callbacks, a_wrapper_of_a_weight, a_cast])
@room(1.6)
def test_what_works_on_weights_by_itself_is_left_to_reforge(on: Running, done: Any) -> None:
    assert on.image() < 0.06 and on.image() < 0.06 and on.away
    patcher = on.host.model_data.sd_model.original
    on.host.memory.unload_all_models()
    done(patcher)
    on.host._load(patcher)
    assert on.model.model_lowvram
    assert on.model.model_loaded_weight_memory <= sum(p.nbytes for p in on.host.unet.parameters() if p.is_cuda)


@room(1.6)
def test_without_a_function_that_is_wrapped_reforge_loads_it_in_parts(on: Running) -> None:
    assert on.image() < 0.06 and on.image() < 0.06 and on.away
    on.kind.stop()
    with pytest.MonkeyPatch.context() as patch:
        # another version may have it by another name
        patch.delattr(reforge_memory.reforge.ModelPatcher, "patch_weight_to_device")
        forge.start("test")
        assert on.session is not None and not on.session.follows_residence()
        on.kind.stop()
    forge.start("test")
    assert on.session.follows_residence()
