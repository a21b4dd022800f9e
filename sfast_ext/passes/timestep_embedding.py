"""The sinusoidal embedding of timesteps and of SDXL's sizes, with the swap of its halves and the casts around it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import fx

from sfast_ext.kernels.pointwise import timestep_embedding as kernel

from .fusion import fusion
from .geglu import half
from .rewrite import KERNEL_DTYPES, argument, call, dtype, is_cast, is_op, only_user, overloads, replace, shape

if TYPE_CHECKING:
    from .context import PassContext

CAT = overloads("cat", "concat")
SIN, COS = overloads("sin"), overloads("cos")
MUL = overloads("mul.Tensor")


class TimestepEmbeddingMatch(NamedTuple):
    t: fx.Node
    frequency: fx.Node
    sine_first: bool


@fusion(CAT, needs=(kernel.launch,))
def timestep_embedding(cat: fx.Node, pinned: set[fx.Node], ctx: PassContext) -> bool:
    """Replaces an embedding, the swap of its halves that alone reads it, and the cast that alone reads the result.

    Pattern: [cast]([swap](cat([sin(t * frequency), cos(t * frequency)], 1))), in either order
    Replacement: kernel.launch(t, frequency, sine_first=..., out_dtype=...)
    """
    found = match(cat)
    if found is None or not pinned.isdisjoint([found.t, found.frequency, *cat.all_input_nodes]):
        return False
    last = match_swap(cat, pinned)
    sine_first = found.sine_first if last is cat else not found.sine_first
    user = only_user(last)
    if user is not None and is_cast(user) and user not in pinned and dtype(user) in KERNEL_DTYPES:
        last = user
    with cat.graph.inserting_before(last):
        options = {"sine_first": sine_first, "out_dtype": dtype(last)}
        new = call(cat.graph, kernel.launch, (found.t, found.frequency), last, options)
    replace(last, new)
    return True


def match(cat: fx.Node) -> TimestepEmbeddingMatch | None:
    """Matches sine and cosine of one float32 product of timesteps (N, 1) and frequencies (1, F)."""
    parts = match_pair(cat)
    if parts is None:
        return None
    first, second = parts
    sine_first = is_op(first, SIN) and is_op(second, COS)
    if not sine_first and not (is_op(first, COS) and is_op(second, SIN)):
        return None
    angle: Any = first.args[0]
    if angle is not second.args[0] or not is_op(angle, MUL):
        return None
    size = shape(angle) or ()
    for t, frequency in (angle.args, angle.args[::-1]):
        if len(size) == 2 and shape(t) == (size[0], 1) and shape(frequency) in ((1, size[1]), (size[1],)):
            break
    else:
        return None
    if is_cast(t) and dtype(t) == torch.float32 and dtype(t.args[0]) in kernel.TIMES:
        t = t.args[0]
    # their product, its sine and its cosine are float32 then
    alike = dtype(frequency) == torch.float32 and dtype(t) in kernel.TIMES
    return TimestepEmbeddingMatch(t, frequency, sine_first) if alike else None


def match_swap(node: fx.Node, pinned: set[fx.Node]) -> fx.Node:
    """Returns the concatenation of second and first half of `node`, if nothing else reads these; otherwise `node`."""
    slices = list(node.users)
    users = {only_user(part) for part in slices}
    last = users.pop() if len(slices) == 2 and len(users) == 1 else None
    parts = None if last is None or last in pinned or not pinned.isdisjoint(slices) else match_pair(last)
    if last is None or parts is None or half(parts[0]) != (node, 1) or half(parts[1]) != (node, 0):
        return node
    return last


def match_pair(node: Any) -> tuple[fx.Node, fx.Node] | None:
    """Matches a concatenation of two tensors (N, F) along F."""
    if not is_op(node, CAT) or len(node.args[0]) != 2 or len(shape(node) or ()) != 2:
        return None
    first, second = node.args[0]
    return (first, second) if argument(node, 1, "dim", 0) in (1, -1) and shape(first) == shape(second) else None
