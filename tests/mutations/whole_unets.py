"""What decides whether a UNet that SD.Next maps in parts comes to the GPU as a whole, and how it goes back."""

from __future__ import annotations

from mutations import Mutation

_FILE = "hosts/sdnext/whole_unet.py"
_TESTS = "hosts/adapters/test_sdnext_whole_unet.py::"
_OUT = "hosts/adapters/test_sdnext_whole_short.py::"
_FIRST = "hosts/adapters/test_sdnext_resident_first.py::"
_SHORT = (_OUT + "test_the_first_forward_runs_out_of_memory",)
_ON_GPU = (_TESTS + "test_off_and_on_while_it_is_on_the_gpu",)

MUTATIONS = [
    Mutation(
        "maps with a disk or a second GPU", _FILE,
        'if others.pop("cpu", None) is None or len(others) != 1:', 'if others.pop("cpu", None) is None:',
        (_TESTS + "test_maps",),
    ),
    Mutation(
        "a UNet of which the host has parts in system memory", _FILE,
        "resident.in_parts = not whole", "pass",
        (_TESTS + "test_maps",),
    ),
    Mutation(
        "a UNet that would be bypassed as a whole, too", _FILE,
        "if self._refusal(unet) is not None:", "if False:",
        (_TESTS + "test_what_is_bypassed_however_it_comes",),
    ),
    Mutation(
        "weights that another dispatch has left elsewhere", _FILE,
        "p.is_meta or", "",
        (_TESTS + "test_weights_that_another_dispatch_has_left_elsewhere",),
    ),
    Mutation(
        "weights that are not in half precision", _FILE,
        "p.dtype not in _HALF", "False",
        (_TESTS + "test_single_precision",),
    ),
    Mutation(
        "GPU memory that others hold", _FILE,
        "missing <= most and self._make_room(missing)", "missing <= most",
        (_TESTS + "test_what_other_programs_hold_does_not",),
    ),
    Mutation(
        "GPU memory of weights that stay in system memory for the first plan", _FILE,
        "needed -= self.expected_aside(found, place) // 2", "pass",
        (_FIRST + "test_switched_on_after_images_in_parts",),
    ),
    Mutation(
        "GPU memory that a call needs which is bypassed", _FILE,
        "return 0 if bypassed else found.expected_aside(place)", "return found.expected_aside(place)",
        (_FIRST + "test_an_image_that_is_bypassed_finds_all_weights",),
    ),
    Mutation(
        "GPU memory that a call needs which nothing accelerates", _FILE,
        "if torch_state.obstacle() is None:", "if True:",
        (_TESTS + "test_calls_that_are_bypassed_need_room_for_all_of_it",),
    ),
    Mutation(
        "tied weights of a UNet that comes as a whole", _FILE,
        "if is_tied(unet):", "if False:",
        (_FIRST + "test_tied_weights",),
    ),
    Mutation(
        "tied weights while a UNet comes", "hosts/sdnext/offload.py",
        "[] if networks and is_tied(model) else networks", "networks",
        (_FIRST + "test_tied_weights",),
    ),
    Mutation(
        "weights of a first plan in SD.Next", "hosts/sdnext/offload.py",
        "return staying(kept, goes, bool(early))", "return staying(kept, goes)",
        (_FIRST + "test_the_first_images",),
    ),
    Mutation(
        "weights that a bypassed call needs", "hosts/sdnext/offload.py",
        "return staying(kept, goes, bool(early))", "return staying(kept, goes, True)",
        (_FIRST + "test_an_image_that_is_bypassed_finds_all_weights",),
    ),
    Mutation(
        "memory that ran out once", _FILE,
        "or unet in self._refused or found.parts", "or found.parts",
        (_OUT + "test_a_later_size_runs_out_of_memory",),
    ),
    Mutation(
        "a forward that runs out of memory in a rehearsal", _FILE,
        "if rehearsing() or building() or torch_state.obstacle() is not None:", "if False:",
        (_OUT + "test_nothing_gives_way_in_a_rehearsal",),
    ),
    Mutation(
        "memory that runs out as a UNet comes", "hosts/sdnext/offload.py",
        "self.whole.did_not_fit(model)", "pass",
        (_OUT + "test_memory_runs_out_as_it_comes",),
    ),
    Mutation(
        "a UNet that came another way in the middle of an image", "hosts/sdnext/hooks.py",
        "self._whole.changes != self._dispatches", "False",
        _SHORT,
    ),
    Mutation(
        "a model that is in another form since the original ran", "runtime/plan_builder.py",
        "if self._context.bypassed():", "if False:",
        _SHORT,
    ),
    Mutation(
        "a setting that is switched while a UNet stays on the GPU", _FILE,
        "if leaves and gpu_room.on_gpu(unet) and _is_balanced(unet):", "if False:",
        _ON_GPU,
    ),
    Mutation(
        "a UNet in parts that is not accelerated for another reason", _FILE,
        "wanted and not asked and", "wanted and",
        (_TESTS + "test_one_that_is_not_accelerated_leaves_once",),
    ),
    Mutation(
        "a whole UNet under another mode of offload", _FILE,
        "gpu_room.on_gpu(unet) and _is_balanced(unet)", "gpu_room.on_gpu(unet)",
        (_TESTS + "test_another_mode_is_left_alone",),
    ),
]  # fmt: skip
