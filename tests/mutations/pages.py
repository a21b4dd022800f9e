"""What the page starts by itself or on a click: the plan of the first image, and the last image in both ways."""

from __future__ import annotations

from mutations import Mutation

_AHEAD = "jobs/test_ahead.py::"
_GIVEN_UP = (_AHEAD + "test_it_is_given_up_at_once_and_leaves_nothing",)
_ROOM = (_AHEAD + "test_cards_without_room_are_left_alone",)
_LAST = "hosts/adapters/test_last_request.py::"
_SWITCH = (_LAST + "test_the_switch_is_that_of_the_comparison_and_is_put_back",)

MUTATIONS = [
    Mutation(
        "who waits for the queue while a size is prepared", "jobs/ahead.py",
        "self._over.is_set() or self._waiting() is not False", "self._over.is_set()", _GIVEN_UP,
    ),
    Mutation(
        "an image that does not wait for the queue", "jobs/ahead.py",
        "if not self._over.is_set():\n            self.end()", "pass",
        (_AHEAD + "test_an_image_without_the_queue_ends_it_first",),
    ),
    Mutation(
        "a host that does not tell who waits", "jobs/ahead.py",
        "waiting is None or", "", (_AHEAD + "test_nothing_is_done_where_the_host_does_not_tell_who_waits",),
    ),
    Mutation(
        "a host that is at work", "jobs/ahead.py",
        "idle = not waiting and not self._host.busy()", "idle = not waiting",
        (_AHEAD + "test_a_busy_host_is_left_alone_and_so_is_one_that_had_an_image",),
    ),
    Mutation(
        "weights on several devices before the first image", "jobs/ahead.py",
        "if len(devices) != 1:\n            return False", "", _ROOM,
    ),
    Mutation("small cards before the first image", "jobs/ahead.py", "total >= SMALL_CARD and", "", _ROOM),
    Mutation(
        "room before the first image", "jobs/ahead.py",
        "and free >= ROOM + sum(weight.numel() * weight.element_size() for weight in weights)", "", _ROOM,
    ),
    Mutation(
        "flags for cards of little memory", "hosts/idle.py",
        "small or offloaded or any(getattr(flags, name, False) for name in LITTLE_MEMORY)", "small or offloaded",
        (_AHEAD + "test_flags_for_cards_of_little_memory",),
    ),
    Mutation(
        "offload before the first image", "hosts/idle.py", "small or offloaded or", "small or",
        (_AHEAD + "test_settings_that_leave_no_room_for_it",),
    ),
    Mutation(
        "the first pass of hires fix", "jobs/ahead.py",
        "min(used, key=lambda plan: plan.generation_of_use, default=None)",
        "max(used, key=lambda plan: plan.generation_of_use, default=None)",
        (_AHEAD + "test_of_hires_fix_the_first_pass_counts",),
    ),
    Mutation(
        "the switch of a comparison over that of a request", "hosts/per_request.py",
        ", **getattr(p, FORCED, {})", "", _SWITCH,
    ),
    Mutation(
        "settings that a grid's copies keep", "hosts/last_request.py",
        "p.override_settings_restore_afterwards = True", "pass",
        (_LAST + "test_no_setting_of_a_request_of_a_grid_stays",),
    ),
    Mutation(
        "the switch after a failure of the host", "hosts/last_request.py",
        "if getattr(shared.opts, KEY) != was:\n                setattr(shared.opts, KEY, was)", "pass",
        (_LAST + "test_a_failure_of_the_host_is_told_and_the_switch_is_as_it_was",),
    ),
    Mutation(
        "lists of a request that the host writes to", "hosts/last_request.py",
        "if type(value) in (list, dict):", "if False:",
        (_LAST + "test_the_request_is_that_before_the_host_has_worked_on_it",),
    ),
    Mutation(
        "a request within another", "hosts/last_request.py",
        "if thread in self._within:\n            return original(p, *args, **kwargs)", "",
        (_LAST + "test_a_request_within_another_is_a_part_of_it",),
    ),
    Mutation(
        "prompts that are not the same", "ui/comparison.py",
        "accelerated.asked == original.asked", "True",
        (_LAST + "test_a_prompt_of_parts_at_random_is_not_called_the_same",),
    ),
    Mutation(
        "images of a comparison that are saved", "hosts/last_request.py",
        "p.do_not_save_samples = p.do_not_save_grid = True", "pass",
        (_LAST + "test_both_images_are_those_of_the_last_request_and_nothing_is_saved",),
    ),
    Mutation(
        "the seed of the last image", "hosts/last_request.py", "setattr(p, name, chosen[0])", "pass",
        (_LAST + "test_both_images_are_those_of_the_last_request_and_nothing_is_saved",),
    ),
]  # fmt: skip
