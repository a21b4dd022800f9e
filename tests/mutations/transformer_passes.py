"""What keeps the passes for diffusion transformers from replacing operations that are others."""

from __future__ import annotations

from mutations import Mutation

_RMS = ("passes/test_rms_norm.py::test_others_stay",)
_ROTARY = "passes/test_norm_rotary.py::"
_STAYS = (_ROTARY + "test_others_stay",)
_COMPLEX = (_ROTARY + "test_other_complex_numbers_stay",)
_MODULATED = ("passes/test_modulated_norm.py::test_others_stay",)
_GATED = ("passes/test_gated_residual.py::test_others_stay",)
_SWIGLU = ("passes/test_swiglu.py::test_others_stay",)
_LEFT_ALONE = ("passes/test_eight_bits_transformers.py::test_others_stay_in_half_precision",)
_JOINT = ("passes/test_joint_heads.py::test_others_stay",)
_OPERATORS = ("passes/test_rotary_operators.py::test_others_stay",)
_PARTS = ("passes/test_cleanup.py::test_other_parts_are_joined",)
_JOINED = ("passes/test_eight_bits_transformers.py::test_what_others_read_is_written_in_half_precision",)

MUTATIONS = [
    Mutation(
        "heads that are repeated in turns", "passes/attention.py",
        "or one != (*many[: at + 1], 1, *many[at + 2 :]) or count < 2:", "or count < 2:",
        ("passes/test_attention.py::test_heads_that_are_repeated_are_shared",),
    ),
    Mutation(
        "norms of other dimensions", "passes/rms_norm.py",
        "if not size or dims is None or [dim % len(size) for dim in dims] != [len(size) - 1]:",
        "if not size or dims is None:", _RMS,
    ),
    Mutation(
        "squares of another value", "passes/rms_norm.py",
        "if strip_lossless_casts(other) is not x or shape(product) != shape(x):",
        "if shape(product) != shape(x):", _RMS,
    ),
    Mutation("cubes", "passes/rms_norm.py", "if is_op(node, POW) and node.args[1] == 2:", "if is_op(node, POW):", _RMS),
    Mutation(
        "reciprocals that others read", "passes/rms_norm.py",
        "or any(only_user(each) is None for each in chain[:-1])", "", _RMS,
    ),
    Mutation(
        "a rotation the other way", "passes/norm_rotary.py",
        "if len(parts) != 2 or not is_op(parts[0], NEG):\n        return None\n"
        "    second, first = part_of(parts[0].args[0], x), part_of(parts[1], x)",
        "if len(parts) != 2:\n        return None\n"
        "    second, first = (part_of(p.args[0] if is_op(p, NEG) else p, x) for p in parts)", _STAYS,
    ),
    Mutation(
        "which part is which", "passes/norm_rotary.py",
        "return form if (first, second) == ((form, 0), (form, 1)) else None",
        "return form if first and second else None", _STAYS,
    ),
    Mutation(
        "angles of each head", "passes/norm_rotary.py",
        "if len(size) != 4 or size[0] not in (1, (shape(found.x) or ())[0]) or size[heads] != 1:",
        "if len(size) != 4:", (_ROTARY + "test_angles_of_more_dimensions_or_of_heads_stay",),
    ),
    Mutation(
        "a factor of the crossed product", "passes/norm_rotary.py",
        'if dtype(add) != torch.float32 or argument(add, 2, "alpha", 1) != 1:',
        "if dtype(add) != torch.float32:", _STAYS,
    ),
    Mutation(
        "products of complex numbers that others read", "passes/norm_rotary.py",
        "if not is_op(product, MUL) or only_user(product) is not real or", "if not is_op(product, MUL) or", _COMPLEX,
    ),
    Mutation(
        "tables that are more exact than the kernel", "passes/norm_rotary.py",
        "kind == torch.complex128 and dtype(x) in HALF", "kind == torch.complex128",
        (_ROTARY + "test_a_table_in_float64_as_lumina_has_it",),
    ),
    Mutation(
        "parts in another order", "passes/cleanup.py",
        "or not same or start != at or length is None:", "or not same or length is None:", _PARTS,
    ),
    Mutation(
        "parts of another value", "passes/cleanup.py",
        "if part.args[0] is not source or not same", "if not same", _PARTS,
    ),
    Mutation(
        "parts of what a forward is given", "passes/cleanup.py",
        'computed = isinstance(source, fx.Node) and source.op == "call_function"', "computed = True",
        ("passes/test_cleanup.py::test_parts_are_joined_if_something_writes_to_them_or_they_are_returned",),
    ),
    Mutation(
        "a factor of addcmul", "passes/modulated_norm.py",
        'if not is_op(node, ADDCMUL) or argument(node, 3, "value", 1) != 1:', "if not is_op(node, ADDCMUL):",
        (*_MODULATED, *_GATED),
    ),
    Mutation(
        "a shift of each token", "passes/modulated_norm.py",
        "if not is_vector(shift, node, pinned):\n            return False", "pass", _MODULATED,
    ),
    Mutation(
        "a residual of one token", "passes/gated_residual.py",
        "if same_meta(x, add) and same_meta(y, add) and y not in pinned", "if same_meta(y, add) and y not in pinned",
        _GATED,
    ),
    Mutation(
        "another default epsilon", "passes/rms_norm.py",
        "if abs(found * math.sqrt(magnitude**2 + eps) / magnitude - 1) < 0.01:", "if found:",
        ("passes/test_rms_norm.py::test_another_default_is_not_taken_for_one_that_is_known",),
    ),
    Mutation(
        "tokens of heads of two epsilons", "passes/joint_heads.py",
        "if eps != other_eps or not pinned", "if not pinned",
        ("passes/test_joint_heads.py::test_norms_of_two_epsilons_stay",),
    ),
    Mutation(
        "a norm of heads that others read", "passes/joint_heads.py",
        "and not part.kwargs and only_user(part) is user", "and not part.kwargs", _JOINT,
    ),
    Mutation(
        "heads that are concatenated as tokens", "passes/joint_heads.py",
        "if (dim == 2) == swapped and is_rotation", "if is_rotation",
        ("passes/test_joint_heads.py::test_a_rotation_of_heads_is_none_of_tokens",),
    ),
    Mutation(
        "columns of heads, or images, as tokens", "passes/joint_heads.py",
        "if len(size) != 4 or dim not in (1, 2) or", "if len(size) != 4 or", _JOINT,
    ),
    Mutation(
        "a table that is more exact than the kernel", "passes/rotary_operators.py",
        "if dtype(table) not in kinds or", "if", _OPERATORS,
    ),
    Mutation(
        "matrices of each head", "passes/rotary_operators.py",
        "if matrices[1] == 1 and matrices[2] == size[2]:", "if matrices[2] == size[2]:", _OPERATORS,
    ),
    Mutation(
        "columns behind others that something else reads", "passes/eight_bits_inputs.py",
        "if writer is None or only_user(second) is not cat or", "if writer is None or", _JOINED,
    ),
    Mutation(
        "an activation whose input is written to later", "passes/eight_bits_inputs.py",
        "if unchanged(second, cat) else None", "", _JOINED,
    ),
    Mutation(
        "activations of other tokens", "passes/eight_bits_inputs.py",
        'or argument(cat, 1, "dim", 0) % len(size) != len(size) - 1:', ":", _JOINED,
    ),
    Mutation(
        "scales of each token", "passes/modulated_norm.py",
        "and lead[0] in (1, of[0]) and all(each == 1 for each in lead[1:])", "", _MODULATED,
    ),
    Mutation(
        "a number that is not 1", "passes/modulated_norm.py",
        "if not is_number(number) or number != 1 or", "if not is_number(number) or",
        ("passes/test_modulated_norm.py::test_modulations_become_one",),
    ),
    Mutation(
        "a gated product that others read", "passes/gated_residual.py",
        "or list(added.users) != [add]", "", _GATED,
    ),
    Mutation(
        "readers of a sum before its norm", "passes/gated_residual.py",
        "if between.isdisjoint(total.users):\n        return norm", "return norm",
        ("passes/test_gated_residual.py::test_the_norm_of_the_sum_is_fused",),
    ),
    Mutation(
        "gates that are broadcast", "passes/swiglu.py",
        "if not same_meta(gate, value) or not same_meta(gate, product) or", "if", _SWIGLU,
    ),
    Mutation(
        "layers that make pixels", "passes/eight_bits_match.py",
        "if size[1] >= PIXELS * columns:", "if False:", _LEFT_ALONE,
    ),
    Mutation(
        "embedders with a norm", "passes/eight_bits_match.py",
        "return is_op(x, (modulated_norm.launch,)) and after_product(x)", "return is_op(x, (modulated_norm.launch,))",
        _LEFT_ALONE,
    ),
    Mutation(
        "parts that nothing known writes", "passes/eight_bits_match.py",
        "return all(is_written(part, pinned) for part in x.args[0])",
        "return any(is_written(part, pinned) for part in x.args[0])", _LEFT_ALONE,
    ),
    Mutation(
        "the sum in the place of the norm", "passes/eight_bits_match.py",
        "return is_op(x.args[0], (gated_norm.launch,)) and x.args[1] == 1",
        "return is_op(x.args[0], (gated_norm.launch,))", _LEFT_ALONE,
    ),
    Mutation(
        "an input that is rotated in two ways", "passes/eight_bits_inputs.py",
        "if len(turns) == 1 and set(x.users)", "if set(x.users)",
        ("passes/test_eight_bits_transformers.py::test_layers_that_are_rotated_in_two_ways_have_a_kernel_each",),
    ),
]  # fmt: skip
