"""Queries or keys of text and of an image that one attention reads, written next to each other by the kernel of their
norms and rotation."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import fx

from sfast_ext.kernels.pointwise import norm_rotary as kernel

from .attention import ATTENTION
from .cleanup import PERMUTE
from .eight_bits_match import is_part
from .fusion import fusion
from .norm_rotary import CAT, MAX_COLUMNS, UNBIND, transposed
from .rewrite import (
    HALF,
    RESHAPE,
    argument,
    aten,
    call,
    dtype,
    is_op,
    meta_like,
    only_user,
    overloads,
    replace,
    shape,
)

if TYPE_CHECKING:
    from .context import PassContext


SELECT = overloads("select.int", "slice.Tensor")


@fusion(CAT, needs=(kernel.launch,), skip_pinned_inputs=True)
def joint_heads(cat: fx.Node, pinned: set[fx.Node], ctx: PassContext) -> bool:
    """Replaces two norms of heads, the concatenation of their tokens, and the rotation if that alone reads it.

    Pattern: norm_rotary.launch(cat([norm_rotary.launch(x, weight, eps), norm_rotary.launch(second, other, eps)], 1),
        None, None, cos, sin, form), also of tokens after heads; or the concatenation without a rotation, also of parts
        of packed products, as values are
    Replacement: norm_rotary.launch(x, weight, eps, cos, sin, form, second, other)

    PyTorch's concatenation of parts that are apart in memory takes five times as long.
    """
    size, parts = shape(cat) or (), cat.args[0]
    dim = argument(cat, 1, "dim", 0) % (len(size) or 1)
    if len(size) != 4 or dim not in (1, 2) or len(parts) != 2:  # type: ignore[arg-type]
        return False
    norms = [norm_of(part, cat) for part in parts]  # type: ignore[union-attr]
    if None in norms:
        return joint_parts(cat, dim, pinned)
    (x, weight, eps), (second, other, other_eps) = (part.norm.args for part in norms)  # type: ignore[union-attr]
    if eps != other_eps or not pinned.isdisjoint([x, weight, second, other]):
        return False
    if {dtype(x), dtype(second)} != {dtype(cat)}:
        return False
    last, view = cat, only_user(cat)
    swapped = view is not None and is_op(view, (aten.transpose.int,)) and view.args[1:] == (1, 2)
    rotated = only_user(view) if swapped and view is not None else view
    read = view if swapped else cat
    angles: tuple[Any, ...] = (None, None, "none")
    # a rotation has heads after tokens
    if (dim == 2) == swapped and is_rotation(rotated, read) and pinned.isdisjoint([rotated, read]):
        assert rotated is not None
        last, angles = rotated, tuple(rotated.args[3:])
    with cat.graph.inserting_before(last):
        # heads after tokens
        swap = [part.swapped != (dim == 2) for part in norms]  # type: ignore[union-attr]
        tensors = [transposed(cat.graph, t) if turn else t for t, turn in zip((x, second), swap, strict=True)]
    replace(last, joined(cat, last, dim, (tensors[0], weight, eps, *angles, tensors[1], other)))
    return True


def joint_parts(cat: fx.Node, dim: int, pinned: set[fx.Node]) -> bool:
    """Replaces a concatenation of tokens of heads that are parts of packed products."""
    size, (x, second) = shape(cat) or (), cat.args[0]  # type: ignore[misc]
    if dtype(cat) not in HALF or size[3] > MAX_COLUMNS or size[3] % 2 or not is_part_of_packed(x):
        return False
    if {dtype(x), dtype(second)} != {dtype(cat)} or not pinned.isdisjoint([x, second]) or not is_part_of_packed(second):
        return False
    if not of_attention(cat):
        return False
    with cat.graph.inserting_before(cat):
        first, other = (transposed(cat.graph, t) if dim == 2 else t for t in (x, second))
    replace(cat, joined(cat, cat, dim, (first, None, None, None, None, "none", other, None)))
    return True


def joined(cat: fx.Node, last: fx.Node, dim: int, args: tuple[Any, ...]) -> fx.Node:
    """The call of the kernel in place of a concatenation, or of the rotation behind it."""
    graph, size = cat.graph, shape(cat) or ()
    with graph.inserting_before(last):
        like = meta_like(cat, (size[0], size[2], size[1], size[3]) if dim == 2 else size)
        new = call(graph, kernel.launch, args, like)
        return transposed(graph, new) if last is cat and dim == 2 else new  # type: ignore[return-value]


def of_attention(x: fx.Node) -> bool:
    """Whether attentions alone read a value."""
    return bool(x.users) and all(
        (is_op(user, ATTENTION) and x in user.args[:3]) or (is_op(user, RESHAPE | PERMUTE) and of_attention(user))
        for user in x.users
    )


def is_part_of_packed(x: Any) -> bool:
    """Whether heads are a part of a product of several layers, so that their tokens are apart in memory."""
    while isinstance(x, fx.Node):
        if is_op(x, SELECT) or is_part(x) or (is_op(x, (operator.getitem,)) and is_op(x.args[0], UNBIND)):
            return True
        if not is_op(x, RESHAPE | PERMUTE):
            return False
        x = x.args[0]
    return False


class Norm(NamedTuple):
    """A norm of heads without a rotation."""

    norm: fx.Node
    swapped: bool
    """Whether it is read with the second and the third dimension exchanged."""


def norm_of(part: Any, cat: fx.Node) -> Norm | None:
    """The norm that a concatenation alone reads, in this place."""
    user, swapped = cat, is_op(part, (aten.transpose.int,)) and part.args[1:] == (1, 2)
    if swapped:
        if only_user(part) is not cat:
            return None
        user, part = part, part.args[0]
    plain = is_op(part, (kernel.launch,)) and len(part.args) == 3 and not part.kwargs and only_user(part) is user
    return Norm(part, swapped) if plain else None


def is_rotation(node: Any, x: Any) -> bool:
    """Whether a value is the rotation of x, without a norm."""
    plain = is_op(node, (kernel.launch,)) and len(node.args) == 6 and not node.kwargs
    return plain and node.args[:3] == (x, None, None)
