"""value * gelu(gate) over the two halves of one product, without taking it apart."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

from torch import fx

from sfast_ext.kernels.pointwise import geglu as kernel

from .rewrite import (
    KERNEL_DTYPES,
    argument,
    call,
    dtype,
    is_op,
    mutated,
    only_user,
    overloads,
    replace,
    shape,
)

if TYPE_CHECKING:
    from . import PassContext

GELU = overloads("gelu")
MUL = overloads("mul.Tensor")
CHUNK = overloads("chunk")
SPLIT = overloads("split.Tensor", "split_with_sizes", "split.sizes")
SLICE = overloads("slice.Tensor")


def geglu(gm: fx.GraphModule, ctx: PassContext) -> int:
    if not ctx.serves(kernel):
        return 0
    pinned, count = mutated(gm.graph), 0
    for node in list(gm.graph.nodes):
        if node._erased or not is_op(node, GELU) or node in pinned:
            continue
        mul = only_user(node)
        if mul is None or not is_op(mul, MUL) or mul in pinned:
            continue
        halves = match(node, mul)
        if halves is None or halves[0] in pinned:
            continue
        x, gate_first = halves
        approximate = argument(node, 1, "approximate", "none")
        with gm.graph.inserting_before(mul):
            new = call(gm.graph, kernel.launch, (x,), mul, {"gate_first": gate_first, "approximate": approximate})
        replace(mul, new)
        count += 1
    return count


def match(gelu: fx.Node, mul: fx.Node) -> tuple[fx.Node, bool] | None:
    """The value whose halves are gate and factor, and whether the gate is its first half."""
    gate = gelu.args[0]
    factor = mul.args[1] if mul.args[0] is gelu else mul.args[0]
    first, second = half(gate), half(factor)
    if first is None or second is None or first[0] is not second[0] or {first[1], second[1]} != {0, 1}:
        return None
    x = first[0]
    if dtype(x) not in KERNEL_DTYPES or dtype(mul) != dtype(x) or shape(mul) != shape(gate):
        return None
    # A half that others need as well would be read from the product again: nothing is saved.
    if len(gate.users) != 1 or len(factor.users) != 1:
        return None
    return x, first[1] == 0


def half(node: Any) -> tuple[fx.Node, int] | None:
    """Which half, 0 or 1, of the last dimension of which value `node` is."""
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
