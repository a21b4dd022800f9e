"""Linear layers of transformer blocks as products of 8-bit integers; 3x3 convolutions: eight_bits_conv.py.

Layers whose input a norm, GEGLU, SwiGLU, GELU or an attention writes. Others stay in half precision: embeddings, what
modulates norms, other convolutions and what stands in for them, the keys and values of the prompt, whose first token is
an outlier, and a transformer's last layer, which makes pixels. If half-precision weights leave the GPU, keys and values
of the prompt are taken as well, and so is what is not faster in 8 bits. Which of the layers are taken is said by
`Selection`.
"""

from __future__ import annotations

import contextlib
import functools
import math
import operator
from collections import defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from sfast_ext import reasons
from sfast_ext.kernels.backend import health
from sfast_ext.kernels.eight_bits import (
    add_layer_norm8,
    gain,
    geglu8,
    layer_norm8,
    linear8,
    quantise_rows,
    quantise_weights,
)
from sfast_ext.kernels.linear import linear_accumulate, linear_geglu
from sfast_ext.kernels.pointwise import geglu
from sfast_ext.reasons import Detail, Reason

from . import query_attention
from .eight_bits_attention import attention_candidates, choose
from .eight_bits_conv_match import conv_candidates
from .eight_bits_inputs import quantised, writer_of
from .eight_bits_match import Candidate, matches, with_weights_to_leave
from .eight_bits_selection import LIMIT, Errors, Layer, measured
from .rewrite import (
    HALF,
    argument,
    call,
    dtype,
    hoist_weights,
    is_op,
    meta_like,
    replace,
    top,
)

if TYPE_CHECKING:
    from sfast_ext.weights.banks import Bank

    from .context import PassContext

KERNELS = (
    quantise_rows.launch, quantise_weights.launch, linear8.launch, geglu8.launch, layer_norm8.launch,
    add_layer_norm8.launch,
)  # fmt: skip
ROOM_TO_MEASURE = 1 << 30
"""So many bytes of weights leave first, if the GPU has no memory to measure layers next to all of them."""


def eight_bits(gm: fx.GraphModule, ctx: PassContext) -> int:
    """Replaces products of transformer blocks. Returns how many.

    Pattern: linear(x, weight, bias); linear_accumulate.launch(x, weight, sum)
    Replacement: linear8.launch(q, scale, rows, scales, bias, sum)

    Pattern: linear_geglu.launch(x, weight, bias, ...); geglu.launch(linear(x, weight, bias), ...)
    Replacement: geglu8.launch(q, scale, rows, scales, bias, ...)

    `rows` and `scales` are those of the weight's bank, which one quantise_weights.launch at the top brings up to date.
    (q, scale) = quantise_rows.launch(x), or the results of a kernel in the place of the norm or the activation that
    writes x (eight_bits_inputs.py), if nothing else reads it. If the selection is resident, the arena brings banks up
    to date.

    Attentions are marked, see eight_bits_attention.py.
    """
    selection = ctx.eight_bits
    if selection is None or ctx.most_bytes is not None:
        return 0
    if selection.declined is not None:
        return selection.decline(selection.declined, elsewhere_too=False)
    if not ctx.supported(*KERNELS):
        return selection.decline(without_kernels(ctx.device), for_good=True)
    hoist_weights(gm.graph)
    resident = selection.resident
    convolutions = conv_candidates(gm.graph, ctx)
    fit, needed = matches(gm.graph, few_too=resident), 0
    if resident:
        found = with_weights_to_leave(gm.graph, fit, ctx.arena)
        convolutions = with_weights_to_leave(gm.graph, convolutions, ctx.arena)
    else:
        found = paying(fit, query_attention.fused_linears(gm.graph, ctx), ctx.device)
        if fit and not found and not convolutions:
            return selection.decline(reasons.EIGHT_BITS_NO_GAIN(), elsewhere_too=False)
        needed = ctx.arena.banks.missing(c.weight for c in found)
        if selection.room is not None and needed > selection.room:
            return selection.decline(reasons.EIGHT_BITS_ROOM())
    layers = [Layer(c.name, c.x, c.weight) for c in found]
    layers += [Layer(c.name, c.x, c.weight, c.stride, c.silu) for c in convolutions]
    attentions = attention_candidates(gm.graph, ctx) if found else []
    layers += [Layer(a.name, a.node, None, operands=a.operands) for a in attentions]
    layers = [layer for layer in layers if layer.name not in selection.errors]
    wanted = [(c.name, c.weight) for c in found] + [(c.name, c.weight) for c in convolutions] if resident else []

    def set_aside(most: float = math.inf) -> None:
        chosen, size = [], 0
        for name, weight in wanted:
            if name not in selection.kept and size < most:
                chosen.append(weight)
                size += weight.tensor.nbytes
        ctx.arena.set_aside(chosen, ctx.device)

    if layers:
        errors = errors_of(gm, layers, ctx, set_aside)
        if 1 < len(errors) < 2 * sum(math.isnan(each.least) for each in errors.values()):
            # the call of a black image says nothing of the layers: a later plan measures them
            return selection.decline(reasons.EIGHT_BITS_VALUES(), elsewhere_too=False)
        selection.learn(errors)
    if resident:
        set_aside()
    taken = [c for c in found if c.name not in selection.kept]
    if not taken:
        if any(c.name not in selection.kept for c in convolutions):
            return 0
        read = resident and len(found) < len(fit)
        why = reasons.EIGHT_BITS_READ() if read else nothing_taken(gm.graph, found)
        return selection.decline(why, elsewhere_too=False)
    choose(attentions, selection.kept)
    if selection.room is not None:
        selection.room -= needed
    groups = {c.result: selection.group(c.name, c.norm is None) for c in taken}
    get = ctx.arena.resident.bank if selection.resident else ctx.arena.banks.get
    banks = [get(c.weight, groups[c.result]) for c in taken]
    weights = bank_nodes(gm, taken, banks)
    readers: dict[fx.Node, list[Candidate]] = defaultdict(list)
    for candidate in taken:
        readers[candidate.x].append(candidate)
    for some in readers.values():
        # x is read anew: if a kernel of GEGLU writes it, an earlier turn may have replaced that
        operands = quantised(some[0].x, some, groups, ctx)
        for candidate in some:
            rewrite(candidate, operands[groups[candidate.result]], weights[candidate.weight, groups[candidate.result]])
    return len(taken)


def errors_of(
    gm: fx.GraphModule, layers: list[Layer], ctx: PassContext, set_aside: Callable[..., None]
) -> dict[str, Errors]:
    """See `measured`. Weights that are to leave the GPU are read there if its memory allows."""
    selection = ctx.eight_bits
    assert selection is not None
    measure = functools.partial(
        measured, gm, layers, selection.inputs, ctx.arena.read, by_bytes=selection.resident
    )
    for leaving in (0.0, ROOM_TO_MEASURE) if selection.resident else ():
        if leaving:
            set_aside(leaving)
        with contextlib.suppress(torch.cuda.OutOfMemoryError):
            return measure()
    if selection.resident:
        set_aside()
    return measure()


def without_kernels(device: torch.device) -> Reason:
    """Why there are no kernels for a device."""
    for kernel in KERNELS:
        failure = health.reason(kernel.name, device)
        if failure is not None:
            return reasons.EIGHT_BITS_KERNEL_FAILED(kernel.name, Detail(failure))
    return reasons.EIGHT_BITS_KERNELS(device)


def nothing_taken(graph: fx.Graph, found: list[Candidate]) -> Reason:
    """Why none of the products is one of 8-bit integers."""
    if found:
        return reasons.EIGHT_BITS_ERRORS(LIMIT)
    kinds = {dtype(node) for node in graph.nodes if node.op == "get_attr"}
    return reasons.EIGHT_BITS_LAYERS() if kinds.intersection(HALF) else reasons.EIGHT_BITS_FLOAT32()


def paying(found: list[Candidate], fused: dict[fx.Node, float], device: torch.device) -> list[Candidate]:
    """Those that are faster so, with what quantises their input for all that read it.

    Args:
        fused: of products that could be one kernel with what follows, the microseconds that this saves.
    """
    readers: dict[fx.Node, list[Candidate]] = defaultdict(list)
    for candidate in found:
        readers[candidate.x].append(candidate)
    taken: set[fx.Node] = set()
    for some in readers.values():
        products = [each.product(fused.get(each.node, 0.0)) for each in some]
        alone = writer_of(some[0].x) is not None and set(some[0].x.users) == {each.node for each in some}
        pays = gain.pays(products, some[0].norm is not None, device, written=alone)
        taken.update(each.node for each, faster in zip(some, pays) if faster)
    return [candidate for candidate in found if candidate.node in taken]


def rewrite(candidate: Candidate, x: tuple[fx.Node, fx.Node], weight: tuple[fx.Node, fx.Node]) -> None:
    """Replaces a product by one of 8-bit integers."""
    node, result, _ = candidate
    graph, kind = node.graph, dtype(node)
    third = argument(node, 2, "bias")
    with graph.inserting_before(result):
        if is_op(result, (geglu.launch, linear_geglu.launch)):
            given = dict(result.kwargs)
            for name, value in zip(("gate_first", "approximate"), result.args[1 if result is not node else 3 :]):
                given[name] = value
            new = call(graph, geglu8.launch, (*x, *weight, third), result, {**given, "dtype": kind})
        else:
            onto = is_op(node, (linear_accumulate.launch,))
            operands = (*x, *weight, None, node.args[2]) if onto else (*x, *weight, third)
            new = call(graph, linear8.launch, operands, result, {"dtype": kind})
    replace(result, new)


def bank_nodes(
    gm: fx.GraphModule, taken: list[Candidate], banks: list[Bank]
) -> dict[tuple[Any, int], tuple[fx.Node, fx.Node]]:
    """Inserts the kernel that brings banks up to date, at the top. Returns the nodes of (rows, scales) by weight and
    group."""
    graph = gm.graph
    # weights stand at the top: what reads them stands after the last of them
    place = top(graph)
    while place.next.op == "get_attr":
        place = place.next
    order = {node: i for i, node in enumerate(graph.nodes)}
    by_use = sorted(zip(taken, banks, strict=True), key=lambda each: order[each[0].result])
    readers: dict[int, Candidate] = {}
    once: list[Bank] = []
    for candidate, bank in by_use:
        if readers.setdefault(id(bank), candidate) is candidate:
            once.append(bank)
    held: dict[int, list[fx.Node]] = {}
    others = sum(node.meta.get("bank") is not None for node in graph.nodes)
    for bank in once:
        with graph.inserting_before(place):
            like = argument(readers[id(bank)].node, 1, "weight")
            # an erased node would keep its bank
            read = 2 if bank.sources else 3
            held[id(bank)] = [bank_node(gm, bank, i, others + len(held), like) for i in range(read)]
    if all(bank.sources for bank in once):
        # resident: the arena brings them up to date
        return {(c.weight, bank.group): tuple(held[id(bank)]) for c, bank in zip(taken, banks, strict=True)}  # type: ignore[misc]
    found: dict[tuple[Any, int], tuple[fx.Node, fx.Node]] = {}
    sources = [argument(readers[id(bank)].node, 1, "weight") for bank in once]
    lists = [sources, *map(list, zip(*(held[id(bank)] for bank in once))), [bank.group for bank in once]]
    vals = tuple(held[id(bank)][0].meta["val"] for bank in once)
    with graph.inserting_after(place):
        fresh = call(graph, quantise_weights.launch, tuple(lists), vals)
    with graph.inserting_before(readers[id(once[0])].result):
        for i, bank in enumerate(once):
            rows, scales, _ = held[id(bank)]
            found[bank.weight, bank.group] = call(graph, operator.getitem, (fresh, i), rows), scales
    return found


def bank_node(gm: fx.GraphModule, bank: Bank, index: int, number: int, like: fx.Node) -> fx.Node:
    """The node of a tensor of a bank."""
    tensor = bank.tensors[index]
    name = f"_bank{number}_{index}"
    gm.register_buffer(name, tensor, persistent=False)
    node = gm.graph.create_node("get_attr", name)
    node.meta["bank"], node.meta["held"] = bank, tensor
    node.meta["val"] = meta_like(like, tensor.shape, tensor.dtype)
    return node

