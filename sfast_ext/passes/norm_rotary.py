"""Rotary embedding of queries and keys as one kernel, with the RMS norm of their heads."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import fx

from sfast_ext.kernels.pointwise import modulated_norm
from sfast_ext.kernels.pointwise import norm_rotary as kernel

from .fusion import fusion
from .rewrite import (
    ADD,
    CAST,
    HALF,
    KERNEL_DTYPES,
    RESHAPE,
    argument,
    aten,
    call,
    dtype,
    erase,
    is_cast,
    is_op,
    is_pure,
    meta_like,
    only_user,
    overloads,
    replace,
    same_meta,
    shape,
    strip_lossless_casts,
    value,
)

if TYPE_CHECKING:
    from .context import PassContext

MUL = overloads("mul.Tensor")
NEG = overloads("neg")
CAT = overloads("cat")
STACK = overloads("stack")
UNBIND = overloads("unbind.int")
CHUNK = overloads("chunk")
SELECT = overloads("select.int")
SLICE = overloads("slice.Tensor")
TO_COMPLEX, TO_REAL = overloads("view_as_complex"), overloads("view_as_real")
MAX_COLUMNS = 256


class Rotation(NamedTuple):
    """What is rotated, by which angles, and the result, in the dtype of x."""

    x: fx.Node
    cosine: fx.Node
    sine: fx.Node | None
    form: str
    last: fx.Node
    read: fx.Node
    """What reads the angles."""


@fusion(TO_REAL | ADD, needs=(kernel.launch,), skip_pinned_inputs=True)
def rotary(node: fx.Node, pinned: set[fx.Node], ctx: PassContext) -> bool:
    """Replaces the rotation of the columns of heads: (batch, tokens, heads, columns), or tokens after heads.

    Pattern: cast(view_as_real(view_as_complex(pairs of float(x)) * table)); cast(float(x) * cos + float(turned) * sin)
        with turned the pairs (-b, a) of neighbours or of halves (a, b)
    Replacement: kernel.launch(x, None, None, cos, sin, form)

    Computes in float32, as these do, and rounds once.
    """
    found = complex_rotation(node) if is_op(node, TO_REAL) else real_rotation(node)
    if found is None or not pinned.isdisjoint({found.x, found.last, found.sine}):
        return False
    written = found.cosine in pinned
    if written and (found.form != "complex" or not unchanged(found.read, found.last)):
        return False
    size = shape(found.x) or ()
    if len(size) != 4 or size[-1] > MAX_COLUMNS or dtype(found.x) not in KERNEL_DTYPES:
        return False
    graph, last = node.graph, found.last
    heads_first = of_tokens(found, 2)
    if not heads_first and not of_tokens(found, 1):
        return False
    with graph.inserting_before(last):
        x, cosine, sine = found.x, found.cosine, found.sine
        if written:
            # a copy: what may lie in memory that is written to would keep all that reads it from being rewritten
            cosine = call(graph, aten.clone.default, (cosine,), cosine)
        if found.form == "complex":
            cosine = pairs_of(cosine)
        if heads_first:
            x, cosine, sine = (transposed(graph, t) for t in (x, cosine, sine))  # type: ignore[assignment]
        new = call(graph, kernel.launch, (x, None, None, cosine, sine, found.form), x)
        if heads_first:
            new = transposed(graph, new)  # type: ignore[assignment]
    replace(last, new)
    return True


def unchanged(first: fx.Node, last: fx.Node) -> bool:
    """Whether nothing writes to any memory from one node on up to another, which comes after it."""
    node = first
    while node is not last:
        node = node.next
        if node.op == "root" or not is_pure(node):
            return False
    return True


def transposed(graph: fx.Graph, x: fx.Node | None) -> fx.Node | None:
    """x with the second and the third of at least four dimensions exchanged; what has fewer has neither."""
    size = shape(x)
    if x is None or size is None:
        return None
    if is_op(x, (aten.transpose.int,)) and x.args[1:] == (1, 2):
        return x.args[0]  # type: ignore[return-value]
    return call(graph, aten.transpose.int, (x, 1, 2), meta_like(x, (size[0], size[2], size[1], *size[3:])))


def pairs_of(table: fx.Node) -> fx.Node:
    """A table of complex numbers as pairs in float32, the same node for all that read it."""
    if dtype(table) != torch.complex64:
        table = behind(table, aten.to.dtype, (torch.complex64,), shape(table) or (), torch.complex64)
    return behind(table, aten.view_as_real.default, (), (*(shape(table) or ()), 2), torch.float32)


def behind(node: fx.Node, op: Any, args: tuple[Any, ...], size: tuple[int, ...], kind: torch.dtype) -> fx.Node:
    """An operation on a value at the place where that is computed."""
    for user in node.users:
        if is_op(user, (op,)) and user.args == (node, *args) and not user.kwargs and user.prev is node:
            return user
    with node.graph.inserting_after(node):
        return call(node.graph, op, (node, *args), meta_like(node, size, kind))


def of_tokens(found: Rotation, place: int) -> bool:
    """Whether the angles differ between tokens, the dimension `place` of x, and not between heads."""
    heads = 3 - place
    for angles in (found.cosine, found.sine):
        size = shape(angles)
        if size is None:
            continue
        if len(size) != 4 or size[0] not in (1, (shape(found.x) or ())[0]) or size[heads] != 1:
            return False
    return True


def complex_rotation(real: fx.Node) -> Rotation | None:
    """Matches the products of complex numbers: view_as_real's argument, and what follows."""
    product: Any = real.args[0]
    flat = only_user(real)
    if not is_op(product, MUL) or only_user(product) is not real or flat is None or not is_op(flat, RESHAPE):
        return None
    for number, table in (product.args[:2], product.args[1::-1]):
        if not is_op(number, TO_COMPLEX) or only_user(number) is not product or not isinstance(table, fx.Node):
            continue
        x, last = unpaired(number.args[0]), rounded(flat)
        if x is None or last is None or shape(flat) != shape(x) or not fits(table, x):
            continue
        angles, val = shape(table) or (), value(table)
        if (val is not None and val.is_conj()) or angles[-1:] != (shape(number) or ())[-1:]:
            continue
        if same_meta(x, last) and shape(product) == shape(number):
            return Rotation(x, table, None, "complex", last, product)
    return None


def fits(table: fx.Node, x: fx.Node) -> bool:
    """Whether what is rotated in float32 is rounded no worse: a table in float64 makes the original compute so."""
    kind = dtype(table)
    return kind == torch.complex64 or (kind == torch.complex128 and dtype(x) in HALF)


def unpaired(pairs: Any) -> fx.Node | None:
    """What is reshaped into pairs (..., C / 2, 2), under a cast to float32."""
    size = shape(pairs) or (0,)
    while is_op(pairs, RESHAPE | CAST) and isinstance(pairs.args[0], fx.Node) and dtype(pairs) == torch.float32:
        pairs = pairs.args[0]
    whole = shape(pairs) or ()
    return pairs if size[-1] == 2 and whole == (*size[:-2], 2 * size[-2]) and pairs is not None else None


def rounded(node: fx.Node) -> fx.Node | None:
    """The cast that alone reads a value in float32, or that value."""
    user = only_user(node)
    if user is not None and is_cast(user) and user.args[0] is node and dtype(user) in KERNEL_DTYPES:
        return user
    return node


def real_rotation(add: fx.Node) -> Rotation | None:
    """Matches a sum of two products in float32."""
    if dtype(add) != torch.float32 or argument(add, 2, "alpha", 1) != 1:
        return None
    for straight, crossed in (add.args[:2], add.args[1::-1]):
        if not is_op(straight, MUL) or not is_op(crossed, MUL) or straight is crossed:
            continue
        if only_user(straight) is not add or only_user(crossed) is not add:
            continue
        for x, cosine in (straight.args[:2], straight.args[1::-1]):
            for turned, sine in (crossed.args[:2], crossed.args[1::-1]):
                heads = strip_lossless_casts(x)
                form = turned_form(strip_lossless_casts(turned), heads)
                if form is None or not isinstance(cosine, fx.Node) or not isinstance(sine, fx.Node):
                    continue
                last = rounded(add)
                # float32 angles as they are: the kernel reads no others
                if last is None or not same_meta(heads, last) or {dtype(cosine), dtype(sine)} != {torch.float32}:
                    continue
                columns = (shape(heads) or ())[-1:]
                if (shape(cosine) or ())[-1:] == (shape(sine) or ())[-1:] == columns:
                    return Rotation(heads, cosine, sine, form, last, straight)
    return None


def turned_form(turned: Any, x: Any) -> str | None:
    """How x is turned: (-b, a) of "neighbours" or of "halves"; None if it is not."""
    if not isinstance(x, fx.Node):
        return None
    size = shape(x) or (0,)
    if is_op(turned, RESHAPE) and shape(turned) == size:
        turned = turned.args[0]
        if not is_op(turned, STACK) or argument(turned, 1, "dim", 0) % (len(size) + 1) != len(size):
            return None
        parts: Any = turned.args[0]
        form = "neighbours"
    elif is_op(turned, CAT) and argument(turned, 1, "dim", 0) % len(size) == len(size) - 1:
        parts, form = turned.args[0], "halves"
    else:
        return None
    if len(parts) != 2 or not is_op(parts[0], NEG):
        return None
    second, first = part_of(parts[0].args[0], x), part_of(parts[1], x)
    return form if (first, second) == ((form, 0), (form, 1)) else None


def part_of(node: Any, x: fx.Node) -> tuple[str, int] | None:
    """Which of the neighbours, or of the halves, of x a node is."""
    size = shape(x) or (0,)
    half = (*size[:-1], size[-1] // 2)
    if shape(node) != half:
        return None
    if is_op(node, SLICE):
        start, step = argument(node, 2, "start") or 0, argument(node, 4, "step", 1)
        if strip_lossless_casts(node.args[0]) is not x or argument(node, 1, "dim", 0) % len(size) != len(size) - 1:
            return None
        if step == 1 and start in (0, half[-1]):
            return "halves", int(start != 0)
        return ("neighbours", start) if step == 2 and start in (0, 1) else None
    if is_op(node, SELECT):
        pairs, index, dim = node.args[0], argument(node, 2, "index"), argument(node, 1, "dim")
    elif is_op(node, (operator.getitem,)) and is_op(node.args[0], UNBIND):
        pairs, index, dim = node.args[0].args[0], node.args[1], argument(node.args[0], 1, "dim", 0)
    elif is_op(node, (operator.getitem,)) and is_op(node.args[0], CHUNK):
        whole, count, dim = node.args[0].args[0], node.args[0].args[1], argument(node.args[0], 2, "dim", 0)
        if strip_lossless_casts(whole) is not x or count != 2 or dim % len(size) != len(size) - 1:
            return None
        return "halves", node.args[1]
    else:
        return None
    pairs_size = shape(pairs) or ()
    if not is_op(pairs, RESHAPE) or source(pairs) is not source(x) or index not in (0, 1, -1, -2):
        return None
    place = dim % len(pairs_size)
    if pairs_size == (*half, 2) and place == len(size):
        return "neighbours", index % 2
    if pairs_size == (*half[:-1], 2, half[-1]) and place == len(size) - 1:
        return "halves", index % 2
    return None


def source(node: Any) -> Any:
    """What is under reshapes and casts that widen."""
    while is_op(node, RESHAPE) and isinstance(node.args[0], fx.Node):
        node = strip_lossless_casts(node.args[0])
    return strip_lossless_casts(node)


@fusion((modulated_norm.launch,), needs=(kernel.launch,), skip_pinned_inputs=True)
def norm_rotary(norm: fx.Node, pinned: set[fx.Node], ctx: PassContext) -> bool:
    """Replaces the RMS norm of heads, with the rotation if that alone reads it.

    Pattern: norm_rotary.launch(modulated_norm.launch(x, weight, None, eps), None, None, cos, sin, form), or the norm
        alone, of x (..., ..., ..., at most 256)
    Replacement: norm_rotary.launch(x, weight, eps, cos, sin, form)
    """
    size = shape(norm) or ()
    # a plain norm, as `rms_norm` makes it
    if len(norm.args) != 4 or norm.kwargs or norm.args[2] is not None or len(size) != 4 or size[-1] > MAX_COLUMNS:
        return False
    if size[-1] % 2:
        return False
    x, weight, _, eps = norm.args
    graph, rotated = norm.graph, only_user(norm)
    swapped = rotated is not None and is_op(rotated, (aten.transpose.int,)) and rotated.args[1:] == (1, 2)
    view = rotated if swapped and rotated is not None else norm
    rotated = only_user(view)
    if rotated is None or not is_op(rotated, (kernel.launch,)) or rotated.args[0] is not view or rotated in pinned:
        with graph.inserting_before(norm):
            replace(norm, call(graph, kernel.launch, (x, weight, eps), norm))
        return True
    if rotated.args[1:3] != (None, None):
        return False
    with graph.inserting_before(rotated):
        heads = transposed(graph, x) if swapped else x  # type: ignore[arg-type]
        new = call(graph, kernel.launch, (heads, weight, eps, *rotated.args[3:]), rotated)
    replace(rotated, new)
    erase(norm)
    return True
