"""Rotary embedding by operators of comfy_kitchen, as ComfyUI and Forge Neo call them.

An operator takes queries and keys (batch, heads, tokens, columns), or tokens before heads, and a table of 2x2 matrices
(batch, 1, tokens, columns / 2, 2, 2), in the same order. It multiplies each pair of columns by a matrix, in the dtype
of the table, and rounds once.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from sfast_ext.kernels.pointwise import norm_rotary as kernel

from .fusion import fusion
from .norm_rotary import MAX_COLUMNS, behind, transposed
from .rewrite import KERNEL_DTYPES, aten, call, dtype, is_op, replace, same_meta, shape, value

if TYPE_CHECKING:
    from .context import PassContext

FORMS = {
    "comfy_kitchen::apply_rope": "matrices",
    "comfy_kitchen::apply_rope1": "matrices",
    "comfy_kitchen::apply_rope_split_half": "matrices of halves",
    "comfy_kitchen::apply_rope_split_half1": "matrices of halves",
}
"""Which columns are a pair, by the name of the operator. Those that end in 1 take one tensor, others two."""


class Named(Collection[Any]):
    """The operators of these names, which exist once their library is imported."""

    def __contains__(self, target: object) -> bool:
        return isinstance(target, torch._ops.OpOverload) and target._schema.name in FORMS

    def __iter__(self) -> Iterator[Any]:
        return iter(FORMS)

    def __len__(self) -> int:
        return len(FORMS)


@fusion(Named(), needs=(kernel.launch,), skip_pinned_inputs=True)
def rotary_operators(node: fx.Node, pinned: set[fx.Node], ctx: PassContext) -> bool:
    """Replaces rotations of the columns of heads.

    Pattern: comfy_kitchen.apply_rope(q, k, table), apply_rope1(x, table), and both of halves
    Replacement: kernel.launch(x, None, None, table, None, form), for each of the tensors
    """
    name = node.target._schema.name  # type: ignore[union-attr]
    single = name.endswith("1")
    if node.kwargs or len(node.args) != (2 if single else 3):
        return False
    *tensors, table = node.args
    users = [node] if single else list(node.users)
    if not single and any(not is_op(user, (operator.getitem,)) or user in pinned for user in users):
        return False
    found = [(user, tensors[0] if single else tensors[user.args[1]]) for user in users]  # type: ignore[index]
    if any(place_of_tokens(x, table) is None for x in tensors) or not all(same_meta(*each) for each in found):
        return False
    graph = node.graph
    if dtype(table) != torch.float32:
        table = behind(table, aten.to.dtype, (torch.float32,), shape(table) or (), torch.float32)
    for user, x in found:
        heads_first = place_of_tokens(x, table) == 2
        with graph.inserting_before(node):
            operands = [transposed(graph, t) if heads_first else t for t in (x, table)]  # type: ignore[arg-type]
            new = call(graph, kernel.launch, (operands[0], None, None, operands[1], None, FORMS[name]), operands[0])
            if heads_first:
                new = transposed(graph, new)  # type: ignore[assignment]
        replace(user, new)
    return True


def place_of_tokens(x: Any, table: Any) -> int | None:
    """Which dimension of heads is that of tokens, between which matrices differ, 1 or 2; None if the kernel rotates
    no such heads."""
    size, matrices = shape(x) or (), shape(table) or ()
    if len(size) != 4 or len(matrices) != 6 or size[3] > MAX_COLUMNS or dtype(x) not in KERNEL_DTYPES:
        return None
    # in float32, or in x's dtype, which is rounded more often than by the kernel; others have other ranges
    kinds = (torch.float32, dtype(x))
    if dtype(table) not in kinds or value(table).device != value(x).device:  # type: ignore[union-attr]
        return None
    if matrices[0] not in (1, size[0]) or (*matrices[3:],) != (size[3] // 2, 2, 2) or size[3] % 2:
        return None
    if matrices[1] == 1 and matrices[2] == size[2]:
        return 2
    return 1 if matrices[2] == 1 and matrices[1] == size[1] else None
