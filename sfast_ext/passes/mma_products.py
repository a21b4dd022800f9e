"""Linear layers and 3x3 convolutions that a kernel of this project may compute on GeForce and A100, with exact sums or,
on GeForce if the user has chosen so, in half precision."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from sfast_ext.kernels.conv import conv2d, mma_conv2d
from sfast_ext.kernels.linear import linear_accumulate, linear_geglu, mma_gemm, mma_linear

from .conv_match import stride_of
from .fusion import fusion
from .rewrite import CONV, LINEAR, argument, call, dtype, is_op, is_weight, replace, shape

if TYPE_CHECKING:
    from .context import PassContext

_CHOOSING = {linear_accumulate.launch, linear_geglu.launch}
"""Kernels that choose between the two ways themselves."""
_CONVOLUTIONS = CONV | {conv2d.launch}


@fusion(LINEAR | _CHOOSING | _CONVOLUTIONS, needs=(mma_linear.launch, mma_conv2d.launch), skip_pinned_inputs=True)
def mma_products(node: fx.Node, pinned: set[fx.Node], ctx: PassContext) -> bool:
    """Replaces products and convolutions in half precision of at least `mma_gemm.MIN_ROWS` rows, on GeForce and A100.

    Pattern: linear(x, weight, bias); conv2d(x, weight, bias)  # 3x3, stride 1 or 2; conv2d.launch(x, weight)
    Replacement: mma_linear.launch(x, weight, bias); mma_conv2d.launch(x, weight, bias, stride)

    If sums may be in half precision, and the node is in float16, half_sums=True is added, to linear_accumulate and
    linear_geglu as well. Otherwise plans whose calls are rare, as a VAE's, are left as they are: to measure would take
    longer than it saves.
    """
    kind = dtype(node)
    half_sums = ctx.faster_sums and kind == torch.float16 and mma_gemm.half_sums_profitable(ctx.device)
    if not half_sums and (ctx.most_bytes is not None or is_op(node, _CHOOSING)):
        return False
    if kind is None or not mma_gemm.supported(ctx.device, kind):
        return False
    third = None if is_op(node, (conv2d.launch,)) else argument(node, 2, "bias")
    x, weight = node.args[0], argument(node, 1, "weight")
    size, convolution = shape(weight) or (), is_op(node, _CONVOLUTIONS)
    if len(size) != (4 if convolution else 2) or any(t is not None and dtype(t) != kind for t in (x, weight, third)):
        return False
    if math.prod(shape(node if convolution else x) or ()) < mma_gemm.MIN_ROWS * size[0 if convolution else 1]:
        return False
    options = {"half_sums": True} if half_sums else {}
    if is_op(node, _CHOOSING):
        node.kwargs = {**node.kwargs, **options}
        return True
    operands: tuple[Any, ...] = x, weight, third
    kernel: Any = mma_linear
    if convolution:
        stride = 1 if is_op(node, (conv2d.launch,)) else stride_of(node)
        if stride is None or not is_weight(weight) or not ctx.arena.channels_last(weight.meta["weight"]):
            return False
        operands, kernel = (*operands, stride), mma_conv2d
    with node.graph.inserting_before(node):
        new = call(node.graph, kernel.launch, operands, node, options)
    replace(node, new)
    return True
