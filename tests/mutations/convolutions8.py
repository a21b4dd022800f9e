"""What keeps convolutions of 8-bit integers right: operands that the kernel does not take, and which are replaced."""

from __future__ import annotations

from mutations import Mutation

_KERNEL = "kernels/eight_bits/test_conv2d8.py::"
_NORM = "kernels/eight_bits/test_group_norm8.py::"
_WEIGHTS = "kernels/eight_bits/test_quantise_weights.py::"
_PASS = "passes/test_eight_bits_conv.py::"
_REFUSED = (_KERNEL + "test_other_operands_are_declined",)
_REFUSED_SIZES = (_KERNEL + "test_other_sizes_are_declined",)
_SIZES = (_PASS + "test_sizes_that_the_kernels_take_and_that_pay",)
_LEFT_ALONE = (_PASS + "test_others_are_left_alone",)
_BEHIND = (_PASS + "test_a_convolution_behind_a_norm",)
_MATCH = "passes/eight_bits_conv_match.py"
_CONV = "passes/eight_bits_conv.py"

_HOPPER = "kernels/eight_bits/test_wgmma_conv8.py::"

MUTATIONS = [
    Mutation(
        "convolutions of 8 bits that Hopper's kernel does not take", "kernels/eight_bits/conv2d8.py",
        "if wgmma_conv8.accepts(*operands) is None:", "if True:",
        (_HOPPER + "test_hoppers_kernel_goes_first_if_it_takes_them",),
    ),
    Mutation(
        "strides of Hopper's convolution of 8 bits", "kernels/eight_bits/wgmma_conv8.py", "stride != 1 or", "",
        (_HOPPER + "test_what_it_takes",),
    ),
    Mutation(
        "pixels at two borders of an image", "kernels/eight_bits/wgmma_conv8.py", "min(x.shape[2:]) < 2 or", "",
        (_HOPPER + "test_what_it_takes",),
    ),
    Mutation(
        "sums of codes beyond float32's integers", "kernels/eight_bits/wgmma_conv8.py", "or depth > MAX_DEPTH", "",
        (_HOPPER + "test_what_it_takes",),
    ),
    Mutation(
        "vectors that 16 bytes do not divide", "kernels/eight_bits/wgmma_conv8.py", "any(each.data_ptr() % 16 for",
        "any(each.data_ptr() % 2 for", (_HOPPER + "test_memory_that_it_refuses",),
    ),
    Mutation(
        "a convolution's weight that a plan writes, read early", "kernels/eight_bits/wgmma_conv8.py",
        "_NAMES, variants, hopper=True", '_NAMES, variants, ("weight",), hopper=True',
        ("kernels/backend/test_pdl.py::test_who_begins_early_waits",),
    ),
    Mutation(
        "sums of codes of convolutions that are not 3x3", "kernels/eight_bits/quantise_weights.py",
        "entry.weight.dim() == 4 and entry.weight.shape[2:] != (3, 3)", "False",
        (_WEIGHTS + "test_weights_of_convolutions_as_they_lie_in_memory",),
    ),
    Mutation(
        "sums of a convolution beyond int32", "kernels/eight_bits/mma_conv8.py", "or depth > MAX_DEPTH", "",
        (_KERNEL + "test_extreme_values_of_the_deepest_image",),
    ),
    Mutation(
        "a part of a stage of channels", "kernels/eight_bits/mma_conv8.py", "or x.shape[1] % DEPTH", "",
        _REFUSED_SIZES,
    ),
    Mutation(
        "images that are not channels last", "kernels/eight_bits/mma_conv8.py",
        "not all(each.is_contiguous(memory_format=torch.channels_last) for each in images)", "False", _REFUSED,
    ),
    Mutation(
        "scales and zeros of other images", "kernels/eight_bits/mma_conv8.py",
        "x_scale.shape != (2, x.shape[0]) or", "", _REFUSED,
    ),
    Mutation("strides of 3", "kernels/eight_bits/mma_conv8.py", "or stride not in (1, 2)", "", _REFUSED_SIZES),
    Mutation(
        "a shift of other images", "kernels/eight_bits/group_norm8.py",
        "or (shift is not None and shift.shape != x.shape[:2])", "", (_NORM + "test_what_it_does_not_take",),
    ),
    Mutation(
        "weights of convolutions that are not channels last", "kernels/eight_bits/quantise_weights.py",
        "not weight.is_contiguous(memory_format=torch.channels_last)", "False",
        (_WEIGHTS + "test_weights_of_convolutions_as_they_lie_in_memory",),
    ),
    Mutation(
        "sums of codes that nobody stores", "kernels/eight_bits/quantise_weights.py",
        "(SCALES, count) if entry.weight.dim() == 4 else (count,)", "scale.shape",
        (_WEIGHTS + "test_weights_of_convolutions_as_they_lie_in_memory",),
    ),
    Mutation(
        "convolutions of weights that are computed", _MATCH, "or not is_weight(weight)", "",
        _LEFT_ALONE,
    ),
    Mutation("other readers of a group norm that is quantised", _MATCH, "or list(x.users) != [conv]", "", _LEFT_ALONE),
    Mutation("output channels of 8-bit convolutions", _MATCH, "columns % COLUMNS or", "", _SIZES),
    Mutation("channels of 8-bit convolutions", _MATCH, "or channels % DEPTH", "", _SIZES),
    Mutation("convolutions of few pixels", _MATCH, "pixels < MIN_PIXELS or", "", _SIZES),
    Mutation(
        "rare calls with 8-bit convolutions", _CONV,
        "replaced(gm, ctx, selection) if ctx.most_bytes is None else 0", "replaced(gm, ctx, selection)",
        (_PASS + "test_nothing_without_the_setting_without_kernels_or_for_rare_calls",),
    ),
    Mutation(
        "convolutions whose error is large", _CONV, "if name not in selection.kept}", "}",
        (_PASS + "test_the_selection_of_another_plan_is_kept_to",),
    ),
    Mutation(
        "room for a second copy of a convolution's weight", _CONV, "if selection.room is not None and", "if False and",
        (_PASS + "test_too_little_room_for_the_second_copy",),
    ),
    Mutation("a sum that is scaled", _CONV, "or scale != 1.0", "", _BEHIND),
    Mutation(
        "the image's own scale in the error of a convolution", "passes/eight_bits_selection.py",
        "rounded(sample, scale[:, None, None, None])", "rounded(sample)",
        (_PASS + "test_the_error_of_a_layer_is_that_of_its_convolution",),
    ),
]  # fmt: skip
