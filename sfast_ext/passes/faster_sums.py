"""Linear layers and 3x3 convolutions whose sums may be in half precision, where the user has chosen so."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from sfast_ext.kernels.conv import conv2d, faster_conv2d
from sfast_ext.kernels.linear import faster_linear, linear_accumulate, linear_geglu, mma_gemm
from sfast_ext.kernels.pointwise import geglu

from .conv_match import stride_of
from .fusion import fusion
from .rewrite import CONV, LINEAR, argument, aten, call, dtype, is_op, is_weight, replace, shape

if TYPE_CHECKING:
    from .context import PassContext

_PRODUCTS = LINEAR | {linear_accumulate.launch, linear_geglu.launch}
_CONVOLUTIONS = CONV | {conv2d.launch}


@fusion(_PRODUCTS | _CONVOLUTIONS, needs=(faster_linear, faster_conv2d), skip_pinned_inputs=True)
def faster_sums(node: fx.Node, pinned: set[fx.Node], ctx: PassContext) -> bool:
    """Replaces products and convolutions in float16, on a GPU that adds up faster so.

    Pattern: linear(x, weight, bias); linear_accumulate.launch(x, weight, sum);
        linear_geglu.launch(x, weight, bias, ...); conv2d(x, weight, bias)  # 3x3, stride 1 or 2;
        conv2d.launch(x, weight)
    Replacement: faster_linear.launch(x, weight, bias), with the addition or GEGLU behind it;
        faster_conv2d.launch(x, weight, bias, stride)
    """
    if not ctx.faster_sums or dtype(node) != torch.float16 or not mma_gemm.available(ctx.device):
        return False
    with node.graph.inserting_before(node):
        new = _convolution(node, ctx) if is_op(node, _CONVOLUTIONS) else _product(node)
    if new is None:
        return False
    replace(node, new)
    return True


def _product(node: fx.Node) -> fx.Node | None:
    x: Any = node.args[0]
    weight, third = argument(node, 1, "weight"), argument(node, 2, "bias")
    rows, columns = shape(x), shape(weight)
    if rows is None or columns is None or len(columns) != 2 or dtype(x) != torch.float16 or dtype(weight) != dtype(x):
        return None
    accumulates = is_op(node, (linear_accumulate.launch,))
    bias = None if accumulates else third
    if bias is not None and dtype(bias) != torch.float16:
        return None
    val = torch.empty((*rows[:-1], columns[0]), dtype=torch.float16, device="meta")
    new = call(node.graph, faster_linear.launch, (x, weight) if bias is None else (x, weight, bias), val)
    if accumulates:
        return call(node.graph, aten.add.Tensor, (new, third), node)
    if is_op(node, (linear_geglu.launch,)):
        return call(node.graph, geglu.launch, (new,), node, dict(node.kwargs))
    new.meta["val"] = node.meta.get("val")
    return new


def _convolution(node: fx.Node, ctx: PassContext) -> fx.Node | None:
    x: Any = node.args[0]
    weight, bias = argument(node, 1, "weight"), None
    stride: int | None = 1
    if is_op(node, CONV):
        bias, stride = argument(node, 2, "bias"), stride_of(node)
        if stride is None or any(t is not None and dtype(t) != torch.float16 for t in (x, weight, bias)):
            return None
        if not is_weight(weight) or not ctx.arena.channels_last(weight.meta["weight"]):
            return None
    return call(node.graph, faster_conv2d.launch, (x, weight, bias, stride), node)
