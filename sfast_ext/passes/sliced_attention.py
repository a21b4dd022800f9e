"""Attentions over slices of the queries, or of the heads, whose results are put beside each other, as one.

Hosts cut attention so where the scores would not fit the memory that is free: SDPA never stores them.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from torch import fx

from .attention import ATTENTION, kernel_options
from .rewrite import argument, call, dtype, is_op, meta_like, mutated, only_user, overloads, replace, shape
from .scaled_dot_product import cast, is_float_cast

if TYPE_CHECKING:
    from . import PassContext

CAT = overloads("cat", "concat")
SLICE = overloads("slice.Tensor")
NARROW = overloads("narrow")


def sliced_attention(gm: fx.GraphModule, ctx: PassContext) -> int:
    """After scaled_dot_product. Counts the attentions that became one."""
    pinned, count = mutated(gm.graph), 0
    for node in list(gm.graph.nodes):
        if not is_op(node, CAT) or node in pinned:
            continue
        pieces = match_slices(node, pinned)
        operands = match_operands(node, pieces, pinned) if pieces else None
        if operands is None:
            continue
        first = pieces[0]
        size = (*(shape(operands[0]) or ())[:-1], (shape(node) or ())[-1])
        with gm.graph.inserting_before(node):
            new = call(gm.graph, first.target, operands, meta_like(first, size), dict(first.kwargs))
            new = cast(new, dtype(node))
        replace(node, new)
        count += len(pieces)
    return count


def match_slices(cat: fx.Node, pinned: set[fx.Node]) -> list[fx.Node]:
    """What is put beside each other, under casts; nothing where that is not attention alone, or is seen by others."""
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
    """Queries, keys and values of all: slices of them in a row, or the same for each."""
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
    """What these are slices of, side by side from its first row to its last."""
    source, at = None, 0
    for part in slices:
        rows = slice_range(part, dim)
        if rows is None or rows[0] != at or (source is not None and part.args[0] is not source):
            return None
        source, at = part.args[0], rows[1]
    return source if source is not None and at == (shape(source) or ())[dim] else None


def slice_range(part: Any, dim: int) -> tuple[int, int] | None:
    """From where to where a node is a slice along a dimension."""
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
