"""Arguments and results that are objects."""

from __future__ import annotations

from mutations import Mutation

_FILE = "test_argument_objects.py"

MUTATIONS = [
    Mutation(
        "a tensor that is two arguments", "call_signature.py",
        "shared = _shared(leaves) if len({*map(id, leaves)}) != len(leaves) else ()", "shared = ()",
        (f"{_FILE}::test_a_tensor_that_is_two_arguments_is_another_call_than_two_tensors",),
    ),
    Mutation(
        "a tensor that is two arguments of a recorded call", "capture/capture.py",
        "rebuild_call(call.tree, call.signature.joined(leaves))", "rebuild_call(call.tree, leaves)",
        (f"{_FILE}::test_a_tensor_that_is_two_arguments_is_another_call_than_two_tensors",),
    ),
    Mutation(
        "attributes of tensors", "call_signature.py",
        "if (held := value.__dict__) and kind is torch.Tensor", "if (held := {}) and kind is torch.Tensor",
        (f"{_FILE}::test_an_attribute_of_an_argument_is_not_lost",),
    ),
    Mutation(
        "attributes of dictionaries and tuples", "argument_objects.py",
        "if held or hasattr(kind", "if hasattr(kind",
        (f"{_FILE}::test_an_attribute_of_an_argument_is_not_lost",),
    ),
    Mutation(
        "attributes of dataclasses that are no fields", "argument_objects.py",
        "for name in [*names, *(name for name in held if name not in names)]", "for name in names",
        (f"{_FILE}::test_an_attribute_of_an_argument_is_not_lost",),
    ),
    Mutation(
        "classes of arguments", "runtime/plan_builder.py",
        "argument_kinds.refuse_code(lookup.call.tree)", "pass",
        (f"{_FILE}::test_what_the_class_of_an_argument_reads_is_not_followed",),
    ),
    Mutation(
        "results without tensors in them", "runtime/plan_builder.py",
        "if tree != captured.output_tree:", "if False:",
        (f"{_FILE}::test_a_number_in_the_result_is_the_number",),
    ),
]
