"""Which plan a call gets: signature, behaviour, settings, refusals."""

from __future__ import annotations

from mutations import Mutation

_SIGNATURES = ("test_call_signature.py::test_what_makes_signatures_differ",)
_KEY = ("behaviour/test_fingerprint.py::test_what_changes_the_key",)
_QUICK = ("test_stale.py::test_what_a_reading_sees_a_quick_check_sees_too",)
_LATE = ("behaviour/test_fingerprint.py::test_within_a_generation_a_late_patch_is_seen",)
_AHEAD = ("test_speculation.py::test_a_change_before_any_call_is_in_its_result",)
_CALLED = ("behaviour/test_fingerprint.py::test_what_the_methods_of_a_class_call_is_read",)
_SEEN = "behaviour/test_reach.py::test_it_is_seen_at_the_very_next_call"
_VOUCHED = "behaviour/test_vouched.py::test_what_a_wrapper_reads_is_seen_at_the_next_call"
_COMPOSED = "behaviour/test_vouched.py::test_an_attribute_under_a_composed_name_is_read"
_TORCHS = "behaviour/test_reach.py::test_what_torchs_code_reaches_is_seen_at_each_call"
_REPLACED = (
    "behaviour/test_surroundings.py::test_while_a_function_is_replaced_the_original_runs_and_no_plan_is_made_or_lost",
)

SIGNATURE = [
    Mutation(
        "results that share memory", "plans/plan.py",
        "hand_out(handed, outputs, self.views)", "pass",
        ("plans/test_result_views.py::test_a_write_to_a_result_is_seen_in_the_others_as_without_us",),
    ),
    Mutation(
        "plans with a key that was not read", "runtime/call_server.py",
        "if not (lookup.key_confirmed and ", "if not (",
        ("runtime/test_plan_finder.py::test_no_plan_is_made_with_a_key_that_was_not_read_as_it_was_not_due",),
    ),
    Mutation(
        "dtypes of arguments", "call_signature.py",
        'return ("tensor", value.dtype, shape, len', 'return ("tensor", torch.float32, shape, len',
        _SIGNATURES,
    ),
    Mutation(
        "memory formats of arguments", "call_signature.py",
        "if len(shape) < 4 or device is None or value.is_contiguous():", "if True:",
        ("test_result_tensors.py::test_results_have_the_strides_of_the_original",),
    ),
    Mutation(
        "gaps in arguments", "runtime/plan_builder.py",
        "recorded if i in gaps else tuple(x.stride())", "tuple(x.stride())",
        ("test_result_tensors.py::test_an_input_with_gaps_that_is_returned_leaves_none_in_later_results",),
    ),
    Mutation(
        "inference mode around a call", "plans/plan.py",
        "return self._copy_outputs(outputs)", "with torch.inference_mode(False): return self._copy_outputs(outputs)",
        ("test_result_tensors.py::test_results_are_inference_tensors_if_those_of_the_original_are",),
    ),
    Mutation(
        "results that are weights, in inference mode", "plans/plan.py",
        "if self.lent and torch.is_inference_mode_enabled():", "if False:",
        ("test_result_tensors.py::test_results_are_inference_tensors_if_those_of_the_original_are",),
    ),
    Mutation(
        "shapes of arguments", "call_signature.py",
        'return ("tensor", value.dtype, shape, len', 'return ("tensor", value.dtype, (value.dim(),), len',
        _SIGNATURES,
    ),
    Mutation(
        "kinds of numbers", "call_signature.py",
        'return ("number", kind, len(leaves) - 1)', 'return ("number", int, len(leaves) - 1)',
        ("test_call_signature.py::test_a_number_of_its_own_is_an_input_and_not_part_of_the_signature",),
    ),
    Mutation(
        "names of keyword arguments", "call_signature.py",
        'tree = ("call", positional, named)',
        'tree = ("call", positional, tuple(("x", t) for _, t in named))',
        ("test_call_signature.py::test_the_names_of_arguments_make_signatures_differ",),
    ),
    Mutation(
        "strides of arguments", "call_signature.py",
        "return leaf.detach().to(device).contiguous()", "return leaf.detach().to(device)",
        ("test_call_signature.py::test_leaves_become_contiguous_tensors_on_the_device",),
    ),
    Mutation(
        "devices of arguments", "call_signature.py",
        'if device is not None and not (there.type == "cpu" and value.numel() <= SMALL):', "if False:",
        ("test_call_signature.py::test_a_large_tensor_elsewhere_is_not_ours_but_a_timestep_is",),
    ),
    Mutation(
        "subclasses and layouts of tensors", "call_signature.py",
        "if not plain or value.layout is not torch.strided or value.is_quantized:", "if False:",
        ("test_call_signature.py::test_what_is_not_understood_is_not_ours",),
    ),
    Mutation(
        "autocast", "call_signature.py",
        "mode, other_mode = autocast_mode(kind),", "other_mode =",
        ("test_accelerator.py::test_inference_mode_and_autocast",),
    ),
    Mutation(
        "numerical flags of torch", "call_signature.py",
        "Signature(tree, mode, numerical_flags(), other_mode, (), shared)",
        "Signature(tree, mode, 0, other_mode, (), shared)",
        ("test_accelerator.py::test_a_numerical_flag_of_torch_gets_a_plan_of_its_own",),
    ),
    Mutation(
        "numbers that a forward branches on", "argument_roles.py",
        "replace(self.known.get(signature, _Roles()), static=True)", "_Roles()",
        ("test_refusals.py::test_a_forward_that_branches_on_a_number_gets_it_into_the_signature",),
    ),
    Mutation(
        "gradients", "runtime/plan_finder.py",
        "if torch.is_grad_enabled():", "if False:",
        ("test_accelerator.py::test_gradients_go_to_the_original",),
    ),
    Mutation(
        "gradients around a replay", "plans/plan.py",
        "if torch.is_grad_enabled():", "if False:",
        ("test_speculation.py::test_the_inputs_of_a_graph_take_no_gradients",),
    ),
]  # fmt: skip

BEHAVIOUR = [
    Mutation(
        "classes", "behaviour/reader.py",
        'self.key += [kind, self.kind(kind, "forward"), module.training, len(weights), places]',
        'self.key += [self.kind(kind, "forward"), module.training, len(weights), places]',
        ("test_stale.py::test_two_classes_of_one_forward_differ",),
    ),
    Mutation(
        "forwards of classes", "behaviour/reader.py",
        'self.key += [kind, self.kind(kind, "forward"), module.training, len(weights), places]',
        "self.key += [kind, module.training, len(weights), places]",
        ("test_stale.py::test_a_forward_of_torchs_own_classes_is_in_the_key",),
    ),
    Mutation(
        "training mode", "behaviour/reader.py",
        'self.key += [kind, self.kind(kind, "forward"), module.training, len(weights), places]',
        'self.key += [kind, self.kind(kind, "forward"), len(weights), places]',
        _KEY,
    ),
    Mutation(
        "parameters that come and go", "behaviour/reader.py",
        'self.key += [kind, self.kind(kind, "forward"), module.training, len(weights), places]',
        'self.key += [kind, self.kind(kind, "forward"), module.training, places]',
        _KEY,
    ),
    Mutation(
        "forwards of instances in the key", "behaviour/reader.py",
        "self.key.append((slot, self.function(function)))", "pass",
        _KEY,
    ),
    Mutation(
        "forwards of instances as patches", "behaviour/reader.py",
        'self.patches.append(Patch(path, module, "forward", function))', "pass",
        ("test_refusals.py::test_a_foreign_patch_inside_means_the_original_and_is_named",),
    ),
    Mutation(
        "hooks in the key", "behaviour/reader.py",
        "self.key.append((slot, self.function(hook)))", "pass",
        _KEY,
    ),
    Mutation(
        "hooks as patches", "behaviour/reader.py",
        'self.patches.append(Patch(path, module, "hook", hook))', "pass",
        ("behaviour/test_fingerprint.py::test_patches_are_found_and_named",),
    ),
    Mutation(
        "attributes", "behaviour/reader.py",
        "self.key.append((name, found))", "pass",
        _KEY,
    ),
    Mutation(
        "lists", "behaviour/reader.py",
        "return tuple(self.value(v, depth + 1) for v in value) if depth < 2 and len(value) <= MAX_LENGTH else None",
        "return None",
        _KEY,
    ),
    Mutation(
        "configurations in the key", "behaviour/reader.py",
        'return (type(node), self.value(attributes.get("_content", attributes.get("_val")), depth))',
        "return (type(node),)",
        _KEY,
    ),
    Mutation(
        "configurations in the quick check", "behaviour/reader.py",
        "self.snapshot.container(attributes)\n", "pass\n",
        _KEY,
    ),
    Mutation(
        "closures", "behaviour/reader.py",
        "key += [self.held(cell) for cell in closure]\n                self.run", "self.run",
        ("behaviour/test_foreign_code.py::test_state_in_the_closure_of_a_class_patched_by_its_own_package_is_in_the_key",),
    ),
    Mutation(
        "names in a method's module", "behaviour/foreign_code.py",
        "yield around, used, found", "pass",
        _CALLED,
    ),
    Mutation(
        "plain values in a method's module", "behaviour/foreign_code.py",
        "(callable(value) or isinstance(value, PLAIN) or _of_plain(value))", "(callable(value) or _of_plain(value))",
        ("behaviour/test_fingerprint.py::test_a_plain_value_that_a_hook_reads_is_in_the_key",),
    ),
    Mutation(
        "methods laid over an instance", "behaviour/reader.py",
        "if overrides_method(module, name, value):", "if False:",
        ("behaviour/test_fingerprint.py::test_a_method_laid_over_an_instance_is_a_patch_and_says_whose",),
    ),
    Mutation(
        "functions of torch", "behaviour/reader.py",
        'self.patches.append(Patch(name, root, "replaced", function))', "pass",
        _REPLACED,
    ),
    Mutation(
        "hooks on all modules", "behaviour/reader.py",
        'self.patches.append(Patch("", root, "hook on all modules", hook))', "pass",
        ("behaviour/test_surroundings.py::test_under_a_hook_on_all_modules_the_original_runs_and_is_named",),
    ),
    Mutation(
        "which attention took the place of torch's", "behaviour/reader.py",
        "self.key.append((name, self.identity(function)))", "pass",
        ("test_stale.py::test_attentions_that_keep_nothing_are_told_apart",),
    ),
    Mutation(
        "what such an attention keeps", "behaviour/reader.py",
        "self.key += [self.free_value(place, value) for place, value in free_values(function)]", "pass",
        ("behaviour/test_surroundings.py::test_an_attention_that_keeps_a_number_in_its_closure_is_captured_with_it",),
    ),
    Mutation(
        "what such an attention keeps that is not plain", "behaviour/reader.py",
        "function is not None and knowable(function):", "function is not None:",
        ("behaviour/test_surroundings.py::test_an_attention_that_keeps_more_goes_to_the_original",),
    ),
    Mutation(
        "a look at torch after a reading", "behaviour/fingerprint.py",
        "or surroundings.look() != self.around:", ":",
        _REPLACED,
    ),
    Mutation(
        "a look at torch within a generation", "behaviour/fingerprint.py",
        "and self.contents.unchanged() and self.torch_check.unchanged()", "and self.contents.unchanged()",
        ("test_stale.py::test_within_a_generation_a_function_that_is_replaced_is_seen",),
    ),
    Mutation(
        "a class exchanged since a reading", "behaviour/quick_check.py",
        "now == self._values and list(map(type, chain(now, self._roots))) == self._kinds", "now == self._values",
        _LATE,
    ),
    Mutation(
        "hooks since a reading", "behaviour/quick_check.py",
        "and self._no_hooks_came()\n", "\n",
        _LATE,
    ),
    Mutation(
        "attributes since a reading", "behaviour/quick_check.py",
        "and self._rows.unchanged()\n", "\n",
        ("test_stale.py::test_what_is_seen_at_each_call",),
    ),
    Mutation(
        "containers since a reading", "behaviour/snapshot.py",
        "and all(map(operator.is_, values_in(self._dicts), self._dict_values))\n", "\n",
        ("behaviour/test_reach.py::test_once_a_generation_that_is_read_all_the_same[unread]",),
    ),
    Mutation(
        "what objects hold since a reading", "behaviour/quick_check.py",
        "now == self._values and list(map(type, chain(now, self._roots))) == self._kinds",
        "list(map(type, chain(now, self._roots))) == self._kinds",
        ("test_stale.py::test_what_is_seen_at_each_call",),
    ),
    Mutation(
        "items of lists since a reading", "behaviour/quick_check.py",
        "and list(chain.from_iterable(self._lists)) == self._items\n", "\n",
        ("test_stale.py::test_what_is_seen_at_each_call",),
    ),
    Mutation(
        "names of keys since a reading", "behaviour/snapshot.py",
        "and all(map(operator.is_, chain.from_iterable(self._dicts), self._dict_keys))\n", "\n",
        _QUICK,
    ),
    Mutation(
        "attributes that come since a reading", "behaviour/quick_check.py",
        "list(map(len, self._homes)) == self._lengths\n", "True\n",
        ("test_midway.py::test_it_is_seen_at_the_very_next_call[a forward]",),
    ),
    Mutation(
        "names in modules and classes since a reading", "behaviour/quick_check.py",
        "and self._found.unchanged()\n", "\n",
        (f"{_VOUCHED}[a number in the module of a helper's helper]",),
    ),
    Mutation(
        "methods that classes are given since a reading", "behaviour/quick_check.py",
        "list(map(len, self._classes)) == self._sizes and", "",
        (f"{_TORCHS}[by a call of one class]",),
    ),
    Mutation(
        "torch's own methods in an object of the host's", "behaviour/reach.py",
        'elif hasattr(value, "__dict__"):', "elif False:",
        ("behaviour/test_reach.py::test_what_torchs_own_forward_calls_is_seen_if_a_host_keeps_that_in_an_object",),
    ),
    Mutation(
        "methods of torch's classes that others of them call", "behaviour/snapshot.py",
        "if of_torch or name in names}", "if name in names}",
        ("behaviour/test_reach.py::test_a_method_of_torchs_class_that_another_calls_is_seen_at_each_call",),
    ),
    Mutation(
        "closures since a reading", "behaviour/quick_check.py",
        "and all(map(operator.is_, map(_CONTENT, self._cells), self._contents))\n", "\n",
        (f"{_SEEN}[what the closure of that function holds]",),
    ),
    Mutation(
        "what a processor's class reads", "behaviour/reader.py",
        "self.called.append((*self.place, type(value)))", "pass",
        (f"{_COMPOSED}[a number of its class]",),
    ),
    Mutation(
        "what a function among the attributes holds", "behaviour/reader.py",
        "self.key += [self.held(cell) for cell in closure]", "pass",
        (f"{_SEEN}[what the closure of that function holds]",),
    ),
    Mutation(
        "what a processor's processor holds", "behaviour/reader.py",
        "if depth <= 1 and isinstance(settings, dict)", "if depth == 0 and isinstance(settings, dict)",
        (f"{_COMPOSED}[a number of what it calls]",),
    ),
    Mutation(
        "functions that a method's functions call", "behaviour/foreign_code.py",
        "if isinstance(found, FunctionType) and depth < _MAX_DEPTH and", "if False and",
        (f"{_VOUCHED}[a number in the module of a helper's helper]",),
    ),
    Mutation(
        "containers in a method's module", "behaviour/foreign_code.py",
        "isinstance(value, PLAIN) or _of_plain(value))", "isinstance(value, PLAIN))",
        (f"{_VOUCHED}[a dictionary in its module]",),
    ),
    Mutation(
        "numbers in another module of the package", "behaviour/foreign_code.py",
        "if isinstance(found, ModuleType) and package(found.__name__) == own:", "if False:",
        (f"{_VOUCHED}[a number in another module of the package]",),
    ),
    Mutation(
        "plain values of classes", "behaviour/foreign_code.py",
        'elif isinstance(value, PLAIN) and not name.startswith("__"):', "elif False:",
        ("behaviour/test_vouched.py::test_a_number_of_a_class_under_a_name_that_is_a_value_is_read_once_a_generation",),
    ),
    Mutation(
        "names that are strings elsewhere", "behaviour/reach.py",
        "if isinstance(value, (str, frozenset, set)):\n            self._waiting += _strings(value)\n"
        "        elif isinstance(value, (tuple, list, dict)):\n            self._waiting += _strings(value)\n",
        "if isinstance(value, (str, frozenset, set)):\n            self._waiting += _strings(value)\n"
        "        elif isinstance(value, (tuple, list, dict)):\n",
        (f"{_SEEN}[an attribute that is read by a name elsewhere]",),
    ),
    Mutation(
        "what torch's own functions call", "behaviour/surroundings.py",
        "waiting += inner\n", "\n",
        (f"{_TORCHS}[by a function that torch's function calls]",),
    ),
    Mutation(
        "operators of tensors", "behaviour/surroundings.py",
        "waiting = [*names, *special, *CALLS]", "waiting = [*names, *CALLS]",
        (f"{_TORCHS}[by an operator]",),
    ),
    Mutation(
        "what changed in torch while it was read", "behaviour/surroundings.py",
        "self._true = look() == around", "self._true = True",
        ("behaviour/test_reach.py::test_what_changes_while_it_is_read_is_not_taken_for_what_was_read",),
    ),
    Mutation(
        "methods that tensors are given", "behaviour/surroundings.py",
        " and len(self._methods) == self._own\n", "\n",
        ("behaviour/test_reach.py::test_what_says_nothing_in_torch_is_looked_at_once",),
    ),
    Mutation(
        "classes at the begin of a generation", "behaviour/key.py",
        "if previous.classes_unchanged(self._module):", "if True:",
        ("behaviour/test_fingerprint.py::test_what_methods_find_later_is_read_once_a_generation",),
    ),
]  # fmt: skip

CALL = [
    Mutation(
        "images of one colour", "runtime/plan_finder.py",
        "if len(call.leaves) == 1 and self._loses_digits(call.leaves[0]):", "if False:",
        ("runtime/test_plan_finder.py::test_an_image_of_one_colour_is_not_normalised_by_a_plan_that_keeps_no_digits",),
    ),
    Mutation(
        "the signature of a plan", "runtime/plan_finder.py",
        "key = PlanKey(call.signature, behaviour, host, device)", "key = PlanKey(None, behaviour, host, device)",
        ("test_accelerator.py::test_plans_are_kept_up_to_a_number",),
    ),
    Mutation(
        "the behaviour of a plan", "runtime/plan_finder.py",
        "key = PlanKey(call.signature, behaviour, host, device)",
        "key = PlanKey(call.signature, 0, host, device)",
        ("test_accelerator.py::test_a_scalar_attribute_brings_another_plan_and_the_first_comes_back",),
    ),
    Mutation(
        "the host's key", "runtime/plan_finder.py",
        "key = PlanKey(call.signature, behaviour, host, device)",
        "key = PlanKey(call.signature, behaviour, None, device)",
        ("test_accelerator.py::test_hooks_of_the_host_are_asked_at_each_call",),
    ),
    Mutation(
        "the device of a plan", "runtime/plan_finder.py",
        "key = PlanKey(call.signature, behaviour, host, device)",
        "key = PlanKey(call.signature, behaviour, host, None)",
        ("test_stale.py::test_a_plan_of_one_device_does_not_run_on_another",),
    ),
    Mutation(
        "the host's reason to bypass a call", "runtime/plan_finder.py",
        'reason = _ask("bypass_reason", hooks.bypass_reason) if hooks.bypass_reason else None', "reason = None",
        ("test_accelerator.py::test_hooks_of_the_host_are_asked_at_each_call",),
    ),
    Mutation(
        "what another party patched", "runtime/plan_finder.py",
        "if foreign:\n            raise NotOurs(foreign)", "if False:\n            raise NotOurs(foreign)",
        ("test_refusals.py::test_a_foreign_patch_inside_means_the_original_and_is_named",),
    ),
    Mutation(
        "the behaviour after a replay", "runtime/plan_finder.py",
        "if behaviour != lookup.key.behaviour or foreign:", "if False:",
        ("test_speculation.py::test_a_change_before_any_call_is_in_its_result[scalar]",
         "test_speculation.py::test_a_change_before_any_call_is_in_its_result[layer]"),
    ),
    Mutation(
        "the weights after a replay", "runtime/plan_finder.py",
        "valid = not self._sync(lookup.plan)", "valid = self._sync(lookup.plan) >= 0",
        _AHEAD,
    ),
    Mutation(
        "the behaviour before a plan is made or compared", "runtime/plan_finder.py",
        "if now != behaviour or foreign:", "if False:",
        ("test_speculation.py::test_a_plan_is_not_compared_with_what_behaves_otherwise",
         "test_speculation.py::test_a_plan_for_weights_of_another_shape_has_the_key_of_its_own_behaviour"),
    ),
    Mutation(
        "a refusal", "runtime/plan_finder.py",
        "refused = self._cache.rejection(key)", "refused = None",
        ("test_refusals.py::test_what_is_refused_is_not_tried_again",),
    ),
    Mutation(
        "refusals that are over with other settings", "accelerator.py",
        "self._cache.clear_rejected()\n                self._backoff.clear()", "self._backoff.clear()",
        ("test_faults_gpu.py::test_a_plan_whose_replay_raises_is_given_up_until_the_settings_change",),
    ),
    Mutation(
        "refusals that lapse", "runtime/plan_cache.py",
        "if rejection.generations.pay():", "if False:",
        ("test_refusals.py::test_a_plan_refused_under_a_patch_is_made_when_the_patch_is_gone",),
    ),
    Mutation(
        "back-off of captures", "runtime/plan_finder.py",
        "if self._backoff.must_wait(alike, key):", "if False:",
        ("plans/test_backoff.py::test_a_number_that_changes_at_each_step_costs_two_captures",),
    ),
    Mutation(
        "an accelerator that was released", "accelerator.py",
        "if self._released:", "if False:",
        ("test_stale.py::test_an_accelerator_that_is_called_after_its_release_makes_no_plan",),
    ),
    Mutation(
        "an accelerator that is switched off", "accelerator.py",
        "or not self.config.enabled:", "or False:",
        ("test_accelerator.py::test_switched_off_is_the_original",),
    ),
    Mutation(
        "parts while a plan of the whole is made", "accelerator.py",
        "bypass = self.whole is not None and building()", "bypass = False",
        ("test_parts.py::test_the_first_call_of_the_whole_runs_no_plan_of_a_part",),
    ),
    Mutation(
        "settings that build other plans", "accelerator.py",
        "if not config.builds_like(was):", "if False:",
        ("test_accelerator.py::test_other_kernels_mean_other_plans_but_a_budget_does_not",),
    ),
    Mutation(
        "another forward in the module's place", "accelerator.py",
        "if left_aside.install(self._context):\n", "if left_aside.install(self._context) and False:\n",
        ("test_stale.py::test_a_forward_that_takes_the_modules_place_ends_its_plans",),
    ),
    Mutation(
        "the structure of a model that is moved to", "accelerator.py",
        "if structure(self.module, self.hooks.ignored) != structure(module, hooks.ignored):", "if False:",
        ("test_move.py::test_another_architecture_is_not_moved_to",),
    ),
    Mutation(
        "plans of another behaviour when the host moves on", "accelerator.py",
        "if key.behaviour != behaviour]:", "if False]:",
        ("test_move.py::test_plans_of_another_behaviour_stay_behind",),
    ),
]  # fmt: skip

MUTATIONS = [*SIGNATURE, *BEHAVIOUR, *CALL]
