"""GEGLU, value * gelu(gate), over the two halves of one tensor, without splitting it."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import fx

from sfast_ext.kernels.pointwise import geglu as kernel

from .fusion import fusion
from .rewrite import KERNEL_DTYPES, argument, call, dtype, is_op, only_user, overloads, replace, shape

if TYPE_CHECKING:
    from .context import PassContext

GELU = overloads("gelu")
MUL = overloads("mul.Tensor")
CHUNK = overloads("chunk")
SPLIT = overloads("split.Tensor", "split_with_sizes", "split.sizes")
SLICE = overloads("slice.Tensor")


class GegluMatch(NamedTuple):
    x: fx.Node
    gate_first: bool


@fusion(GELU, needs=(kernel.launch,))
def geglu(gelu: fx.Node, pinned: set[fx.Node], ctx: PassContext) -> bool:
    """Replaces the halves of a tensor, GELU and the multiplication.

    Pattern: value * gelu(gate) with value, gate = chunk(x, 2, -1), in either order, or slices of x
    Replacement: kernel.launch(x, gate_first=..., approximate=...)
    """
    mul = only_user(gelu)
    if mul is None or not is_op(mul, MUL) or mul in pinned:
        return False
    found = match(gelu, mul)
    if found is None or found.x in pinned:
        return False
    options = {"gate_first": found.gate_first, "approximate": argument(gelu, 1, "approximate", "none")}
    with mul.graph.inserting_before(mul):
        new = call(mul.graph, kernel.launch, (found.x,), mul, options)
    replace(mul, new)
    return True


def match(gelu: fx.Node, mul: fx.Node) -> GegluMatch | None:
    """Matches two halves of one tensor, each with one user."""
    gate: Any = gelu.args[0]
    value: Any = mul.args[1] if mul.args[0] is gelu else mul.args[0]
    first, second = half(gate), half(value)
    if first is None or second is None or first[0] is not second[0] or {first[1], second[1]} != {0, 1}:
        return None
    x = first[0]
    if dtype(x) not in KERNEL_DTYPES or dtype(mul) != dtype(x) or shape(mul) != shape(gate):
        return None
    # If others read a half as well, `x` would be split anyway: nothing is saved.
    if len(gate.users) != 1 or len(value.users) != 1:
        return None
    return GegluMatch(x, first[1] == 0)


def half(node: Any) -> tuple[fx.Node, int] | None:
    """Returns the tensor of whose last dimension `node` is a half, and which half, 0 or 1; None for other nodes."""
    if is_op(node, (operator.getitem,)) and is_op(node.args[0], CHUNK | SPLIT):
        x, index = node.args[0].args[0], node.args[1]
        dim = argument(node.args[0], 2, "dim", 0)
    elif is_op(node, SLICE):
        x, dim = node.args[0], argument(node, 1, "dim", 0)
        index = 0 if argument(node, 2, "start") in (0, None) else 1
    else:
        return None
    size, part = shape(x), shape(node)
    starts = ((None, 0), ((part or (0,))[-1],))
    if size is None or part is None or not size or dim % len(size) != len(size) - 1:
        return None
    if size[-1] != 2 * part[-1] or size[:-1] != part[:-1] or index not in (0, 1):
        return None
    if is_op(node, SLICE) and (argument(node, 4, "step", 1) != 1 or argument(node, 2, "start") not in starts[index]):
        return None
    return x, index
