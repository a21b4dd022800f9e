"""Residual additions with a gate of the sample, with an RMS norm before them and a modulated norm after them."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch import fx

from sfast_ext.kernels.pointwise import gated_norm as norm_kernel
from sfast_ext.kernels.pointwise import gated_residual as kernel
from sfast_ext.kernels.pointwise import modulated_norm

from .fusion import fusion
from .layer_norm import is_residual_add
from .modulated_norm import ADDCMUL, added_product, is_vector
from .rewrite import ADD, KERNEL_DTYPES, call, dtype, inputs, is_op, only_user, overloads, replace, same_meta, shape

if TYPE_CHECKING:
    from .context import PassContext

MUL = overloads("mul.Tensor")
TANH = overloads("tanh")


@fusion(ADD | ADDCMUL, needs=(kernel.launch, norm_kernel.launch), skip_pinned_inputs=True)
def gated_residual(add: fx.Node, pinned: set[fx.Node], ctx: PassContext) -> bool:
    """Replaces a residual addition, the product with a gate and the RMS norm before it.

    Pattern: x + gate * y, addcmul(x, gate, y), x + tanh(gate) * y, x + y with y = modulated_norm.launch(z, weight,
        None, eps), which it must be if there is no gate
    Replacement: kernel.launch(x, z or y, gate, weight, eps, tanh)
    """
    if dtype(add) not in KERNEL_DTYPES or len(shape(add) or ()) < 3:
        return False
    for x, y, gate, user in residuals(add, pinned):
        norm = inner_norm(y, user, pinned)
        if norm is None and gate is None:
            continue
        z, weight, eps = norm or (y, None, None)
        tanh = is_op(gate, TANH) and gate is not None and gate.args[0] not in pinned
        source = gate.args[0] if tanh and gate is not None else gate
        with add.graph.inserting_before(add):
            new = call(add.graph, kernel.launch, (x, z, source, weight, eps, tanh), add)
        replace(add, new)
        return True
    return False


def residuals(
    add: fx.Node, pinned: set[fx.Node]
) -> Iterator[tuple[fx.Node, fx.Node, fx.Node | None, fx.Node]]:
    """The ways in which an operation may be x + gate * y: x, y, the gate if there is one, and what reads y."""
    joint = added_product(add)
    if joint is not None:
        x, first, second = joint
        for gate, y in ((first, second), (second, first)):
            if same_meta(x, add) and same_meta(y, add) and y not in pinned and is_vector(gate, y, pinned):
                yield x, y, gate, add
    if not is_residual_add(add):
        return
    for x, added in ((add.args[0], add.args[1]), (add.args[1], add.args[0])):
        if not isinstance(x, fx.Node) or not isinstance(added, fx.Node) or x is added or list(added.users) != [add]:
            continue
        found = gated(added, pinned)
        if found is not None:
            yield x, *found, add if found[0] is added else added


def gated(product: fx.Node, pinned: set[fx.Node]) -> tuple[fx.Node, fx.Node | None] | None:
    """What is gated, and the gate; (product, None) for what has none."""
    if product in pinned:
        return None
    if is_op(product, MUL):
        for gate, y in (product.args[:2], product.args[1::-1]):
            if isinstance(y, fx.Node) and same_meta(y, product) and y not in pinned and is_vector(gate, y, pinned):
                return y, gate  # type: ignore[return-value]
    return product, None


def inner_norm(y: fx.Node, user: fx.Node, pinned: set[fx.Node]) -> tuple[Any, Any, Any] | None:
    """x, weight and epsilon of an RMS norm that `user` alone reads, as `rms_norm` makes it."""
    if not is_op(y, (modulated_norm.launch,)) or only_user(y) is not user or len(y.args) != 4 or y.kwargs:
        return None
    x, weight, bias, eps = y.args
    return None if bias is not None or x in pinned else (x, weight, eps)


@fusion((kernel.launch,), needs=(norm_kernel.launch,), skip_pinned_inputs=True)
def gated_norm(total: fx.Node, pinned: set[fx.Node], ctx: PassContext) -> bool:
    """Replaces a gated residual addition and the norm of the sum. Other users read the sum from the pair.

    Pattern: modulated_norm.launch(gated_residual.launch(...), ...)
    Replacement: (sum, normed) = gated_norm.launch(...)
    """
    users = list(total.users)
    norms = [user for user in users if is_op(user, (modulated_norm.launch,)) and user.args[0] is total]
    if len(norms) != 1 or norms[0] in pinned:
        return False
    norm, graph = norms[0], total.graph
    place = common_place(total, norm)
    if place is None:
        return False
    options = {name: norm.kwargs[name] for name in ("rms", "plus_one") if name in norm.kwargs}
    with graph.inserting_before(place):
        pair = call(graph, norm_kernel.launch, (*total.args, *norm.args[1:]), None, options)
        both = call(graph, operator.getitem, (pair, 0), total)
        normed = call(graph, operator.getitem, (pair, 1), norm)
    pair.meta["val"] = (total.meta.get("val"), norm.meta.get("val"))
    replace(norm, normed)
    replace(total, both)
    return True


def common_place(total: fx.Node, norm: fx.Node) -> fx.Node | None:
    """Where both may be computed: at the norm if nothing between reads the sum, or at the sum if all that the norm
    reads is known there."""
    between: set[fx.Node] = set()
    node = total.next
    while node is not norm:
        if node.op == "root":
            return None
        between.add(node)
        node = node.next
    if between.isdisjoint(total.users):
        return norm
    return total if between.isdisjoint(inputs(norm.args)) else None
