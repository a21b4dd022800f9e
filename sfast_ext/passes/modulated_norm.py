"""Norms that are scaled and shifted by vectors of their sample, as one kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import fx

from sfast_ext.kernels.pointwise import modulated_norm as kernel

from .fusion import fusion
from .layer_norm import LAYER_NORM
from .rewrite import (
    ADD,
    KERNEL_DTYPES,
    argument,
    call,
    dtype,
    is_number,
    is_op,
    only_user,
    overloads,
    replace,
    same_meta,
    shape,
)

if TYPE_CHECKING:
    from .context import PassContext

MUL = overloads("mul.Tensor")
ADDCMUL = overloads("addcmul")


@fusion(LAYER_NORM | {kernel.launch}, needs=(kernel.launch,), skip_pinned_inputs=True)
def modulated_norm(node: fx.Node, pinned: set[fx.Node], ctx: PassContext) -> bool:
    """Replaces a norm and what alone reads it: the product with a scale, and the addition of a shift.

    Pattern: norm * scale [+ shift], norm * (1 + scale) [+ shift], or addcmul, with norm an RMS or a layer norm over
        the last dimension
    Replacement: kernel.launch(x, weight, bias, eps, scale, shift, rms=..., plus_one=...)
    """
    rms, operands = is_op(node, (kernel.launch,)), norm_operands(node)
    product = only_user(node)
    if operands is None or product is None or product in pinned or not same_meta(product, node):
        return False
    joint, shift, last = added_product(product), None, product
    if joint is not None:
        shift, *factors = joint
        if not is_vector(shift, node, pinned):
            return False
    elif is_op(product, MUL):
        factors = list(product.args[:2])
    else:
        return False
    if factors[0] is factors[1] or node not in factors:
        return False
    scale = factors[1] if factors[0] is node else factors[0]
    if not is_vector(scale, node, pinned):
        return False
    source, total = without_one(scale, node, pinned), only_user(product)
    if joint is None and total is not None and is_op(total, ADD) and argument(total, 2, "alpha", 1) == 1:
        other = total.args[1] if total.args[0] is product else total.args[0]
        if total not in pinned and same_meta(total, node) and is_vector(other, node, pinned):
            shift, last = other, total
    options = {"rms": rms, "plus_one": source is not None}
    given = (*operands, scale if source is None else source, shift)
    with last.graph.inserting_before(last):
        new = call(last.graph, kernel.launch, given, last, options)
    replace(last, new)
    return True


def added_product(node: fx.Node) -> tuple[Any, Any, Any] | None:
    """What a product is added to, and its factors, if one operation does both; None for another operation."""
    if not is_op(node, ADDCMUL) or argument(node, 3, "value", 1) != 1:
        return None
    return node.args[:3]  # type: ignore[return-value]


def norm_operands(node: fx.Node) -> tuple[Any, Any, Any, Any] | None:
    """x, weight, bias and epsilon of a norm that is not modulated yet, all of one dtype."""
    if is_op(node, (kernel.launch,)):
        return None if len(node.args) != 4 or node.kwargs else node.args  # type: ignore[return-value]
    x: Any = node.args[0]
    size = shape(x)
    if not size or list(argument(node, 1, "normalized_shape")) != [size[-1]] or not same_meta(x, node):
        return None
    weight, bias = argument(node, 2, "weight"), argument(node, 3, "bias")
    if dtype(x) not in KERNEL_DTYPES or any(t is not None and dtype(t) != dtype(x) for t in (weight, bias)):
        return None
    return x, weight, bias, argument(node, 4, "eps", 1e-5)


def is_vector(node: Any, x: fx.Node, pinned: set[fx.Node]) -> bool:
    """Whether a value is a vector of each sample of x (batch, ..., channels), or of all."""
    size, of = shape(node), shape(x) or ()
    if size is None or node in pinned or dtype(node) != dtype(x) or not size or size[-1] != of[-1] or len(of) < 3:
        return False
    lead = (*[1] * (len(of) - len(size)), *size[:-1])
    return len(lead) == len(of) - 1 and lead[0] in (1, of[0]) and all(each == 1 for each in lead[1:])


def without_one(scale: Any, x: fx.Node, pinned: set[fx.Node]) -> fx.Node | None:
    """What 1 is added to, to give a scale; None for another scale."""
    if not is_op(scale, ADD) or argument(scale, 2, "alpha", 1) != 1:
        return None
    source, number = scale.args[:2]
    if not is_number(number) or number != 1 or not is_vector(source, x, pinned):
        return None
    return source  # type: ignore[return-value]
