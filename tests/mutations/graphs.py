"""Whether a CUDA graph may be replayed, and what is copied into it. All of it is noticed without a GPU."""

from __future__ import annotations

from mutations import Mutation

_PRETENDED = "plans/test_graph_pool_pretended.py::"
_BUDGET = (_PRETENDED + "test_the_budget_is_kept_to_the_megabyte",)
_STREAMS = (_PRETENDED + "test_replays_on_several_streams_do_not_meet",)

MUTATIONS = [
    Mutation(
        "the budget", "plans/graph_pool.py",
        "over = budget_mb and self._reserved > budget_mb * MB", "over = False",
        _BUDGET,
    ),
    Mutation(
        "half of the budget", "plans/graph_pool.py",
        "over = budget_mb and self._reserved > budget_mb * MB",
        "over = budget_mb and self._reserved > 2 * budget_mb * MB",
        _BUDGET,
    ),
    Mutation(
        "one of the graphs too many", "plans/graph_pool.py",
        "> max_graphs + 1e-6:", "> max_graphs + 1:",
        (_PRETENDED + "test_no_more_graphs_than_are_allowed_and_the_oldest_goes",),
    ),
    Mutation(
        "the order of graphs", "plans/graph_pool.py",
        "self._entries.move_to_end(id(captured))", "pass",
        (_PRETENDED + "test_no_more_graphs_than_are_allowed_and_the_oldest_goes",),
    ),
    Mutation(
        "owners of evicted graphs", "plans/graph_pool.py",
        'report.event("graph pool", f"a CUDA graph is evicted: {why}")\n        on_evict()',
        'report.event("graph pool", f"a CUDA graph is evicted: {why}")',
        (_PRETENDED + "test_no_more_graphs_than_are_allowed_and_the_oldest_goes",),
    ),
    Mutation(
        "waiting for another stream", "plans/graph_pool.py",
        "stream.wait_event(self._last)", "pass",
        _STREAMS,
    ),
    Mutation(
        "which stream was the last", "plans/graph_pool.py",
        "self._last_stream != stream.cuda_stream", "self._last_stream is None",
        _STREAMS,
    ),
    Mutation(
        "the end of a use of the pool", "plans/graph_pool.py",
        "self._last.record(stream)", "pass",
        _STREAMS,
    ),
    Mutation(
        "the order of a replay", "plans/plan.py",
        "pool.end_use(stream, captured)", "pool.touch(captured)",
        (_PRETENDED + "test_plans_on_two_streams_wait_for_each_other",),
    ),
    Mutation(
        "collections of garbage during a capture", "plans/graph_pool.py",
        "gc.disable()", "pass",
        (_PRETENDED + "test_no_destructor_runs_during_a_capture",),
    ),
    Mutation(
        "graphs that were switched off", "accelerator.py",
        "plan.drop_graph()", "pass",
        (_PRETENDED + "test_graphs_that_are_switched_off_give_their_memory_back",),
    ),
    Mutation(
        "copies of another dtype or size", "kernels/backend/input_copies.py",
        "and (source.dtype, source.nbytes) == kind", "",
        ("kernels/backend/test_input_copies.py::test_what_is_not_its_targets_like_is_left_to_torch",),
    ),
    Mutation(
        "copies of another dtype", "kernels/backend/input_copies.py",
        "(source.dtype, source.nbytes) == kind", "source.nbytes == kind[1]",
        ("kernels/backend/test_input_copies.py::test_what_is_not_its_targets_like_is_left_to_torch",),
    ),
    Mutation(
        "copies of another size", "kernels/backend/input_copies.py",
        "(source.dtype, source.nbytes) == kind", "source.dtype == kind[0]",
        ("kernels/backend/test_input_copies.py::test_what_is_not_its_targets_like_is_left_to_torch",),
    ),
    Mutation(
        "copies from other strides", "kernels/backend/input_copies.py",
        "return plain and source.is_contiguous()", "return plain",
        ("kernels/backend/test_input_copies.py::test_what_is_not_its_targets_like_is_left_to_torch",),
    ),
    Mutation(
        "copies of what was negated", "kernels/backend/input_copies.py",
        " and not source.is_neg()", "",
        ("kernels/backend/test_input_copies.py::test_what_is_not_its_targets_like_is_left_to_torch",),
    ),
    Mutation(
        "copies from another device", "kernels/backend/input_copies.py",
        "and source.get_device() == index and", "and",
        ("kernels/backend/test_input_copies.py::test_what_is_on_another_device_is_left_to_torch",),
    ),
    Mutation(
        "inputs of the last call in a table of copies", "kernels/backend/input_copies.py",
        "if kind is not None:\n                table[_ENTRY * i + _BYTES] = 0", "",
        ("kernels/backend/test_input_copies.py::test_its_own_node_is_told",),
    ),
    Mutation(
        "a node that could not be told", "kernels/backend/input_copies.py",
        "            node()\n", "            pass\n",
        ("kernels/backend/test_input_copies.py::test_a_node_that_cannot_be_told_must_not_run",),
    ),
    Mutation(
        "room for a VAE", "hosts/gpu_room.py",
        "DECODING_RESERVE = 6 << 30", "DECODING_RESERVE = 0",
        ("hosts/adapters/test_gpu_room.py::test_weights_stay_if_decoding_finds_room_beside_them",),
    ),
]  # fmt: skip
