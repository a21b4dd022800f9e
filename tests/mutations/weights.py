"""Whether the weights that a plan reads are those of the module."""

from __future__ import annotations

from mutations import Mutation

_REPLACED = ("weights/test_arena.py::test_replaced_values_are_copied_in_and_the_parameter_is_bound_again",)
_NOT_FOLLOWED = ("weights/test_arena.py::test_weights_that_cannot_be_followed_say_so",)
_ALONE = ("weights/test_gate.py::test_nobody_is_alone_while_another_is_inside",)
_PLACES = "test_replaced_dictionaries.py::test_it_is_seen_"
_MOVED = ("weights/test_host_copies.py::test_after_random_changes_a_module_is_as_if_the_host_had_moved_it",)

MUTATIONS = [
    Mutation(
        "dictionaries of a module that are replaced", "behaviour/quick_check.py",
        "tuple(name for name in PLACES if home[name])", "()",
        (f"{_PLACES}at_the_next_call[parameters-True]",),
    ),
    Mutation(
        "dictionaries that are replaced, among what code looks up", "behaviour/snapshot.py",
        "looked = names.union(PLACES)", "looked = names",
        (f"{_PLACES}at_the_next_call[one number in another dtype-True]", f"{_PLACES}at_the_next_call[submodules-True]"),
    ),
    Mutation(
        "dictionaries of single numbers that are replaced", "behaviour/quick_check.py",
        "and all(home[name] is there for home, name, there in self._of_ones)\n", "\n",
        (f"{_PLACES}at_the_next_call[one number in another dtype-True]",),
    ),
    Mutation(
        "dictionaries of parameters in the key", "behaviour/snapshot.py",
        'for each in (parameters, attributes["_buffers"]) if each', 'for each in (attributes["_buffers"],) if each',
        (f"{_PLACES}at_the_next_call[parameters by setattr-True]",),
    ),
    Mutation(
        "dictionaries of buffers in the key", "behaviour/snapshot.py",
        'for each in (parameters, attributes["_buffers"]) if each', "for each in (parameters,) if each",
        (f"{_PLACES}at_the_next_call[buffers-True]",),
    ),
    Mutation(
        "the attributes of a module that are replaced", "behaviour/snapshot.py",
        "all(map(operator.is_, map(vars, map(_MODULE, self._modules)), self._homes))\n            and", "",
        (f"{_PLACES}in_the_next_generation[the attributes]",),
    ),
    Mutation(
        "parameters that are replaced", "weights/change_detector.py",
        "all(map(operator.is_, map(dict.get, self._containers, self._names), self._bound))\n            and", "",
        _REPLACED,
    ),
    Mutation(
        "parameters that are moved by their data", "weights/change_detector.py",
        "and list(map(torch.Tensor.data_ptr, self._bound)) == self._pointers\n", "\n",
        _REPLACED,
    ),
    Mutation(
        "parameters of another form on the same memory", "weights/change_detector.py",
        "and list(map(torch.Tensor.stride, self._bound)) == self._strides\n", "\n",
        (
            "test_regressions.py::test_a_weight_transposed_on_its_own_memory_is_seen",
            "test_regressions.py::test_the_weight_of_a_convolution_transposed_on_its_own_memory_is_seen",
            "weights/test_changed_forms.py::test_it_is_followed",
        ),
    ),
    Mutation(
        "parameters of fewer rows on the same memory", "weights/change_detector.py",
        "and (not self.closely or list(map(torch.Tensor.numel, self._bound)) == self._sizes)\n", "\n",
        ("weights/test_changed_forms.py::test_it_is_followed",),
    ),
    Mutation(
        "a close look in each generation", "weights/tracked.py",
        "detector.closely, detector.always_closely = True, False", "detector.always_closely = False",
        ("weights/test_changed_forms.py::test_it_is_followed",),
    ),
    Mutation(
        "parameters that are gone", "weights/weight.py",
        "if not isinstance(now, torch.Tensor):", "if now is None and False:",
        _NOT_FOLLOWED,
    ),
    Mutation(
        "parameters of other classes", "weights/weight.py",
        "if not is_plain(now):", "if False:",
        ("test_stale.py::test_a_weight_in_another_form_cannot_be_followed",),
    ),
    Mutation(
        "parameters on other devices", "weights/weight.py",
        'if now.device != live.device and not (anywhere and now.device.type != "meta"):', "if False:",
        _NOT_FOLLOWED,
    ),
    Mutation(
        "parameters of other shapes or dtypes", "weights/weight.py",
        "if now.shape != live.shape or now.dtype != live.dtype:", "if False:",
        _NOT_FOLLOWED,
    ),
    Mutation(
        "memory that was exchanged", "weights/weight.py",
        "if live.data_ptr() != weight.pointer:", "if False:",
        ("weights/test_arena.py::test_memory_that_was_exchanged_under_a_plan_is_noticed",),
    ),
    Mutation(
        "weights that are untied", "weights/copy_in.py",
        "if container.get(name) is not now:", "if False:",
        ("test_stale.py::test_a_weight_that_is_untied_cannot_be_followed",),
    ),
    Mutation(
        "a layout that is restored while a plan is made", "weights/arena.py",
        "if (tracked.bound, tracked.indexed_times) == uses else None", "if tracked.bound == uses[0] else None",
        ("weights/test_gate.py::test_a_layout_is_not_restored_while_a_plan_is_made",),
    ),
    Mutation(
        "weights that were laid back while a plan was made", "weights/tracked.py",
        "if any(id(w) not in known for w in weights):", "if False:",
        ("weights/test_gate.py::test_weights_that_were_laid_back_meanwhile_are_bound_to_no_plan",),
    ),
    Mutation(
        "one tensor in the places of two weights", "weights/copy_in.py",
        "if other is not weight:", "if False:",
        ("test_stale.py::test_one_tensor_for_two_weights_cannot_be_followed",),
    ),
    Mutation(
        "weights that change places by their data", "weights/copy_in.py",
        "now.detach().clone() if memory_of(now) in memory else now.detach()", "now.detach()",
        ("test_regressions.py::test_weights_that_changed_places_by_their_data",),
    ),
    Mutation(
        "memory that others read", "weights/copy_in.py",
        "if other is not None:\n        raise WeightsChanged", "if False:\n        raise WeightsChanged",
        ("test_stale.py::test_the_memory_of_a_weight_that_somebody_reads_is_not_written_to",),
    ),
    Mutation(
        "tensors that leave a module", "weights/external_refs.py",
        "if id(old) not in coming and memory_of(old) == memory_of(weight.tensor):", "if False:",
        ("test_regressions.py::test_what_a_host_keeps_of_a_weight_and_puts_back_is_not_written_to",),
    ),
    Mutation(
        "packing of what a plan reads", "weights/packs.py",
        "if any(w.plans for w in weights):\n            return None", "",
        ("weights/test_arena.py::test_what_a_plan_reads_is_not_moved",),
    ),
    Mutation(
        "layout of what a plan reads", "weights/arena.py",
        "if weight.plans or weight.pack is not None or weight.bound is None:", "if weight.bound is None:",
        ("weights/test_arena.py::test_what_a_plan_reads_is_not_moved",),
    ),
    Mutation(
        "weights that do not fit together", "weights/packs.py",
        " and alike and ", " and ",
        ("weights/test_arena.py::test_weights_that_do_not_fit_are_not_packed",),
    ),
    Mutation(
        "memory that was given back", "runtime/plan_runner.py",
        "if context.arena.lacks(plan.weights):", "if False:",
        ("weights/test_vacancy.py::test_no_plan_runs_while_the_memory_is_away",),
    ),
    Mutation(
        "memory that a module still lies in", "weights/vacancy.py",
        "used = {memory_of(value) for value in held if isinstance(value, torch.Tensor)} & blocks.keys()",
        "used = set()",
        ("weights/test_vacancy.py::test_nothing_is_given_back_if_the_module_lies_in_it",),
    ),
    Mutation(
        "graphs of memory that is given back", "runtime/model_state.py",
        "for plan in plans:\n                plan.drop_graph()", "",
        ("weights/test_vacancy.py::test_plans_outlive_their_memory_and_graphs_are_captured_anew",),
    ),
    Mutation(
        "a model that is moved to with other shapes", "weights/arena.py",
        "if new.shape != w.tensor.shape or new.dtype != w.tensor.dtype or self.locate(new) is not None:", "if False:",
        ("test_move.py::test_another_architecture_is_not_moved_to",),
    ),
    Mutation(
        "a model left behind that is in use", "weights/arena.py",
        "if any(c[n].data_ptr() == w.tensor.data_ptr() for c, n in w.slots if c.get(n) is not None):", "if False:",
        ("test_move.py::test_a_model_that_is_still_in_use_keeps_its_plans",),
    ),
    Mutation(
        "weights of a part that were laid out anew", "weights/submodule_arena.py",
        "if self._epoch != self._tracked.epoch:", "if self._epoch == -1:",
        ("test_parts.py::test_whole_and_parts_share_the_weights_and_see_every_change",),
    ),
    Mutation(
        "plans of parts before the whole's first", "runtime/plan_builder.py",
        'part.forget_plans("the model is captured as a whole")', "pass",
        ("test_parts.py::test_the_first_call_of_the_whole_runs_no_plan_of_a_part",),
    ),
    Mutation(
        "weights of which some are away while a plan is made", "runtime/plan_builder.py",
        "if away is not None:", "if False:",
        ("test_regressions.py::test_weights_that_are_away_while_a_plan_is_built_are_no_reason_to_refuse_for_ever",),
    ),
    Mutation(
        "forwards that run while weights are laid out", "weights/gate.py",
        "while self._owner not in (None, me) or self._inside.keys() - {me}:",
        "while self._owner not in (None, me):",
        _ALONE,
    ),
    Mutation(
        "forwards that begin while weights are laid out", "weights/gate.py",
        "while self._owner not in (None, me):\n                self._free.wait()", "",
        ("weights/test_gate.py::test_others_enter_when_who_was_alone_has_ended",),
    ),
    Mutation(
        "the gate around the original", "weights/host_order.py",
        "        with gate:\n            if self._laid and", "        if True:\n            if self._laid and",
        ("weights/test_gate.py::test_weights_lie_still_while_another_thread_computes",),
    ),
    Mutation(
        "weights that are laid out in place of others' work", "weights/arena.py",
        "with self.gate.exclusive(), self._tracked.lock:\n            return copy_in(self._tracked, changed)",
        "with self._tracked.lock:\n            return copy_in(self._tracked, changed)",
        ("weights/test_gate.py::test_new_weights_of_a_part_are_not_copied_while_another_thread_computes",),
    ),
    Mutation(
        "weights that changed on the GPU beside their copies", "weights/host_copies.py",
        " if p is not None and is_same]", " if p is not None]",
        _MOVED,
    ),
    Mutation(
        "copies whose memory others use", "weights/host_copies.py",
        " and uses(source) == ALONE", "",
        ("weights/test_host_copies.py::test_memory_that_others_use_is_not_kept",),
    ),
    Mutation(
        "copies of another dtype or shape", "weights/host_copies.py",
        "is_plain(parameter) and parameter.dtype == source.dtype and parameter.shape == source.shape",
        "is_plain(parameter)",
        ("weights/test_host_copies.py::test_the_same_bits_in_another_dtype_or_shape_are_copied",),
    ),
    Mutation(
        "the sums of a digest", "weights/digest.py",
        "return [sums, words[rows * COLUMNS :].to(torch.int64)]", "return [words[rows * COLUMNS :].to(torch.int64)]",
        ("weights/test_digest.py::test_changes_of_the_whole_are_seen",),
    ),
    Mutation(
        "the last row of a digest", "weights/digest.py",
        "return [sums, words[rows * COLUMNS :].to(torch.int64)]", "return [sums]",
        ("weights/test_digest.py::test_one_bit_of_one_element_is_seen",),
    ),
    Mutation(
        "the last row of a digest by a thread", "weights/digest.py",
        "out[COLUMNS:] = array[whole:]", "out[COLUMNS:] = 0",
        ("weights/test_digest.py::test_by_threads_and_by_torch_it_is_the_same",),
    ),
    Mutation(
        "weights that follow the first of a group", "weights/digest.py",
        "        groups[-1].append(tensor)\n", "        groups[-1] = groups[-1] or [tensor]\n",
        ("weights/test_digest.py::test_by_threads_and_by_torch_it_is_the_same",),
    ),
    Mutation(
        "tensors without memory are not numbers", "weights/vacancy.py",
        "torch.full((), math.nan if dtype.is_floating_point else 0, dtype=dtype", "torch.full((), 0, dtype=dtype",
        ("weights/test_vacancy.py::test_tensors_without_memory_share_what_they_are_of",),
    ),
    Mutation(
        "parameters that are elsewhere", "hosts/quick_to.py",
        "or parameter.device != place", "",
        ("hosts/adapters/test_quick_to.py::test_one_that_is_elsewhere_is_moved",),
    ),
    Mutation(
        "modules that do more when they are moved", "hosts/quick_to.py",
        "kind._apply is ours and ", "",
        ("hosts/adapters/test_quick_to.py::test_what_torchs_own_does_in_addition_is_done",),
    ),
    Mutation(
        "gradients that move with parameters", "hosts/quick_to.py",
        "if not parameter.is_leaf or parameter.grad is not None:", "if False:",
        ("hosts/adapters/test_quick_to.py::test_what_torchs_own_does_in_addition_is_done",),
    ),
    Mutation(
        "a way to move modules that is not torch's", "hosts/quick_to.py",
        "if original is not nn.Module.to or any(f.__code__.co_filename != _FILE for f in (original, ours)):",
        "if False:",
        ("hosts/adapters/test_quick_to.py::test_anothers_method_is_called",),
    ),
    Mutation(
        "buffers of a module whose parameters are there", "hosts/quick_to.py",
        "each._buffers[name] = buffer.to(place)", "pass",
        ("hosts/adapters/test_quick_to.py::test_parameters_that_are_there_stay_as_they_are",),
    ),
    Mutation(
        "a host's module is moved by what is quick", "hosts/moves.py",
        "functools.partial(quick_to.to, original, module", "functools.partial(original, module",
        ("hosts/adapters/test_weight_moves.py::test_torch_looks_at_no_parameter_if_all_are_there",),
    ),
    Mutation(
        "a buffer that is still on its way", "weights/staging.py",
        "        self._buffers[0][1].synchronize()\n", "",
        ("weights/test_staging.py::test_copies_are_exact",),
    ),
    Mutation(
        "the last buffer is sent", "weights/staging.py",
        "            if kind is None:\n                self._send()\n                self._give_back()\n",
        "            pass\n",
        ("weights/test_vacancy.py::test_weights_are_fetched_without_a_second_copy",),
    ),
    Mutation(
        "parameters are bound once they have their values", "weights/copy_in.py",
        "if now.device == weight.tensor.device:", "if now is not None:",
        ("weights/test_vacancy.py::test_a_fetch_that_fails_leaves_the_host_its_weights",),
    ),
    Mutation(
        "a network at the start of a WebUI", "gc_pause.py",
        "if parameter_bytes(gc.get_objects()) > LARGE:", "if False:",
        ("hosts/adapters/startup_objects_alone.py::test_a_model_that_is_loaded_at_the_start_is_not_frozen",),
    ),
    Mutation(
        "objects of the start while the extension is off", "hosts/startup_objects.py",
        "if session.config().enabled:", "if True:",
        ("hosts/adapters/startup_objects_alone.py::test_in_the_other_webuis_objects_are_frozen_while_scripts_are_loaded",),
    ),
    Mutation(
        "garbage of the page before", "gc_pause.py",
        "    if _thawed:", "    if False:",
        ("hosts/adapters/startup_objects_alone.py::test_garbage_of_the_page_before_is_not_frozen",),
    ),
    Mutation(
        "a failure to freeze", "hosts/webui_session.py",
        "self.guarded(lambda: startup_objects.freeze_if_on(self))", "startup_objects.freeze_if_on(self)",
        ("hosts/adapters/startup_objects_alone.py::test_a_session_starts_if_nothing_can_be_frozen",),
    ),
    Mutation(
        "survivors after objects were thawed", "gc_pause.py",
        "_seen_frozen, _thawed = False, True", "_thawed = True",
        ("test_gc_pause.py::test_survivors_are_moved_again_once_what_was_frozen_is_thawed",),
    ),
    Mutation(
        "a network that leftovers are searched with", "capture/leftovers.py",
        "            gc_pause.freeze()\n", "            gc.freeze()\n",
        ("capture/test_leftovers.py::test_what_was_frozen_is_frozen_again_unless_a_network_was_loaded",),
    ),
    Mutation(
        "what Python itself freezes", "gc_pause.py",
        "gc.get_freeze_count() > _PYTHONS_OWN", "gc.get_freeze_count() > 0",
        ("test_gc_pause.py::test_what_python_freezes_at_its_start_is_nobody_s_choice",),
    ),
    Mutation(
        "wrappers around torch's own methods only", "hosts/attachment.py",
        "vars(nn.Module).get(wrapped.__name__) is wrapped", "True",
        ("hosts/adapters/test_weight_moves.py::test_only_what_wraps_torch_s_own_is_vouched_for",),
    ),
    Mutation(
        "memory of a VAE's plans, when it leaves", "hosts/moves.py",
        "                guarded(self._report, \"memory\", each.give_memory_back)\n", "                pass\n",
        ("hosts/adapters/test_a1111_medvram_vae.py::test_both_parts_come_and_leave_together",),
    ),
    Mutation(
        "blocks with --lowvram", "hosts/a1111/memory.py",
        "yield from part if isinstance(part, nn.ModuleList) else [part]", "yield part",
        ("hosts/adapters/test_a1111_memory.py::test_with_lowvram_blocks_that_did_not_change_are_not_copied_back",),
    ),
    Mutation(
        "tensors that are held while the host is short of memory", "weights/arena.py",
        "self._tracked.layouts.give_up()", "self._tracked.layouts.sweep()",
        ("hosts/adapters/test_forge_programs.py::test_on_a_gpu_what_forge_moves_off_is_held_only_if_there_is_room",),
    ),
    Mutation(
        "the detector of a part, once the arena has moved weights", "weights/submodule_arena.py",
        "        self._own()\n        self.order.plan()", "        self.order.plan()",
        ("weights/test_arena.py::test_a_part_checks_what_was_bound_after_its_last_check",),
    ),
    Mutation(
        "weights that a graph of the program reads", "weights/host_order.py",
        "if self._laid and not self.pinned and", "if self._laid and",
        ("test_program_graphs.py::test_weights_that_a_graph_of_the_program_reads_stay_where_and_as_they_are",),
    ),
    Mutation(
        "strides that were the host's", "weights/host_order.py",
        "if id(now) != known or now.stride() != strides:", "if False:",
        ("weights/test_host_order.py::"
         "test_strides_that_were_seen_to_be_the_hosts_are_asked_again_once_they_change[maps-plan_between]",),
    ),
    Mutation(
        "the host's order before the original runs", "runtime/model_state.py",
        "resident.is_streamed:\n with self.arena.order.host():",
        "resident.is_streamed:\n            with self.arena.gate:",
        ("weights/test_host_order.py::test_a_bypassed_call_has_the_strides_of_the_original",),
    ),
    Mutation(
        "the order of plans before a plan runs", "weights/host_order.py",
        "live.copy_(now.detach())\n", "\n",
        ("weights/test_host_order.py::test_the_memory_of_plans_is_rewritten_and_its_addresses_stay",),
    ),
    Mutation(
        "memory that others reference is not rewritten", "weights/host_order.py",
        "_fills_memory(weight, original) and _alone(weight)", "_fills_memory(weight, original)",
        ("weights/test_host_order.py::test_what_others_hold_of_the_weights_keeps_its_values",),
    ),
    Mutation(
        "memory that others took in the host's order", "weights/host_order.py",
        "if not _soon_alone(weight):", "if False:",
        ("weights/test_host_order_threads.py::test_memory_that_others_took_in_the_hosts_order_is_not_rewritten",),
    ),
    Mutation(
        "modes around a rewrite of weights", "weights/host_order.py",
        "with undisturbed(), torch.inference_mode(False)", "with torch.inference_mode(False)",
        ("weights/test_host_order_threads.py::test_modes_around_a_call_change_no_weight",),
    ),
    Mutation(
        "weights in another memory format", "weights/host_order.py",
        "if before != is_channels_last(now.shape, new or now.stride()):", "if False:",
        ("weights/test_host_order.py::test_conversions_of_the_whole_model",),
    ),
    Mutation(
        "weights that other code reads", "passes/channels_last.py",
        "if not is_weight(weight) or not only_convolutions_read(weight):", "if not is_weight(weight):",
        ("weights/test_host_order.py::test_a_weight_that_other_code_reads_keeps_its_layout",),
    ),
    Mutation(
        "copies of a module that share its forward", "behaviour/forward_slot.py",
        "(module := called_on(frame, self, own)) is not own", "(module := own) is not own",
        ("behaviour/test_copies.py::test_a_copy_runs_its_own_layers",),
    ),
    Mutation(
        "a forward that was given to another module", "behaviour/holder.py",
        "and any(here.get(name) is there.get(name) for name in _SHARED)", "",
        ("behaviour/test_copies.py::test_a_forward_that_was_given_to_another_module_runs_the_one_that_it_is_of",),
    ),
]
