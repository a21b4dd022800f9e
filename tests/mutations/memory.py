"""What keeps results in the memory of operands right, and what a plan needs at one time small."""

from __future__ import annotations

from mutations import Mutation

_IN_PLACE = "passes/test_in_place.py::"
_USED = _IN_PLACE + "test_memory_that_is_in_use_is_not_taken"
_ORDER = "passes/test_memory_order.py::"
_STAYS = _ORDER + "test_what_may_not_move_or_gains_nothing_stays"

MUTATIONS = [
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
        "memory for another dtype", "passes/in_place.py",
        'norm.kwargs.get("out_dtype") in (None, dtype(x))', "True",
        (_IN_PLACE + "test_a_result_of_another_dtype_needs_memory_of_its_own",),
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
        ("passes/test_conv_group_norm.py::test_where_memory_counts_they_stay_apart",),
    ),
]  # fmt: skip
