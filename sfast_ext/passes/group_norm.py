"""Group norm as one kernel, with the additions before it, SiLU after it, and the casts around it."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from sfast_ext.kernels.group_norm import group_norm as kernel

from .fusion import rewrite_each
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
    from .context import PassContext

GROUP_NORM = overloads("group_norm")
SLICE = overloads("slice.Tensor")


def group_norm(gm: fx.GraphModule, ctx: PassContext) -> int:
    """Fuses a norm with what only it reads and what alone reads it.

    Pattern: cast(silu(cast(group_norm(cast(x [+ embedding] [+ bias of a convolution]), groups, weight, bias, eps))))
    Replacement: kernel.launch(x, groups, weight, bias, eps, shift=..., silu=..., out_dtype=...)

    `embedding` is one number per image and channel, (N or 1, C, 1, 1). The sum of embedding and bias, (N, C), is
    `shift`. Shifts that are slices of one packed linear are computed by one addition: see `pack_shifts`.
    """
    if not ctx.supported(kernel.launch):
        if ctx.device.type == "cpu":
            contiguous_inputs(gm.graph)
        # no kernel is used
        return 0
    hoist_weights(gm.graph)
    pinned = mutated(gm.graph)
    shifts: list[fx.Node] = []
    count = rewrite_each(gm.graph, GROUP_NORM, pinned, lambda norm: fuse(norm, pinned, shifts))
    pack_shifts(gm, ctx, shifts)
    return count


def contiguous_inputs(graph: fx.Graph) -> None:
    """Gives the norms of images contiguous copies, on a CPU.

    Pattern: group_norm(x, ...), x (N, C, H, W)
    Replacement: group_norm(clone(x, contiguous), ...)

    torch's CPU kernel for channels-last memory computes the variance as E[x^2] - E[x]^2, which cancels digits of smooth
    images. Plans have channels-last images, the original has not.
    """
    norms = [node for node in graph.nodes if is_op(node, GROUP_NORM) and isinstance(node.args[0], fx.Node)]
    found = [node for node in norms if len(shape(node) or ()) == 4]
    for norm in found:
        x, *others = norm.args
        with graph.inserting_before(norm):
            copy = call(graph, aten.clone.default, (x,), x, {"memory_format": torch.contiguous_format})
        norm.args = (copy, *others)


def fuse(norm: fx.Node, pinned: set[fx.Node], shifts: list[fx.Node]) -> bool:
    """Replaces one norm. Appends the additions of embedding and bias to `shifts`."""
    x, groups = norm.args[0], argument(norm, 1, "num_groups")
    weight, bias, eps = argument(norm, 2, "weight"), argument(norm, 3, "bias"), argument(norm, 4, "eps", 1e-5)
    size = shape(norm)
    if not isinstance(x, fx.Node) or size is None or len(size) not in (3, 4):
        return False
    # The kernel computes in fp32 whatever it reads, so lossless casts before it are not needed.
    source, weight, bias = strip_lossless_casts(x), strip_lossless_casts(weight), strip_lossless_casts(bias)
    if dtype(source) not in KERNEL_DTYPES or source in pinned or dtype(norm) not in KERNEL_DTYPES:
        return False
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
    return True


def only_use(x: fx.Node, source: fx.Node) -> bool:
    """Whether only the norm reads `source`, and only through the casts from it to `x`."""
    while x is not source:
        if len(x.users) != 1:
            return False
        x = x.args[0]
    return len(source.users) == 1


def trailing_ops(node: fx.Node, pinned: set[fx.Node]) -> tuple[fx.Node, bool]:
    """Follows [cast] [SiLU] [cast] after `node`, each the only user of the one before.

    Returns the last of them and whether there is a SiLU. SiLU in the kernel's fp32 is at least as precise as after the
    cast.
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
    """Takes an embedding and a convolution's bias off `x`. Returns what is left of `x` and their sum, (N, C)."""
    size = shape(x) or ()
    shift = None
    if is_op(x, ADD) and len(size) == 4 and argument(x, 2, "alpha", 1) == 1:
        for source, embedding in (x.args[:2], x.args[1::-1]):
            dtypes = dtype(source), dtype(embedding)
            if per_channel(embedding, size) and shape(source) == size and dtypes == (dtype(x), dtype(x)):
                if source in pinned or embedding in pinned:
                    return x, None
                shift = as_rows(embedding, size)
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


def per_channel(embedding: Any, size: tuple[int, ...]) -> bool:
    """Whether the shape is (N, C, 1, 1) or (1, C, 1, 1)."""
    given = shape(embedding)
    return given is not None and len(given) == 4 and given[0] in (1, size[0]) and given[1:] == (size[1], 1, 1)


def as_rows(embedding: fx.Node, size: tuple[int, ...]) -> fx.Node:
    """Returns the embedding as (N, C)."""
    given = shape(embedding) or ()
    flat = reshaped(embedding.graph, embedding, given[:2])
    if given[0] == size[0]:
        return flat
    return call(embedding.graph, aten.expand.default, (flat, list(size[:2])), meta_like(flat, size[:2]))


def pack_shifts(gm: fx.GraphModule, ctx: PassContext, shifts: list[fx.Node]) -> None:
    """Adds the biases of all convolutions to a packed linear at once.

    Pattern: packed[:, start:end] + bias, for adjacent slices that cover `packed` and have no other user
    Replacement: (packed + packed_bias)[:, start:end]
    """
    groups: dict[fx.Node, list[tuple[int, int, fx.Node, fx.Node, fx.Node]]] = defaultdict(list)
    for shift in shifts:
        part, bias = inputs(shift.args)
        span = column_range(part)
        if span is not None and is_weight(bias) and len(part.users) == 1 and len(bias.users) == 1:
            groups[next(inputs(part.args))].append((*span, part, bias, shift))
    for linear, slices in groups.items():
        slices.sort(key=lambda row: row[0])
        # Every slice must take part, or the linear would be needed without the biases too.
        ends = [0, *[end for _, end, *_ in slices]]
        if len(slices) < 2 or len(slices) != len(linear.users) or ends[-1] != (shape(linear) or (0,))[-1]:
            continue
        if [start for start, *_ in slices] != ends[:-1]:
            continue
        packed = ctx.arena.pack([bias.meta["weight"] for _, _, _, bias, _ in slices])
        if packed is None:
            continue
        biases = weight_node(gm, packed, slices[0][3])
        with gm.graph.inserting_after(linear):
            total = call(gm.graph, aten.add.Tensor, (linear, biases), linear)
        for _, _, part, _, shift in slices:
            part.replace_input_with(linear, total)
            replace(shift, part)


def column_range(part: fx.Node) -> tuple[int, int] | None:
    """Returns start and end of a slice along N of an (M, N) matrix; None for other nodes."""
    if not is_op(part, SLICE) or len(shape(part) or ()) != 2 or argument(part, 1, "dim", 0) != 1:
        return None
    start, end = argument(part, 2, "start"), argument(part, 3, "end")
    return (start, end) if type(start) is int and type(end) is int and argument(part, 4, "step", 1) == 1 else None
