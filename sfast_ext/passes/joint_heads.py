"""Queries or keys of text and of an image that one attention reads, written next to each other by the kernel of their
norms and rotation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from torch import fx

from sfast_ext.kernels.pointwise import norm_rotary as kernel

from .fusion import fusion
from .norm_rotary import CAT, transposed
from .rewrite import argument, aten, call, dtype, is_op, meta_like, only_user, replace, shape

if TYPE_CHECKING:
    from .context import PassContext


@fusion(CAT, needs=(kernel.launch,), skip_pinned_inputs=True)
def joint_heads(cat: fx.Node, pinned: set[fx.Node], ctx: PassContext) -> bool:
    """Replaces two norms of heads, the concatenation of their tokens, and the rotation if that alone reads it.

    Pattern: norm_rotary.launch(cat([norm_rotary.launch(x, weight, eps), norm_rotary.launch(second, other, eps)], 1),
        None, None, cos, sin, form), also of tokens after heads; or the concatenation without a rotation
    Replacement: norm_rotary.launch(x, weight, eps, cos, sin, form, second, other)
    """
    size, parts = shape(cat) or (), [norm_of(part, cat) for part in cat.args[0]]  # type: ignore[union-attr]
    dim = argument(cat, 1, "dim", 0) % (len(size) or 1)
    if len(size) != 4 or dim not in (1, 2) or len(parts) != 2 or None in parts:
        return False
    (x, weight, eps), (second, other, other_eps) = (part.norm.args for part in parts)  # type: ignore[union-attr]
    if eps != other_eps or not pinned.isdisjoint([x, weight, second, other]):
        return False
    if {dtype(x), dtype(second)} != {dtype(cat)}:
        return False
    graph, last = cat.graph, cat
    view = only_user(cat)
    swapped = view is not None and is_op(view, (aten.transpose.int,)) and view.args[1:] == (1, 2)
    rotated = only_user(view) if swapped and view is not None else view
    read = view if swapped else cat
    angles: tuple[Any, ...] = (None, None, "none")
    # a rotation has heads after tokens
    if (dim == 2) == swapped and is_rotation(rotated, read) and pinned.isdisjoint([rotated, read]):
        assert rotated is not None
        last, angles = rotated, tuple(rotated.args[3:])
    with graph.inserting_before(last):
        # heads after tokens
        swap = [part.swapped != (dim == 2) for part in parts]  # type: ignore[union-attr]
        tensors = [transposed(graph, t) if turn else t for t, turn in zip((x, second), swap, strict=True)]
        like = meta_like(cat, (size[0], size[2], size[1], size[3]) if dim == 2 else size)
        new = call(graph, kernel.launch, (tensors[0], weight, eps, *angles, tensors[1], other), like)
        if last is cat and dim == 2:
            new = transposed(graph, new)  # type: ignore[assignment]
    replace(last, new)
    return True


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
