"""Linear layers of transformer blocks as products of 8-bit integers.

Layers whose input a norm, GEGLU, SwiGLU, GELU or an attention writes. Others stay in half precision: embeddings, what
modulates norms, convolutions and what stands in for them, the keys and values of the prompt, whose first token is an
outlier, and a transformer's last layer, which makes pixels. Which of the layers are taken is said by `Selection`.
"""

from __future__ import annotations

import math
import operator
from collections import defaultdict
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import fx

from sfast_ext import reasons
from sfast_ext.kernels.backend import health
from sfast_ext.kernels.eight_bits import (
    add_layer_norm8,
    geglu8,
    layer_norm8,
    linear8,
    quantise_rows,
    quantise_weights,
)
from sfast_ext.kernels.linear import linear_accumulate, linear_geglu
from sfast_ext.kernels.pointwise import add_layer_norm, gated_norm, geglu, layer_norm, modulated_norm, swiglu
from sfast_ext.reasons import Detail, Reason

from .attention import ATTENTION
from .cleanup import PERMUTE
from .eight_bits_selection import Layer, measured
from .rewrite import (
    CONV,
    HALF,
    LINEAR,
    RESHAPE,
    argument,
    call,
    dtype,
    hoist_weights,
    is_kernel,
    is_op,
    is_weight,
    meta_like,
    mutated,
    only_user,
    overloads,
    replace,
    shape,
    top,
)

if TYPE_CHECKING:
    from sfast_ext.weights.banks import Bank

    from .context import PassContext

KERNELS = (
    quantise_rows.launch, quantise_weights.launch, linear8.launch, geglu8.launch, layer_norm8.launch,
    add_layer_norm8.launch,
)  # fmt: skip
MIN_ROWS = 256
"""Of a product: with fewer it takes no longer than its weight takes to be read, which is read in half precision as
well, to be quantised."""
COLUMNS, DEPTH = 32, 64
"""The rows and the columns of a weight are multiples of these. The kernels take multiples of 8 rows, or 16 with GEGLU;
32 leaves out no layer of Stable Diffusion."""
PIXELS = 16
"""Times as deep as it is wide is a layer that makes pixels of tokens: its error is that of the image. The deepest of
other layers, Flux's, is 5 times."""
_PRODUCTS = LINEAR | {linear_geglu.launch, linear_accumulate.launch}
_VIEWS = RESHAPE | PERMUTE | overloads("transpose.int", "contiguous")
_PARTS = overloads("slice.Tensor", "split_with_sizes", "split.sizes")
_CAT = overloads("cat")
_GATED = frozenset({geglu.launch, linear_geglu.launch, swiglu.launch}) | overloads("gelu")


class Candidate(NamedTuple):
    """A product in half precision that may be one of 8-bit integers."""

    node: fx.Node
    """A linear, or a kernel that has one."""
    result: fx.Node
    """What is replaced: `node`, or the kernel of GEGLU that alone reads it."""
    norm: fx.Node | None
    """The kernel of the norm that writes the input; None for others."""

    @property
    def x(self) -> Any:
        """Its input."""
        return self.node.args[0]

    @property
    def weight(self) -> Any:
        """The weight of the arena."""
        return argument(self.node, 1, "weight").meta["weight"]

    @property
    def name(self) -> str:
        """That of the layer, or of the layers that are packed."""
        return layer_name(self.weight.path)


def eight_bits(gm: fx.GraphModule, ctx: PassContext) -> int:
    """Replaces products of transformer blocks. Returns how many.

    Pattern: linear(x, weight, bias); linear_accumulate.launch(x, weight, sum)
    Replacement: linear8.launch(q, scale, rows, scales, bias, sum)

    Pattern: linear_geglu.launch(x, weight, bias, ...); geglu.launch(linear(x, weight, bias), ...)
    Replacement: geglu8.launch(q, scale, rows, scales, bias, ...)

    `rows` and `scales` are those of the weight's bank, which one quantise_weights.launch at the top brings up to date.
    (q, scale) = quantise_rows.launch(x), or the results of layer_norm8.launch or add_layer_norm8.launch in the place of
    the norm that writes x, if nothing else reads it.
    """
    selection = ctx.eight_bits
    if selection is None or ctx.most_bytes is not None:
        return 0
    if not ctx.supported(*KERNELS):
        return selection.decline(without_kernels(ctx.device), for_good=True)
    hoist_weights(gm.graph)
    found = candidates(gm.graph, ctx.device)
    if selection.room is not None and ctx.arena.banks.missing(c.weight for c in found) > selection.room:
        return selection.decline(reasons.EIGHT_BITS_ROOM())
    layers = [Layer(c.name, c.x, c.weight.tensor) for c in found if c.name not in selection.errors]
    if layers:
        errors = measured(gm, layers, selection.inputs)
        if 1 < len(errors) < 2 * sum(math.isnan(each.least) for each in errors.values()):
            # the call of a black image says nothing of the layers: a later plan measures them
            return selection.decline(reasons.EIGHT_BITS_VALUES(), elsewhere_too=False)
        selection.learn(errors)
    taken = [c for c in found if c.name not in selection.kept]
    if not taken:
        return selection.decline(reasons.EIGHT_BITS_LAYERS(), elsewhere_too=False)
    groups = {c.result: selection.group(c.name, c.norm is None) for c in taken}
    banks = [ctx.arena.banks.get(c.weight, groups[c.result]) for c in taken]
    weights = bank_nodes(gm, taken, banks)
    readers: dict[fx.Node, list[Candidate]] = defaultdict(list)
    for candidate in taken:
        readers[candidate.x].append(candidate)
    for some in readers.values():
        # x is read anew: if a kernel of GEGLU writes it, an earlier turn may have replaced that
        operands = quantised(some[0].x, some, groups)
        for candidate in some:
            rewrite(candidate, operands[groups[candidate.result]], weights[candidate.weight, groups[candidate.result]])
    return len(taken)


def without_kernels(device: torch.device) -> Reason:
    """Why there are no kernels for a device."""
    for kernel in KERNELS:
        failure = health.reason(kernel.name, device)
        if failure is not None:
            return reasons.EIGHT_BITS_KERNEL_FAILED(kernel.name, Detail(failure))
    return reasons.EIGHT_BITS_KERNELS(device)


def candidates(graph: fx.Graph, device: torch.device) -> list[Candidate]:
    """The products whose input may be quantised where it is written, if that pays."""
    pinned = mutated(graph)
    found = (match(node, pinned, device) for node in graph.nodes if is_op(node, _PRODUCTS))
    return [candidate for candidate in found if candidate is not None]


def match(node: fx.Node, pinned: set[fx.Node], device: torch.device) -> Candidate | None:
    """Matches a product in half precision that is large enough, by a weight of the arena."""
    x: Any = node.args[0]
    weight, bias = argument(node, 1, "weight"), argument(node, 2, "bias")
    kind, size = dtype(node), shape(weight) or ()
    if not is_weight(weight) or len(size) != 2 or kind not in HALF or not pinned.isdisjoint([node, x, weight]):
        return None
    if any(t is not None and (dtype(t) != kind or t in pinned) for t in (x, weight, bias)):
        return None
    # a kernel reads the rows of a weight, which may lie apart
    if weight.meta["weight"].tensor.stride(-1) != 1:
        return None
    user = only_user(node)
    pair = is_op(user, (geglu.launch,)) and user not in pinned and dtype(user) == kind
    result = user if pair and user is not None else node
    columns = size[0] // 2 if is_op(result, (geglu.launch, linear_geglu.launch)) else size[0]
    rows = math.prod((shape(x) or ())[:-1])
    if size[1] >= PIXELS * columns:
        return None
    if columns % COLUMNS or size[1] % DEPTH or rows < MIN_ROWS or not linear8.profitable(rows, *size, device):
        return None
    norm = norm_of(x)
    if norm is None and not is_written(x, pinned):
        return None
    return Candidate(node, result, None if norm in pinned else norm)


def norm_of(x: fx.Node) -> fx.Node | None:
    """The kernel of the norm that writes a value, which is in half precision like what the norm reads."""
    norm: Any = x
    if is_op(x, (operator.getitem,)) and x.args[1] == 1:
        norm = x.args[0]
    if not is_op(norm, (layer_norm.launch,) if norm is x else (add_layer_norm.launch,)):
        return None
    return norm  # type: ignore[no-any-return]


def is_written(x: Any, pinned: set[fx.Node]) -> bool:
    """Whether a value, or each part of one, is the result of a modulated norm, an activation or an attention, in
    another order or shape."""
    while x not in pinned and (is_op(x, _VIEWS | _PARTS) or is_part(x)):
        x = x.args[0]
    if not isinstance(x, fx.Node) or x in pinned:
        return False
    if is_op(x, _CAT):
        return all(is_written(part, pinned) for part in x.args[0])  # type: ignore[union-attr]
    return is_op(x, ATTENTION | _GATED) or is_modulated(x)


def is_part(x: Any) -> bool:
    """Whether a value is one of those that another was split into."""
    return is_op(x, (operator.getitem,)) and is_op(x.args[0], _PARTS)


def is_modulated(x: fx.Node) -> bool:
    """Whether a norm of a transformer writes a value, and not that of an input's embedding."""
    if is_op(x, (operator.getitem,)):
        return is_op(x.args[0], (gated_norm.launch,)) and x.args[1] == 1
    return is_op(x, (modulated_norm.launch,)) and after_product(x)


def after_product(norm: fx.Node) -> bool:
    """Whether a norm reads what a product has made: not what a forward is given, joined, padded or cast."""
    waiting, seen = [norm.args[0]], set()
    while waiting:
        node: Any = waiting.pop()
        if node in seen or not isinstance(node, fx.Node):
            continue
        if is_op(node, LINEAR | CONV) or is_kernel(node.target):
            return True
        seen.add(node)
        waiting += node.all_input_nodes
    return False


def quantised(x: fx.Node, some: list[Candidate], groups: dict[fx.Node, int]) -> dict[int, tuple[fx.Node, fx.Node]]:
    """Inserts what quantises `x` for the products that read it. Returns (q, scale) by group."""
    norm = some[0].norm
    if norm is not None and set(x.users) == {c.node for c in some} and not any(groups[c.result] for c in some):
        fused = quantised_by_norm(norm, x)
        if fused is not None:
            return {0: fused}
    made: dict[int, tuple[fx.Node, fx.Node]] = {}
    graph = x.graph
    for group in dict.fromkeys(groups[c.result] for c in some):
        with graph.inserting_after(x):
            pair = call(graph, quantise_rows.launch, (x,), None, {"group": group} if group else {})
        made[group] = results(pair, x, 0)
    return made


def quantised_by_norm(norm: fx.Node, normed: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """Replaces the kernel of a norm by one that quantises its result. None if that does not take its operands."""
    graph, sums = norm.graph, is_op(norm, (add_layer_norm.launch,))
    kernel: Any = add_layer_norm8 if sums else layer_norm8
    names = ("x", "residual", "weight", "bias", "eps") if sums else ("x", "weight", "bias", "eps")
    operands = [argument(norm, i, name) for i, name in enumerate(names)]
    more = {name: norm.kwargs.get(name) for name in ("shift", "post_bias")} if sums else {}
    tensors = [t for t in (*operands[:-1], *more.values()) if t is not None]
    if len(norm.args) > len(names) or any(dtype(t) != dtype(normed) for t in tensors):
        return None
    options = {name: value for name, value in more.items() if value is not None}
    with graph.inserting_before(norm):
        new = call(graph, kernel.launch, tuple(operands), None, options)
    if not sums:
        return results(new, normed, 0)
    with graph.inserting_after(new):
        total = call(graph, operator.getitem, (new, 0), normed)
    pair = results(new, normed, 1)
    new.meta["val"] = (total.meta.get("val"), *new.meta["val"])
    for user in list(norm.users):
        if user is not normed:
            replace(user, total)
    return pair


def results(kernel: fx.Node, like: fx.Node, first: int) -> tuple[fx.Node, fx.Node]:
    """Inserts the nodes of q and scale behind a kernel that returns them at `first` and after. `like` has the shape and
    device of q."""
    size = shape(like) or ()
    vals = meta_like(like, size, torch.int8), meta_like(like, size[:-1], torch.float32)
    kernel.meta["val"] = vals
    graph, after = kernel.graph, kernel
    while is_op(after.next, (operator.getitem,)) and after.next.args[0] is kernel:
        after = after.next
    with graph.inserting_after(after):
        q = call(graph, operator.getitem, (kernel, first), vals[0])
    with graph.inserting_after(q):
        scale = call(graph, operator.getitem, (kernel, first + 1), vals[1])
    return q, scale


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
    sources: dict[int, fx.Node] = {}
    held: list[list[fx.Node]] = []
    for candidate, bank in zip(taken, banks, strict=True):
        if id(bank) not in sources:
            like = argument(candidate.node, 1, "weight")
            sources[id(bank)] = like
            with graph.inserting_before(place):
                held.append([bank_node(gm, bank, i, len(held), like) for i in range(3)])
    once = list({id(bank): bank for bank in banks}.values())
    lists = [list(sources.values()), *map(list, zip(*held)), [bank.group for bank in once]]
    with graph.inserting_after(place):
        fresh = call(graph, quantise_weights.launch, tuple(lists), tuple(rows.meta["val"] for rows, *_ in held))
    found: dict[tuple[Any, int], tuple[fx.Node, fx.Node]] = {}
    for i, (bank, (rows, scales, _)) in enumerate(zip(once, held, strict=True)):
        with graph.inserting_after(fresh):
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


def layer_name(path: str) -> str:
    """The name of a layer, or of several, by the path of its weight or of those that are packed."""
    first, *others = (each.removesuffix(".weight") for each in path.split("+"))
    return "+".join([first, *(each.rpartition(".")[2] for each in others)])
