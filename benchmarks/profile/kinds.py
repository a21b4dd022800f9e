"""What a node of a rewritten graph does: its kind of operation, its FLOPs, the bytes it has to move."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from sfast_ext.kernels.backend import registry
from sfast_ext.tools.lib import rates

OTHER = "copies, casts, other elementwise"
ARITHMETIC = frozenset({"convolution", "linear", "attention"})
"""Kinds whose ceiling is the rate of the matrix units; that of the others is the bandwidth."""
# the first that is found in an operation's name; names are those of aten and of kernels
_WORDS = [
    ("convolution", r"conv(?!ert)"),
    ("attention", r"attention|sdpa"),
    ("linear", r"linear|matmul|mm$|mm_|einsum|geglu8"),
    ("group norm", r"group_norm"),
    ("layer norm", r"layer_norm|rms_norm|modulated_norm|gated_norm|norm_rotary"),
    ("GEGLU", r"gelu|geglu|swiglu"),
    ("residual and bias", r"^add|_add|add$|bias|residual"),
]
KINDS = (*(kind for kind, _ in _WORDS), OTHER)


class Cost(NamedTuple):
    """What one node did in one run."""

    operation: str
    kind: str
    shapes: str
    flops: int
    bytes: int
    """Each input read once, each output written once."""


def operation(target: Any) -> str:
    """The name of what a node calls: an aten operation's, or a kernel's."""
    while isinstance(target, functools.partial):
        target = target.func
    packet = getattr(target, "overloadpacket", None)
    if packet is not None:
        return packet.__name__
    return getattr(target, "__name__", str(target))


def kind(name: str) -> str:
    """The kind of an operation, by its name."""
    return next((found for found, words in _WORDS if re.search(words, name)), OTHER)


def cost(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Cost:
    """What a call of a node costs, told by the tensors that it took and gave."""
    name = operation(target)
    inputs, outputs = list(_tensors((args, kwargs))), list(_tensors(out))
    seen = {(t.data_ptr(), t.shape, t.stride()): t for t in inputs}
    moved = sum(map(size, seen.values())) + sum(map(size, outputs))
    shapes = ", ".join("×".join(map(str, t.shape)) for t in inputs if t.dim() > 1)
    return Cost(name, kind(name), shapes, flops(target, args, kwargs), moved)


def _tensors(value: Any) -> Iterator[Tensor]:
    return (leaf for leaf in pytree.tree_flatten(value)[0] if isinstance(leaf, Tensor))


def size(tensor: Tensor) -> int:
    """Bytes that a tensor's elements take, those of an expanded dimension once."""
    count = 1
    for length, stride in zip(tensor.shape, tensor.stride()):
        count *= length if stride else 1
    return count * tensor.element_size()


def flops(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Of a call, by shapes alone: a kernel's `flop_reference`, or else its reference, is run without memory."""
    kernel = registry.of(target)
    if kernel is not None:
        target = kernel.flop_reference or kernel.reference

    def bare(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return torch.device("meta") if isinstance(leaf, torch.device) else leaf
        return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")

    args, kwargs = pytree.tree_map(bare, (args, kwargs))
    try:
        return rates.flops(lambda: target(*args, **kwargs))
    except Exception:
        return 0  # it does not run without memory: none of the operations with FLOPs
