"""RMS norm as one kernel, however it is written, and the casts in it."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from sfast_ext.kernels.pointwise import modulated_norm as kernel

from .fusion import fusion
from .rewrite import (
    ADD,
    KERNEL_DTYPES,
    argument,
    call,
    dtype,
    is_cast,
    is_number,
    is_op,
    only_user,
    overloads,
    replace,
    same_meta,
    shape,
    strip_lossless_casts,
)

if TYPE_CHECKING:
    from .context import PassContext

RMS_NORM = overloads("rms_norm")
RSQRT = overloads("rsqrt")
MUL = overloads("mul.Tensor")
MEAN = overloads("mean.dim")
SQUARE = overloads("square")
POW = overloads("pow.Tensor_Scalar")


@fusion(RSQRT | RMS_NORM, needs=(kernel.launch,), skip_pinned_inputs=True)
def rms_norm(node: fx.Node, pinned: set[fx.Node], ctx: PassContext) -> bool:
    """Replaces an RMS norm over the last dimension. It computes in float32 whatever the dtype, and rounds once.

    Pattern: weight * cast(x * rsqrt(mean(float(x) ** 2, -1) + eps)), with or without weight and casts; rms_norm(x)
    Replacement: modulated_norm.launch(x, weight, None, eps)
    """
    found = of_operator(node, ctx) if is_op(node, RMS_NORM) else written_out(node, pinned)
    if found is None:
        return False
    x, weight, eps, last = found
    size = shape(x)
    if dtype(x) not in KERNEL_DTYPES or not same_meta(x, last) or not size:
        return False
    if weight is not None and (dtype(weight) != dtype(x) or shape(weight) != size[-1:] or weight in pinned):
        return False
    with last.graph.inserting_before(last):
        new = call(last.graph, kernel.launch, (x, weight, None, eps), last)
    replace(last, new)
    return True


def of_operator(node: fx.Node, ctx: PassContext) -> tuple[fx.Node, Any, float, fx.Node] | None:
    """PyTorch's operator: what is normed, weight, epsilon, and the norm."""
    x: Any = node.args[0]
    weight, eps, size, kind = argument(node, 2, "weight"), argument(node, 3, "eps"), shape(x), dtype(x)
    if not size or kind not in KERNEL_DTYPES or list(argument(node, 1, "normalized_shape")) != [size[-1]]:
        return None
    if eps is None:
        eps = default_epsilon(kind, ctx.device, weighted=weight is not None)
    return (x, weight, float(eps), node) if is_number(eps) else None


@functools.lru_cache(maxsize=None)
def default_epsilon(kind: torch.dtype, device: torch.device, *, weighted: bool) -> float | None:
    """The epsilon of PyTorch's operator if it is given none, that of x's dtype or of a wider one: which it is depends
    on its version and on the device. None if it is another."""
    magnitude = 2.0**-11
    x = torch.full((1, 8), magnitude, dtype=kind, device=device)
    weight = torch.ones_like(x[0]) if weighted else None
    (norm,) = RMS_NORM
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        found = float(norm(x, [8], weight)[0, 0])
    for each in dict.fromkeys((kind, torch.float32, torch.float64)):
        eps = torch.finfo(each).eps
        if abs(found * math.sqrt(magnitude**2 + eps) / magnitude - 1) < 0.01:
            return eps
    return None


def written_out(rsqrt: fx.Node, pinned: set[fx.Node]) -> tuple[fx.Node, Any, float, fx.Node] | None:
    """Operations around a reciprocal square root: what is normed, weight, epsilon, and the last operation."""
    shifted: Any = rsqrt.args[0]
    if not is_op(shifted, ADD) or argument(shifted, 2, "alpha", 1) != 1:
        return None
    mean, eps = shifted.args[:2]
    if not is_op(mean, MEAN) or not is_number(eps) or argument(mean, 2, "keepdim") is not True:
        return None
    squares, dims = mean.args[0], argument(mean, 1, "dim")
    size = shape(squares)
    if not size or dims is None or [dim % len(size) for dim in dims] != [len(size) - 1]:
        return None
    x, product = strip_lossless_casts(squared(squares)), only_user(rsqrt)
    if x is None or product is None or not is_op(product, MUL) or product in pinned or x in pinned:
        return None
    other = product.args[1] if product.args[0] is rsqrt else product.args[0]
    if strip_lossless_casts(other) is not x or shape(product) != shape(x):
        return None
    chain = [squares, mean, shifted, rsqrt, product]
    if not pinned.isdisjoint(chain) or any(only_user(each) is None for each in chain[:-1]):
        return None
    last, weight = ended(product, dtype(x), pinned)
    return None if last is None else (x, weight, float(eps), last)


def squared(node: Any) -> Any:
    """What is squared; None if nothing is."""
    if is_op(node, POW) and node.args[1] == 2:
        return node.args[0]
    if is_op(node, SQUARE):
        return node.args[0]
    return node.args[0] if is_op(node, MUL) and node.args[0] is node.args[1] else None


def ended(product: fx.Node, kind: Any, pinned: set[fx.Node]) -> tuple[fx.Node | None, Any]:
    """The last operation of a norm of dtype `kind` and its weight: a cast back, a product with a weight, or both in
    either order."""
    last: fx.Node = product
    weight: Any = None
    found: fx.Node | None = product if dtype(product) == kind else None
    while True:
        user = only_user(last)
        if user is None or user in pinned:
            break
        if is_cast(user) and dtype(user) == kind and user.args[0] is last:
            last = found = user
            continue
        scaled = weight_of(user, last) if weight is None else None
        if scaled is None or dtype(user) not in (kind, dtype(product)):
            break
        last, weight = user, scaled
        if dtype(user) == kind:
            found = user
    # a product with a weight that is not in the result, as one in float32 that is not cast back
    return (found, weight) if found is last else (None, None)


def weight_of(product: fx.Node, normed: fx.Node) -> Any:
    """The vector, a weight of the model under lossless casts, that `product` multiplies `normed` by; else None."""
    if not is_op(product, MUL) or product.args[0] is product.args[1]:
        return None
    weight: Any = strip_lossless_casts(product.args[1] if product.args[0] is normed else product.args[0])
    known = isinstance(weight, fx.Node) and weight.op == "get_attr"
    return weight if known and shape(weight) == (shape(normed) or ())[-1:] and shape(product) == shape(normed) else None
