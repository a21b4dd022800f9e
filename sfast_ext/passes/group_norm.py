"""Group norm with what surrounds it as one kernel: the addition before it, SiLU after it, casts around it."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

from torch import fx

from sfast_ext.kernels.group_norm import group_norm as kernel

from .rewrite import (
    ADD,
    CONV,
    KERNEL_DTYPES,
    SILU,
    argument,
    aten,
    call,
    dtype,
    hoist_weights,
    inputs,
    is_cast,
    is_op,
    is_weight,
    meta_like,
    mutated,
    only_user,
    overloads,
    replace,
    reshaped,
    shape,
    strip_lossless_casts,
    weight_node,
    without_bias,
)

if TYPE_CHECKING:
    from . import PassContext

GROUP_NORM = overloads("group_norm")
SLICE = overloads("slice.Tensor")


def group_norm(gm: fx.GraphModule, ctx: PassContext) -> int:
    if not ctx.serves(kernel):
        return 0
    graph, count = gm.graph, 0
    hoist_weights(graph)
    pinned = mutated(graph)
    shifts: list[fx.Node] = []
    for node in list(graph.nodes):
        if not node._erased and is_op(node, GROUP_NORM):
            count += fuse(node, pinned, shifts)
    pack_shifts(gm, ctx, shifts)
    return count


def fuse(norm: fx.Node, pinned: set[fx.Node], shifts: list[fx.Node]) -> int:
    x, groups = norm.args[0], argument(norm, 1, "num_groups")
    weight, bias, eps = argument(norm, 2, "weight"), argument(norm, 3, "bias"), argument(norm, 4, "eps", 1e-5)
    size = shape(norm)
    if not isinstance(x, fx.Node) or size is None or len(size) not in (3, 4) or norm in pinned:
        return 0
    # The kernel computes in fp32 whatever it reads, so casts that lose nothing are not needed before it.
    source, weight, bias = strip_lossless_casts(x), strip_lossless_casts(weight), strip_lossless_casts(bias)
    if dtype(source) not in KERNEL_DTYPES or source in pinned or dtype(norm) not in KERNEL_DTYPES:
        return 0
    last, silu = trailing_ops(norm, pinned)
    with norm.graph.inserting_before(norm):
        source, shift = take_shift(source, pinned) if only_use(x, source) else (source, None)
        if shift is not None and is_op(shift, ADD):
            shifts.append(shift)
        new = call(
            norm.graph,
            kernel.launch,
            (source, groups, weight, bias, eps),
            last,
            {"shift": shift, "silu": silu, "out_dtype": dtype(last)},
        )
    replace(last, new)
    return 1


def only_use(x: fx.Node, source: fx.Node) -> bool:
    """Nobody but the norm sees `source`, neither itself nor through the casts from it to `x`."""
    while x is not source:
        if len(x.users) != 1:
            return False
        x = x.args[0]
    return len(source.users) == 1


def trailing_ops(node: fx.Node, pinned: set[fx.Node]) -> tuple[fx.Node, bool]:
    """The last of [cast] [SiLU] [cast] after `node`, each the only user, and whether SiLU was there.

    SiLU in the kernel's fp32 is at least as precise as after the cast.
    """
    silu, last = False, node
    user = only_user(node)
    while user is not None and user not in pinned:
        if is_op(user, SILU) and not silu:
            silu = True
        elif not is_cast(user) or dtype(user) not in KERNEL_DTYPES or is_cast(last):
            break
        last, user = user, only_user(user)
    return last, silu


def take_shift(x: fx.Node, pinned: set[fx.Node]) -> tuple[fx.Node, fx.Node | None]:
    """What `x` is made from when a sum per channel and a bias are left to the kernel, and these two."""
    size = shape(x) or ()
    shift = None
    if is_op(x, ADD) and len(size) == 4 and argument(x, 2, "alpha", 1) == 1:
        for source, term in (x.args[:2], x.args[1::-1]):
            if per_channel(term, size) and shape(source) == size and dtype(source) == dtype(term) == dtype(x):
                if source in pinned or term in pinned:
                    return x, None
                shift = as_rows(term, size)
                x = source
                break
    only = len(x.users) == 1
    if not only or not is_op(x, CONV) or x in pinned or len(size) != 4:
        return x, shift
    bias = argument(x, 2, "bias")
    if not isinstance(bias, fx.Node) or dtype(bias) != dtype(x):
        return x, shift
    graph = x.graph
    if shift is None:
        shift = call(graph, aten.expand.default, (bias, [size[0], size[1]]), meta_like(bias, size[:2]))
    else:
        shift = call(graph, aten.add.Tensor, (shift, bias), meta_like(bias, size[:2]))
    return without_bias(x), shift


def per_channel(term: Any, size: tuple[int, ...]) -> bool:
    """(n, c, 1, 1), with one row for the whole batch or one each."""
    given = shape(term)
    return given is not None and len(given) == 4 and given[0] in (1, size[0]) and given[1:] == (size[1], 1, 1)


def as_rows(term: fx.Node, size: tuple[int, ...]) -> fx.Node:
    given = shape(term) or ()
    flat = reshaped(term.graph, term, given[:2])
    if given[0] == size[0]:
        return flat
    return call(term.graph, aten.expand.default, (flat, list(size[:2])), meta_like(flat, size[:2]))


def pack_shifts(gm: fx.GraphModule, ctx: PassContext, shifts: list[fx.Node]) -> None:
    """Slices of one packed projection, each with a convolution's bias added: one addition before slicing."""
    groups: dict[fx.Node, list[tuple[int, int, fx.Node, fx.Node, fx.Node]]] = defaultdict(list)
    for shift in shifts:
        part, bias = inputs(shift.args)
        span = column_range(part)
        if span is not None and is_weight(bias) and len(part.users) == 1 and len(bias.users) == 1:
            groups[next(inputs(part.args))].append((*span, part, bias, shift))
    for product, rows in groups.items():
        rows.sort(key=lambda row: row[0])
        # Every slice must take part, or the product would be needed without the biases too.
        ends = [0, *[end for _, end, *_ in rows]]
        if len(rows) < 2 or len(rows) != len(product.users) or ends[-1] != (shape(product) or (0,))[-1]:
            continue
        if [start for start, *_ in rows] != ends[:-1]:
            continue
        packed = ctx.arena.pack([bias.meta["weight"] for _, _, _, bias, _ in rows])
        if packed is None:
            continue
        biases = weight_node(gm, packed, rows[0][3])
        with gm.graph.inserting_after(product):
            total = call(gm.graph, aten.add.Tensor, (product, biases), product)
        for _, _, part, _, shift in rows:
            part.replace_input_with(product, total)
            replace(shift, part)


def column_range(part: fx.Node) -> tuple[int, int] | None:
    """From where to where `part` is a slice of the columns of a matrix."""
    if not is_op(part, SLICE) or len(shape(part) or ()) != 2 or argument(part, 1, "dim", 0) != 1:
        return None
    start, end = argument(part, 2, "start"), argument(part, 3, "end")
    return (start, end) if type(start) is int and type(end) is int and argument(part, 4, "step", 1) == 1 else None
