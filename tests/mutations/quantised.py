"""What keeps codes of 8 bits from being those of other weights."""

from __future__ import annotations

from mutations import Mutation

_WEIGHTS = "kernels/eight_bits/quantise_weights.py"
_ROWS = "kernels/eight_bits/quantise_rows.py"
_TEST = "kernels/eight_bits/test_quantise_weights.py::"
_ROWS_TEST = "kernels/eight_bits/test_quantise_rows.py::"
_LAYERS = "passes/quantised_linear.py"
_LAYER = "passes/test_quantised_linear.py::"
_PLAN = "plans/test_quantised_weights.py::"
_INNER = "weights/inner_tensors.py"
_INNER_TEST = "weights/test_inner_tensors.py::test_"
_SEEN = _INNER_TEST + "what_is_replaced_or_written_to_is_seen"

MUTATIONS = [
    Mutation(
        "classes of quantised weights", "behaviour/reader.py",
        "self.weights.update(dict.fromkeys(kind for kind in weights if kind not in _PLAIN_WEIGHTS))", "pass",
        ("weights/test_inner_tensors.py::test_a_method_of_the_class_that_is_replaced_is_seen",),
    ),
    Mutation(
        "a weight that is made of others was replaced", "weights/change_detector.py",
        "if self._inner:", "if False:",
        (_SEEN + "[replaced]",),
    ),
    *(
        Mutation(
            f"what a weight is made of was replaced: {what}", _INNER,
            source, "",
            (_INNER_TEST + test,),
        )
        for what, source, test in (
            ("its scale", ", (fields, _SCALE, scale)", "a_scale_of_the_same_value_is_another_tensor"),
            ("its parameters", ', (held, "_params", params)',
             "what_is_replaced_or_written_to_is_seen[scale of new parameters]"),
            ("its codes", "(held, _CODES, codes),", "what_is_replaced_or_written_to_is_seen[codes are another tensor]"),
        )
    ),
    Mutation(
        "a weight of another form", _INNER,
        "if found is not None and found.form != self.form:", "if False:",
        (_INNER_TEST + "another_form_is_captured_anew[a field]",),
    ),
    Mutation(
        "a weight that was exchanged with another in Python", _INNER,
        "            and all(map(operator.is_, map(_ATTRIBUTES, self._outer), self._attributes))\n", "",
        (f"{_SEEN}[exchanged with another]",),
    ),
    Mutation(
        "a field of frozen parameters", _INNER,
        "            and all(map(operator.eq, self._fields, self._were))\n", "",
        (_INNER_TEST + "another_form_is_captured_anew[a field of frozen parameters]",),
    ),
    *(
        Mutation(
            f"what rounded inputs explain: {what}", "runtime/verify.py",
            source, mutant,
            (f"runtime/test_rounded_inputs.py::test_any_other_is_dropped[{test}]",),
        )
        for what, source, mutant, test in (
            ("of such products", "plan.rounds_inputs and not error <= most", "not error <= most", "0.04-options0"),
            ("if it is measured", " or not math.isfinite(moved):", ":", "0.04-options2"),
        )
    ),
    Mutation(
        "inputs of whole numbers", "plans/graph_facts.py",
        " and not whole.issuperset(narrow):", " and any(True for _ in narrow):",
        ("runtime/test_rounded_inputs.py::test_products_with_weights_that_are_widened_first_do_not",),
    ),
    Mutation(
        "a plan that differs by what rounded inputs explain, and other settings", "runtime/plan_runner.py",
        "(most := most_of(plan, config))", "(most := config.tolerance)",
        ("runtime/test_rounded_inputs.py::test_settings_that_change_nothing_keep_what_was_kept",),
    ),
    Mutation(
        "weights that are widened before a product", "plans/graph_facts.py",
        "elif not following.isdisjoint(given) and", "elif given and",
        ("runtime/test_rounded_inputs.py::test_products_with_weights_that_are_widened_first_do_not",),
    ),
    *(
        Mutation(
            f"masks of 8 bits: {what}", "plans/graph_facts.py", source, mutant,
            (f"runtime/test_rounded_inputs.py::test_masks_that_tell_something_of_the_input_round_nothing[{test}]",),
        )
        for what, source, mutant, test in (
            ("comparisons", "return dtype == torch.bool", "return False", "a comparison as a number"),
            ("what is not rounded before a cast", "return _name(source) not in _TO_CODES", "return False", "a sign"),
        )
    ),
    Mutation(
        "a model with weights of another form", "weights/arena.py",
        "if form_of(container) != form_of(w.slots[0][0])", "if False",
        (_INNER_TEST + "plans_move_to_a_model_of_the_same_form_alone[False]",),
    ),
    Mutation(
        "a block with weights of another form", "capture/block_reuse.py",
        "self._code), weights, forms", "self._code), weights",
        ("capture/test_block_reuse.py::test_a_field_makes_another_form",),
    ),
    Mutation(
        "a layout that is not known", _INNER,
        "_LAYOUTS.get(layout), fields", "_LAYOUTS[next(iter(_LAYOUTS))], fields",
        (_INNER_TEST + "a_format_that_is_not_known_is_bypassed_and_named[layout]",),
    ),
    Mutation(
        "fields that are not known", _INNER,
        "not _COMMON <= fields.keys() <= known or", "",
        (_INNER_TEST + "a_format_that_is_not_known_is_bypassed_and_named[fields]",),
    ),
    Mutation(
        "other weights next to those of 8 bits in Forge", "hosts/forge/programs.py",
        "all(type(p) is nn.Parameter and p.dtype in COMPUTED for p in plain)", "True",
        ("hosts/adapters/test_forge.py::test_weights_of_8_bits_of_another_layout_are_bypassed",),
    ),
    Mutation(
        "rows that changed, by PyTorch", _WEIGHTS,
        "changed = now != digest", "changed = digest == 0",
        (_TEST + "test_on_a_cpu_pytorch_does_the_same",),
    ),
    Mutation(
        "the group of codes in their digest", _WEIGHTS,
        "(columns << 16 | group)", "(columns << 16)",
        (_TEST + "test_another_group_is_another_digest",),
    ),
    Mutation(
        "the dtype of a weight in its digest", _WEIGHTS,
        "cuda_tier.TYPES.get(weight.dtype, 3)", "0",
        (_TEST + "test_another_group_is_another_digest",),
    ),
    Mutation(
        "no digest is that of a new bank", _WEIGHTS,
        "torch.where(found == 0, 1, found)", "found",
        (_TEST + "test_no_digest_is_zero",),
    ),
    Mutation(
        "the place of a pack in its digest", _WEIGHTS,
        "+ place * _signed(_KEYS[i])", "+ 0 * place",
        (_TEST + "test_changes_that_cancel_in_a_sum",),
    ),
    Mutation(
        "weights of another dtype in a launch", _WEIGHTS,
        "by_dtype.setdefault(entry.weight.dtype, [])", "by_dtype.setdefault(torch.float16, [])",
        (_TEST + "test_more_weights_than_a_launch_takes",),
    ),
    *(
        Mutation(
            f"whole accesses: {what}", _WEIGHTS,
            source, mutant,
            (_TEST + "test_what_is_read_and_written_by_whole_accesses",),
        )
        for what, source, mutant in (
            ("columns", "not (columns % 8 or", "not ("),
            ("the distance of rows", "or stride % 8 or", "or"),
            ("where a weight begins", "or weight.data_ptr() % 16 or", "or"),
            ("where codes begin", "or entry.row.data_ptr() % 8)", ")"),
        )
    ),
    *(
        Mutation(
            f"operands of quantise_weights: {what}", _WEIGHTS,
            source, mutant,
            (_TEST + "test_what_it_does_not_take",),
        )
        for what, source, mutant in (
            ("lists", "if not len(weights) == len(rows) == len(scales) == len(digests) == len(groups):", "if False:"),
            ("a matrix in half precision", "weight.dim() != 2 or weight.dtype not in HALF", "weight.dim() != 2"),
            ("neighbours", "or (columns > 1 and weight.stride(1) != 1)", ""),
            ("long rows", "columns > _MAX_COLUMNS or", ""),
            ("groups", "(group and columns % group)", "False"),
            ("shapes of a bank", "x.shape != shape or x.dtype", "x.dtype"),
            ("dtypes of a bank", "or x.dtype != dtype or", "or"),
            ("layouts of a bank", "or not x.is_contiguous() for", "for"),
        )
    ),
    Mutation(
        "a rotation in memory that begins at an odd place", _ROWS,
        "if group and pack < PACK:", "if False:",
        (_ROWS_TEST + "test_views_and_odd_places",),
    ),
    Mutation(
        "columns that a group does not divide", _ROWS,
        "(group and x.shape[-1] % group)", "False",
        (_ROWS_TEST + "test_what_it_does_not_take",),
    ),
    Mutation(
        "addresses in a table, of a recorded run", "plans/recorded_run.py",
        "self._addresses.append((ctypes.c_uint64.from_buffer(x.encoded, place), *root(tensor)))", "pass",
        (_PLAN + "test_a_recorded_run_follows_them_too",),
    ),
    Mutation(
        "banks are not read before a kernel waits", "plans/graph_facts.py",
        "return [x for x in tensors if id(x) not in written]", "return list(tensors)",
        (_PLAN + "test_what_it_writes_is_not_read_before_a_kernel_waits",),
    ),
    Mutation(
        "further arguments that a kernel writes to", "plans/graph_facts.py",
        "(kernel.writes, *kernel.updates)", "(kernel.writes,)",
        (_PLAN + "test_what_it_writes_is_not_read_before_a_kernel_waits",),
    ),
    Mutation(
        "banks live while a result is read", "kernels/backend/graph_memory.py",
        "return given[node.args[1]]", "return None",
        (_PLAN + "test_banks_that_a_graph_makes_live_as_long_as_they_are_read",),
    ),
    Mutation(
        "a result shares the memory that a kernel writes to", "passes/rewrite.py",
        "return ((target.writes, list(inspect.signature(target).parameters)[target.writes]),)", "return ()",
        (_PLAN + "test_it_pins_nothing_and_what_is_written_in_place_pins_a_bank_alone",),
    ),
    Mutation(
        "Triton alone runs nothing in CUDA C++", "kernels/backend/registry.py",
        "triton and not (self.portable and not self.triton_functions and not self.uses)", "triton",
        (_PLAN + "test_triton_alone_is_not_enough",),
    ),
    Mutation(
        "bounds of a library's codes", _LAYERS,
        "if bounds not in ([-128, 127], [-127, 127]):", "if False:",
        (_LAYER + "test_other_formats_stay",),
    ),
    Mutation(
        "levels of a library's codes", _LAYERS,
        "and scale.args[1] == quantise_rows.LARGEST", "",
        (_LAYER + "test_other_formats_stay",),
    ),
    Mutation(
        "scales of rows", _LAYERS,
        "or largest.args[1] not in ([-1], -1)", "",
        (_LAYER + "test_other_formats_stay",),
    ),
    Mutation(
        "a factor of addcmul", _LAYERS,
        'or argument(last, 3, "value", 1) != 1', "",
        (_LAYER + "test_other_formats_stay",),
    ),
    Mutation(
        "the layout of a library's weight", _LAYERS,
        'if weight.meta["weight"].tensor.stride() != (1, size[0]):', "if False:",
        (_LAYER + "test_other_formats_stay",),
    ),
    Mutation(
        "inputs that are written later", _LAYERS,
        "return pinned.isdisjoint([x, weight, scales, result]) and", "return",
        (_LAYER + "test_an_input_that_is_written_later_stays",),
    ),
    Mutation(
        "products by Triton that are none of integers", "capture/integer_products.py",
        "a.dtype == b.dtype == torch.int8", "True",
        ("capture/test_integer_products.py::test_operands_that_are_no_integers_are_left",),
    ),
    Mutation(
        "the bias of a product by Triton", "capture/integer_products.py",
        "if bias is not None or not _of_integers(a, b):", "if not _of_integers(a, b):",
        ("capture/test_integer_products.py::test_operands_that_are_no_integers_are_left",),
    ),
]
