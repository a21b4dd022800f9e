"""Layer norm, alone and with the residual addition before it, as one kernel."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import fx

from sfast_ext.kernels.pointwise import add_layer_norm as add_kernel
from sfast_ext.kernels.pointwise import layer_norm as kernel

from .rewrite import (
    ADD,
    KERNEL_DTYPES,
    LINEAR,
    argument,
    call,
    dtype,
    hoist_weights,
    is_cast,
    is_op,
    mutated,
    only_user,
    overloads,
    replace,
    same_meta,
    shape,
    strip_lossless_casts,
    without_linear_bias,
)

if TYPE_CHECKING:
    from . import PassContext

LAYER_NORM = overloads("layer_norm")


class LayerNormMatch(NamedTuple):
    x: fx.Node  # under casts that lost nothing: the kernel computes in fp32 whatever it reads
    params: tuple[Any, Any, float]
    last: fx.Node  # the norm, or the cast of its result


def match(node: fx.Node, pinned: set[fx.Node]) -> LayerNormMatch | None:
    if node._erased or not is_op(node, LAYER_NORM) or node in pinned:
        return None
    size, normalized = shape(node), argument(node, 1, "normalized_shape")
    if size is None or list(normalized) != [size[-1]]:
        return None
    x = strip_lossless_casts(node.args[0])
    if x in pinned or dtype(x) not in KERNEL_DTYPES or dtype(node) not in KERNEL_DTYPES:
        return None
    user = only_user(node)
    weight, bias = strip_lossless_casts(argument(node, 2, "weight")), strip_lossless_casts(argument(node, 3, "bias"))
    params = (weight, bias, argument(node, 4, "eps", 1e-5))
    if user is not None and is_cast(user) and dtype(user) in KERNEL_DTYPES and user not in pinned:
        return LayerNormMatch(x, params, user)
    return LayerNormMatch(x, params, node)


def add_layer_norm(gm: fx.GraphModule, ctx: PassContext) -> int:
    if not ctx.serves(add_kernel):
        return 0
    hoist_weights(gm.graph)
    pinned, count = mutated(gm.graph), 0
    for node in list(gm.graph.nodes):
        norm = match(node, pinned)
        if norm is None or not is_residual_add(norm.x) or any(a in pinned for a in norm.x.args):
            continue
        if any(isinstance(x, fx.Node) and x.op != "get_attr" for x in norm.params):
            continue  # it may not be there yet where the sum is made
        add, graph = norm.x, gm.graph
        # Where the sum was made: others may use it before the norm is due. The norm's weights are at the top.
        with graph.inserting_before(add):
            x, residual, shift = split_linear_bias(add, pinned)
            options = {"out_dtype": dtype(norm.last), "shift": shift}
            pair = call(graph, add_kernel.launch, (x, residual, *norm.params), None, options)
            total = call(graph, operator.getitem, (pair, 0), add)
            normed = call(graph, operator.getitem, (pair, 1), norm.last)
        pair.meta["val"] = (total.meta.get("val"), normed.meta.get("val"))
        replace(norm.last, normed)
        replace(add, total)
        count += 1
    return count


def split_linear_bias(add: fx.Node, pinned: set[fx.Node]) -> tuple[Any, Any, Any]:
    """What is added, and the bias of a linear layer whose result goes nowhere else: without it cuBLAS has quicker
    products."""
    for x, residual in (add.args[:2], add.args[1::-1]):
        bias = argument(x, 2, "bias") if is_op(x, LINEAR) else None
        if bias is None or x in pinned or bias in pinned or only_user(x) is not add or x is residual:
            continue
        if dtype(bias) == dtype(x) and shape(bias) == (shape(x) or ())[-1:]:
            return without_linear_bias(x), residual, bias
    return add.args[0], add.args[1], None


def is_residual_add(node: fx.Node) -> bool:
    """No broadcast, no promotion, no factor."""
    if not is_op(node, ADD) or argument(node, 2, "alpha", 1) != 1:
        return False
    return same_meta(node.args[0], node) and same_meta(node.args[1], node)


def layer_norm(gm: fx.GraphModule, ctx: PassContext) -> int:
    if not ctx.serves(kernel):
        return 0
    pinned, count = mutated(gm.graph), 0
    for node in list(gm.graph.nodes):
        norm = match(node, pinned)
        if norm is None:
            continue
        with gm.graph.inserting_before(node):
            new = call(gm.graph, kernel.launch, (norm.x, *norm.params), norm.last, {"out_dtype": dtype(norm.last)})
        replace(norm.last, new)
        count += 1
    return count
