"""Matches the 3x3 convolutions that may be computed with 8-bit integers: those that read a group norm alone."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import fx

from sfast_ext.kernels.eight_bits import add_group_norm8, cat_group_norm8, conv2d8, group_norm8, quantise_weights
from sfast_ext.kernels.group_norm import add_group_norm, cat_group_norm, group_norm

from .conv_match import stride_of
from .eight_bits_match import layer_name
from .rewrite import CONV, argument, dtype, is_op, is_weight, mutated, shape

if TYPE_CHECKING:
    from .context import PassContext

CONV_KERNELS = (
    conv2d8.launch, group_norm8.launch, add_group_norm8.launch, cat_group_norm8.launch, quantise_weights.launch,
)  # fmt: skip
MIN_PIXELS = 256
"""Of a result: with fewer it takes no longer than its weight takes to be read."""
COLUMNS, DEPTH = 32, 64
"""Output and input channels are multiples of these. The kernel takes multiples of 8 output channels; 32 leaves out no
layer of Stable Diffusion but the last."""
MAX_GROUPS = 128


class ConvCandidate(NamedTuple):
    """A convolution in half precision that may be one of 8-bit integers."""

    node: fx.Node
    norm: fx.Node
    """The kernel that writes its input, alone or with a sum or a concatenation."""
    stride: int

    @property
    def silu(self) -> bool:
        """Whether SiLU follows the norm."""
        return bool(self.norm.kwargs.get("silu", False))

    @property
    def x(self) -> Any:
        """Its input."""
        return self.node.args[0]

    @property
    def name(self) -> str:
        """That of the layer."""
        return layer_name(self.weight.path)

    @property
    def weight(self) -> Any:
        """The weight of the arena."""
        return argument(self.node, 1, "weight").meta["weight"]


def conv_candidates(graph: fx.Graph, ctx: PassContext) -> list[ConvCandidate]:
    """The convolutions whose input may be quantised where it is written, if that pays: in time, or if the selection is
    resident, in memory. None without their kernels."""
    if not ctx.supported(*CONV_KERNELS):
        return []
    pinned = mutated(graph)
    found = (match(node, pinned, ctx) for node in graph.nodes if is_op(node, CONV))
    return [candidate for candidate in found if candidate is not None]


def match(conv: fx.Node, pinned: set[fx.Node], ctx: PassContext) -> ConvCandidate | None:
    """Matches a convolution in half precision that is large enough, by a weight of the arena, which alone reads a
    norm."""
    stride, x = stride_of(conv), conv.args[0]
    weight, bias = argument(conv, 1, "weight"), argument(conv, 2, "bias")
    if stride is None or not isinstance(x, fx.Node) or not is_weight(weight) or list(x.users) != [conv]:
        return None
    kind, norm = dtype(conv), norm_of(x)
    if norm is None or not pinned.isdisjoint([conv, norm, *conv.all_input_nodes]):
        return None
    # the kernel that quantises takes one dtype
    operands = x, weight, bias, *norm.all_input_nodes
    if any(t is not None and dtype(t) != kind for t in operands):
        return None
    (images, columns, height, width), channels = shape(conv) or (0, 0, 0, 0), (shape(x) or (0, 0))[1]
    pixels = images * height * width
    if columns % COLUMNS or channels % DEPTH:
        return None
    if ctx.eight_bits is not None and ctx.eight_bits.resident:
        return ConvCandidate(conv, norm, stride)
    if pixels < MIN_PIXELS or not conv2d8.profitable(pixels, columns, 9 * channels, ctx.device, stride):
        return None
    return ConvCandidate(conv, norm, stride)


def norm_of(x: fx.Node) -> fx.Node | None:
    """The kernel of a group norm that writes an image."""
    second = is_op(x, (operator.getitem,)) and x.args[1] == 1
    norm: Any = x
    if second:
        norm = x.args[0]
    kernels = (group_norm.launch,) if norm is x else (add_group_norm.launch, cat_group_norm.launch)
    if not is_op(norm, kernels) or norm.kwargs.get("patches", False) or len(norm.args) > arguments_of(norm):
        return None
    groups = norm.args[1 if norm is x else 4]
    return norm if type(groups) is int and 0 < groups <= MAX_GROUPS else None


def arguments_of(norm: fx.Node) -> int:
    """Positional arguments of a norm's kernel up to eps."""
    return 5 if is_op(norm, (group_norm.launch,)) else 8
