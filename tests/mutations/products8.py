"""What keeps products of 8-bit integers right: operands that the kernel does not take, and who computes a product."""

from __future__ import annotations

from mutations import Mutation

_GEMM = "kernels/eight_bits/test_mma_gemm8.py::"
_LINEAR = "kernels/eight_bits/test_linear8.py::"
_REFUSED = (_GEMM + "test_what_it_does_not_take",)

MUTATIONS = [
    Mutation(
        "sums beyond int32", "kernels/eight_bits/mma_gemm8.py", "or depth > MAX_DEPTH", "",
        (_GEMM + "test_extreme_values_and_the_longest_sums",),
    ),
    Mutation("a part of a stage", "kernels/eight_bits/mma_gemm8.py", "or depth % DEPTH", "", _REFUSED),
    Mutation(
        "integers of another kind", "kernels/eight_bits/mma_gemm8.py",
        "not x.dtype == weight.dtype == torch.int8 or", "", _REFUSED,
    ),
    Mutation(
        "a bias of another dtype", "kernels/eight_bits/mma_gemm8.py",
        "or any(each.dtype != dtype for each in added)", "", _REFUSED,
    ),
    Mutation(
        "scales of other rows", "kernels/eight_bits/mma_gemm8.py", "x_scale.shape != x.shape[:-1] or", "", _REFUSED,
    ),
    Mutation(
        "scales that are not dense", "kernels/eight_bits/mma_gemm8.py",
        "not all(each.is_contiguous() for each in dense)", "False", _REFUSED,
    ),
    Mutation(
        "an address that 16 bytes do not divide", "kernels/eight_bits/mma_gemm8.py",
        "each.data_ptr() % 16", "each.data_ptr() % 2", _REFUSED,
    ),
    Mutation(
        "cards before 7.5", "kernels/eight_bits/mma_gemm8.py", "since=MIN_CAPABILITY", "since=None",
        (_GEMM + "test_cards_it_is_for",),
    ),
    Mutation(
        "shared memory of a GeForce", "kernels/eight_bits/mma8_tiles.py",
        "AMPERE if capability in _LARGE else _GEFORCE", "AMPERE", (_GEMM + "test_tiles_fit_every_card",),
    ),
    Mutation(
        "operands that Hopper's kernel does not take", "kernels/eight_bits/linear8.py",
        "if unfit is None and wgmma_gemm8.profitable(x):", "if wgmma_gemm8.profitable(x):",
        (_LINEAR + "test_hoppers_kernel_goes_first_if_it_takes_them_and_pays",),
    ),
    Mutation(
        "GEGLU that Hopper's kernel does not take", "kernels/eight_bits/geglu8.py",
        "if unfit is None and wgmma_gemm8.profitable(x):", "if wgmma_gemm8.profitable(x):",
        (_LINEAR + "test_hoppers_kernel_goes_first_if_it_takes_them_and_pays",),
    ),
    Mutation(
        "a residual that measurements overwrite", "kernels/eight_bits/choice8.py",
        "repeatable(way, residual) for way in ways",
        "functools.partial(way, residual=residual) for way in ways",
        (_LINEAR + "test_the_faster_tile_is_chosen",),
    ),
    Mutation(
        "a result in memory that is counted twice", "kernels/backend/graph_memory.py",
        "if place < len(node.args): return", "if False: return",
        (_LINEAR + "test_memory_is_counted_once_if_the_result_takes_the_residuals",),
    ),
]  # fmt: skip
