"""States of torch around a call, compilers, and arguments that change."""

from __future__ import annotations

from mutations import Mutation

MUTATIONS = [
    Mutation(
        "modes that see torch's functions", "torch_state.py",
        "if _function_modes() and (mode := _function_mode_of_others()) is not None:", "if (mode := None) is not None:",
        ("test_torch_state.py::test_the_original_runs_after_a_plan_was_made",),
    ),
    Mutation(
        "a default device is none of these", "torch_state.py",
        "if type(mode) is not DeviceContext", "",
        ("test_torch_flags.py::test_a_default_device_for_the_whole_program_is_served",),
    ),
    Mutation(
        "modes that see operations", "torch_state.py",
        "if _dispatch_modes() or _recorders():", "if False:",
        ("test_torch_state.py::test_the_original_runs_after_a_plan_was_made",),
    ),
    Mutation(
        "traces", "torch_state.py",
        "if _traces():", "if False:",
        ("test_torch_state.py::test_the_original_runs_after_a_plan_was_made",),
    ),
    Mutation(
        "transforms", "torch_state.py",
        "if _transform() is not None:", "if False:",
        ("test_torch_state.py::test_the_original_runs_after_a_plan_was_made",),
    ),
    Mutation(
        "derivatives in forward mode", "torch_state.py",
        "if _dual._current_level >= 0:", "if False:",
        ("test_torch_state.py::test_the_original_runs_after_a_plan_was_made",),
    ),
    Mutation(
        "overrides that are off", "torch_state.py",
        "if not _overrides_serve():", "if False:",
        ("test_torch_state.py::test_the_original_runs_after_a_plan_was_made",),
    ),
    Mutation(
        "cached parametrisations", "torch_state.py",
        "if _parametrize._cache_enabled:", "if False:",
        ("test_torch_state.py::test_the_original_runs_after_a_plan_was_made",),
    ),
    Mutation(
        "records of torch.fx", "torch_state.py",
        "if _fx._is_fx_tracing_flag and _runs(_tracing_code()):", "if False:",
        ("test_torch_state.py::test_the_original_runs_after_a_plan_was_made",),
    ),
    Mutation(
        "records of torch.fx in other threads", "torch_state.py",
        "if _fx._is_fx_tracing_flag and _runs(_tracing_code()):", "if _fx._is_fx_tracing_flag:",
        ("test_torch_state.py::test_a_trace_in_another_thread_is_not_ours",),
    ),
    Mutation(
        "kernels of torch.library", "torch_state.py",
        "if len(_registered) != _kernels.count:", "if False:",
        ("test_torch_state.py::test_the_original_runs_after_a_plan_was_made",),
    ),
    Mutation(
        "kernels of torch.library that are no obstacle", "torch_state.py",
        'return parts[0] == "aten" and parts[-1] in self._SERVING', "return True",
        (
            "test_torch_flags.py::test_what_changes_no_result_leaves_the_plan_in_use",
            "test_torch_flags.py::test_a_kernel_for_another_device_is_no_obstacle",
        ),
    ),
    Mutation(
        "kernels of flash attention", "torch_state.py",
        "if name not in self.flash), None)", "), None)",
        ("test_torch_flags.py::test_flash_attention_of_another_package_is_part_of_the_key_and_no_obstacle",),
    ),
    Mutation(
        "a CUDA graph of the program's", "runtime/plan_finder.py",
        "if records_graph(device):", "if False:",
        ("test_program_graphs.py::test_a_call_within_a_graph_that_the_program_captures_gets_the_original",),
    ),
    Mutation(
        "the state of torch around a call", "runtime/call_server.py",
        "if obstacle is not None:", "if False:",
        (
            "test_torch_state.py::test_the_original_runs_after_a_plan_was_made",
            "test_torch_state.py::test_no_plan_is_made",
            "test_torch_state.py::test_later_traces_are_not_disturbed",
            "test_torch_state.py::test_parts_ask_as_well",
        ),
    ),
    Mutation(
        "strides of weights under a transform", "weights/host_order.py",
        "and not _compiled() and", "and not _compiled() and not torch_state.transforms() and",
        ("test_torch_state.py::test_weights_have_their_own_strides_under_a_transform",),
    ),
    Mutation(
        "strides of weights under a trace", "weights/host_order.py",
        "if not torch_state.traces() and not", "if not",
        ("test_torch_state.py::test_weights_have_their_own_strides_under_a_transform",),
    ),
    Mutation(
        "weights that torch.func differentiates by", "weights/original_layout.py",
        "torch._C._has_storage(tensor)", "True",
        ("weights/test_modes_of_the_caller.py::test_what_a_transform_wraps_is_not_plain",),
    ),
    Mutation(
        "strides that a host chose before a release", "weights/original_layout.py",
        "if tensor.shape == shape and tensor.stride() != strides:", "if False:",
        ("weights/test_original_layout.py::test_what_a_release_keeps_of_a_tensor",),
    ),
    Mutation(
        "data that is away at a release", "weights/original_layout.py",
        "if tensor.shape == shape and tensor.stride() != strides:", "if tensor.stride() != strides:",
        ("weights/test_original_layout.py::test_what_a_release_keeps_of_a_tensor",),
    ),
    Mutation(
        "weights that torch.func makes functional", "weights/original_layout.py",
        " and not torch._is_functional_tensor(tensor)", "",
        ("weights/test_modes_of_the_caller.py::test_a_transform_by_the_weights",),
    ),
    Mutation(
        "a layout that is restored among fake tensors", "weights/arena.py",
        "with host_order.undisturbed():", "if True:",
        ("weights/test_modes_of_the_caller.py::test_the_layout_is_restored_among_fake_tensors",),
    ),
    Mutation(
        "the default dtype", "call_signature.py",
        "_default_dtype(), _default_type()", "None, _default_type()",
        ("test_torch_flags.py::test_what_chooses_how_torch_computes_has_a_plan_of_its_own",),
    ),
    Mutation(
        "the default device", "call_signature.py",
        "default_device() if _function_modes() else None", "None",
        ("test_torch_flags.py::test_what_chooses_how_torch_computes_has_a_plan_of_its_own",),
    ),
    Mutation(
        "ways to compute attention", "call_signature.py",
        "_sdp_efficient(), _sdp_math()", "None, None",
        ("test_torch_flags.py::test_what_chooses_how_torch_computes_has_a_plan_of_its_own",),
    ),
    Mutation(
        "flash attention", "call_signature.py",
        "_mkldnn(), _sdp_flash()", "_mkldnn(), None",
        ("test_torch_flags.py::test_what_chooses_how_torch_computes_has_a_plan_of_its_own",),
    ),
    Mutation(
        "oneDNN", "call_signature.py",
        "_mkldnn(), _sdp_flash()", "None, _sdp_flash()",
        ("test_torch_flags.py::test_what_chooses_how_torch_computes_has_a_plan_of_its_own",),
    ),
    Mutation(
        "autocast of the other device", "call_signature.py",
        "numerical_flags(), other_mode, (), shared)", "numerical_flags(), (), (), shared)",
        ("test_torch_flags.py::test_what_chooses_how_torch_computes_has_a_plan_of_its_own",),
    ),
    Mutation(
        "Dynamo in the accelerator", "accelerator.py",
        "if compiles():", "if False:",
        ("test_compilers.py::test_the_accelerator_itself_may_be_compiled",),
    ),
    Mutation(
        "what a forward on the instance is to Dynamo", "behaviour/forward_slot.py",
        "return previous(*args, **kwargs) if previous is not None else type(module)", "return type(module)",
        ("test_compilers.py::test_a_forward_on_the_instance_is_what_is_compiled",),
    ),
    Mutation(
        "what exporters read of a forward", "behaviour/forward_slot.py",
        'if name in _OF_METHODS or "__wrapped__" not in self.__dict__:', "if True:",
        ("test_compilers.py::test_the_forward_looks_like_a_method_to_exporters",),
    ),
    Mutation(
        "what tells a forward of the class", "behaviour/forward_slot.py",
        'if name in _OF_METHODS or "__wrapped__" not in self.__dict__:', 'if "__wrapped__" not in self.__dict__:',
        ("test_compilers.py::test_the_forward_looks_like_a_method_to_exporters",),
    ),
    Mutation(
        "numbers that change become inputs", "runtime/plan_finder.py",
        "if plan is None and self._roles.open_changed(call):", "if False:",
        ("test_argument_roles.py::test_a_number_that_changes_becomes_an_input",),
    ),
    Mutation(
        "numbers that do not change", "argument_roles.py",
        "if now != then}", "}",
        ("test_argument_roles.py::test_a_number_that_stays_is_a_constant_next_to_one_that_changes",),
    ),
    Mutation(
        "numbers that cannot be inputs", "argument_roles.py",
        "inputs=frozenset(), closed=True)", "inputs=frozenset())",
        ("test_argument_roles.py::test_a_forward_that_cannot_take_it_as_an_input_is_right_and_not_captured_for_ever",),
    ),
    Mutation(
        "too many numbers that change", "argument_roles.py",
        "or len(inputs) > MAX_INPUTS", "",
        ("test_argument_roles.py::test_many_numbers_that_change_stay_constants",),
    ),
    Mutation(
        "a refused plan that took a number", "runtime/plan_finder.py",
        "if self._roles.close_nested(call):", "if False:",
        (
            "test_argument_roles.py::test_a_plan_with_a_number_as_input_is_compared_again_at_its_next_value",
            "test_argument_roles.py::test_a_forward_that_cannot_take_it_as_an_input_is_right_and_not_captured_for_ever",
        ),
    ),
    Mutation(
        "a number at another value", "runtime/plan_finder.py",
        "plan.built_for, plan.compare_again = None, True", "plan.built_for = None",
        ("test_argument_roles.py::test_a_plan_with_a_number_as_input_is_compared_again_at_its_next_value",),
    ),
    Mutation(
        "constants are not told apart by the back-off", "call_signature.py",
        "tree=tuple(_tensors(signature.tree))", "tree=signature.tree",
        ("test_argument_roles.py::test_another_constant_that_changes_at_each_call_is_seen_by_the_back_off",),
    ),
    Mutation(
        "refusals that lapse without generations", "runtime/plan_cache.py",
        "if not self._announced:", "if False:",
        ("test_argument_roles.py::test_a_refused_key_is_tried_again_if_no_generations_are_announced",),
    ),
    Mutation(
        "refusals that last longer each time", "plans/payback.py",
        "self.calls = Payback(doubled(REJECTED_CALLS, times))", "self.calls = Payback(REJECTED_CALLS)",
        ("test_argument_roles.py::test_each_refusal_lasts_twice_as_long",),
    ),
]
