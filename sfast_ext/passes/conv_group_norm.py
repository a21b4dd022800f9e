"""Group norm fused into the convolution that makes its input, with the additions between them."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import fx

from sfast_ext.kernels.conv import conv2d
from sfast_ext.kernels.group_norm import add_group_norm, group_norm
from sfast_ext.kernels.group_norm import conv_group_norm as kernel

from .fusion import fusion
from .rewrite import call, dtype, is_op, only_user, replace

if TYPE_CHECKING:
    from .context import PassContext

OPTIONS = ("silu", "out_dtype")


class ConvGroupNormMatch(NamedTuple):
    conv: fx.Node
    rest: tuple[Any, ...]  # the kernel's operands after those of the convolution: shift, residual, those of the norm


@fusion((group_norm.launch, add_group_norm.launch), needs=(kernel.launch,))
def conv_group_norm(norm: fx.Node, pinned: set[fx.Node], ctx: PassContext) -> bool:
    """Replaces a norm and the convolution that only it reads: the convolution's kernel takes the statistics.

    Pattern: group_norm.launch(conv2d.launch(x, weight), ..., shift=shift)
    Replacement: (_, normed) = kernel.launch(x, weight, shift, None, ...)

    Pattern: (sum, normed) = add_group_norm.launch(conv2d.launch(x, weight), bias, residual, 1.0, ...)
    Replacement: (sum, normed) = kernel.launch(x, weight, bias, residual, ...)

    If memory counts, convolution and norm stay apart, so that the norm takes the convolution's memory (`in_place`).
    """
    found = match(norm) if ctx.most_bytes is None else None
    if found is None or found.conv in pinned:
        return False
    graph = norm.graph
    options = {name: norm.kwargs[name] for name in OPTIONS if name in norm.kwargs}
    with graph.inserting_before(norm):
        new = call(graph, kernel.launch, (*found.conv.args, *found.rest), norm, options)
        if is_op(norm, (group_norm.launch,)):
            new.meta["val"] = (None, norm.meta.get("val"))
            new = call(graph, operator.getitem, (new, 1), norm)
    replace(norm, new)
    return True


def match(norm: fx.Node) -> ConvGroupNormMatch | None:
    """Matches a norm of a convolution, or of the sum of a convolution and a residual.

    A norm that writes the im2col matrix is not matched.
    """
    if norm.kwargs.get("patches", False):
        return None
    if is_op(norm, (group_norm.launch,)):
        conv: Any = norm.args[0]
        if len(norm.args) != 5 or not is_only_read_by(conv, norm):
            return None
        return ConvGroupNormMatch(conv, (norm.kwargs.get("shift"), None, *norm.args[1:]))
    x, bias, residual, scale = norm.args[:4]
    if len(norm.args) != 8 or scale != 1.0 or residual is None:
        return None
    for conv, other in ((x, residual), (residual, x)):
        if other is not conv and is_only_read_by(conv, norm) and dtype(other) == dtype(conv):
            return ConvGroupNormMatch(conv, (bias, other, *norm.args[4:]))
    return None


def is_only_read_by(conv: Any, norm: fx.Node) -> bool:
    return is_op(conv, (conv2d.launch,)) and only_user(conv) is norm
