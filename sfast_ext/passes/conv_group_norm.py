"""A group norm goes into the convolution that makes its picture, with what is added to that on the way."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

from torch import fx

from sfast_ext.kernels.conv import conv2d
from sfast_ext.kernels.group_norm import add_group_norm, group_norm
from sfast_ext.kernels.group_norm import conv_group_norm as kernel

from .rewrite import call, dtype, is_op, mutated, only_user, replace

if TYPE_CHECKING:
    from . import PassContext

OPTIONS = ("silu", "out_dtype")


def conv_group_norm(gm: fx.GraphModule, ctx: PassContext) -> int:
    """After conv2d, whose kernel takes the statistics."""
    if not ctx.serves(kernel):
        return 0
    pinned, count = mutated(gm.graph), 0
    for norm in list(gm.graph.nodes):
        if not is_op(norm, (group_norm.launch, add_group_norm.launch)) or norm in pinned:
            continue
        found = operands(norm)
        if found is None or found[0] in pinned:
            continue
        conv, rest = found
        options = {name: norm.kwargs[name] for name in OPTIONS if name in norm.kwargs}
        with gm.graph.inserting_before(norm):
            new = call(gm.graph, kernel.launch, (*conv.args, *rest), norm, options)
            if is_op(norm, (group_norm.launch,)):
                new.meta["val"] = (None, norm.meta.get("val"))
                new = call(gm.graph, operator.getitem, (new, 1), norm)
        replace(norm, new)
        count += 1
    return count


def operands(norm: fx.Node) -> tuple[fx.Node, tuple[Any, ...]] | None:
    """A convolution that only the norm sees, and the kernel's other operands: shift, residual, and the norm's."""
    if norm.kwargs.get("patches", False):
        return None
    if is_op(norm, (group_norm.launch,)):
        if len(norm.args) != 5 or not made_for(norm.args[0], norm):
            return None
        return norm.args[0], (norm.kwargs.get("shift"), None, *norm.args[1:])
    x, bias, residual, scale = norm.args[:4]
    if len(norm.args) != 8 or scale != 1.0 or residual is None:
        return None
    for conv, other in ((x, residual), (residual, x)):
        if other is not conv and made_for(conv, norm) and dtype(other) == dtype(conv):
            return conv, (bias, other, *norm.args[4:])
    return None


def made_for(conv: Any, norm: fx.Node) -> bool:
    return is_op(conv, (conv2d.launch,)) and only_user(conv) is norm
