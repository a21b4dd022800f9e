"""What transformers need: tables that are no attributes, and values that are read of arguments."""

from __future__ import annotations

from mutations import Mutation

_TABLES = "weights/test_tables.py::"
_VALUES = "capture/test_known_values.py::"
_CONTENTS = "test_argument_contents.py::"

MUTATIONS = [
    Mutation(
        "tables that are written", "weights/tables.py",
        "tensor, [({_SLOT: tensor}, _SLOT)]", "(copied := tensor.clone()), [({_SLOT: copied}, _SLOT)]",
        (f"{_TABLES}test_what_is_written_to_a_table_is_seen_at_once",),
    ),
    Mutation(
        "tables that are replaced", "behaviour/reader.py",
        "self.tensors[id(value)] = weakref.ref(value)\n        return id(value)",
        "self.tensors[id(value)] = weakref.ref(value)\n        return 0",
        (f"{_TABLES}test_a_table_is_read_and_another_one_is_seen",),
    ),
    Mutation(
        "tables that the forward computes with in system memory", "capture/capture.py",
        "return arena.table_on(table, device) if moved else None", "return arena.table_on(table, device)",
        ("weights/test_tables_elsewhere.py::test_a_table_in_system_memory_is_copied_where_the_forward_moves_it",),
    ),
    Mutation(
        "contents that a forward reads", "argument_roles.py",
        "signature=call.signature._replace(contents=contents)", "signature=call.signature",
        (f"{_VALUES}test_a_mask_that_is_written_in_place_is_read_anew",),
    ),
    Mutation(
        "unknown values written to known ones", "capture/known_values.py",
        'if node.target is not operator.getitem and getattr(_schema(node), "is_mutable", True):', "if False:",
        (f"{_VALUES}test_what_follows_from_more_is_bypassed_with_a_reason",),
    ),
    Mutation(
        "values that follow from weights", "capture/known_values.py",
        "return held if literal else _ELSEWHERE", "return held",
        (f"{_VALUES}test_what_follows_from_more_is_bypassed_with_a_reason",),
    ),
    Mutation(
        "contents that were written since", "argument_contents.py",
        "return all(content_of(each.copy) == each.expected for each in pending)", "return True",
        (f"{_CONTENTS}test_what_was_written_since_is_noticed_and_read_anew",),
    ),
    Mutation(
        "contents of another object", "argument_contents.py",
        "reference is not None and reference() is leaf", "reference is not None",
        (f"{_CONTENTS}test_an_object_at_the_address_of_another_is_read",),
    ),
]
