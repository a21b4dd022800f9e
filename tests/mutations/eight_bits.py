"""What keeps plans with 8-bit integers from being stale, far off or in the way."""

from __future__ import annotations

from mutations import Mutation

_PASS = "passes/test_eight_bits.py::"
_SELECTION = "passes/test_eight_bits_selection.py::"
_PLANS = "runtime/test_eight_bits.py::"
_MEMORY = "runtime/test_eight_bits_memory.py::"
_ATTENTION = "passes/test_eight_bits_attention.py::"
_LEFT_ALONE = (_PASS + "test_others_are_left_alone",)
_SIZES = (_PASS + "test_sizes_that_the_kernels_do_not_take_or_that_do_not_pay",)
_WIDTHS = (_PASS + "test_widths_that_the_kernels_take",)
_COMPARED = (_PLANS + "test_weights_are_asked_for_at_the_first_call_of_a_generation_and_compared_if_they_changed",)
_ROOM = (_MEMORY + "test_too_little_memory_for_the_second_copy",)
_CARD = (_PLANS + "test_what_a_card_must_have",)
_MATCH = "passes/eight_bits_match.py"

MUTATIONS = [
    Mutation(
        "plans with 8 bits that are slower", "runtime/eight_bits.py",
        "slower(plan, other) if drops else None", "None",
        (_MEMORY + "test_a_plan_that_is_slower_than_the_exact_one_is_not_kept",),
    ),
    Mutation(
        "plans with 8 bits that are slower than a later one", "runtime/eight_bits.py",
        "elif drops and other is not None and other.banks", "elif False and other is not None and other.banks",
        (_MEMORY + "test_a_plan_that_turns_out_slower_than_a_later_exact_one_goes",),
    ),
    Mutation(
        "cards without gain from 8 bits", "kernels/eight_bits/gain.py",
        "if _WITHOUT_TENSOR_CORES in name:", "if False:",
        ("kernels/eight_bits/test_gain.py::test_cards_whose_products_in_half_precision_are_as_fast",),
    ),
    *(
        Mutation(
            f"attentions in 8 bits: {what}", "passes/eight_bits_attention.py",
            source, mutant,
            (_ATTENTION + test,),
        )
        for what, source, mutant, test in (
            ("of a prompt", "of_queries.args[0] is not of_keys.args[0]", "False", "test_a_transformer_block"),
            ("with a mask", 'options["mask"] is not None or options["is_causal"]', "False", "test_others"),
            ("what is kept", "candidate.name not in kept", "True", "test_what_is_kept_stays_as_it_is"),
            ("few keys", "keys[2] <= mma_attention.MAX_KEYS_AT_ONCE", "False", "test_not_of_few_keys"),
        )
    ),
    Mutation(
        "results in 8 bits that are wrong", "kernels/attention/attention.py",
        "limits={_EIGHT_BITS: _FAR}", "limits={_EIGHT_BITS: 9.0}",
        ("kernels/attention/test_attention_in_8_bits.py::test_a_wrong_result_is",),
    ),
    Mutation(
        "weights in 8 bits of other values", "passes/eight_bits.py",
        "call(graph, operator.getitem, (fresh, i), rows), scales", "rows, scales",
        (_PASS + "test_values_that_change_in_place_are_followed",),
    ),
    Mutation(
        "inputs that nothing quantises where they are written", _MATCH,
        "if norm is None and not is_written(x, pinned) and not (few_too and is_of_prompt(node, pinned)):", "if False:",
        _LEFT_ALONE,
    ),
    Mutation(
        "keys of the prompt that are normed", _MATCH,
        " or (is_op(user, _HEADS) and node is user.args[0]):", ":",
        ("runtime/test_resident_transformers.py::test_the_life_of_a_transformer[anima]",),
    ),
    Mutation(
        "weights that are computed", _MATCH,
        "if not is_weight(weight) or len(size) != 2", "if len(size) != 2", _LEFT_ALONE,
    ),
    Mutation("products of few rows", _MATCH, "(rows < MIN_ROWS and", "(False and", _SIZES),
    Mutation("columns of 8-bit products", _MATCH, "if columns % COLUMNS or", "if", _WIDTHS),
    Mutation("depths of 8-bit products", _MATCH, "or size[1] % DEPTH", "", _WIDTHS),
    Mutation(
        "other readers of a norm that is quantised", "passes/eight_bits_inputs.py",
        "if len(turns) == 1 and set(x.users) == {c.node for c in some}:", "if len(turns) == 1:",
        (_PASS + "test_what_writes_the_input_quantises_it",),
    ),
    Mutation(
        "rare calls in 8 bits", "passes/eight_bits.py",
        "if selection is None or ctx.most_bytes is not None:", "if selection is None:",
        (_PASS + "test_nothing_without_the_setting_without_kernels_or_for_rare_calls",),
    ),
    Mutation(
        "layers whose error is large", "passes/eight_bits_selection.py",
        "if not error.least <= LIMIT", "if False",
        (_SELECTION + "test_layers_with_outliers_are_rotated_if_that_helps_and_kept_if_not",),
    ),
    Mutation(
        "layers whose error is no number", "passes/eight_bits_selection.py",
        "if not error.least <= LIMIT", "if error.least > LIMIT",
        (_SELECTION + "test_values_that_are_not_finite_keep_a_layer",),
    ),
    Mutation(
        "room for a second copy of weights", "passes/eight_bits.py",
        "if selection.room is not None and", "if False and",
        (_PASS + "test_too_little_room_for_the_second_copy",),
    ),
    Mutation(
        "plans with and without 8 bits", "runtime/plan_finder.py",
        "key = key._replace(eight_bits=True)", "pass",
        (_PLANS + "test_requests_switch_it_in_the_middle_of_an_image_and_off_gives_the_exact_bits_again",),
    ),
    Mutation(
        "the limit of a plan with 8 bits", "runtime/verify.py",
        "return BUDGET * config.tolerance if plan.banks else config.tolerance", "return 1e9",
        (_PLANS + "test_the_limit_of_the_whole_is_twice_the_tolerance",),
    ),
    Mutation(
        "weights of another checkpoint in 8 bits", "runtime/eight_bits.py",
        "if state not in plan.compared_weights:", "if False:",
        (*_COMPARED, _PLANS + "test_another_checkpoint_in_place_has_its_layers_selected_anew"),
    ),
    Mutation(
        "the first call of a generation in 8 bits", "runtime/eight_bits.py",
        "elif plan.weights_due or", "elif", _COMPARED,
    ),
    Mutation(
        "calls in 8 bits without generations", "runtime/eight_bits.py",
        "or plan.replays % CALLS_BETWEEN_CHECKS == CALLS_BETWEEN_CHECKS - 1", "",
        (_PLANS + "test_weights_are_asked_for_now_and_then_without_generations",),
    ),
    Mutation(
        "inputs of less noise in 8 bits", "runtime/eight_bits.py",
        "if plan.replays == SECOND_LOOK:", "if False:",
        (_PLANS + "test_a_plan_is_compared_again_with_an_input_of_less_noise",),
    ),
    Mutation(
        "the result of a plan whose weights changed", "runtime/call_server.py",
        "if self._is_compared(lookup):", "if False:",
        (_PLANS + "test_a_plan_is_compared_again_with_an_input_of_less_noise",),
    ),
    Mutation(
        "the result of a speculative replay whose weights changed", "runtime/call_server.py",
        "and not self._is_compared(launched):", ":", _COMPARED,
    ),
    Mutation(
        "layers that are selected anew", "runtime/eight_bits.py",
        "self._selections.pop(model, None) self._exceeded += 1", "self._exceeded += 1",
        (_PLANS + "test_another_checkpoint_in_place_has_its_layers_selected_anew",),
    ),
    Mutation(
        "memory of banks that goes to the host", "weights/arena.py",
        "self.banks.vacate()", "pass",
        (_MEMORY + "test_memory_that_goes_to_the_host_and_comes_back",),
    ),
    Mutation(
        "banks without memory", "runtime/plan_runner.py",
        "if plan.banks and context.arena.banks.vacant:", "if False:",
        (_MEMORY + "test_memory_that_goes_to_the_host_and_comes_back",),
    ),
    Mutation(
        "banks without values", "weights/banks.py",
        "tensors[2].zero_()", "pass",
        (_MEMORY + "test_banks_that_get_memory_have_digests_of_no_row",),
    ),
    Mutation(
        "a second copy of weights while memory is short", "plans/graph_pool.py",
        "banks -= each.vacate(banks) if banks > 0 else 0", "pass",
        (_MEMORY + "test_what_is_short_of_memory_finds_the_second_copy",),
    ),
    Mutation(
        "a second copy of weights next to an original that is short of memory", "plans/graph_pool.py",
        "or any(banks.held for banks in self.spare)", "",
        (_MEMORY + "test_an_original_that_runs_out_of_memory_gets_that_of_the_second_copy",),
    ),
    Mutation(
        "memory that ends while 8 bits are prepared", "runtime/plan_builder.py",
        "if not lookup.key.eight_bits: raise", "raise",
        (_MEMORY + "test_memory_that_ends_while_the_plan_is_made",),
    ),
    Mutation(
        "memory that the model needs itself", "runtime/residency.py",
        "int(room(device) - _MIN_ROOM * bytes_of(context.module))", "int(room(device))", _ROOM,
    ),
    Mutation(
        "a model that is read for a plan that has no room", "runtime/call_server.py",
        "if residency.lacks_room(self._context, key):", "if False:",
        ("runtime/test_short_of_memory.py::test_no_plan_is_tried_without_room_for_it_and_one_is_made_when_there_is",),
    ),
    Mutation(
        "memory that is gone when a plan is made", "runtime/plan_builder.py",
        "if residency.lacks_room(context, lookup.key):", "if False:",
        ("runtime/test_short_of_memory.py::test_room_that_is_gone_after_the_original_ran",),
    ),
    Mutation(
        "cards without 8-bit products", "eight_bits.py", "if has < MIN_CAPABILITY:", "if False:", _CARD,
    ),
    Mutation(
        "bfloat16 on cards that have none", "runtime/eight_bits.py",
        "if torch.bfloat16 in dtypes and capability < _MIN_BFLOAT16:", "if False:", _CARD,
    ),
    Mutation(
        "kernels that cannot be compiled", "eight_bits.py",
        "if not nvrtc.supported(device):", "if False:", _CARD,
    ),
    Mutation(
        "plans with 8 bits that nobody asks for", "runtime/plan_cache.py",
        "if not chosen and plan.generation_of_use < number - KEPT_UNUSED:", "if False:",
        (_PLANS + "test_plans_that_nobody_asks_for_any_more_are_dropped_with_their_memory",),
    ),
]  # fmt: skip
