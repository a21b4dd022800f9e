"""What keeps results in the memory of operands right, and what a plan needs at one time small."""

from __future__ import annotations

from mutations import Mutation

_IN_PLACE = "passes/test_in_place.py::"
_USED = _IN_PLACE + "test_memory_that_is_in_use_is_not_taken"
_ORDER = "passes/test_memory_order.py::"
_VAE_MEMORY = "hosts/adapters/test_vae_memory.py"
_PLANNED = (f"{_VAE_MEMORY}::test_a_plan_needs_what_its_values_take",)
_STAYS = _ORDER + "test_what_may_not_move_or_gains_nothing_stays"

_ROOM = "hosts/adapters/test_forge_vae_room.py::"
_RATHER = (_ROOM + "test_what_no_plan_serves_gets_what_forge_estimates",)

MUTATIONS = [
    Mutation(
        "what Forge frees for a VAE that a plan serves", "hosts/forge/vae_room.py",
        "needs is None or needs[1] >= memory_required", "True",
        (_ROOM + "test_with_a_plan_other_models_stay",),
    ),
    Mutation(
        "several images that Forge divides by what is free", "hosts/forge/vae_room.py",
        "or len(operand) != 1", "",
        _RATHER,
    ),
    Mutation(
        "a number of a VAE for another load", "hosts/forge/vae_room.py",
        "finally:\n self._call.needs = self._call.withheld = None", "finally:\n            pass",
        (_ROOM + "test_the_number_holds_for_the_load_of_that_vae_alone",),
    ),
    Mutation(
        "an original that runs in a plan's room", "hosts/forge/secondary.py",
        "replace(hooks, short_of_memory=self._gave_way)", "hooks",
        (_ROOM + "test_if_the_original_runs_all_the_same_forge_frees_the_rest",),
    ),
    Mutation(
        "memory that is read later", "passes/in_place.py",
        "own and not later and", "own and",
        (_USED,),
    ),
    Mutation(
        "memory of arguments", "passes/in_place.py",
        'node.op == "call_function" and node not in pinned', "node not in pinned",
        (_USED,),
    ),
    Mutation(
        "memory that something writes to", "passes/in_place.py",
        'node.op == "call_function" and node not in pinned', 'node.op == "call_function"',
        (_IN_PLACE + "test_memory_that_something_writes_to_is_not_taken",),
    ),
    Mutation(
        "memory of two operands", "passes/in_place.py",
        "and others.isdisjoint(sharing)", "",
        (_USED,),
    ),
    Mutation(
        "memory of views that their operator does not tell of", "passes/rewrite.py",
        "or target in SILENT_ALIAS:", "or False:",
        (_USED,),
    ),
    Mutation(
        "memory for another dtype", "passes/in_place.py",
        'norm.kwargs.get("out_dtype") in (None, dtype(x))', "True",
        (_IN_PLACE + "test_a_result_of_another_dtype_needs_separate_memory",),
    ),
    Mutation(
        "memory in plans with a CUDA graph", "passes/in_place.py",
        "return 0 if ctx.most_bytes is None else len(", "return len(",
        (_IN_PLACE + "test_plans_whose_calls_are_not_rare_stay",),
    ),
    Mutation(
        "norms that read and write in one launch", "kernels/group_norm/group_norm.py",
        'return fitting(pixels, groups, width)[0] != "whole"', "return True",
        (_IN_PLACE + "test_small_images_are_normed_in_one_launch",),
    ),
    Mutation(
        "memory that holds another dtype", "kernels/group_norm/group_norm.py",
        "if out is None or out.dtype != dtype or", "if out is None or",
        ("kernels/group_norm/test_in_place_portable.py::test_group_norm_over_other_memory",),
    ),
    Mutation(
        "memory of a result that is counted twice", "kernels/backend/graph_memory.py",
        "_bytes(x) if memory is None else 0", "_bytes(x)",
        ("plans/test_peak_memory.py::test_so_does_one_of_several",),
    ),
    Mutation(
        "random numbers in another order", "passes/memory_order.py",
        "not is_pure(node) or writes", "writes",
        (_STAYS,),
    ),
    Mutation(
        "reads of what is written to meanwhile", "passes/memory_order.py",
        "if node in self._pinned or not self._pinned.isdisjoint(node.all_input_nodes):", "if False:",
        (_STAYS,),
    ),
    Mutation(
        "an order that gains nothing", "passes/memory_order.py",
        "state.restore()", "pass",
        (_STAYS,),
    ),
    Mutation(
        "the order in plans with a CUDA graph", "passes/memory_order.py",
        "return 0 if ctx.most_bytes is None else _Search", "return _Search",
        (_ORDER + "test_plans_whose_calls_are_not_rare_stay",),
    ),
    Mutation(
        "a convolution that keeps its memory beside its norm", "passes/conv_group_norm.py",
        "match(norm) if ctx.most_bytes is None else None", "match(norm)",
        ("passes/test_conv_group_norm.py::test_if_memory_counts_they_stay_apart",),
    ),
    Mutation(
        "the memory of a decode by a plan that is compared", "runtime/plan_finder.py",
        "if any(map(self._is_compared, alike)):", "if False:", _PLANNED,
    ),
    Mutation(
        "the memory of a decode by another size's plan", "runtime/plan_finder.py",
        "if plan.shape_signature == kind]", "]", _PLANNED,
    ),
    Mutation(
        "the memory of a decode whose plan is switched off", "runtime/plan_finder.py",
        "if device is None or not self._context.config.enabled:", "if device is None:", _PLANNED,
    ),
    Mutation(
        "what a plan's decode needs", "hosts/vae_memory.py",
        "self._need(args[0]) if planned is None else planned", "self._need(args[0])", _PLANNED,
    ),
    Mutation(
        "an image that ends as a plan's need is not known", "hosts/gpu_room.py",
        "with contextlib.suppress(Exception):\n        planned", "with contextlib.suppress():\n        planned",
        (f"{_VAE_MEMORY}::test_an_image_does_not_end_because_a_plans_need_is_not_known",),
    ),
    Mutation(
        "one block for a plan's decode", "hosts/vae_memory.py",
        "if planned is None and not self._frees_cached:", "if not self._frees_cached:", _PLANNED,
    ),
    Mutation(
        "banks that are freed in rounds", "hosts/gpu_room.py",
        "graph_pool.make_room(report, why, banks=missing)", "graph_pool.make_room(report, why)",
        (f"{_VAE_MEMORY}::test_banks_of_what_is_missing_are_freed_until_pieces_between_them_are_whole",),
    ),
    Mutation(
        "a VAE's plan next to 8 bits", "hosts/vae.py",
        "if config.eight_bits and gpu_room.is_tight() else GAIN", "if gpu_room.is_tight() else GAIN",
        ("hosts/adapters/test_a1111_vae.py::test_next_to_8_bits_on_a_small_card_the_second_image_makes_the_plan",),
    ),
    Mutation(
        "results that outgrow all before", "kernels/backend/graph_memory.py",
        "            largest = size\n", "", ("plans/test_peak_memory.py::test_what_is_larger_than_all_before_it",),
    ),
    Mutation(
        "cached memory in a run that is repeated", "plans/register_machine.py",
        "if self._compiles and self._runs", "if self._runs",
        ("plans/test_register_machine.py::test_the_cache_is_given_back_before_chosen_nodes_in_each_run",),
    ),
    Mutation(
        "cached memory on a large card", "runtime/plan_maker.py",
        "if config.rare_calls and environment.is_small_card(device) else ()", "if config.rare_calls else ()",
        ("plans/test_rare_calls.py::test_on_a_small_card_a_plan_gives_cached_memory_back",),
    ),
    Mutation(
        "what a compiler's thread has freed", "kernels/backend/precompile.py",
        "            # Triton's; see `nvrtc.build` for the others\n"
        "            freed_memory.give_back_of_thread()\n",
        "            pass\n",
        ("kernels/backend/test_precompile.py::test_each_thread_gives_back_what_the_compiler_has_freed",),
    ),
    Mutation(
        "what NVRTC has freed", "kernels/backend/nvrtc.py",
        "        freed_memory.give_back_of_thread()\n", "        pass\n",
        ("kernels/backend/test_nvrtc.py::test_what_the_compiler_has_freed_is_given_back",),
    ),
    Mutation(
        "the end of a thread's heap", "freed_memory.py", "library.madvise(first", "bool(first",
        ("test_freed_memory.py::test_the_end_of_a_thread_s_heap",),
    ),
    Mutation(
        "what a Forge has freed of a model that it unloads", "hosts/webui_session.py",
        "        system_memory.trim()\n        return result", "        return result",
        ("hosts/adapters/test_forge.py::test_unloading_releases_everything",),
    ),
    Mutation(
        "what TCMalloc keeps", "freed_memory.py", "        release()\n", "        pass\n",
        ("test_freed_memory.py::test_tcmalloc_is_asked_for_what_it_keeps",),
    ),
    Mutation(
        "an allocator in the place of glibc's", "freed_memory.py",
        "if _address(quick.malloc) != _address(own.malloc):", "if False:",
        ("test_freed_memory.py::test_another_allocator_is_left_to_itself",),
    ),
    Mutation(
        "pinned buffers that the next copy takes", "weights/pinned_buffers.py",
        "_spare[:] = [(buffers, arrival)]", "pass",
        ("weights/test_pinned_buffers.py::test_one_copy_after_another_takes_the_same_two",),
    ),
    Mutation(
        "what is on its way from pinned buffers", "weights/pinned_buffers.py",
        "                arrival.synchronize()\n", "                pass\n",
        ("weights/test_pinned_buffers.py::test_what_is_copied_from_them_is_waited_for",),
    ),
    Mutation(
        "the last copy from pinned buffers", "weights/staging.py",
        "for buffer, _ in self._buffers], self._arrival)", "for buffer, _ in self._buffers], self._buffers[0][1])",
        ("weights/test_pinned_buffers.py::test_what_was_sent_last_is_waited_for",),
    ),
    Mutation(
        "pinned memory that torch keeps", "weights/pinned_buffers.py", "                empty()\n", "",
        ("weights/test_pinned_buffers.py::test_free_has_torch_give_its_pinned_memory_back",),
    ),
    Mutation(
        "copies of what SD.Next unloads", "hosts/sdnext/adapter.py",
        "        self.guarded(self._offload.sweep)\n", "",
        ("hosts/adapters/test_sdnext_memory.py::test_unloading_frees_copies_in_system_memory",),
    ),
    Mutation(
        "operations that load further kernels to measure layers", "passes/eight_bits_selection.py",
        "torch.dot(each, each) for each in found", "torch.linalg.vector_norm(each) ** 2 for each in found",
        ("passes/test_eight_bits_errors.py::test_few_operations_measure",),
    ),
    Mutation(
        "the first row of each image in the error of a layer", "passes/eight_bits_selection.py",
        "every(images.shape[1], SAMPLE // max(1, len(images)))", "every(images.shape[1], SAMPLE)",
        ("passes/test_eight_bits_errors.py::test_the_first_row_of_each_image_is_measured",),
    ),
    Mutation(
        "where the pixels of a sample begin", "passes/eight_bits_selection.py",
        "slice(min(step, count) // 2 * stride + place,", "slice(step // 2 * stride + place,",
        ("passes/test_eight_bits_errors.py::test_pixels_of_a_convolution_are_those_of_the_image",),
    ),
]  # fmt: skip
