"""What keeps plans right that are made while half-precision weights stay in system memory."""

from __future__ import annotations

from mutations import Mutation

_TESTS = "runtime/test_lean_calls.py::"
_NO_ROOM = "runtime/test_resident_no_room.py::"
_FORWARDS = "runtime/test_lean_forwards.py::"
_FIRST = "runtime/test_lean_first_calls.py::"
_STAND_INS = "weights/stand_ins.py"
_LEAN = "runtime/lean_calls.py"
_BUILDER = "runtime/plan_builder.py"
_BROUGHT_BACK = (_TESTS + "test_weights_that_another_thread_brings_back",)

MUTATIONS = [
    Mutation(
        "what is saved while weights stand in", _LEAN, "arena.resident.standing, arena", "arena",
        (_FORWARDS + "test_what_another_thread_saves_has_its_values",),
    ),
    Mutation(
        "results that are not on the GPU", _LEAN, "if all(x.device == device for x in tensors(result)):", "if True:",
        (_FORWARDS + "test_each_call_gives_what_the_original_gives",),
    ),
    Mutation(
        "what a host raises", _LEAN, "if is_theirs(exc):", "if False:",
        (_FORWARDS + "test_what_a_host_raises_once_is_raised",),
    ),
    Mutation(
        "random numbers of a call that runs again", _LEAN, "before.put_back()", "pass",
        (_TESTS + "test_random_numbers_are_those_of_one_run_if_it_runs_again",),
    ),
    Mutation(
        "views that a forward keeps", "weights/streamed.py",
        "if kind is None:\n self._move_views()\n else:", "if kind:",
        (_FORWARDS + "test_each_call_gives_what_the_original_gives",),
    ),
    Mutation(
        "views that a failed run keeps", "weights/streamed.py",
        "with contextlib.suppress(torch.cuda.OutOfMemoryError):\n self._move_views()", "pass",
        (_NO_ROOM + "test_what_a_failed_run_by_layer_keeps_is_on_the_gpu",),
    ),
    Mutation(
        "values of such views", "weights/streamed.py", "self._copy = torch.Tensor.copy_", "pass",
        (_NO_ROOM + "test_what_a_failed_run_by_layer_keeps_is_on_the_gpu",),
    ),
    Mutation(
        "another dtype in a move", "weights/aside.py",
        "set_data(each, source.to(each.dtype))", "set_data(each, source)",
        (_FORWARDS + "test_a_move_to_another_dtype",),
    ),
    Mutation(
        "a forward that has no room next to all weights", "runtime/model_state.py",
        "if self._leave_again(device):\n return True", "pass",
        (_NO_ROOM + "test_a_forward_without_room_next_to_all_weights_reads_them_by_layer",),
    ),
    Mutation(
        "what is known of it in a generation", "runtime/model_state.py",
        "if self.model.crowded and self.arena.resident.out(self.device()):", "if False:",
        (_NO_ROOM + "test_a_forward_without_room_next_to_all_weights_reads_them_by_layer",),
    ),
    Mutation(
        "the next generation after one without room", "runtime/model_state.py",
        "self.arena.new_generation()\n self.crowded = False", "self.arena.new_generation()",
        (_NO_ROOM + "test_a_forward_without_room_next_to_all_weights_reads_them_by_layer",),
    ),
    Mutation(
        "calls of another size that need no weights on the GPU", _LEAN,
        "if not resident.out(context.device()) or key.device != resident.device:", "if True:",
        (_TESTS + "test_another_size_brings_no_weights_back",),
    ),
    Mutation(
        "their first run", "runtime/call_server.py",
        "result = lean_calls.run(self._context, state, args, kwargs, self.run_original)",
        "result = self.run_original(*args, **kwargs)",
        (_TESTS + "test_another_size_brings_no_weights_back",),
    ),
    Mutation(
        "weights that stand in", _BUILDER,
        "lean_calls.standing_in(context) if lean else", "",
        (_TESTS + "test_layers_find_their_weights_on_the_gpu",),
    ),
    Mutation(
        "weights that stood in", _STAND_INS,
        "for value, source in taken.values():", "for value, source in ():",
        (_TESTS + "test_parameters_are_what_they_were", _TESTS + "test_stand_ins_share_memory_and_keep_their_form"),
    ),
    Mutation(
        "memory of the GPU that all share", _STAND_INS,
        "tracked.vacate(apart(indexed, tracked.layouts))\n                tracked.reset_detector()", "pass",
        (_TESTS + "test_results_are_those_with_all_weights_on_the_gpu",),
    ),
    Mutation(
        "packs without memory", _STAND_INS,
        "vacancy = of_pack(made, vacant) if whole is made else vacant[id(whole)].with_rows(made)",
        "vacancy = vacant[id(weights[0])]",
        (_TESTS + "test_layers_that_were_not_near_enough_come_in_half_precision",),
    ),
    Mutation(
        "weights without memory that another thread has moved", _STAND_INS,
        "if not all(id(weight) in vacant for weight in weights):", "if False:", _BROUGHT_BACK,
    ),
    Mutation(
        "values of weights without memory", "weights/arena.py",
        "return self.resident.values(weight) if weight.is_bare and self.resident.has(weight) else weight.tensor",
        "return weight.tensor",
        (_TESTS + "test_without_success_weights_come_back",),
    ),
    Mutation(
        "original forwards of other threads meanwhile", _LEAN,
        "with arena.gate.exclusive(), arena.resident.standing, arena.resident.standing_in():",
        "with arena.resident.standing_in():",
        (_TESTS + "test_original_forwards_of_other_threads_wait",),
    ),
    Mutation(
        "such a call that fails", _LEAN,
        "give_up(context, because(exc)) return True", "return False",
        (_TESTS + "test_without_success_weights_come_back",),
    ),
    Mutation(
        "a recording that fails so", _BUILDER,
        "if lean and lean_calls.is_why(exc):", "if False:",
        (_TESTS + "test_a_forward_that_fails_as_it_is_recorded",),
    ),
    Mutation(
        "arguments of a run that fails so", _LEAN,
        "before.put_back()", "pass",
        (_TESTS + "test_arguments_are_as_they_were_if_it_runs_again",),
    ),
    Mutation(
        "an error of the model itself", _LEAN,
        "result = otherwise(*args, **kwargs)", "give_up(context, why)\n    result = otherwise(*args, **kwargs)",
        (_TESTS + "test_a_model_that_fails_itself_is_no_reason",),
    ),
    Mutation(
        "memory that ends in such a call", _LEAN,
        "raise WeightsAway(reasons.NO_ROOM()) from exc", "pass",
        (_TESTS + "test_without_memory_the_image_is_made",),
    ),
    Mutation(
        "room for integers alone", _LEAN,
        "and residency.room(key.device) > missing", "",
        (_TESTS + "test_without_room_for_the_integers_it_is_as_if_all_came",),
    ),
    Mutation(
        "strides of a weight without memory", "passes/eight_bits_match.py",
        'if weight.meta["val"].stride(-1) != 1:', 'if weight.meta["weight"].tensor.stride(-1) != 1:',
        (_TESTS + "test_another_size_brings_no_weights_back",),
    ),
    Mutation(
        "weights of a first plan, before the host moves them", _LEAN,
        "context.arena.resident.expect(device)", "pass",
        (_FIRST + "test_the_first_call_brings_no_weights",),
    ),
    Mutation(
        "weights of a first plan in AUTOMATIC1111", "hosts/moves.py",
        "with staying(accelerators, place, early=True):", "with staying(accelerators, place):",
        ("hosts/adapters/test_a1111_resident_first.py::test_the_first_image",),
    ),
    Mutation(
        "weights of a model that is accelerated later", "hosts/webui_session.py", "if not known:", "if False:",
        ("hosts/adapters/test_a1111_resident_first.py::test_weights_leave_if_the_extension_is_turned_on_later",),
    ),
    Mutation(
        "weights of a model that was loaded", "hosts/webui_session.py",
        "self._follow(model)\n self._leave_early(model)", "self._follow(model)",
        ("hosts/adapters/test_a1111_resident_first.py::test_without_a_flag_weights_leave_when_a_model_is_loaded",),
    ),
    Mutation(
        "what plans read where it is", "hosts/a1111/memory.py",
        "if not any(each.plans for attachment in attachments for each in attachment.accelerators()):", "if True:",
        ("hosts/adapters/test_a1111_resident_first.py::test_what_stays_moves_together_until_plans_read_it",),
    ),
    Mutation(
        "parameters on one memory", "weights/defragmentation.py", "and used[memory_of(p)] == 1", "",
        ("weights/test_defragmentation.py::test_parameters_get_other_memory_with_the_same_values",),
    ),
    Mutation(
        "parameters that did not come again", "weights/defragmentation.py", "if not parameter.is_cuda:", "if False:",
        ("weights/test_defragmentation.py::test_if_anything_fails_all_are_on_the_gpu",),
    ),
    Mutation(
        "memory of other programs next to Forge's VAE", "hosts/forge/memory.py", "if in_one:", "if False:",
        ("hosts/adapters/test_forge_vae_room.py::test_the_original_leaves_memory_to_other_programs_too",),
    ),
    Mutation(
        "steps that read weights by layer", "runtime/call_server.py", "or slow or", "or",
        (_NO_ROOM + "test_a_step_that_reads_weights_by_layer_earns_the_plan_of_its_size",),
    ),
    Mutation(
        "tables, which have no place in a module", "weights/aside.py", "if not weight.slots:", "if False:",
        ("runtime/test_resident.py::test_a_table_on_another_device_is_none_of_them",),
    ),
    Mutation(
        "weights that leave while another thread reads them", _LEAN,
        "except WeightsInUse:\n pass", "except AssertionError: pass",
        (_FIRST + "test_what_another_thread_uses_stays",),
    ),
    Mutation(
        "weights that plans in half precision read stay", _LEAN,
        "if not first and not residency.stay_aside(context, device):", "if False:",
        (_FIRST + "test_what_plans_are_not_expected_to_read_stays",),
    ),
    Mutation(
        "weights of a GPU that has no 8 bits", _LEAN,
        "return unsupported(device, {p.dtype for p in context.module.parameters()}) is None", "return True",
        (_FIRST + "test_what_plans_are_not_expected_to_read_stays",),
    ),
    Mutation(
        "weights that others than a first plan read", _LEAN,
        "if not (first and _is_possible(context) and residency.wanted(context, device)):", "if False:",
        (_FIRST + "test_where_no_such_plan_is_expected_the_module_comes",),
    ),
    Mutation(
        "weights that were expected to be in 8 bits and are not", "runtime/residency.py",
        "context.arena.resident.keep_used()", "pass",
        (_FIRST + "test_what_is_not_in_8_bits_comes",),
    ),
]
