"""Layer norm as one kernel, alone or with the residual addition before it, and the casts around it."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import fx

from sfast_ext.kernels.pointwise import add_layer_norm as add_kernel
from sfast_ext.kernels.pointwise import layer_norm as kernel

from .fusion import fusion
from .rewrite import (
    ADD,
    KERNEL_DTYPES,
    LINEAR,
    argument,
    call,
    dtype,
    is_cast,
    is_op,
    only_user,
    overloads,
    replace,
    same_meta,
    shape,
    strip_lossless_casts,
    without_linear_bias,
)

if TYPE_CHECKING:
    from .context import PassContext

LAYER_NORM = overloads("layer_norm")


class LayerNormMatch(NamedTuple):
    x: fx.Node  # under lossless casts: the kernel computes in fp32 whatever it reads
    params: tuple[Any, Any, float]
    last: fx.Node  # the norm, or the cast of its result


def match(node: fx.Node, pinned: set[fx.Node]) -> LayerNormMatch | None:
    """Matches a layer norm over the last dimension, with the cast that alone reads it."""
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


@fusion(LAYER_NORM, needs=(add_kernel.launch,), hoist=True)
def add_layer_norm(node: fx.Node, pinned: set[fx.Node], ctx: PassContext) -> bool:
    """Replaces a norm and the residual addition before it. Other users read the sum from the pair.

    Pattern: [cast](layer_norm([cast](x + residual), ...)); x may be a linear with a bias
    Replacement: (sum, normed) = kernel.launch(x, residual, ..., out_dtype=..., shift=bias of the linear)
    """
    found = match(node, pinned)
    if found is None or not is_residual_add(found.x) or any(a in pinned for a in found.x.args):
        return False
    if any(isinstance(x, fx.Node) and x.op != "get_attr" for x in found.params):
        return False  # it may not be computed yet at the place of the sum
    add, graph = found.x, node.graph
    # At the place of the sum: its other users may precede the norm. The norm's weights are at the top.
    with graph.inserting_before(add):
        x, residual, shift = split_linear_bias(add, pinned)
        options = {"out_dtype": dtype(found.last), "shift": shift}
        pair = call(graph, add_kernel.launch, (x, residual, *found.params), None, options)
        total = call(graph, operator.getitem, (pair, 0), add)
        normed = call(graph, operator.getitem, (pair, 1), found.last)
    pair.meta["val"] = (total.meta.get("val"), normed.meta.get("val"))
    replace(found.last, normed)
    replace(add, total)
    return True


def split_linear_bias(add: fx.Node, pinned: set[fx.Node]) -> tuple[Any, Any, Any]:
    """Returns x, residual and bias of a residual addition.

    If an operand is a linear that only `add` reads, `x` is a new linear without the bias: cuBLAS has faster GEMMs
    without one. Otherwise the bias is None.
    """
    for x, residual in (add.args[:2], add.args[1::-1]):
        bias = argument(x, 2, "bias") if is_op(x, LINEAR) else None
        if bias is None or x in pinned or bias in pinned or only_user(x) is not add or x is residual:
            continue
        if dtype(bias) == dtype(x) and shape(bias) == (shape(x) or ())[-1:]:
            return without_linear_bias(x), residual, bias
    return add.args[0], add.args[1], None


def is_residual_add(node: Any) -> bool:
    """Whether a node adds two tensors without broadcast, type promotion or factor."""
    if not is_op(node, ADD) or argument(node, 2, "alpha", 1) != 1:
        return False
    return same_meta(node.args[0], node) and same_meta(node.args[1], node)


@fusion(LAYER_NORM, needs=(kernel.launch,))
def layer_norm(node: fx.Node, pinned: set[fx.Node], ctx: PassContext) -> bool:
    """Replaces a norm and the casts around it.

    Pattern: [cast](layer_norm([cast](x), ...))
    Replacement: kernel.launch(x, ..., out_dtype=...)
    """
    found = match(node, pinned)
    if found is None:
        return False
    with node.graph.inserting_before(node):
        new = call(node.graph, kernel.launch, (found.x, *found.params), found.last, {"out_dtype": dtype(found.last)})
    replace(found.last, new)
    return True
