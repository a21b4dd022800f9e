"""What keeps 8-bit integers from being stale, and forwards from weights in system memory, on a card that is small."""

from __future__ import annotations

from mutations import Mutation

_TESTS = "runtime/test_resident.py::"
_BYTES = "runtime/test_resident_bytes.py::"
_COPIES = "runtime/test_resident_copies.py::"
_CHANGES = _TESTS + "test_changes_are_followed_at_the_next_call"
_REFORGE = "hosts/adapters/test_reforge_resident.py::"
_FORGE = "hosts/adapters/test_forge_old_resident.py::"
_FORGE_STATE = "hosts/adapters/test_forge_old_resident_state.py::"
_REFUSED = (_FORGE + "test_what_is_not_known_is_left_to_forge",)
_NO_ROOM = "runtime/test_resident_no_room.py::"
_REPLACED = "runtime/test_replaced_layers.py::"
_BACK = (_TESTS + "test_the_original_gets_its_weights_back",)

_SELECTIONS = ("runtime/test_resident_selections.py::test_plans_run_in_turns",)

MUTATIONS = [
    Mutation(
        "plans that get no layers, as others read all of them", "runtime/plan_builder.py",
        "if read and residency.drop_others(context):", "if False:",
        ("runtime/test_resident_selections.py::test_a_plan_gets_its_layers_although_another_reads_them_all",),
    ),
    Mutation(
        "plans that are dropped when they are about to run", "runtime/plan_runner.py",
        "if plan.state == DROPPED:", "if False:",
        ("runtime/test_resident_selections.py::test_a_plan_that_was_dropped_since_it_was_found",),
    ),
    Mutation(
        "allocations that fail and are counted within", "runtime/shortages.py",
        "return int(torch.cuda.memory_stats(device).get(\"num_ooms\", 0)) - report.counter(COUNTER)",
        "return int(torch.cuda.memory_stats(device).get(\"num_ooms\", 0))",
        ("runtime/test_shortages.py::test_what_is_counted_within_is_counted_once",),
    ),
    Mutation(
        "allocations that fail while a plan is made", "runtime/model_state.py",
        "return shortages.counted(self.report, self.device())", "return contextlib.nullcontext()",
        ("hosts/adapters/test_sdnext_resident_first.py"
         "::test_memory_that_the_extension_lacks_is_not_lacked_by_the_host",),
    ),
    Mutation(
        "plans with integers of what a later one reads in half precision", "runtime/residency.py",
        "_drop_unlike(context, plan)\n    with", "with",
        _SELECTIONS,
    ),
    Mutation(
        "weights that earlier plans read in half precision", "passes/eight_bits_match.py",
        "if slots.isdisjoint(slots_of([c.weight]))", "",
        _SELECTIONS,
    ),
    Mutation(
        "forwards that find weights in system memory and no room on the GPU", "runtime/model_state.py",
        "except torch.cuda.OutOfMemoryError:\n pass\n # after the handler: the exception keeps what had come",
        "except AssertionError: pass",
        (_NO_ROOM + "test_calls_are_right_until_there_is_room",),
    ),
    Mutation(
        "weights that find no room on the GPU when a model is released", "runtime/left_aside.py",
        "elif context.arena.resident.out(context.device()):", "elif False:",
        (_NO_ROOM + "test_calls_are_right_until_there_is_room",),
    ),
    Mutation(
        "weights that leave a GPU which has no memory for digests", "weights/host_copies.py",
        "with contextlib.suppress(torch.cuda.OutOfMemoryError):", "if True:",
        (_NO_ROOM + "test_weights_leave_again_without_memory_for_digests",),
    ),
    Mutation(
        "what a UNet takes next to plans of layers that were replaced", "hosts/gpu_room.py",
        "if any(id(each.now) in here for each, _ in bank.sources)", "",
        ("hosts/adapters/test_forge_resident_first.py::test_layers_are_replaced_on_the_gpu",),
    ),
    Mutation(
        "such weights after a late release of the accelerator before", "runtime/left_aside.py",
        "if left is not None and left() is context:", "if left is not None:",
        (_NO_ROOM + "test_a_late_release_takes_nothing_from_a_later_accelerator",),
    ),
    Mutation(
        "such weights if a wrapper is in the forward's place", "runtime/left_aside.py",
        "elif context.arena.resident.out(context.device()):",
        "elif context.arena.resident.out(context.device()) and context.slot.installed():",
        (_NO_ROOM + "test_a_wrapper_has_the_forward_of_a_module_that_is_released",),
    ),
    Mutation(
        "such weights if another forward is in its place", "accelerator.py",
        "(left_aside.let_go if self._released else left_aside.give_back)(self._context)",
        "left_aside.give_back(self._context)",
        (_NO_ROOM + "test_another_forward_finds_weights_once_there_is_room",),
    ),
    Mutation(
        "plans of other models while weights of layers come", "behaviour/surroundings.py",
        " if not is_hook(hook)", "",
        (_NO_ROOM + "test_other_models_in_other_threads_have_their_plans",),
    ),
    Mutation(
        "threads that have weights of layers on the GPU", "runtime/model_state.py",
        "with self.arena.resident.alone:", "if True:",
        (_NO_ROOM + "test_two_threads_take_turns",),
    ),
    Mutation(
        "weights of a layer that calls itself", "weights/streamed_by_layer.py",
        "if not held and all(each is not layer for each, _ in self._called):", "if not held:",
        (_NO_ROOM + "test_a_layer_within_its_own_call",),
    ),
    Mutation(
        "weights that are written to where no layer is called", "weights/streamed.py",
        "x.copy_(there[id(x)])", "pass",
        (_NO_ROOM + "test_a_layers_own_hooks_write_and_restore",),
    ),
    Mutation(
        "weights that are given other strides where no layer is called", "weights/streamed_by_layer.py",
        "return torch.Tag.inplace_view not in function.tags", "return True",
        (_NO_ROOM + "test_weights_are_read_where_no_layer_is_called",),
    ),
    Mutation(
        "a forward that stays for such weights goes once they have come", "runtime/left_aside.py",
        "return forward(*args, **kwargs)\n    finally:\n        _end(context)",
        "return forward(*args, **kwargs)\n    finally:\n        pass",
        (_NO_ROOM + "test_calls_are_right_until_there_is_room",),
    ),
    Mutation(
        "such weights of a module that is accelerated again", "runtime/left_aside.py",
        "context.arena.resident.take_over(before.arena.resident)", "pass",
        (_NO_ROOM + "test_another_accelerator_has_what_is_left",),
    ),
    Mutation(
        "weights that came before memory ran out", "runtime/model_state.py",
        "resident.leave()\n                    raise", "raise",
        (_NO_ROOM + "test_some_came_and_memory_ran_out",),
    ),
    Mutation(
        "hosts that give way before weights are read from system memory", "runtime/model_state.py",
        "return None if not last and self.make_way(for_weights=True) else True", "return True",
        (_NO_ROOM + "test_without_plans_a_host_gives_way_first",),
    ),
    Mutation(
        "weights that are read by layer before a host gives way for good", "runtime/model_state.py",
        "if for_weights and self.config.enabled and self.config.eight_bits and self._are_in_eight_bits(device):",
        "if False:",
        (_NO_ROOM + "test_with_plans_a_forward_reads_weights_by_layer_first",
         "hosts/adapters/test_forge_resident.py::test_memory_that_another_program_takes_while_an_image_is_made"),
    ),
    Mutation(
        "weights that come as soon as they may with 8 bits off", "runtime/model_state.py",
        "if for_weights and self.config.enabled and self.config.eight_bits and self", "if for_weights and self",
        (_NO_ROOM + "test_calls_are_right_until_there_is_room",),
    ),
    Mutation(
        "hosts that give way if a forward fails by layer", "runtime/model_state.py",
        "if not by_layer or last or not self.make_way():", "if True:",
        (_NO_ROOM + "test_a_host_gives_way_if_a_forward_fails_by_layer",),
    ),
    Mutation(
        "results of a forward by layer that are not on the GPU", "runtime/model_state.py",
        "if last or all(x.device == resident.device for x in tensors(result)) or not self.make_way():", "if True:",
        (_NO_ROOM + "test_a_host_gives_way_if_a_forward_fails_by_layer",),
    ),
    Mutation(
        "weights after a host gave way to a forward that fails by layer", "runtime/model_state.py",
        "model.crowded = False\n before", "before",
        (_NO_ROOM + "test_a_host_gives_way_if_a_forward_fails_by_layer",),
    ),
    Mutation(
        "what a host raises in a forward by layer", "runtime/model_state.py", "if is_theirs(exc):", "if False:",
        (_NO_ROOM + "test_what_a_host_raises_is_raised_by_layer",),
    ),
    Mutation(
        "random numbers of a forward that fails by layer", "runtime/model_state.py",
        "# who catches this may run it again\n before.put_back()", "pass",
        (_NO_ROOM + "test_a_host_gives_way_if_a_forward_fails_by_layer",),
    ),
    Mutation(
        "lists and random numbers of one whose result is not on the GPU", "runtime/model_state.py",
        "self.model.crowded = False\n before.put_back()", "self.model.crowded = False",
        (_NO_ROOM + "test_a_host_gives_way_if_a_forward_fails_by_layer",),
    ),
    Mutation(
        "random numbers of a GPU", "runtime/run_again.py",
        "if device is not None:", "if False:",
        ("runtime/test_run_again.py::test_those_of_the_cpu_and_of_one_gpu_are_put_back",),
    ),
    Mutation(
        "weights that a layer writes to while it is called", "weights/streamed_by_layer.py",
        "source.copy_(now)", "pass",
        (_NO_ROOM + "test_a_layer_has_its_weights_on_the_gpu_while_it_is_called",),
    ),
    Mutation(
        "weights of a layer that raised", "weights/streamed_by_layer.py",
        "while self._called:", "while False:",
        (_NO_ROOM + "test_a_layer_that_raises_leaves_its_weights_where_they_were",),
    ),
    Mutation(
        "weights that changed while they were in system memory", "weights/resident.py",
        "if aside.changed()", "if False",
        (_CHANGES,),
    ),
    Mutation(
        "layers that a host has put at other paths", "weights/aside.py", "return id(container), name", "return 0, name",
        (_REPLACED + "test_results_are_those_of_the_layers_that_are_there",),
    ),
    Mutation(
        "weights that have other places or another form by now", "weights/aside.py",
        "if found is not None and not _is_of(found, weight):", "if False:",
        (_REPLACED + "test_an_aside_is_that_of_a_place_and_a_form",),
    ),
    Mutation(
        "weights that a host moved to another place of the module", "weights/aside.py",
        "lost.add(aside.number)", "pass",
        (_REPLACED + "test_in_a_call_without_a_plan_as_well",),
    ),
    Mutation(
        "the same before the first call", "weights/aside.py",
        "aside.number = aside.number or id(aside.now)", "pass",
        (_REPLACED + "test_in_a_call_without_a_plan_as_well",),
    ),
    Mutation(
        "banks of two layers at one path", "weights/banks.py",
        "key = tuple(id(aside) for aside, _ in sources), group", "key = (len(weight.path),), group",
        (_REPLACED + "test_two_layers_at_one_path_have_banks_of_their_own",),
    ),
    Mutation(
        "writes that torch does not count", "weights/resident.py",
        "changed |= told()", "told()",
        (_CHANGES,),
    ),
    Mutation(
        "a change that a digest found and no call quantised", "weights/aside.py",
        "aside.seen = None\n found.add(id(aside))", "found.add(id(aside))",
        (_TESTS + "test_what_a_digest_found_is_due_until_it_is_quantised",),
    ),
    Mutation(
        "what was read before a generation", "weights/resident.py",
        " or self.audit_all:", ":",
        (_COPIES + "test_what_was_read_before_a_generation_does_not_count_for_it",),
    ),
    Mutation(
        "what another thread quantised while a plan ran", "runtime/plan_finder.py",
        " and self._context.arena.copied == lookup.copied", "",
        (_COPIES + "test_what_another_thread_quantised_meanwhile_discards_a_result",),
    ),
    Mutation(
        "banks without values", "weights/banks.py",
        "self.ready = not self.sources", "pass",
        (_TESTS + "test_memory_that_others_need",),
    ),
    Mutation(
        "copies of values that changed while they were away", "weights/resident.py",
        "return not bank.known or bool(changed) and any(id(aside) in changed for aside, _ in bank.sources)",
        "return not bank.known",
        (_COPIES + "test_changes_are_followed_by_values_that_gave_way",),
    ),
    Mutation(
        "copies of values that were quantised again", "weights/resident.py",
        "bank.copies = None\n bank.occupy()", "bank.occupy()",
        (_COPIES + "test_changes_are_followed_by_values_that_gave_way",),
    ),
    Mutation(
        "writes that torch does not count, while values come back", "weights/resident.py",
        "changed |= before() if before is not None else set()", "pass",
        (_COPIES + "test_a_write_that_nothing_counts_is_read_while_the_plan_runs",),
    ),
    Mutation(
        "a result whose weights were read meanwhile", "runtime/plan_finder.py",
        "confirmed = not self._reads(plan)", "pass",
        (_COPIES + "test_a_write_that_nothing_counts_is_read_while_the_plan_runs",),
    ),
    Mutation(
        "a run that waits until all weights are read", "runtime/residency.py",
        "_nothing_to_restore if later and all_of_them else None", "None",
        (_COPIES + "test_the_first_run_of_a_generation_does_not_wait_for_what_is_read",),
    ),
    Mutation(
        "banks in blocks of other values", "weights/banks.py",
        "if any(bank.rows.is_cuda for bank in banks):", "if False:",
        (_COPIES + "test_values_come_back_to_blocks_of_their_own",),
    ),
    Mutation(
        "values without a copy of them", "weights/banks.py",
        "if bank.sources and bank.ready and bank.copies is None]", "if bank.sources and bank.copies is None]",
        (_COPIES + "test_what_has_no_values_is_not_copied",),
    ),
    Mutation(
        "weights that come back before the original forward", "runtime/model_state.py",
        "if device is None or not resident.out(device):", "if True:",
        _BACK,
    ),
    Mutation(
        "the host's order of weights next to those in system memory", "runtime/model_state.py",
        "with self.arena.order.host():\n # another thread may",
        "with self.arena.gate:\n                # another thread may",
        (_TESTS + "test_the_original_has_its_strides_next_to_weights_in_system_memory",),
    ),
    Mutation(
        "weights of a forward over the module's", "accelerator.py",
        "if not self.installed():\n (left_aside.let_go if self._released else left_aside.give_back)(self._context)",
        "pass",
        (_TESTS + "test_a_forward_that_is_put_over_the_module_finds_its_weights",),
    ),
    Mutation(
        "weights of copies", "runtime/residency.py",
        "context.bring_back()\n arena.restore_layout_temporarily()", "arena.restore_layout_temporarily()",
        (_TESTS + "test_copies_have_their_weights_on_one_device",),
    ),
    Mutation(
        "weights that something else of the graph reads", "passes/eight_bits_match.py",
        "return [c for c in found if read.isdisjoint(map(id, parts_of(c.weight)))]", "return found",
        (_TESTS + "test_a_weight_that_is_read_elsewhere_as_well_stays",),
    ),
    Mutation(
        "weights after 8 bits are off", "accelerator.py",
        "if not (config.enabled and config.eight_bits):\n left_aside.give_back(self._context)", "pass",
        (_TESTS + "test_off_gives_them_back_at_once_and_the_exact_bits",),
    ),
    Mutation(
        "memory that the module has left", "weights/tracked.py",
        "if not w.plans and not _is_there(w)", "if False",
        ("weights/test_left_memory.py::test_it_is_freed_and_the_module_comes_back",),
    ),
    Mutation(
        "weights that are on the GPU are known", "weights/tracked.py",
        "if not w.plans and not _is_there(w)", "if not w.plans",
        ("weights/test_left_memory.py::test_what_is_on_the_gpu_stays_known",),
    ),
    Mutation(
        "room for a host's move", "hosts/moves.py",
        "result = _with_room(place, self._report, move)", "result = move()",
        ("weights/test_left_memory.py::test_a_move_that_finds_no_memory_gets_that_of_graphs",),
    ),
    Mutation(
        "results of calls whose accounts fail", "runtime/call_server.py",
        "self._guarded(lambda: self._account(lookup, watch, build, tried), None)",
        "self._account(lookup, watch, build, tried)",
        ("runtime/test_faults_of_accounts.py::test_the_caller_gets_the_result",),
    ),
    Mutation(
        "strides of weights that leave the GPU", "weights/resident.py",
        "if value.stride() != original:", "if False:",
        (_BYTES + "test_the_original_has_its_weights_as_the_host_laid_them",),
    ),
    Mutation(
        "memory of weights that no plan reads any more", "weights/arena.py",
        "weight.let_go()", "pass",
        (_BYTES + "test_after_the_release_no_memory_waits_for_garbage_collection",),
    ),
    Mutation(
        "products that make keys or values alone", "passes/eight_bits_match.py",
        "elif not is_op(user, ATTENTION) or node is user.args[0] or node not in user.args[1:3]:", "elif False:",
        ("passes/test_eight_bits.py::test_keys_and_values_of_what_is_given",),
    ),
    Mutation(
        "errors as weights come back", "runtime/model_state.py",
        "except torch.cuda.OutOfMemoryError:\n raise\n except Exception as exc:",
        "except torch.cuda.OutOfMemoryError:\n                raise\n            except ZeroDivisionError as exc:",
        (_TESTS + "test_what_fails_as_weights_come_back_does_not_reach_the_host",),
    ),
    Mutation(
        "the room of a UNet that comes as a whole", "hosts/a1111/whole_unet.py",
        "return size + gpu_room.WORKSPACE <= free + torch.cuda.memory_reserved(place) and total < SMALL * size",
        "return True",
        ("hosts/adapters/test_a1111_resident.py::test_with_lowvram_a_unet_without_room_comes_block_by_block",),
    ),
    Mutation(
        "blocks that come again", "runtime/model_state.py",
        "return short is not None and short()", "return False",
        ("hosts/adapters/test_a1111_resident.py::test_with_lowvram_blocks_come_again_if_memory_runs_out",),
    ),
    Mutation(
        "layouts of blocks that come again", "hosts/a1111/whole_unet.py",
        "accelerator.arena.restore_layout_temporarily()", "pass",
        ("hosts/adapters/test_a1111_resident.py::test_with_lowvram_the_unet_comes_as_a_whole",),
    ),
    Mutation(
        "writes to weights that come for one operation", "weights/streamed.py",
        "raise NotStreamed(str(function))", "pass",
        ("runtime/test_resident_compared.py::test_others_are_left_alone",),
    ),
    Mutation(
        "weights that are let go, and their order", "weights/resident.py",
        "tracked.order.left({id(tracked.weights[key].bound) for key in left})", "pass",
        (_BYTES + "test_what_is_let_go_as_banks_are_filled_is_in_no_order",),
    ),
    Mutation(
        "lists that a comparison emptied", "runtime/call_server.py",
        "            before.put_back()\n        return self.run_original", "            return self.run_original",
        ("runtime/test_resident_compared.py::test_a_comparison_that_fails_leaves_lists_as_they_were",),
    ),
    Mutation(
        "parameters of a module that is gone", "plans/graph_facts.py",
        "for node in [*graph_module.graph.nodes, *named]:", "for node in graph_module.graph.nodes:",
        ("hosts/adapters/test_forge_resident_memory.py::test_while_it_is_on",),
    ),
    Mutation(
        "weights that a host made in inference mode", "weights/original_layout.py",
        "first = live_tensor(tensor)[", "first = tensor.detach()[",
        ("weights/test_original_layout.py::test_a_tensor_of_inference_mode_is_brought_home",),
    ),
    Mutation(
        "layers of a network that is gone", "hosts/a1111/lora.py",
        "[weakref.ref(m) for m in named", "[lambda m=m: m for m in named",
        ("hosts/adapters/test_a1111_resident_memory.py::test_at_rest_it_is_what_the_webui_takes_alone",),
    ),
    Mutation(
        "layers of a network that is gone, by Hypertile", "hosts/a1111/adapter.py",
        "[weakref.ref(m) for m in modules", "[lambda m=m: m for m in modules",
        ("hosts/adapters/test_a1111.py::test_what_is_known_of_a_network_keeps_none_of_its_layers",),
    ),
    Mutation(
        "a UNet in 8 bits whose plans go to another one", "hosts/forge/resident.py",
        "guarded(self._report, \"memory\", lambda other=other: self._leaves(other))", "pass",
        (_REFORGE + "test_of_two_checkpoints_that_are_kept_each_has_its_own_weights",),
    ),
    Mutation(
        "a card that is too small for reForge", "hosts/forge/residence.py",
        "return card >= self.least * bytes_of(unet)", "return True",
        ("hosts/adapters/test_reforge_resident.py::"
         "test_on_a_card_without_room_for_a_forward_next_to_all_weights_it_stays_in_parts",),
    ),
    Mutation(
        "hooks, injections and callbacks on weights, in reForge", "hosts/forge/residence.py",
        "return bool(hooks or callbacks or patcher.injections or _patched_otherwise(patcher))",
        "return _patched_otherwise(patcher)",
        (_REFORGE + "test_what_works_on_weights_by_itself_is_left_to_reforge",),
    ),
    Mutation(
        "functions around single weights, in reForge", "hosts/forge/residence.py",
        "or patcher.injections or _patched_otherwise(patcher))", "or patcher.injections)",
        (_REFORGE + "test_what_works_on_weights_by_itself_is_left_to_reforge",),
    ),
    Mutation(
        "layers that cast their weights, in reForge", "hosts/forge/residence.py",
        'if getattr(model, "manual_cast_dtype", None) is not None:', "if False:",
        (_REFORGE + "test_what_works_on_weights_by_itself_is_left_to_reforge",),
    ),
    Mutation(
        "a UNet as a whole that leaves too little room for its forward", "hosts/forge/resident_layers.py",
        "if stays and usable <= bytes_of(model):", "if False:",
        (_REFORGE + "test_without_room_for_all_of_it_and_a_forward_it_is_in_parts_once_8_bits_are_off",),
    ),
    Mutation(
        "room that reForge does not tell", "hosts/forge/resident_layers.py",
        "usable = min(usable, known.usable)", "pass",
        (_REFORGE + "test_without_room_for_all_of_it_and_a_forward_it_is_in_parts_once_8_bits_are_off",),
    ),
    Mutation(
        "the same at the end of a session", "hosts/forge/resident.py",
        "whole = self._residence.shrinks or self._whole[found.module].usable > size", "whole = True",
        (_REFORGE + "test_without_room_for_all_of_it_and_a_forward_it_is_in_parts_once_8_bits_are_off",),
    ),
    Mutation(
        "a UNet in 8 bits whose patcher is gone", "hosts/forge/resident_layers.py",
        "if taken is not None and patcher is None:", "if False:",
        ("hosts/adapters/test_forge_resident.py::test_at_the_end_of_a_session_after_the_patcher_of_an_image_is_gone",),
    ),
    Mutation(
        "weights that stay while Forge moves a UNet", "hosts/forge/resident_models.py",
        "with found.keeping_aside(place, early=True):", "with contextlib.nullcontext():",
        (_FORGE + "test_a_lora_that_finds_no_room_on_the_gpu_is_made_in_system_memory",),
    ),
    Mutation(
        "weights with LoRA without room on the GPU", "hosts/forge/resident_models.py",
        "except torch.cuda.OutOfMemoryError:\n            # Forge would move",
        "except ZeroDivisionError:\n            # Forge would move",
        (_FORGE + "test_a_lora_that_finds_no_room_on_the_gpu_is_made_in_system_memory",),
    ),
    Mutation(
        "a UNet that leaves the GPU and is taken for loaded", "hosts/forge/resident_models.py",
        "listed.remove(loader)", "pass",
        (_FORGE + "test_with_more_memory_it_comes_as_a_whole_later",),
    ),
    Mutation(
        "a UNet that left the GPU for another", "hosts/forge/resident_models.py",
        "super()._leaves(unet)\n        finally:\n            self._unlist(loader)",
        "super()._leaves(unet)\n        finally:\n            pass",
        (_FORGE_STATE + "test_a_unet_that_left_for_another_is_loaded_again",),
    ),
    Mutation(
        "memory that an image reserves for a ControlNet, in Forge", "hosts/forge/resident_models.py",
        "return float(self._management.minimum_inference_memory() + self._call.preserved)",
        "return float(self._management.minimum_inference_memory())",
        (_FORGE_STATE + "test_memory_that_an_image_reserves_for_a_controlnet",),
    ),
    Mutation(
        "a UNet that Forge has loaded in parts, or as a whole", "hosts/forge/resident_models.py",
        "found.arena.resident.in_parts = kept >= 0", "pass",
        (_FORGE_STATE + "test_what_a_load_by_forge_leaves",),
    ),
    Mutation(
        "a UNet of which Forge loads nothing", "hosts/forge/resident_models.py",
        "in_parts = kept >= 0", "in_parts = kept > 0",
        (_FORGE_STATE + "test_what_a_load_by_forge_leaves",),
    ),
    Mutation(
        "a load in parts that ends early", "hosts/forge/resident_models.py",
        "try:\n            return original(loaded, kept)\n        finally:\n            found.arena"
        ".resident.in_parts = kept >= 0",
        "result = original(loaded, kept)\n        found.arena.resident.in_parts = kept >= 0\n        return result",
        (_FORGE_STATE + "test_what_a_load_by_forge_leaves",),
    ),
    Mutation(
        "LoRAs that weights have already, in Forge", "hosts/forge/residence.py",
        "if str(list(patcher.lora_patches)) == loader.loaded_hash:", "if False:",
        (_FORGE_STATE + "test_weights_that_are_to_get_loras",),
    ),
    Mutation(
        "weights whose LoRA is replaced, in Forge", "hosts/forge/residence.py",
        " - loader.backup.keys()", "",
        (_FORGE_STATE + "test_weights_that_are_to_get_loras",),
    ),
    Mutation(
        "room for weights in system memory that get LoRA there", "hosts/forge/memory.py",
        "return weight.is_cuda or not any(each.is_aside(weight) for each in asides)", "return True",
        (_FORGE_STATE + "test_room_for_weights_that_get_loras",),
    ),
    Mutation(
        "room for weights that get LoRA and came back to the GPU", "hosts/forge/memory.py",
        "return weight.is_cuda or not any(", "return not any(",
        (_FORGE_STATE + "test_room_for_weights_that_get_loras",),
    ),
    Mutation(
        "room for weights that get LoRA on their way to the GPU", "hosts/forge/memory.py",
        "return weight.is_cuda or not any(each.is_aside(weight) for each in asides)", "return weight.is_cuda",
        (_FORGE_STATE + "test_room_for_weights_that_get_loras",),
    ),
    Mutation(
        "the same of a UNet in parts", "hosts/forge/memory.py",
        "if each.banks and not each.in_parts", "if each.banks",
        (_FORGE_STATE + "test_room_for_weights_that_get_loras",),
    ),
    Mutation(
        "the same of a UNet that is not in 8 bits any more", "hosts/forge/memory.py",
        "if each.banks and not each.in_parts", "if not each.in_parts",
        (_FORGE_STATE + "test_room_for_weights_that_get_loras",),
    ),
    Mutation(
        "room for LoRAs that weights have already", "hosts/forge/memory.py",
        "if str(list(patcher.lora_patches)) == loader.loaded_hash:", "if False:",
        (_FORGE_STATE + "test_room_for_weights_that_get_loras",),
    ),
    Mutation(
        "what Forge is told of a UNet in 8 bits", "hosts/forge/resident_models.py",
        "loaded.inclusive_memory, loaded.exclusive_memory = there, max(0, needs(found, model) - there)", "pass",
        (_FORGE + "test_weights_that_stay_are_not_counted_as_loaded",),
    ),
    Mutation(
        "8-bit weights of the UNet that is loaded", "hosts/forge/resident_models.py",
        "if any(each is loader.model.model for each in stay):", "if False:",
        (_FORGE + "test_8_bit_weights_give_way_before_models_do_and_not_to_the_unet_itself",),
    ),
    Mutation(
        "no weights on the GPU by choice, in Forge", "hosts/forge/resident_models.py",
        "if kept != 0 and place is not None and", "if place is not None and",
        (_FORGE + "test_with_no_weights_on_the_gpu_by_choice",),
    ),
    Mutation(
        "a UNet that comes in parts while an image is made", "hosts/forge/hooks.py",
        "forms = 0 if self._resident is None else self._resident.changes", "forms = 0",
        (_FORGE + "test_memory_runs_out_in_the_middle_of_an_image",),
    ),
    Mutation(
        "parts of a UNet that others have put in place, in Forge", "hosts/forge/residence.py",
        'any(name.startswith("diffusion_model") for name in objects)', "False",
        _REFUSED,
    ),
    Mutation(
        "LoRA in the layers of a UNet in 8 bits, in Forge", "hosts/forge/residence.py",
        "return bool(casts or patcher.has_online_lora() or", "return bool(casts or",
        _REFUSED,
    ),
    Mutation(
        "layers that cast their weights, in Forge", "hosts/forge/residence.py",
        "return bool(casts or patcher", "return bool(patcher",
        _REFUSED,
    ),
    Mutation(
        "UNets that stay on the GPU by choice", "hosts/forge/resident.py",
        "if place_of(patcher.offload_device) is not None:", "if False:",
        _REFUSED,
    ),
    Mutation(
        "weights of several kinds, on a small card", "hosts/forge/resident.py",
        "if kinds != {(nn.Parameter, computed)} or computed not in _HALF or refusal_of", "if refusal_of",
        _REFUSED,
    ),
]
