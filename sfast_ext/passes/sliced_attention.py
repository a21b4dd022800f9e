"""Attentions over slices of the queries, or of the heads, whose results are concatenated, merged into one.

Hosts slice attention so if the scores would not fit into free memory. SDPA never stores them.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from torch import fx

from .attention import ATTENTION, kernel_options
from .cleanup import PERMUTE, permutation
from .fusion import fusion
from .rewrite import argument, aten, call, dtype, is_op, meta_like, only_user, overloads, replace, shape
from .scaled_dot_product import cast, is_float_cast

if TYPE_CHECKING:
    from .context import PassContext

CAT = overloads("cat", "concat")
SLICE = overloads("slice.Tensor")
NARROW = overloads("narrow")


@fusion(CAT)
def sliced_attention(cat: fx.Node, pinned: set[fx.Node], ctx: PassContext) -> int:
    """Merges the attentions of a concatenation. Returns how many there were.

    Pattern: cat([sdpa(q[:, a:b], k, v), sdpa(q[:, b:c], k, v), ...], 1), or over slices of q, k and v along heads
    Replacement: sdpa(q, k, v)

    If each result is transposed first, it is the concatenation that is transposed.
    """
    cat = transposed_after(cat, pinned)
    pieces = match_slices(cat, pinned)
    operands = match_operands(cat, pieces, pinned) if pieces else None
    if operands is None:
        return 0
    first: Any = pieces[0]
    size = (*(shape(operands[0]) or ())[:-1], (shape(cat) or ())[-1])
    with cat.graph.inserting_before(cat):
        new = call(cat.graph, first.target, operands, meta_like(first, size), dict(first.kwargs))
        new = cast(new, dtype(cat))
    replace(cat, new)
    return len(pieces)


def transposed_after(cat: fx.Node, pinned: set[fx.Node]) -> fx.Node:
    """Concatenates attentions before they are transposed. Returns the concatenation; `cat` if it is not of that
    form.

    Pattern: cat([permute(sdpa(...), order), permute(sdpa(...), order), ...], dim)
    Replacement: permute(cat([sdpa(...), sdpa(...), ...], order[dim]), order)
    """
    parts, size = list(cat.args[0]), shape(cat) or ()  # type: ignore[arg-type]
    orders = [permutation(part) if is_op(part, PERMUTE) else None for part in parts]
    if not parts or orders[0] is None or any(order != orders[0] for order in orders):
        return cat
    if any(part in pinned or only_user(part) is not cat or not is_op(part.args[0], ATTENTION) for part in parts):
        return cat
    order = orders[0]
    dim = order[argument(cat, 1, "dim", 0) % len(size)]
    before = [size[order.index(i)] for i in range(len(size))]
    with cat.graph.inserting_before(cat):
        sources = [part.args[0] for part in parts]
        joined = call(cat.graph, cat.target, (sources, dim), meta_like(cat, before))
        new = call(cat.graph, aten.permute.default, (joined, order), cat)
    replace(cat, new)
    return joined


def match_slices(cat: fx.Node, pinned: set[fx.Node]) -> list[fx.Node]:
    """Matches the attentions that are concatenated, under casts; empty if there is another operand, or one has another
    user, a mask, or other options."""
    found = []
    for piece in cat.args[0]:  # type: ignore[union-attr]
        user = cat
        while is_float_cast(piece) and piece not in pinned and only_user(piece) is user:
            user, piece = piece, piece.args[0]
        given = kernel_options(piece) if is_op(piece, ATTENTION) and only_user(piece) is user else None
        if given is None or piece in pinned or given["mask"] is not None or given["is_causal"]:
            return []
        found.append(piece)
    alike = {(repr(dict(piece.kwargs)), len(piece.args), dtype(piece)) for piece in found}
    return found if len(alike) == 1 and len(found[0].args) == 3 else []


def match_operands(cat: fx.Node, pieces: list[fx.Node], pinned: set[fx.Node]) -> tuple[Any, Any, Any] | None:
    """Matches the queries, keys and values of all attentions: adjacent slices of one value, or one value for all."""
    size = shape(cat) or ()
    dim = argument(cat, 1, "dim", 0) % max(len(size), 1)
    if dim >= len(size) - 1:
        return None
    found: list[Any] = []
    for index in range(3):
        operands = [piece.args[index] for piece in pieces]
        if dim == len(size) - 2 and index > 0:
            # every slice of the queries meets all keys
            source = operands[0] if all(x is operands[0] for x in operands) else None
        else:
            source = sliced_source(operands, dim)
        if source is None or source in pinned:
            return None
        found.append(source)
    return found[0], found[1], found[2]


def sliced_source(slices: list[Any], dim: int) -> fx.Node | None:
    """Returns the value that adjacent slices cover from its first element along `dim` to its last."""
    source, at = None, 0
    for part in slices:
        span = slice_range(part, dim)
        if span is None or span[0] != at or (source is not None and part.args[0] is not source):
            return None
        source, at = part.args[0], span[1]
    return source if source is not None and at == (shape(source) or ())[dim] else None


def slice_range(part: Any, dim: int) -> tuple[int, int] | None:
    """Returns start and end of a slice along `dim`; None for other nodes."""
    if not is_op(part, SLICE | NARROW) or argument(part, 4, "step", 1) != 1:
        return None
    size = shape(part.args[0])
    if not size or argument(part, 1, "dim", 0) % len(size) != dim:
        return None
    start, end = argument(part, 2, "start"), argument(part, 3, "end")
    if is_op(part, NARROW):
        length = argument(part, 3, "length")
        end = start + length if type(start) is int and start >= 0 and type(length) is int else None
        return None if end is None else (start, end)
    start, end = (0 if start is None else start), (sys.maxsize if end is None else end)
    if type(start) is not int or type(end) is not int:
        return None
    start, end, _ = slice(start, end).indices(size[dim])
    return start, end
