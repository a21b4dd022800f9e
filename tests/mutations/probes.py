"""What keeps a host that is not as known from wrong images, and from a part of the extension that stays in it."""

from __future__ import annotations

from mutations import Mutation

_INSTALLATION = "hosts/adapters/test_installation.py::"
_PROBES = "hosts/adapters/test_probes.py::"
_REFUSAL = "hosts/adapters/test_refusal.py::"

MUTATIONS = [
    Mutation(
        "a Lora that is not known", "hosts/a1111/adapter.py",
        "if self._lora.reason is not None:", "if False:",
        (_PROBES + "test_a_lora_that_is_not_applied_as_known_is_never_ignored",),
    ),
    Mutation(
        "the marks of Lora", "hosts/a1111/probes.py",
        '_of_lora(refers_to("network_layer_name", "network_current_names")),', "",
        (_PROBES + "test_the_marks_of_lora_are_read_in_its_own_code",),
    ),
    Mutation(
        "a required name that is missing", "hosts/starting.py",
        "return not self.found.required", "return True",
        (_REFUSAL + "test_the_badge_and_the_status_say_what_is_missing",),
    ),
    Mutation(
        "a session that could not be installed", "hosts/session.py",
        "session.installation.fail()", "pass",
        (_PROBES + "test_with_a_function_that_raises_its_feature_is_lost_or_nothing_stays",),
    ),
    Mutation(
        "steps of a feature that failed", "hosts/installation.py",
        "self._undo_since(*before)", "pass",
        (_INSTALLATION + "test_a_feature_is_lost_alone_when_a_step_of_it_raises",),
    ),
    Mutation(
        "callbacks of an installation that failed", "hosts/installation.py",
        "self.on_failure(lambda: forget_callback(place.owner, ours))", "pass",
        (_INSTALLATION + "test_a_failed_installation_takes_callbacks_out_of_all_lists",),
    ),
    Mutation(
        "parameters of the host's own functions", "hosts/probes.py",
        "if name and parameter is not None and parameter.name != name:", "if False:",
        (_INSTALLATION + "test_the_names_of_parameters_count_in_the_host_s_own_code",),
    ),
    Mutation(
        "a release that was not tested, without comparison", "hosts/session.py",
        'if config.check == "never" and not self.is_tested():', "if False:",
        (_REFUSAL + "test_in_a_release_that_was_not_tested_plans_are_compared_whatever_the_setting",),
    ),
    Mutation(
        "passwords where nothing is installed", "hosts/refusal.py",
        "session.api_passwords,\n", "dict,\n",
        (_REFUSAL + "test_a_password_is_asked_for_there_too",),
    ),
]  # fmt: skip
