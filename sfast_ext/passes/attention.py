"""Scaled dot product attention, lowered onto the fastest backend that supports it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import fx

from sfast_ext.kernels.attention import attention as kernel
from sfast_ext.kernels.linear import mma_gemm

from .cleanup import PERMUTE, permutation
from .fusion import fusion
from .rewrite import RESHAPE, argument, aten, call, dtype, is_op, meta_like, overloads, replace, reshaped, shape

if TYPE_CHECKING:
    from .context import PassContext

ATTENTION = overloads("scaled_dot_product_attention")
REPEAT = overloads("repeat", "expand")
IN_8_BITS = "eight_bits"
"""In `meta` of an attention: whether its queries and keys may be 8-bit integers."""


@fusion(ATTENTION, skip_pinned_inputs=True)
def attention(node: fx.Node, pinned: set[fx.Node], ctx: PassContext) -> bool:
    """Replaces an attention without dropout by the fastest of the kernels of this project and of the libraries.

    Pattern: scaled_dot_product_attention(q, k, v, ...)
    Replacement: kernel.launch(q, k, v, mask=..., is_causal=..., scale=...), with faster_sums=True
        if the user has chosen so, with eight_bits=True if the pass `eight_bits` has

    If keys and values are heads that were repeated, as in Lumina 2, the kernel gets them as they were before.
    """
    options = kernel_options(node) if ctx.supported(kernel.launch) else None
    if options is None:
        return False
    if ctx.faster_sums and dtype(node) == torch.float16 and mma_gemm.half_sums_profitable(ctx.device):
        options["faster_sums"] = True
    if node.meta.get(IN_8_BITS):
        options["eight_bits"] = True
    q, k, v = node.args[:3]
    found = [each for each in (match_shared(x, pinned) for x in (k, v)) if each is not None]
    with node.graph.inserting_before(node):
        alike = len(found) == 2 and found[0].heads == found[1].heads
        if alike and {each.heads * each.times for each in found} == {(shape(q) or (0, 0))[1]}:
            k, v = (unrepeated(node.graph, each) for each in found)
        new = call(node.graph, kernel.launch, (q, k, v), node, options)
    replace(node, new)
    return True


class SharedHeads(NamedTuple):
    """Heads of which each is repeated for several of the queries."""

    source: fx.Node  # before they are
    size: tuple[int, ...]  # images, tokens, heads and columns, or images, heads, tokens and columns
    heads: int
    times: int  # how often
    order: list[int]  # of `size`, that makes images, heads, tokens and columns


def match_shared(node: Any, pinned: set[fx.Node]) -> SharedHeads | None:
    """Matches permute(reshape(repeat(x))), in which each head follows itself `count` times."""
    order = [0, 1, 2, 3]
    if is_op(node, PERMUTE) and node not in pinned:
        order, node = permutation(node) or order, node.args[0]
    size = shape(node)
    if not is_op(node, RESHAPE) or node in pinned or size is None or len(size) != 4 or order[0] != 0 or order[3] != 3:
        return None
    repeat, at = node.args[0], order[1]
    if not is_op(repeat, REPEAT) or repeat in pinned or repeat.args[0] in pinned:
        return None
    source = repeat.args[0]
    one, many = shape(source), shape(repeat)
    if one is None or many is None or len(one) != 5 or len(many) != 5:
        return None
    heads, count = many[at], many[at + 1]
    merged = (*many[:at], heads * count, *many[at + 2 :])
    if merged != tuple(size) or one != (*many[: at + 1], 1, *many[at + 2 :]) or count < 2:
        return None
    return SharedHeads(source, (*one[: at + 1], *one[at + 2 :]), heads, count, order)


def unrepeated(graph: fx.Graph, found: SharedHeads) -> fx.Node:
    x = reshaped(graph, found.source, found.size)
    if found.order == [0, 1, 2, 3]:
        return x
    size = tuple(found.size[dim] for dim in found.order)
    return call(graph, aten.permute.default, (x, found.order), meta_like(x, size))


def kernel_options(node: fx.Node) -> dict[str, Any] | None:
    """Returns an attention's options as the kernels take them; None if it has other options than their defaults."""
    if len(node.args) < 3 or argument(node, 4, "dropout_p", 0.0) != 0 or node.kwargs.get("enable_gqa", False):
        return None
    mask, causal = argument(node, 3, "attn_mask"), argument(node, 5, "is_causal", False)
    return {"mask": mask, "is_causal": causal, "scale": node.kwargs.get("scale")}
