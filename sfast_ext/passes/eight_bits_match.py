"""Matches the products of transformer blocks that may be computed with 8-bit integers."""

from __future__ import annotations

import math
import operator
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from torch import fx

from sfast_ext.kernels.eight_bits import gain
from sfast_ext.kernels.linear import linear_accumulate, linear_geglu
from sfast_ext.kernels.pointwise import (
    add_layer_norm,
    gated_norm,
    geglu,
    layer_norm,
    modulated_norm,
    norm_rotary,
    swiglu,
)
from sfast_ext.weights.weight import slots_of

from .attention import ATTENTION
from .cleanup import PERMUTE
from .rewrite import (
    CONV,
    HALF,
    LINEAR,
    RESHAPE,
    argument,
    dtype,
    is_cast,
    is_kernel,
    is_op,
    is_weight,
    mutated,
    only_user,
    overloads,
    shape,
)

if TYPE_CHECKING:
    from sfast_ext.weights.arena import WeightArena

MIN_ROWS = 256
"""Of a product: with fewer it takes no longer than its weight takes to be read, which is read in half precision as
well, to be quantised."""
COLUMNS, DEPTH = 32, 64
"""The rows and the columns of a weight are multiples of these. The kernels take multiples of 8 rows, or 16 with GEGLU;
32 leaves out no layer of Stable Diffusion."""
PIXELS = 16
"""Times as deep as it is wide is a layer that makes pixels of tokens: its error is that of the image. The deepest of
other layers, Flux's, is 5 times."""
MOST_NAMED = 3
"""Of packed layers that are named after the first."""
_PRODUCTS = LINEAR | {linear_geglu.launch, linear_accumulate.launch}
_VIEWS = RESHAPE | PERMUTE | overloads("transpose.int", "contiguous")
_PARTS = overloads("slice.Tensor", "split_with_sizes", "split.sizes")
_CAT = overloads("cat")
_HEADS = frozenset({norm_rotary.launch})
"""Kernels between the product that makes keys and the attention that reads them."""
_GATED = frozenset({geglu.launch, linear_geglu.launch, swiglu.launch}) | overloads("gelu")


class Reader(Protocol):
    """What reads a weight of the arena."""

    @property
    def node(self) -> fx.Node:
        """A product."""

    @property
    def weight(self) -> Any:
        """The weight."""


C = TypeVar("C", bound=Reader)


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

    def product(self, fused: float) -> gain.Product:
        """Its sizes, and what is lost as it is not one kernel with what follows."""
        columns, depth = self.weight.tensor.shape
        return gain.Product(math.prod((shape(self.x) or ())[:-1]), columns, depth, fused)

    @property
    def name(self) -> str:
        """That of the layer, or of the layers that are packed."""
        return layer_name(self.weight.path)


def matches(graph: fx.Graph, *, few_too: bool = False) -> list[Candidate]:
    """The products whose input may be quantised where it is written.

    Args:
        few_too: those of few rows as well, and the keys and values of the prompt: their weights take memory like
            others.
    """
    pinned = mutated(graph)
    found = (match(node, pinned, few_too) for node in graph.nodes if is_op(node, _PRODUCTS))
    return [candidate for candidate in found if candidate is not None]


def with_weights_to_leave(graph: fx.Graph, found: list[C], arena: WeightArena) -> list[C]:
    """The candidates whose weights can be set aside. Nothing else in the graph reads these, whole or in part, no plan
    reads them in half precision, and no host asks them for the device of the module."""
    ours = {c.node for c in found}
    nodes = [node for node in graph.nodes if is_weight(node)]
    others = (node for node in nodes if not ours.issuperset(node.users))
    read = {id(part) for node in others for part in parts_of(node.meta["weight"])}
    slots = arena.slots_kept()
    found = [c for c in found if slots.isdisjoint(slots_of([c.weight]))]
    return [c for c in found if read.isdisjoint(map(id, parts_of(c.weight)))]


def is_of_prompt(product: fx.Node, pinned: set[fx.Node]) -> bool:
    """Whether a product makes keys or values alone, of what the forward is given."""
    x: Any = product.args[0]
    while x not in pinned and (is_op(x, _VIEWS | _PARTS) or is_part(x) or is_cast(x)):
        x = x.args[0]
    if not isinstance(x, fx.Node) or x.op != "placeholder" or x in pinned:
        return False
    waiting = [product]
    while waiting:
        node = waiting.pop()
        for user in node.users:
            if is_op(user, _VIEWS | _PARTS) or is_part(user) or (is_op(user, _HEADS) and node is user.args[0]):
                waiting.append(user)
            elif not is_op(user, ATTENTION) or node is user.args[0] or node not in user.args[1:3]:
                return False
    return bool(product.users)


def parts_of(weight: Any) -> tuple[Any, ...]:
    """The parameters of a weight of the arena."""
    return weight.parts or (weight,)


def match(node: fx.Node, pinned: set[fx.Node], few_too: bool = False) -> Candidate | None:
    """Matches a product in half precision that is large enough, by a weight of the arena."""
    x: Any = node.args[0]
    weight, bias = argument(node, 1, "weight"), argument(node, 2, "bias")
    kind, size = dtype(node), shape(weight) or ()
    if not is_weight(weight) or len(size) != 2 or kind not in HALF or not pinned.isdisjoint([node, x, weight]):
        return None
    if any(t is not None and (dtype(t) != kind or t in pinned) for t in (x, weight, bias)):
        return None
    # a kernel reads the rows of a weight, which may lie apart; its live tensor may have no memory
    if weight.meta["val"].stride(-1) != 1:
        return None
    user = only_user(node)
    pair = is_op(user, (geglu.launch,)) and user not in pinned and dtype(user) == kind
    result = user if pair and user is not None else node
    columns = size[0] // 2 if is_op(result, (geglu.launch, linear_geglu.launch)) else size[0]
    rows = math.prod((shape(x) or ())[:-1])
    if size[1] >= PIXELS * columns:
        return None
    if columns % COLUMNS or size[1] % DEPTH or (rows < MIN_ROWS and not few_too):
        return None
    norm = norm_of(x)
    if norm is None and not is_written(x, pinned) and not (few_too and is_of_prompt(node, pinned)):
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


def views_and_parts() -> frozenset[Any]:
    """Operations whose result is another order, shape or part of their first operand."""
    return _VIEWS | _PARTS


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


def layer_name(path: str) -> str:
    """The name of a layer, or of several, by the path of its weight or of those that are packed."""
    first, *others = (each.removesuffix(".weight") for each in path.split("+"))
    if len(others) > MOST_NAMED:
        return f"{first} and {len(others)} more"
    return "+".join([first, *(each.rpartition(".")[2] for each in others)])
