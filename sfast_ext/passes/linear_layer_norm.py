"""Layer norm fused into the GEMM that makes its rows, with the additions between them."""

from __future__ import annotations

import math
import operator
from collections import defaultdict
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import fx

from sfast_ext.kernels.linear import linear_layer_norm as kernel
from sfast_ext.kernels.pointwise import add_layer_norm, layer_norm

from .rewrite import (
    HALF,
    LINEAR,
    RESHAPE,
    argument,
    aten,
    call,
    dtype,
    is_op,
    meta_like,
    mutated,
    only_user,
    replace,
    reshaped,
    shape,
)

if TYPE_CHECKING:
    from .context import PassContext


Sizes = tuple[int, int, int]
"""M, N and K of a GEMM."""


class LinearLayerNormMatch(NamedTuple):
    linear: fx.Node
    viewed: fx.Node  # the linear, or a reshape of it that keeps its rows
    rest: tuple[Any, ...]  # the kernel's operands from the bias on
    sizes: Sizes


def linear_layer_norm(gm: fx.GraphModule, ctx: PassContext) -> int:
    """Replaces a norm and the linear before it, if one kernel is faster than two.

    Pattern: layer_norm.launch(linear(x, weight, bias), ...)
    Replacement: (linear, normed) = kernel.launch(x, weight, bias, None, ..., records)

    Pattern: (sum, normed) = add_layer_norm.launch(linear(x, weight), residual, ..., shift=bias, post_bias=post_bias)
    Replacement: (sum, normed) = kernel.launch(x, weight, bias, residual, ..., post_bias, records)

    `records` is memory by which the kernel's blocks share statistics: see `shared_records`. All sizes must be known
    before it is allocated, so this pass matches the whole graph first and rewrites then.
    """
    if not ctx.supported(kernel.launch):
        return 0
    graph = gm.graph
    pinned = mutated(graph)
    found = [(norm, matched) for norm in graph.nodes if (matched := match(norm, pinned)) is not None]
    faster = [s for s in dict.fromkeys(matched.sizes for _, matched in found) if kernel.profitable(*s, ctx.device)]
    if not faster:
        return 0
    records, count = shared_records(gm, ctx, faster, found[0][1].linear), 0
    for norm, _ in found:
        matched = match(norm, pinned)  # again: rewrites so far have replaced operands of other norms
        if matched is None or matched.sizes not in records:
            continue  # another norm of the same rows came first, or two kernels are faster
        linear, viewed, rest, sizes = matched
        sums = is_op(norm, (add_layer_norm.launch,))
        # At the place of the sum: its other users may precede the norm. The norm's weights are at the top.
        with graph.inserting_before(norm if sums else linear):
            size = shape(viewed) or ()
            x = reshaped(graph, linear.args[0], (*size[:-1], sizes[2]))
            new = call(graph, kernel.launch, (x, linear.args[1], *rest, records[sizes]), norm)
            if not sums:
                new.meta["val"] = (viewed.meta.get("val"), norm.meta.get("val"))
                total, normed = (call(graph, operator.getitem, (new, i), like) for i, like in enumerate((viewed, norm)))
        if sums:
            replace(norm, new)
        else:
            replace(norm, normed)
            replace(viewed, total)
        count += 1
    return count


def shared_records(gm: fx.GraphModule, ctx: PassContext, found: list[Sizes], like: fx.Node) -> dict[Sizes, fx.Node]:
    """Allocates what the kernel's blocks leave for each other: zeros, at the start of each call.

    GEMMs with equal tiles share it, as they run one after the other. `like` is a node with a value on their device.
    """
    alike: dict[Any, list[Sizes]] = defaultdict(list)
    for m, n, k in found:
        alike[m, n, kernel.best(m, n, k, ctx.device)].append((m, n, k))
    counts = [kernel.record_count(*sizes[0], ctx.device) for sizes in alike.values()]
    parts: dict[Sizes, fx.Node] = {}
    head = next(node for node in gm.graph.nodes if node.op == "call_function")
    with gm.graph.inserting_before(head):
        options, val = {"dtype": torch.int64, "device": ctx.device}, meta_like(like, (sum(counts),), torch.int64)
        zeros = call(gm.graph, aten.zeros.default, ([sum(counts)],), val, options)
        begin = 0
        for count, sizes in zip(counts, alike.values(), strict=True):
            part = meta_like(like, (count,), torch.int64)
            node = call(gm.graph, aten.slice.Tensor, (zeros, 0, begin, begin + count), part)
            parts.update(dict.fromkeys(sizes, node))
            begin += count
    return parts


def match(norm: fx.Node, pinned: set[fx.Node]) -> LinearLayerNormMatch | None:
    """Matches a norm's kernel that reads a linear in half precision."""
    if norm in pinned:
        return None
    residual = shift = post_bias = None
    if is_op(norm, (add_layer_norm.launch,)):
        x, residual, norm_weight, norm_bias, eps = norm.args
        shift, post_bias = norm.kwargs.get("shift"), norm.kwargs.get("post_bias")
        if only_user(x) is not norm or x is residual or shape(residual) != shape(x):
            return None
        linear = x
    elif is_op(norm, (layer_norm.launch,)):
        x, norm_weight, norm_bias, eps = norm.args
        linear = under_reshape(x)
    else:
        return None
    if not is_op(linear, LINEAR) or x in pinned or norm.kwargs.get("out_dtype") not in (None, dtype(linear)):
        return None
    rows, weight, bias = linear.args[0], linear.args[1], argument(linear, 2, "bias")
    if bias is not None and shift is not None or dtype(linear) not in HALF or len(shape(weight) or ()) != 2:
        return None
    vectors = [bias if shift is None else shift, norm_weight, norm_bias, post_bias]
    nodes = [n for n in (linear, rows, weight, residual, *vectors) if n is not None]
    if any(n in pinned or dtype(n) != dtype(linear) for n in nodes):
        return None
    # at the place of the kernel, computed values may not be known yet
    if any(n is not None and n.op != "get_attr" for n in vectors):
        return None
    size, given = shape(linear), shape(rows)
    if size is None or given is None:
        return None
    rest = (vectors[0], residual, norm_weight, norm_bias, eps, post_bias)
    return LinearLayerNormMatch(linear, x, rest, (math.prod(size[:-1]), size[-1], given[-1]))


def under_reshape(x: fx.Node) -> Any:
    """Returns the source of a reshape that keeps its rows and is its only user; otherwise `x`."""
    source = x.args[0] if is_op(x, RESHAPE) else None
    if not isinstance(source, fx.Node) or only_user(source) is not x:
        return x
    return source if (shape(x) or ())[-1:] == (shape(source) or ())[-1:] else x
