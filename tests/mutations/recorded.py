"""Whether a recorded run may be repeated, and when a graph that was evicted comes back."""

from __future__ import annotations

from mutations import Mutation

_RUN = "plans/test_recorded_run.py::"
_PLAN = "plans/test_recorded_plan.py::"

MUTATIONS = [
    Mutation(
        "the strides of a recorded run", "plans/recorded_run.py",
        "or x.stride() != stride or", "or",
        (_RUN + "test_other_tensors_are_decided_on_anew",),
    ),
    Mutation(
        "the alignment of a recorded run", "plans/recorded_run.py",
        "if x.data_ptr() % ALIGNMENT != residue or", "if",
        (_RUN + "test_other_tensors_are_decided_on_anew",),
    ),
    Mutation(
        "the shapes of a recorded run", "plans/recorded_run.py",
        "or x.shape != shape:", "or False:",
        (_RUN + "test_other_tensors_are_decided_on_anew",),
    ),
    Mutation(
        "where in its memory a tensor begins", "plans/recorded_run.py",
        "cell.value = registers[register].data_ptr() + offset", "cell.value = registers[register].data_ptr()",
        (_RUN + "test_a_launch_is_a_kernel_s_with_the_tensors_of_that_run",),
    ),
    Mutation(
        "tensor maps of other memory", "plans/recorded_run.py",
        "encoded = known.get(address)", "encoded = next(iter(known.values()), None)",
        (_RUN + "test_tensor_maps_are_of_the_memory_of_that_run",),
    ),
    Mutation(
        "writes to inputs and weights", "plans/recorded_run.py",
        'raise CannotRepeat(f"{function} writes to an input or a weight")', "pass",
        (_RUN + "test_what_cannot_be_repeated",),
    ),
    Mutation(
        "tensors from elsewhere", "plans/recorded_run.py",
        'raise CannotRepeat("a tensor comes from elsewhere")', "return 0",
        (_RUN + "test_what_cannot_be_repeated",),
    ),
    Mutation(
        "values that are read", "plans/recorded_run.py",
        'raise CannotRepeat(f"{function} reads values")', "pass",
        (_RUN + "test_what_cannot_be_repeated",),
    ),
    Mutation(
        "the bits of a repetition", "plans/recorded_run.py",
        "if not _same(again, result):", "if False:",
        (_RUN + "test_what_cannot_be_repeated",),
    ),
    Mutation(
        "measurements within a recording", "kernels/backend/choices.py",
        'launch_log.put(launch_log.Opaque("measurements"))', "pass",
        ("kernels/backend/test_choices.py::test_measurements_are_nothing_to_be_repeated",),
    ),
    Mutation(
        "an evicted graph that stays away", "plans/recapture.py",
        "or self.capture.due", "or True",
        (_PLAN + "test_an_evicted_graph_stays_away_if_it_would_gain_nothing",),
    ),
    Mutation(
        "an evicted graph that comes back", "plans/recapture.py",
        "or self.capture.due", "or False",
        (_PLAN + "test_an_evicted_graph_is_captured_again_when_runs_without_it_have_cost_as_much",),
    ),
    Mutation(
        "memory that a plan gives back", "plans/plan.py",
        "if self._recorded is not None or self.device", "if self.device",
        (_PLAN + "test_a_plan_that_gives_cached_memory_back_is_not_recorded",),
    ),
    Mutation(
        "captures from a recording", "plans/plan.py",
        "if not captures:", "if True:",
        (_PLAN + "test_a_graph_that_goes_with_each_image_is_captured_from_a_recording",),
    ),
    Mutation(
        "what the launches of a capture took", "plans/plan.py",
        "self.recapture.captured(self.graph.ms, self.graph.launch_ms)",
        "self.recapture.captured(self.graph.ms, 0.0)",
        (_PLAN + "test_a_graph_that_goes_with_each_image_is_captured_from_a_recording",),
    ),
    Mutation(
        "seconds of launches", "plans/recapture.py",
        "launch_ms / 1000", "launch_ms",
        ("plans/test_payback.py::test_what_a_recording_is_expected_to_save_is_forgotten_once_a_capture_was_timed",),
    ),
    Mutation(
        "collections while launches are recorded", "runtime/plan_runner.py",
        "with gc_paused(), self._context", "with self._context",
        (_PLAN + "test_a_graph_that_goes_with_each_image_is_captured_from_a_recording",),
    ),
    Mutation(
        "a recording for a graph that may stay", "plans/recapture.py",
        "return self.captures >= RECORDING", "return True",
        ("plans/test_payback.py::test_captures_recur_once_there_were_a_few",),
    ),
    Mutation(
        "a price that no capture had", "plans/recapture.py",
        "0.0 if self._expected else self.capture.price", "self.capture.price",
        (
            "plans/test_payback.py::"
            "test_what_a_recording_is_expected_to_save_is_forgotten_once_a_capture_was_timed",
        ),
    ),
    Mutation(
        "the GPU of a recording that was not timed", "plans/plan.py",
        "self._recorded = bool(self._recorded)", "self._recorded = False",
        (_PLAN + "test_a_recording_that_is_made_is_used_as_one_whatever_happens_next",),
    ),
    Mutation(
        "the price of a capture from a recording", "plans/recapture.py",
        "self.capture.price - saved_ms", "self.capture.price",
        ("plans/test_payback.py::test_a_recording_lowers_the_price_of_a_capture",),
    ),
    Mutation(
        "repeated launches that begin early", "plans/recorded_run.py",
        "if pdl.allowed_at(early):", "if True:",
        ("kernels/backend/test_pdl.py::test_a_launch_that_is_repeated_begins_early_in_a_capture_as_well",),
    ),
    Mutation(
        "repeated launches that read between elements", "plans/recorded_run.py",
        "and all(map(pdl.is_dense, launch.early))", "",
        ("kernels/backend/test_pdl.py::test_a_launch_that_is_repeated_begins_early_in_a_capture_as_well",),
    ),
    Mutation(
        "launches next to what a host does between two runs", "plans/recapture.py",
        "if without is not None and step is not None:", "if False:",
        ("plans/test_payback.py::test_how_far_runs_are_apart_tells_what_a_graph_saves",),
    ),
    Mutation(
        "a pause between runs with a graph and without", "plans/recapture.py",
        " and before[0] == with_graph:", ":",
        ("plans/test_payback.py::test_a_few_runs_tell_nothing_of_how_far_they_are_apart",),
    ),
    Mutation(
        "runs that a host does not make", "runtime/plan_runner.py",
        "plan.recapture.ran(plan.has_graph, time.perf_counter())", "pass",
        ("plans/test_recorded_plan.py::test_runs_for_a_host_are_clocked",),
    ),
]
