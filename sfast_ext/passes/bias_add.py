"""Biases of convolutions and linears, added in one pass over the result, with the residual and the scale of both."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import fx

from sfast_ext.kernels.pointwise import bias_add as kernel

from .fusion import rewrite_each
from .layer_norm import is_residual_add, split_linear_bias
from .rewrite import (
    ADD,
    CONV,
    HALF,
    KERNEL_DTYPES,
    argument,
    aten,
    call,
    dtype,
    is_number,
    is_op,
    meta_like,
    mutated,
    only_user,
    overloads,
    replace,
    same_meta,
    shape,
    without_bias,
)

if TYPE_CHECKING:
    from .context import PassContext

MUL = overloads("mul.Tensor", "mul.Scalar")
DIV = overloads("div.Tensor", "div.Scalar")
MIN_CHANNELS = 16  # with fewer, a tile of the kernel is mostly empty


def bias_add(gm: fx.GraphModule, ctx: PassContext) -> int:
    """Takes biases off convolutions and linears, in three rounds: see `fuse_residual`, `fuse_bias`, `fuse_token_bias`.

    Residuals come first: a bias that is left when they are done has none.
    """
    if not ctx.supported(kernel.launch):
        return 0
    graph, pinned = gm.graph, mutated(gm.graph)
    count = rewrite_each(graph, ADD, pinned, lambda add: fuse_residual(add, pinned))
    count += rewrite_each(graph, CONV, pinned, lambda conv: fuse_bias(conv, pinned))
    return count + rewrite_each(graph, ADD, pinned, lambda add: fuse_token_bias(add, pinned))


def fuse_residual(add: fx.Node, pinned: set[fx.Node]) -> bool:
    """Replaces a residual addition to a convolution.

    Pattern: scale * (conv2d(x, weight, bias) + residual), or divided by a number, or without a scale
    Replacement: kernel.launch(conv2d(x, weight), bias, residual, scale)
    """
    if argument(add, 2, "alpha", 1) != 1:
        return False
    # Of two convolutions the later is taken: the other one is done by then.
    conv: Any = add.args[1]
    residual: Any = add.args[0]
    if not is_biased_operand(conv, add):
        conv, residual = residual, conv
    if not is_biased_operand(conv, add) or not same_meta(residual, add) or conv is residual:
        return False
    if conv in pinned or residual in pinned:
        return False
    last, factor = match_scale(add, pinned)
    graph = add.graph
    with graph.inserting_before(conv):
        bare = without_bias(conv)
    with graph.inserting_before(add):
        new = call(graph, kernel.launch, (bare, argument(conv, 2, "bias"), residual, factor), last)
    replace(last, new)
    return True


def fuse_bias(conv: fx.Node, pinned: set[fx.Node]) -> bool:
    """Replaces the bias of a convolution that no residual is added to.

    Pattern: conv2d(x, weight, bias)
    Replacement: kernel.launch(conv2d(x, weight), bias, None, 1.0)

    PyTorch adds a bias to an NHWC tensor by a kernel whose accesses are not coalesced.
    """
    if not is_biased_conv(conv) or (shape(conv) or (0, 0))[1] < MIN_CHANNELS:
        return False
    with conv.graph.inserting_before(conv):
        bare = without_bias(conv)
        new = call(conv.graph, kernel.launch, (bare, argument(conv, 2, "bias"), None, 1.0), conv)
    replace(conv, new)
    return True


def fuse_token_bias(add: fx.Node, pinned: set[fx.Node]) -> bool:
    """Replaces a residual addition of tokens to a linear: cuBLAS has faster GEMMs without a bias.

    Pattern: linear(x, weight, bias) + residual  # (batch, tokens, channels), half precision
    Replacement: kernel.launch(linear(x, weight), bias, residual, 1.0), over (batch, channels, tokens)
    """
    size, graph = shape(add) or (), add.graph
    if len(size) != 3 or not is_residual_add(add) or dtype(add) not in HALF or not pinned.isdisjoint(add.args[:2]):
        return False
    with graph.inserting_before(add):
        x, residual, bias = split_linear_bias(add, pinned)
        if bias is None:
            return False
        # the kernel's channels are the second dimension, and lie last in memory: only views
        outer = meta_like(add, (size[0], size[2], size[1]))
        operands = [call(graph, aten.permute.default, (t, [0, 2, 1]), outer) for t in (x, residual)]
        total = call(graph, kernel.launch, (operands[0], bias, operands[1], 1.0), outer)
        new = call(graph, aten.permute.default, (total, [0, 2, 1]), add)
    replace(add, new)
    return True


def is_biased_operand(conv: Any, add: fx.Node) -> bool:
    """Whether `conv` is a convolution with a bias that only `add` reads, of its shape and dtype."""
    return is_biased_conv(conv) and only_user(conv) is add and same_meta(conv, add)


def is_biased_conv(conv: Any) -> bool:
    """Whether `conv` is a batched 2-D convolution with a bias, in a dtype that the kernel supports."""
    if not is_op(conv, CONV):
        return False
    bias = argument(conv, 2, "bias")
    return (
        isinstance(bias, fx.Node)
        and len(shape(conv) or ()) == 4
        and dtype(conv) in KERNEL_DTYPES
        and dtype(bias) == dtype(conv)
    )


def match_scale(add: fx.Node, pinned: set[fx.Node]) -> tuple[fx.Node, float]:
    """Returns the multiplication by a number that alone reads `add`, and the number; otherwise `add` and 1.0."""
    user = only_user(add)
    if user is None or user in pinned or not same_meta(user, add) or user.args[0] is not add:
        return add, 1.0
    number = argument(user, 1, "other")
    if not is_number(number):
        return add, 1.0
    if is_op(user, MUL):
        return user, float(number)
    if is_op(user, DIV) and number != 0:
        return user, 1.0 / number
    return add, 1.0
