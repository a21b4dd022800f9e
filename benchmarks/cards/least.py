"""The least time that the nodes of a plan can take on a card: by its FLOPs or by its bytes, whichever is longer."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from benchmarks.cards.published import Card
from benchmarks.compile_table import launches
from benchmarks.compile_table.cuda import for_any_card
from benchmarks.profile import kinds
from sfast_ext.kernels.attention import attention, mma_attention
from sfast_ext.passes.rewrite import is_kernel
from sfast_ext.tools.lib import transformers

_FASTER = {"convolution": 0.5, "linear": 0.5}
"""The part of their time that products take with *Faster sums on GeForce*, by kind."""
_ATTENTION = 0.75
"""The same for attention to many keys: half of its products are those of queries and keys, which stay exact."""


_WRITERS = re.compile("layer_norm|modulated_norm|gated_norm|swiglu|gelu")
"""Operations whose kernel writes 8 bits itself."""
_MIN_ROWS = 256
"""Products of fewer rows stay in half precision: those of the prompt's keys and values, and of the embeddings."""


class Work(NamedTuple):
    """Of a node: its kind, FLOPs, and bytes: each input read once, each output written once."""

    kind: str
    flops: int
    bytes: int
    faster: float = 1.0
    """Its products' time with *Faster sums on GeForce*, as a part of that without."""
    bytes_in_8: int = 0
    """Bytes if its product is one of 8-bit integers, 0 if that stays in half precision: activations, weight and result,
    and what quantises them: the activations are read in half precision and written in 8 bits, unless a norm or an
    activation's kernel writes them so; the weight is read in half precision once, to know whether it changed."""
    keys_in_8: int = 0
    """Bytes that the kernel moves which writes an attention's keys in 8 bits; 0 if they stay in half precision."""


def of_plan(case: str) -> list[Work]:
    """The nodes of the plan for a case such as "sd15:512x512", in half precision, without Triton and Hopper's
    kernels."""
    dtype = torch.bfloat16 if transformers.is_transformer(case.partition(":")[0]) else torch.float16
    with for_any_card():
        graph = launches.graph(case, dtype, triton=False)
    return [work for node in graph.nodes if (work := of_node(node))]


def of_node(node: fx.Node) -> Work | None:
    """What a node does; None where it moves nothing: a view, a placeholder, a weight."""
    if node.op != "call_function" or not is_kernel(node.target) and _is_view(node.target):
        return None
    out = node.meta.get("val")
    if not _tensors(out):
        return None
    name = kinds.operation(node.target)
    args, kwargs = map_arg((node.args, dict(node.kwargs)), lambda n: n.meta.get("val"))
    moved = [t for n in node.all_input_nodes for t in _tensors(n.meta.get("val"))] + _tensors(out)
    kind = kinds.kind(name)
    faster, keys_in_8 = _FASTER.get(kind, 1.0), 0
    if node.target is attention.launch and mma_attention.sums_in_half(args[1]):
        faster = _ATTENTION
    if any(t.dtype == torch.bfloat16 for t in moved):
        # sums in half precision are of float16
        faster = 1.0
    if node.target is attention.launch and args[1].shape[2] > mma_attention.MAX_KEYS_AT_ONCE and _projected(node):
        keys_in_8 = kinds.size(args[1]) + args[1].numel()
    bytes_in_8 = _bytes_in_8(node, moved) if kind in ("linear", "convolution") else 0
    flops = kinds.flops(node.target, args, kwargs)
    return Work(kind, flops, sum(map(kinds.size, moved)), faster, bytes_in_8, keys_in_8)


def _bytes_in_8(node: fx.Node, moved: list[torch.Tensor]) -> int:
    operands = [n for n in node.all_input_nodes if isinstance(n.meta.get("val"), torch.Tensor)][:2]
    if len(operands) < 2:
        return 0
    x, weight = (n.meta["val"] for n in operands)
    if weight.dim() == 4:
        columns, channels = weight.shape[:2]
        normed = "group_norm" in kinds.operation(_source(operands[0]).target)
        if not normed or weight.shape[2:] != (3, 3) or channels % 64 or columns % 32:
            return 0
        if x.numel() < _MIN_ROWS * channels:
            return 0
        # the norm writes them in 8 bits
        return sum(map(kinds.size, moved)) - kinds.size(x) + x.numel() + weight.numel()
    terms = x.shape[-1] if x.dim() else 1
    if weight.dim() != 2 or terms % 64 or weight.shape[1] != terms or x.numel() < _MIN_ROWS * terms:
        return 0
    written = 0 if _WRITERS.search(kinds.operation(_source(operands[0]).target)) else x.numel() + kinds.size(x)
    saved = kinds.size(x) - x.numel() + kinds.size(weight) - weight.numel()
    return sum(map(kinds.size, moved)) - saved + written + kinds.size(weight)


def _projected(node: fx.Node) -> bool:
    """Whether a linear layer makes an attention's keys: those of transformers are of `norm_rotary`, which are not
    quantised."""
    return kinds.kind(kinds.operation(_source(node.args[1]).target)) == "linear"  # type: ignore[arg-type]


def _source(node: fx.Node) -> fx.Node:
    """The node whose result this one is a view or a part of."""
    while node.op == "call_function" and not is_kernel(node.target) and _is_view(node.target):
        node = node.all_input_nodes[0]
    return node


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_flatten(value)[0] if isinstance(leaf, torch.Tensor)]


def _is_view(target: Any) -> bool:
    if not isinstance(target, torch._ops.OpOverload):
        return True
    return any(r.alias_info is not None and not r.alias_info.is_write for r in target._schema.returns)


def milliseconds(
    work: Iterable[Work], card: Card, *, faster_sums: bool = False, eight_bits: bool = False
) -> dict[str, float]:
    """By kind of operation, the least time on a card."""
    found: dict[str, float] = {}
    for each in work:
        products = each.flops / card.tflops / 1e9 * (each.faster if faster_sums else 1)
        moved = each.bytes
        if eight_bits and each.bytes_in_8:
            products, moved = each.flops / card.tops / 1e9, each.bytes_in_8
        before = 0.0
        if eight_bits and each.keys_in_8:
            # half of its products are those of queries and keys
            products += each.flops / 2 * (1 / card.tops - 1 / card.tflops) / 1e9
            before = each.keys_in_8 / card.bandwidth / 1e6
        least = before + max(products, moved / card.bandwidth / 1e6)
        found[each.kind] = found.get(each.kind, 0.0) + least
    return found
