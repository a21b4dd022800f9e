"""Forge by lllyasviel with 8 bits on a small card: in the first image too, half-precision weights of layers stay in
system memory. What Forge Neo's tests do."""

from __future__ import annotations

import pytest

pytest.importorskip("ldm.modules.diffusionmodules.openaimodel", reason="needs stable-diffusion-sdkit without its pins")
from hosts.adapters import test_forge_resident_first as neo
from hosts.adapters.resident_forge import SIZE, SMALL, Running, card_with, room
from hosts.adapters.test_forge_old_resident import right
from hosts.adapters.test_forge_resident_first import lean, told  # noqa: F401
from hosts.standins import forge_old_memory
from sfast_ext.hosts.forge import adapter as forge

TESTS, pytestmark = neo.for_others(
    neo.test_its_weights_wait_for_the_first_plan,
    neo.test_with_a_lora_at_once,
    neo.test_a_first_image_without_a_plan,
    neo.test_memory_runs_out_in_the_first_step,
    neo.test_it_is_switched_on_after_forge_has_loaded_it,
)
globals().update(TESTS)


on = card_with(forge_old_memory, forge.OldSession)


@room(1.6)
def test_weights_with_a_lora_wait(on: Running, lean: list[int]) -> None:  # noqa: F811
    for loras in ({"a": 1.0}, {"a": 1.0, "b": -1.0}, {}, {"b": 1.0}):
        on.lora(**loras)
        neo.load(on)
        # Forge makes them after the move, each once
        assert on.there < SMALL and on.off > 0.95 * SIZE and right(on)
    assert on.image() < 0.06 and len(lean) == 1 and right(on)


@room(1.45)
def test_what_plans_hold_is_free_before_forge_loads_in_parts(on: Running) -> None:
    assert on.image() < 0.06 and on.image() < 0.06 and on.away
    on.lora(a=1.0)
    with on.without_room_for_all():
        on.host.generate()
    assert on.in_parts and on.loaded > forge_old_memory.IN_PARTS * SIZE
