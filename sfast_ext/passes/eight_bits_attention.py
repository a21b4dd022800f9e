"""Self-attentions whose products of queries and keys are of 8-bit integers.

Their softmax and the products with values stay as they are. Attention to a prompt stays in half precision: its first
token is an outlier, and its keys are few. `Selection` says which are taken, by the error of their result, see
eight_bits.py; the pass `attention` asks the kernel for them, which is measured on the card against the exact ones.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import fx

from sfast_ext.kernels.attention import attention as kernel
from sfast_ext.kernels.attention import mma_attention
from sfast_ext.kernels.eight_bits import gain

from .attention import ATTENTION, IN_8_BITS, kernel_options
from .eight_bits_match import is_part, views_and_parts
from .rewrite import HALF, LINEAR, argument, dtype, is_op, is_weight, mutated, shape

if TYPE_CHECKING:
    from .context import PassContext


class AttentionCandidate(NamedTuple):
    """A self-attention in half precision."""

    node: fx.Node
    name: str
    """Of the module that computes it."""

    @property
    def operands(self) -> tuple[Any, Any, Any, float | None]:
        """Queries, keys, values, and the scale of their products."""
        q, k, v = self.node.args[:3]
        return q, k, v, self.node.kwargs.get("scale")  # type: ignore[return-value]


def attention_candidates(graph: fx.Graph, ctx: PassContext) -> list[AttentionCandidate]:
    """The attentions that may be computed so, if that pays."""
    if not ctx.supported(kernel.launch):
        return []
    pinned = mutated(graph)
    found = (match(node, pinned, ctx.device) for node in graph.nodes if is_op(node, ATTENTION))
    return [candidate for candidate in found if candidate is not None]


def match(node: fx.Node, pinned: set[fx.Node], device: torch.device) -> AttentionCandidate | None:
    """Matches an attention without a mask whose queries and keys are of one input, by weights of the arena."""
    options = kernel_options(node)
    if options is None or options["mask"] is not None or options["is_causal"] or not pinned.isdisjoint([node]):
        return None
    if any(not isinstance(x, fx.Node) or x in pinned or dtype(x) not in HALF for x in node.args[:3]):
        return None
    size, keys = shape(node.args[0]) or (), shape(node.args[1]) or ()
    if len(size) != 4 or len(keys) != 4 or keys[2] <= mma_attention.MAX_KEYS_AT_ONCE or size[3] % 8:
        return None
    of_queries, of_keys = (linear_of(x, pinned) for x in node.args[:2])
    if of_queries is None or of_keys is None or of_queries.args[0] is not of_keys.args[0]:
        return None
    images, heads, queries, width = size
    if width > mma_attention.MAX_SIZE or not gain.attention_pays(images * heads, queries, keys[2], width, device):
        return None
    path = argument(of_keys, 1, "weight").meta["weight"].path.partition("+")[0]
    name = path.removesuffix(".weight").rpartition(".")[0]
    return AttentionCandidate(node, name) if name else None


def linear_of(x: Any, pinned: set[fx.Node]) -> fx.Node | None:
    """The linear layer that makes a value, or what it is a view or a part of."""
    while isinstance(x, fx.Node) and x not in pinned and (is_op(x, views_and_parts()) or is_part(x)):
        x = x.args[0]
    return x if is_op(x, LINEAR) and x not in pinned and is_weight(argument(x, 1, "weight")) else None


def choose(found: list[AttentionCandidate], kept: set[str]) -> None:
    """Those that are not kept may be computed so."""
    for candidate in found:
        candidate.node.meta[IN_8_BITS] = candidate.name not in kept
