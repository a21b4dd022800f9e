"""What keeps plans in Forge right and small, measured choices of kernels true, and what is told of an image new."""

from __future__ import annotations

from mutations import Mutation

_CLASSIC = "hosts/adapters/test_forge_classic.py::"
_NEO = "hosts/adapters/test_forge_memory.py::test_layers_that_forge_moved_off_the_gpu_hold_no_memory_there"
_PRODUCTS = "passes/test_mma_products.py::"
_LINEAR = "kernels/linear/test_mma_linear.py::"
_TILES = "kernels/linear/test_mma_gemm.py::"
_EIGHT = "kernels/eight_bits/test_wgmma_gemm8.py::"

MUTATIONS = [
    Mutation(
        "layers that leave the GPU one by one", "hosts/forge/memory.py",
        "self._guarded(accelerator.give_memory_back)", "pass", (_NEO,),
    ),
    Mutation(
        "memory that Forge has pinned", "hosts/forge/memory.py",
        "patcher.unpin_all_weights()", "pass", (_NEO,),
    ),
    Mutation(
        "room for weights that come back", "hosts/forge/memory.py",
        "accelerator.vacant_bytes + twice", "twice",
        ("hosts/adapters/test_forge_memory_events.py::test_images_and_memory_are_those_without_us",),
    ),
    Mutation(
        "inference tensors that pass for normal ones", "weights/original_layout.py",
        "not tensor.is_inference() and tensor._version >= 0", "not tensor.is_inference()",
        ("weights/test_staging.py::test_weights_made_under_inference_mode_and_moved_outside_of_it",),
    ),
    Mutation(
        "memory of some weights alone", "weights/vacancy.py",
        "if memory not in used", "if not used",
        ("weights/test_vacancy.py::test_what_left_the_gpu_is_given_back_while_the_rest_lies_there",),
    ),
    Mutation(
        "a backup that is the memory of plans", "hosts/forge/memory.py",
        "patcher.backup[name] = weight.detach().clone()", "pass",
        (_CLASSIC + "test_plans_are_kept_for_another_lora_and_another_checkpoint",),
    ),
    Mutation(
        "weights that no LoRA patched, on a small card", "hosts/forge/memory.py",
        "patcher.model.to(patcher.offload_device)", "pass",
        (_CLASSIC + "test_on_a_gpu_what_forge_moves_off_is_held_only_if_there_is_room",),
    ),
    Mutation(
        "a UNet that is loaded in parts", "hosts/forge/programs.py",
        "if any(_CAST_BEFORE in vars(m) for m in layers):", "if False:",
        (_CLASSIC + "test_a_unet_that_is_loaded_in_parts_or_cast_is_bypassed_while_it_is",),
    ),
    Mutation(
        "weights that are cast in each layer", "hosts/forge/programs.py",
        "if odd or any(getattr(m, _CAST) for m in layers):", "if False:",
        (_CLASSIC + "test_a_unet_that_is_loaded_in_parts_or_cast_is_bypassed_while_it_is",),
    ),
    Mutation(
        "launches that are late", "kernels/backend/gpu_clock.py",
        "if not woke:", "if True:",
        ("kernels/backend/test_gpu_clock.py::test_launches_that_are_late_are_timed_again_after_a_longer_sleep",),
    ),
    Mutation(
        "sums that measurements would overwrite", "kernels/linear/mma_choice.py",
        "copies.append(residual.clone())", "copies.append(residual)",
        (_LINEAR + "test_the_faster_one_computes_it",),
    ),
    Mutation(
        "exact sums that the user has not left", "passes/mma_products.py",
        "half_sums = ctx.faster_sums and kind == torch.float16", "half_sums = kind == torch.float16",
        (_PRODUCTS + "test_linear_layers",),
    ),
    Mutation(
        "plans whose calls are rare", "passes/mma_products.py",
        "if not half_sums and (ctx.most_bytes is not None or", "if not half_sums and (",
        (_PRODUCTS + "test_plans_whose_calls_are_rare_stay_unless_sums_are_chosen",),
    ),
    Mutation(
        "sums in half precision where they are no faster", "passes/mma_products.py",
        " and mma_gemm.half_sums_profitable(ctx.device)", "",
        (_PRODUCTS + "test_sums_stay_exact_if_halves_are_no_faster",),
    ),
    Mutation(
        "depths of 8 bits that TMA does not take", "kernels/eight_bits/wgmma_gemm8.py",
        "x.shape[-1] % _ALIGNED or weight.shape[0] %", "weight.shape[0] %",
        (_EIGHT + "test_sizes_that_it_refuses",),
    ),
    Mutation(
        "memory of 8 bits that TMA does not take", "kernels/eight_bits/wgmma_gemm8.py",
        "t.is_contiguous() and t.data_ptr() % _ALIGNED == 0", "t.is_contiguous()",
        (_EIGHT + "test_memory_that_it_refuses",),
    ),
    Mutation(
        "8 bits with a weight that is not contiguous", "kernels/eight_bits/wgmma_gemm8.py",
        "t.is_contiguous() and t.data_ptr() % _ALIGNED == 0", "t.data_ptr() % _ALIGNED == 0",
        (_EIGHT + "test_memory_that_it_refuses",),
    ),
    Mutation(
        "scales of 8 bits of another shape", "kernels/eight_bits/wgmma_gemm8.py",
        "x_scale.shape != x.shape[:-1] or any(", "any(",
        (_EIGHT + "test_what_it_refuses",),
    ),
    Mutation(
        "results of 8 bits in two dtypes", "kernels/eight_bits/wgmma_gemm8.py",
        "len(of_result) > 1 or not", "not",
        (_EIGHT + "test_what_it_refuses",),
    ),
    Mutation(
        "8-bit operands of two types", "kernels/eight_bits/wgmma_gemm8.py",
        "or weight.dtype != x.dtype or", "or",
        (_EIGHT + "test_what_it_refuses",),
    ),
    Mutation(
        "8 bits of other operands than were asked about", "kernels/eight_bits/wgmma_gemm8.py",
        "require(accepts(x, x_scale, weight, weight_scale, bias, residual, dtype))", "pass",
        (_EIGHT + "test_nothing_is_launched_that_it_refuses",),
    ),
    Mutation(
        "GEGLU of 8 bits with another approximation", "kernels/eight_bits/wgmma_gemm8.py",
        'require(None if approximate in ("none", "tanh") else "another approximation")', "pass",
        (_EIGHT + "test_nothing_is_launched_that_it_refuses",),
    ),
    Mutation(
        "a weight of 8 bits that is read early", "kernels/eight_bits/wgmma_gemm8.py",
        "_NAMES, variants, hopper=True", '_NAMES, variants, ("weight",), hopper=True',
        (_EIGHT + "test_nothing_is_read_before_the_wait",),
    ),
    Mutation(
        "multiprocessors without work", "kernels/linear/mma_tiles.py",
        "sorted(found, key=work)[:MAX_TILES]", "found[:MAX_TILES]",
        (_TILES + "test_the_tile_with_the_least_work_for_a_multiprocessor_stands_first",),
    ),
    Mutation(
        "slices for multiprocessors with two blocks", "kernels/linear/mma_tiles.py",
        "time * _ALONE if (blocks == 1) == (tile.slices == 1) else time", "time if tile.slices > 1 else time * _ALONE",
        (_TILES + "test_the_tile_with_the_least_work_for_a_multiprocessor_stands_first",),
    ),
    Mutation(
        "slices of a depth that they do not divide", "kernels/linear/mma_tiles.py",
        " if depth % tile.depth == 0", "",
        (_TILES + "test_the_tile_with_the_least_work_for_a_multiprocessor_stands_first",),
    ),
    Mutation(
        "slices with one stage ahead", "kernels/linear/mma_tiles.py",
        " if tile.stages >= min(most, 3)", "",
        (_TILES + "test_tiles_fit_a_multiprocessor",),
    ),
    Mutation(
        "shared memory for the result", "kernels/linear/mma_tiles.py",
        "tile.rows * (columns + _WARP_COLUMNS * tile.across)", "0",
        (_TILES + "test_tiles_fit_a_multiprocessor",),
    ),
    Mutation(
        "shared memory for the sums of slices", "kernels/linear/mma_tiles.py",
        "4 * tile.area if tile.slices > 1 else 0", "0",
        (_TILES + "test_the_sums_that_slices_give_each_other_take_the_place_of_the_stages",),
    ),
    Mutation(
        "values without gates", "kernels/linear/mma_tiles.py",
        "if tile.width // tile.across // 8 % 2 == 0", "",
        (_TILES + "test_values_and_gates_need_an_even_number_of_tiles",),
    ),
    Mutation(
        "what was said while an image was made", "ui/api.py",
        " and self._busy()", "",
        ("ui/test_api.py::test_a_status_is_given_again_for_a_moment_or_until_something_changes",),
    ),
]  # fmt: skip
