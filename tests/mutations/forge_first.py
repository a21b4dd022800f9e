"""What keeps half-precision weights in system memory in the first image in a Forge, and what Forge is told of it."""

from __future__ import annotations

from mutations import Mutation

_TESTS = "hosts/adapters/test_forge_resident_first.py::"
_OLD = "hosts/adapters/test_forge_old_resident_first.py::"
_FIRST = (_TESTS + "test_its_weights_wait_for_the_first_plan",)
_SWITCHED_ON = (_TESTS + "test_it_is_switched_on_after_forge_has_loaded_it",)
_RESIDENT, _LAYERS = "hosts/forge/resident.py", "hosts/forge/resident_layers.py"

MUTATIONS = [
    Mutation(
        "weights of a first plan in Forge Neo", _LAYERS,
        "with found.keeping_aside(place, early=True) as self._hidden:",
        "with found.keeping_aside(place) as self._hidden:",
        _FIRST,
    ),
    Mutation(
        "weights of a first plan in Forge", "hosts/forge/resident_models.py",
        "with found.keeping_aside(place, early=True):", "with found.keeping_aside(place):",
        (_OLD + "test_weights_with_a_lora_wait",),
    ),
    Mutation(
        "what Forge is told of weights that wait", _RESIDENT,
        "return found if found.arena.resident.banks or awaits(found) else None",
        "return found if found.arena.resident.banks else None",
        _FIRST,
    ),
    Mutation(
        "room for weights that wait", "hosts/forge/residence.py",
        "if aside else size", "if False else size",
        (_TESTS + "test_there_need_not_be_room_for_all_of_it",),
    ),
    Mutation(
        "room for weights that were to wait and have come", _RESIDENT,
        "if place is None or unet in self._whole and on_gpu(unet) and not awaits(found):", "if place is None:",
        (_TESTS + "test_all_of_it_is_there_and_another_program_takes_memory",),
    ),
    Mutation(
        "room for a forward next to weights that wait", _RESIDENT,
        "needed = max(first + gpu_room.WORKSPACE, share + free - usable)", "needed = first + gpu_room.WORKSPACE",
        (_TESTS + "test_there_must_be_room_for_8_bits_and_a_forward",),
    ),
    Mutation(
        "weights that wait before it is decided that they may", _RESIDENT,
        "(unet in self._whole or unet is self._asked_of)", "unet in self._whole",
        (_TESTS + "test_there_need_not_be_room_for_all_of_it",),
    ),
    Mutation(
        "a UNet that Forge has loaded by itself", _RESIDENT,
        "self._aside_at_first(found, place): leave()", "self._aside_at_first(found, place): pass",
        _SWITCHED_ON,
    ),
    Mutation(
        "weights that are others since they waited", _RESIDENT,
        "resident.forget()", "pass",
        (_TESTS + "test_layers_are_replaced_before_they_come_again",),
    ),
    Mutation(
        "a UNet that is loaded after the extension was turned on", _RESIDENT,
        "lambda: self._attach(unet)", "lambda: None",
        _SWITCHED_ON,
    ),
    Mutation(
        "8 bits that are on since a UNet was loaded", _RESIDENT,
        "found.configure(self._config())", "pass",
        _SWITCHED_ON,
    ),
    Mutation(
        "memory that Forge Neo has pinned of weights that wait", _LAYERS,
        "# while Forge Neo finds the memory that it has pinned of those in parts\n unpin()", "pass",
        (_TESTS + "test_memory_that_forge_has_pinned_is_found",),
    ),
    Mutation(
        "what Forge is told of weights that have come for a call without a plan", _LAYERS,
        "(found.module in self._whole or self._in_8_bits(model) is found)", "self._in_8_bits(model) is found",
        (_TESTS + "test_a_first_image_without_a_plan",),
    ),
    Mutation(
        "memory that a plan keeps while Forge loads its UNet in parts", "hosts/forge/resident_models.py",
        "found.give_memory_back()", "pass",
        (_OLD + "test_what_plans_hold_is_free_before_forge_loads_in_parts",),
    ),
]
