"""Attention written as softmax(scale * Q @ K^T + mask) @ V, rewritten as one scaled dot product attention (SDPA).

AUTOMATIC1111's optimisations write it so, except for its two by SDPA, and so do the plain and sliced attentions of ldm
and diffusers. They use different matmuls: einsum, bmm, baddbmm, matmul. SDPA accumulates in fp32 and never stores the
scores.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import fx

from .cleanup import PERMUTE, permutation
from .fusion import fusion
from .rewrite import (
    ADD,
    argument,
    aten,
    call,
    dtype,
    is_number,
    is_op,
    meta_like,
    only_user,
    overloads,
    precedes,
    replace,
    shape,
)
from .rewrite import CAST as CASTS

if TYPE_CHECKING:
    from .context import PassContext

SOFTMAX = overloads("softmax.int", "_softmax", "special_softmax")
BMM = overloads("bmm", "matmul")
BADDBMM = overloads("baddbmm")
EINSUM = overloads("einsum")
MUL = overloads("mul.Tensor", "mul.Scalar")
DIV = overloads("div.Tensor", "div.Scalar")


class ScoresMatch(NamedTuple):
    """The operand of a softmax: scale * q @ k^T + mask."""

    q: fx.Node  # (..., queries, channels)
    k: fx.Node  # (..., keys, channels) after the permutation `order`
    order: list[int] | None
    scale: float
    mask: fx.Node | None


class ValuesMatch(NamedTuple):
    matmul: fx.Node  # of the probabilities and the values
    v: fx.Node
    swapped: bool = False
    """Whether it multiplies transposed values, (..., channels, keys), by transposed probabilities: the result is
    transposed as well."""


@fusion(SOFTMAX)
def scaled_dot_product(softmax: fx.Node, pinned: set[fx.Node], ctx: PassContext) -> bool:
    """Replaces a softmax, the matmuls before and after it, and the scale, mask and casts between them.

    Pattern: matmul(softmax(scale * matmul(q, k^T) + mask, -1), v)
    Replacement: scaled_dot_product_attention(q, k, v, mask, scale=scale)

    Each matmul is matmul, bmm or einsum; the first may be baddbmm.

    Pattern: matmul(v^T, softmax(...)^T)
    Replacement: scaled_dot_product_attention(q, k, v, ...)^T
    """
    scores = match_scores(softmax, pinned)
    values = match_values(softmax, pinned) if scores is not None else None
    if scores is None or values is None or not are_valid(scores, values):
        return False
    replace_with_sdpa(scores, values)
    return True


def match_scores(softmax: fx.Node, pinned: set[fx.Node]) -> ScoresMatch | None:
    """Matches the operand of a softmax over the last dimension; None if a value on the way has another user."""
    size = shape(softmax)
    if not size or argument(softmax, 1, "dim") not in (-1, len(size) - 1):
        return None
    scale, mask = 1.0, None
    user, node = softmax, softmax.args[0]
    while isinstance(node, fx.Node) and node not in pinned and only_user(node) is user:
        user = node
        if is_float_cast(node):
            node = node.args[0]
        elif is_op(node, MUL | DIV) and is_number(argument(node, 1, "other")):
            number = argument(node, 1, "other")
            if is_op(node, DIV) and number == 0:
                return None
            scale *= number if is_op(node, MUL) else 1 / number
            node = node.args[0]
        elif is_op(node, ADD) and argument(node, 2, "alpha", 1) == 1 and mask is None and scale == 1.0:
            scores, mask = split_mask(node)
            if mask is None or mask in pinned:
                return None
            node = scores
        elif is_op(node, BADDBMM):
            added, a, b = node.args[:3]
            beta = argument(node, 3, "beta", 1)
            if beta != 0 and (beta != 1 or mask is not None or scale != 1.0):
                return None
            mask = added if beta != 0 else mask
            return match_bmm(a, b, scale * argument(node, 4, "alpha", 1), mask, pinned)
        elif is_op(node, BMM):
            return match_bmm(node.args[0], node.args[1], scale, mask, pinned)
        elif is_op(node, EINSUM):
            equation, operands = node.args[:2]
            if not is_scores_equation(equation) or len(operands) != 2 or not pinned.isdisjoint(operands):
                return None
            return ScoresMatch(operands[0], operands[1], None, scale, mask)
        else:
            return None
    return None


def split_mask(node: fx.Node) -> tuple[Any, fx.Node | None]:
    """Splits an addition into scores and mask. The scores are a matmul, perhaps cast or scaled, of the sum's shape."""
    for scores, mask in (node.args[:2], node.args[1::-1]):
        if isinstance(scores, fx.Node) and isinstance(mask, fx.Node) and shape(scores) == shape(node):
            under = scores
            while is_float_cast(under) or (is_op(under, MUL | DIV) and is_number(argument(under, 1, "other"))):
                under = under.args[0]
            if is_op(under, BADDBMM | BMM | EINSUM):
                return scores, mask
    return None, None


def match_bmm(a: Any, b: Any, scale: float, mask: Any, pinned: set[fx.Node]) -> ScoresMatch | None:
    """Matches a matmul of queries (..., L, D) and transposed keys (..., D, S)."""
    size = shape(b)
    if a in pinned or not isinstance(a, fx.Node) or size is None or len(size) < 3:
        return None
    order, source = list(range(len(size))), b
    if is_op(b, PERMUTE):
        found, source = permutation(b), b.args[0]
        if found is None:
            return None
        order = found
    order[-2:] = order[:-3:-1]
    if b in pinned or source in pinned:
        return None
    return ScoresMatch(a, source, None if order == sorted(order) else order, scale, mask)


def match_values(softmax: fx.Node, pinned: set[fx.Node]) -> ValuesMatch | None:
    """Matches the matmul of the probabilities, cast perhaps, with the values."""
    node = softmax
    user = only_user(node)
    while user is not None and is_float_cast(user) and user not in pinned:
        node, user = user, only_user(user)
    if user is None or user in pinned:
        return None
    if is_op(user, PERMUTE):
        return match_swapped(user, pinned)
    if is_op(user, BMM):
        probabilities, v = user.args[:2]
    elif is_op(user, EINSUM) and is_values_equation(user.args[0]) and len(user.args[1]) == 2:
        probabilities, v = user.args[1]
    else:
        return None
    if probabilities is not node or v is node or not isinstance(v, fx.Node) or v in pinned:
        return None
    return ValuesMatch(user, v)


def match_swapped(turned: fx.Node, pinned: set[fx.Node]) -> ValuesMatch | None:
    """Matches the matmul of transposed values with transposed probabilities: attention over the pixels of an image."""
    size, user = shape(turned) or (), only_user(turned)
    if permutation(turned) != swap_of(len(size)) or user is None or user in pinned or not is_op(user, BMM):
        return None
    v, probabilities = user.args[:2]
    if probabilities is not turned or v is turned or not isinstance(v, fx.Node) or v in pinned:
        return None
    return ValuesMatch(user, v, True) if len(shape(v) or ()) == len(size) else None


def swap_of(rank: int) -> list[int]:
    """The permutation that exchanges the last two of so many dimensions."""
    return [*range(rank - 2), rank - 1, rank - 2]


def swapped(size: tuple[int, ...] | None) -> tuple[int, ...] | None:
    """A shape with its last two sizes exchanged."""
    return None if size is None else (*size[:-2], *size[:-3:-1])


def is_float_cast(node: Any) -> bool:
    """Whether a node casts between floating-point dtypes. It may round: SDPA rounds scores and probabilities less."""
    if not is_op(node, CASTS) or not isinstance(node.args[0], fx.Node):
        return False
    old, new = dtype(node.args[0]), dtype(node)
    if old is None or new is None or node.args[0].meta["val"].device != node.meta["val"].device:
        return False
    return old.is_floating_point and new.is_floating_point


def is_scores_equation(equation: str) -> bool:
    """Whether an equation is like "b i d, b j d -> b i j"."""
    parts = labels(equation)
    if parts is None:
        return False
    q, k, out = parts
    batch = q[:-2]
    return (
        len(q) >= 3 and k[:-2] == out[:-2] == batch and k[-1] == q[-1] and out[-2:] == q[-2] + k[-2]
        and len({*batch, *q[-2:], k[-2]}) == len(batch) + 3
    )  # fmt: skip


def is_values_equation(equation: str) -> bool:
    """Whether an equation is like "b i j, b j d -> b i d"."""
    parts = labels(equation)
    if parts is None:
        return False
    p, v, out = parts
    batch = p[:-2]
    return (
        len(p) >= 3 and v[:-2] == out[:-2] == batch and v[-2] == p[-1] and out[-2:] == p[-2] + v[-1]
        and len({*batch, *p[-2:], v[-1]}) == len(batch) + 3
    )  # fmt: skip


def labels(equation: Any) -> tuple[str, str, str] | None:
    """Returns the subscripts of two operands and of the result, all of one rank; None for other equations."""
    if not isinstance(equation, str) or "." in equation or equation.count("->") != 1:
        return None
    left, out = equation.replace(" ", "").split("->")
    operands = left.split(",")
    if len(operands) != 2 or not len(operands[0]) == len(operands[1]) == len(out):
        return None
    return operands[0], operands[1], out


def are_valid(scores: ScoresMatch, found: ValuesMatch) -> bool:
    """Whether SDPA takes operands of these shapes and dtypes, with nothing broadcast but the mask."""
    q, k, values, out = shape(scores.q), shape(scores.k), shape(found.v), shape(found.matmul)
    if found.swapped:
        values, out = swapped(values), swapped(out)
    if not (q and k and values and out) or not len(q) == len(k) == len(values) == len(out) >= 3:
        return False
    if scores.order is not None:
        k = tuple(k[dim] for dim in scores.order)
    if not q[:-2] == k[:-2] == values[:-2] or q[-1] != k[-1] or k[-2] != values[-2]:
        return False
    if out != (*q[:-1], values[-1]) or math.prod(out) == 0 or q[-1] == 0 or k[-2] == 0:
        return False
    kinds = {dtype(x) for x in (scores.q, scores.k, found.v, found.matmul)}
    if not all(kind is not None and kind.is_floating_point for kind in kinds):
        return False
    if scores.mask is None:
        return True
    mask, wanted = shape(scores.mask), (*q[:-1], k[-2])
    kind = dtype(scores.mask)
    if mask is None or kind is None or not kind.is_floating_point or len(mask) > len(wanted):
        return False
    return all(a in (1, b) for a, b in zip(mask[::-1], wanted[::-1]))


def replace_with_sdpa(scores: ScoresMatch, found: ValuesMatch) -> None:
    """Replaces the second matmul by SDPA. If dtypes differ, as when only the scores are in fp32, it runs in the
    widest."""
    matmul, v = found.matmul, found.v
    out_size = shape(matmul) or ()
    graph, q, k, mask = matmul.graph, scores.q, scores.k, scores.mask
    with graph.inserting_before(matmul):
        if scores.order is not None:
            k = permuted(k, scores.order, matmul)
        if found.swapped:
            v, out_size = permuted(v, swap_of(len(out_size)), matmul), swapped(out_size) or ()
        wide = widest(*(kind for x in (q, k, v) if (kind := dtype(x)) is not None))
        q, k, v, mask = (x if x is None else cast(x, wide) for x in (q, k, v, mask))
        options = scale_option(scores.scale, (shape(q) or (1,))[-1])
        args = (q, k, v) if mask is None else (q, k, v, mask)
        out = call(graph, aten.scaled_dot_product_attention.default, args, meta_like(q, out_size), options)
        out = cast(out, dtype(matmul))
        if found.swapped:
            out = call(graph, aten.permute.default, (out, swap_of(len(out_size))), matmul)
    replace(matmul, out)


def permuted(x: fx.Node, order: list[int], before: fx.Node) -> fx.Node:
    """The permutation of a value, in front of a node: one that is there already, as attentions over slices share it."""
    for user in x.users:
        if user.target is aten.permute.default and user.args == (x, order) and precedes(user, before):
            return user
    size = shape(x) or ()
    return call(x.graph, aten.permute.default, (x, order), meta_like(x, [size[dim] for dim in order]))


def scale_option(scale: float, channels: int) -> dict[str, float]:
    """Returns SDPA's keyword argument, left out if it is the default."""
    return {} if math.isclose(scale, channels**-0.5, rel_tol=1e-6) else {"scale": scale}


def widest(*kinds: torch.dtype) -> torch.dtype:
    kind = kinds[0]
    for other in kinds[1:]:
        kind = torch.promote_types(kind, other)
    return kind


def cast(x: Any, kind: Any) -> fx.Node:
    if dtype(x) == kind:
        return x
    return call(x.graph, aten.to.dtype, (x, kind), meta_like(x, shape(x) or (), kind))
