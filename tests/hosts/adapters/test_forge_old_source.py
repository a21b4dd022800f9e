"""Tests of Forge with 8 bits on a small card, with Forge's own memory management in the stand-in's place."""

from __future__ import annotations

import pytest

pytest.importorskip("ldm.modules.diffusionmodules.openaimodel", reason="needs stable-diffusion-sdkit without its pins")
from hosts.adapters import test_forge_old_resident, test_forge_resident, test_forge_resident_lora
from hosts.adapters.resident_forge import card_with
from hosts.standins import forge_old_source
from sfast_ext.hosts.forge import adapter as forge

pytestmark = [
    pytest.mark.usefixtures("proportions"),
    pytest.mark.skipif(not forge_old_source.FOLDER, reason="set SFAST_FORGE_OLD_DIR to a checkout of Forge"),
]
OTHERS_TOO = (
    test_forge_resident.test_the_unet_is_loaded_as_a_whole_and_stays_in_8_bits,
    test_forge_resident.test_without_8_bits_forge_loads_it_in_parts_as_before,
    test_forge_resident.test_other_models_find_room_next_to_it_or_in_its_place,
    test_forge_resident.test_loras_are_followed_and_made_one_layer_at_a_time,
    test_forge_resident.test_off_and_on_by_the_settings,
    test_forge_resident.test_at_the_end_of_a_session_the_weights_are_where_forge_believes,
    test_forge_resident.test_another_checkpoint_has_the_plans,
    test_forge_resident.test_if_the_first_forward_runs_out_of_memory_forge_loads_it_in_parts,
    test_forge_resident.test_random_scenes,
    test_forge_resident_lora.test_if_all_of_it_cannot_be_loaded_it_is_in_parts_at_once,
    test_forge_old_resident.test_each_weight_has_each_lora_once_whatever_happens,
    test_forge_old_resident.test_memory_runs_out_in_the_middle_of_an_image,
    test_forge_old_resident.test_with_more_memory_it_comes_as_a_whole_later,
)
globals().update({test.__name__: test for test in OTHERS_TOO})


on = card_with(forge_old_source, forge.OldSession)
