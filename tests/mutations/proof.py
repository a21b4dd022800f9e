"""Whether a plan computes what the original does: capture, passes, comparison, time."""

from __future__ import annotations

from mutations import Mutation

MUTATIONS = [
    Mutation(
        "what is read of calls that get no plan yet", "runtime/call_server.py",
        "if (config := self._context.config).rare_calls:", "if (config := self._context.config).rare_calls and False:",
        ("plans/test_rare_calls.py::test_until_a_plan_pays_the_behaviour_is_not_read",),
    ),
    Mutation(
        "the behaviour of rare calls whose kind has a plan", "runtime/plan_finder.py",
        "not (rare or self.builds(key))", "not self.builds(key)",
        ("plans/test_rare_calls.py::"
         "test_another_behaviour_waits_for_its_own_second_call_whatever_the_host_adds_to_the_key",),
    ),
    Mutation(
        "the host's part of a key that is not read", "runtime/plan_finder.py",
        "PlanKey(call.signature, known[0], host, device)", "PlanKey(call.signature, known[0], None, device)",
        ("plans/test_rare_calls.py::test_until_a_plan_pays_the_behaviour_is_not_read",),
    ),
    Mutation(
        "the first comparison", "runtime/verify.py",
        "refusal = Comparison(plan, outputs, references, config, new.run_original, new.exact).difference()",
        "refusal = None",
        ("test_wrong_plans.py::test_a_plan_that_differs_is_discarded_and_the_original_goes_on",),
    ),
    Mutation(
        "what rounding explains", "runtime/verify.py",
        "        if beyond:", "        if False:",
        ("runtime/test_one_wrong_block.py::test_in_float32_every_wrong_block_is_noticed",),
    ),
    Mutation(
        "the tolerance as a ceiling of what rounding explains", "runtime/verify.py",
        "    over = not error <= most", "    over = False",
        ("runtime/test_rounding.py::test_the_tolerance_of_the_user_is_the_ceiling",),
    ),
    Mutation(
        "what rounding moves on another input", "runtime/verify.py",
        "    if all(e <= limit for e, limit in zip(errors, allowed)):", "    if plan.noise is not None:",
        ("runtime/test_rounding.py::test_a_later_comparison_is_judged_by_what_was_measured_or_measures_again",),
    ),
    Mutation(
        "sums in half precision", "runtime/verify.py",
        "if not self._sums_in_half() and not plan.banks:", "if not plan.banks:",
        ("runtime/test_rounding.py::test_sums_in_half_precision_are_judged_by_the_tolerance",),
    ),
    Mutation(
        "arguments of an operation that is rounded otherwise", "runtime/verify.py",
        "if given and value.untyped_storage()._cdata not in given:", "if given:",
        ("runtime/test_rounding.py::test_arguments_are_left_alone",),
    ),
    Mutation(
        "a wrong plan of equal blocks", "runtime/plan_builder.py",
        "refusal is not None and refusal.code == reasons.INACCURATE.code and blocks_copied:", "False:",
        ("runtime/test_one_wrong_block.py::test_equal_blocks_that_are_not_equal_are_recorded_one_by_one",),
    ),
    Mutation(
        "what bfloat16 is held against", "runtime/verify.py",
        "or not ours <= max(tolerance, MAX_OF_ORIGINAL * theirs)", "",
        ("runtime/test_exact_run.py::test_a_wrong_plan_is_rejected_all_the_same",),
    ),
    Mutation(
        "what is rounding in bfloat16 alone", "runtime/verify.py",
        "return in_bfloat16 and error <=", "return error <=",
        ("runtime/test_exact_run.py::test_float32_has_no_such_excuse",),
    ),
    Mutation(
        "a plan that somebody who makes one image pays for", "plans/payback.py",
        "if key not in self._runs or ", "if ",
        ("plans/test_rare_calls.py::test_no_plan_is_made_at_the_first_call_whatever_it_would_save",),
    ),
    Mutation(
        "a plan that does not pay yet", "plans/payback.py",
        "Payback(price, self._runs[key].spent() * gain).due", "True",
        ("plans/test_rare_calls.py::test_a_plan_is_made_once_it_would_have_saved_what_it_costs",),
    ),
    Mutation(
        "an evicted plan that comes again for nothing", "plans/payback.py",
        "            self._runs[key] = Runs()\n            return True", "            return True",
        ("plans/test_rare_calls.py::test_a_plan_is_made_once_it_would_have_saved_what_it_costs",),
    ),
    Mutation(
        "several plans in one image", "plans/payback.py",
        "or (self._announced and self._built):", ":",
        ("plans/test_rare_calls.py::test_one_plan_in_a_generation",),
    ),
    Mutation(
        "a plan whose first use is slower", "runtime/plan_runner.py",
        "        if slow is not None:\n            self._cache.reject(lookup.key, slow)", "",
        ("plans/test_rare_calls.py::test_a_plan_whose_first_use_is_slower_is_dropped",),
    ),
    Mutation(
        "two captures at once", "runtime/model_state.py",
        "self.build_lock = _BUILDING", "self.build_lock = threading.Lock()",
        ("plans/test_rare_calls.py::test_one_plan_is_built_at_a_time_whatever_the_model",),
    ),
    Mutation(
        "every other comparison", "runtime/plan_runner.py",
        "if refusal is None:", "if True:",
        ("test_wrong_plans.py::test_always_checking_catches_a_plan_gone_wrong_later",),
    ),
    Mutation(
        "when a plan is compared: always", "runtime/plan_finder.py",
        'return check == "always" or (', "return (",
        ("test_wrong_plans.py::test_always_checking_catches_a_plan_gone_wrong_later",),
    ),
    Mutation(
        "when a plan is compared: first", "runtime/plan_finder.py",
        '(check == "first" and (plan.error is None or plan.compare_again))', "plan.compare_again",
        ("test_faults.py::test_a_wrong_plan_built_while_the_model_gives_nan_is_found_out",),
    ),
    Mutation(
        "results that say nothing", "runtime/verify.py",
        'config.check != "never" and comparable(references)', 'config.check != "never"',
        ("test_faults.py::test_a_wrong_plan_built_while_the_model_gives_nan_is_found_out",),
    ),
    Mutation(
        "another tolerance", "accelerator.py",
        "self._runner.reject_inaccurate()", "pass",
        ("test_wrong_plans.py::test_a_plan_whose_known_error_is_over_a_new_tolerance_is_used_no_more",),
    ),
    Mutation(
        "the number of results", "runtime/verify.py",
        "if len(outputs) != len(references):", "if False:",
        ("runtime/test_verify.py::test_other_shapes_dtypes_or_counts_are_infinitely_wrong",),
    ),
    Mutation(
        "shapes and dtypes of results", "runtime/verify.py",
        "if output.shape != reference.shape or output.dtype != reference.dtype:", "if False:",
        ("runtime/test_verify.py::test_other_shapes_dtypes_or_counts_are_infinitely_wrong",),
    ),
    Mutation(
        "NaN in a result", "runtime/verify.py",
        "if not bool(torch.isfinite(ours[finite]).all()):", "if False:",
        ("runtime/test_verify.py::test_nan_or_inf_if_the_original_has_none_is_infinitely_wrong",),
    ),
    Mutation(
        "sums that overflow", "runtime/verify.py",
        "vector_norm(values, dtype=torch.float64)", "vector_norm(values)",
        ("runtime/test_verify.py::test_values_whose_squares_overflow_are_compared",),
    ),
    Mutation(
        "strides of results", "plans/plan.py",
        "output.new_empty_strided(output.shape, stride)", "output.new_empty(output.shape)",
        ("test_stale.py::test_results_of_a_plan_have_the_originals_strides",),
    ),
    Mutation(
        "a plan that is slower", "runtime/verify.py",
        "if not config.drop_slower or after", "if True or after",
        ("plans/test_graph_pool_pretended.py::test_a_plan_that_is_slower_is_dropped_unless_it_is_wanted_all_the_same",),
    ),
    Mutation(
        "a plan that is slower, where nothing is said", "config.py",
        "drop_slower: bool = True", "drop_slower: bool = False",
        ("plans/test_graph_pool_pretended.py::test_a_plan_that_is_slower_is_dropped_unless_it_is_wanted_all_the_same",),
    ),
    Mutation(
        "state that a forward keeps", "capture/capture.py",
        "if left_behind or graph_module is None:", "if graph_module is None:",
        ("capture/test_capture.py::test_what_a_forward_keeps_in_a_container_is_noticed_and_taken_back",),
    ),
    Mutation(
        "random numbers", "capture/capture.py",
        "if torch.Tag.nondeterministic_seeded not in tags:", "if True:",
        ("capture/test_capture.py::test_what_cannot_be_a_plan_is_refused_with_the_reason",),
    ),
    Mutation(
        "tensors of others", "capture/capture.py",
        "if weight is None:\n", "if False:\n",
        ("capture/test_capture.py::test_what_cannot_be_a_plan_is_refused_with_the_reason",),
    ),
    Mutation(
        "recordings of another course", "capture/capture.py",
        "if op_sequence in op_sequences else None", "if True else None",
        ("capture/test_live_trace.py::test_a_size_that_runs_otherwise_is_captured_on_fake_tensors",),
    ),
    Mutation(
        "casts that round", "passes/rewrite.py",
        "torch.float32: (torch.float64,),", "torch.float32: (torch.float64, torch.float16),",
        ("passes/test_rewrite.py::test_what_widens_keeps_every_value",
         "passes/test_rewrite.py::test_a_norm_of_what_was_rounded_is_of_what_was_rounded"),
    ),
    Mutation(
        "dtypes of embeddings of timesteps", "passes/timestep_embedding.py",
        "alike = dtype(frequency) == torch.float32 and dtype(t) in kernel.TIMES", "alike = True",
        ("passes/test_timestep_embedding.py::test_left_alone",),
    ),
]  # fmt: skip
