"""What passes are written with: helpers that match nodes, find mutated values, and replace nodes.

`node.meta["val"]` has the shape, dtype and device of a value. Its strides are those of the original forward: a rewrite
may change the layout of a value, never its logical content.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from sfast_ext.kernels.backend.registry import Kernel

aten: Any = torch.ops.aten

HALF = (torch.float16, torch.bfloat16)
KERNEL_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def overloads(*names: str) -> frozenset[Any]:
    """Returns the operators of these names ("packet" or "packet.overload") that this version of PyTorch has."""
    found = []
    for name in names:
        packet, _, overload = name.partition(".")
        op = getattr(getattr(aten, packet, None), overload or "default", None)
        if op is not None:
            found.append(op)
    return frozenset(found)


CAST = overloads("to.dtype", "to.dtype_layout", "to.device", "to.other", "_to_copy", "type_as")
RESHAPE = overloads(
    "reshape",
    "view",
    "_unsafe_view",
    "view_as",
    "reshape_as",
    "unsqueeze",
    "squeeze",
    "squeeze.dim",
    "squeeze.dims",
    "flatten.using_ints",
    "unflatten.int",
)
CONV = overloads("conv2d")
LINEAR = overloads("linear")
ADD = overloads("add.Tensor")
SILU = overloads("silu")

_INTEGERS = frozenset({int})

# Operators that may return their input, or views of it, although their schema does not say so.
SILENT_ALIAS = (
    overloads("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout", "einsum", "type_as", "pad")
    | overloads("reshape_as", "view_as", "_unsafe_view", "unsafe_chunk", "unsafe_split.Tensor", "sum_to_size")
    | overloads("unsafe_split_with_sizes", "broadcast_tensors", "meshgrid", "meshgrid.indexing", "cartesian_prod")
    | overloads(*(f"atleast_{n}d{kind}" for n in (1, 2, 3) for kind in ("", ".Sequence")), "conj_physical", "lift")
    | overloads("chain_matmul", "pixel_shuffle", "pixel_unshuffle", "flatten_dense_tensors", "unflatten_dense_tensors")
    | overloads(*(f"_cast_{name}" for name in ("Byte", "Char", "Double", "Float", "Half", "Int", "Long", "Short")))
)
# Their results depend on strides, so no rewrite may change the layout of a value that they read.
READS_STRIDES = overloads(
    "as_strided",
    "as_strided_",
    "view.dtype",
    "resize_",
    "set_.source_Tensor",
    "is_contiguous",
    "stride.int",
)
# --- match ---


def is_op(node: Any, ops: Iterable[Any]) -> bool:
    """Whether a node calls one of `ops`. `node` may be any argument of a node."""
    return isinstance(node, fx.Node) and node.op == "call_function" and node.target in ops


def argument(node: fx.Node, index: int, name: str, default: Any = None) -> Any:
    """Returns an argument given by position or by name."""
    if len(node.args) > index:
        return node.args[index]
    return node.kwargs.get(name, default)


def value(node: Any) -> torch.Tensor | None:
    val = node.meta.get("val") if isinstance(node, fx.Node) else None
    return val if isinstance(val, torch.Tensor) else None


def shape(node: Any) -> tuple[int, ...] | None:
    """Returns a shape of plain integers; None if `node` has no tensor value or a symbolic size."""
    val = value(node)
    if val is None:
        return None
    sizes = tuple(val.shape)
    return sizes if _INTEGERS.issuperset(map(type, sizes)) else None


def dtype(node: Any) -> torch.dtype | None:
    val = value(node)
    return None if val is None else val.dtype


def same_meta(a: Any, b: Any) -> bool:
    """Whether two values have equal shape, dtype and device, so that one may replace the other."""
    x, y = value(a), value(b)
    return (
        x is not None
        and y is not None
        and shape(a) == shape(b) is not None
        and x.dtype == y.dtype
        and x.device == y.device
    )


def only_user(node: fx.Node) -> fx.Node | None:
    """Returns the user of a node that has exactly one."""
    return next(iter(node.users)) if len(node.users) == 1 else None


def is_number(x: Any) -> bool:
    return type(x) in (int, float)


def is_weight(node: Any) -> bool:
    return isinstance(node, fx.Node) and node.op == "get_attr" and node.meta.get("weight") is not None


# --- casts ---


def is_cast(node: Any) -> bool:
    """Whether a node changes the dtype of a value and nothing else."""
    if not is_op(node, CAST) or not isinstance(node.args[0], fx.Node):
        return False
    old, new = value(node.args[0]), value(node)
    return old is not None and new is not None and old.dtype != new.dtype and old.device == new.device


def widens(old: torch.dtype | None, new: torch.dtype | None) -> bool:
    """Whether every value of `old` is a value of `new`."""
    if old == new:
        return True
    wide = {
        torch.float16: (torch.float32, torch.float64),
        torch.bfloat16: (torch.float32, torch.float64),
        torch.float32: (torch.float64,),
    }
    return new in wide.get(old, ()) if old is not None else False


def strip_lossless_casts(node: Any) -> Any:
    """Returns the value under casts that widen."""
    while is_cast(node) and widens(dtype(node.args[0]), dtype(node)):
        node = node.args[0]
    return node


# --- purity and mutation ---


def is_kernel(target: Any) -> bool:
    return isinstance(target, Kernel)


def is_pure(node: fx.Node) -> bool:
    """Whether a node is known to write to no value and to draw no random number."""
    if node.op == "get_attr":
        return True
    if node.op != "call_function":
        return False
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return not target._schema.is_mutable and not (is_random(target) and draws(node))
    return target is operator.getitem or is_kernel(target)


def is_random(op: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in op.tags


def draws(node: fx.Node) -> bool:
    """Whether an operator tagged random draws: dropout and attention do not if nothing is dropped."""
    name = node.target._schema.name
    if name.removesuffix("_").endswith("dropout"):
        return argument(node, 2, "train", True) is not False and argument(node, 1, "p") != 0
    if name == "aten::scaled_dot_product_attention":
        return argument(node, 4, "dropout_p", 0.0) != 0
    return True


def enters_autocast(node: fx.Node) -> bool:
    return node.op == "call_function" and getattr(node.target, "__name__", "") == "_enter_autocast"


def inputs(args: Any) -> Iterator[fx.Node]:
    found: list[fx.Node] = []
    map_arg(args, found.append)
    return iter(found)


def _writes(node: fx.Node) -> Iterator[fx.Node]:
    schema = node.target._schema
    for index, arg in enumerate(schema.arguments):
        if arg.alias_info is not None and arg.alias_info.is_write:
            yield from inputs(argument(node, index, arg.name))


def aliased(target: Any) -> tuple[tuple[int, str], ...] | None:
    """The arguments whose memory a result may share, by position and name; None if that is not known."""
    if isinstance(target, Kernel) and target.writes is not None:
        return ((target.writes, list(inspect.signature(target).parameters)[target.writes]),)
    if not isinstance(target, torch._ops.OpOverload) or target in SILENT_ALIAS:
        return None
    schema = target._schema
    if all(result.alias_info is None for result in schema.returns):
        return ()
    return tuple((i, argument.name) for i, argument in enumerate(schema.arguments) if argument.alias_info is not None)


def _kind(target: Any) -> str:
    if isinstance(target, torch._ops.OpOverload):
        return "writes" if target._schema.is_mutable else "pure"
    return "pure" if target is operator.getitem or is_kernel(target) else "unknown"


def mutated(graph: fx.Graph) -> set[fx.Node]:
    """Returns the pinned nodes: values that an in-place operation, or an unknown function, may write to, and all their
    aliases. No pass rewrites them."""
    written: list[fx.Node] = []
    # thousands of nodes call some dozens of functions; cached by id, as hashing a function takes longer than `_kind`
    kinds: dict[int, str] = {}
    for node in graph.nodes:
        if node.meta.get("mutated"):
            written.append(node)
        if node.op != "call_function":
            continue
        kind = kinds.get(id(node.target)) or kinds.setdefault(id(node.target), _kind(node.target))
        if kind == "writes":
            written += [node, *_writes(node)]
        elif kind == "unknown":
            written += [node, *node.all_input_nodes]
    if not written:
        return set()
    parent: dict[fx.Node, fx.Node] = {}

    def root(node: fx.Node) -> fx.Node:
        while node in parent:
            node = parent[node]
        return node

    shared: dict[int, tuple[tuple[int, str], ...] | None] = {}
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        target = id(node.target)
        if target not in shared:
            shared[target] = aliased(node.target)
        places = shared[target]
        others = node.all_input_nodes if places is None else [x for p in places for x in inputs(argument(node, *p))]
        for other in others:
            a, b = root(node), root(other)
            if a is not b:
                parent[a] = b
    roots = {root(node) for node in written}
    return {node for node in graph.nodes if root(node) in roots}


# --- replace ---


def meta_like(like: Any, size: Iterable[int], dtype: torch.dtype | None = None) -> torch.Tensor | None:
    """Returns a value for `meta["val"]`: device and fake mode of node `like`, another shape or dtype."""
    val = value(like)
    if val is None:
        return None
    key = tuple(size), dtype or val.dtype, val.device
    mode = getattr(val, "fake_mode", None)
    # one for all that are equal: making one takes a millisecond
    made = {} if mode is None else mode.__dict__.setdefault("_values_of_passes", {})
    if key not in made:
        made[key] = val.new_empty(key[0], dtype=key[1])
    return made[key]


def call(
    graph: fx.Graph,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    val: Any,
    kwargs: dict[str, Any] | None = None,
) -> fx.Node:
    """Inserts a call at the graph's insertion point. `val` is its value, or a node that has an equal value."""
    node = graph.create_node("call_function", function, args, kwargs or {})
    node.meta["val"] = val.meta.get("val") if isinstance(val, fx.Node) else val
    return node


def precedes(node: fx.Node, other: fx.Node) -> bool:
    """Whether a node comes before another one of its graph. Nodes cannot be compared in torch 2.1."""
    before = other.prev
    while before.op != "root":
        if before is node:
            return True
        before = before.prev
    return False


def replace(node: fx.Node, new: fx.Node) -> None:
    """Replaces all uses of `node` by `new`, and erases `node` and everything that only it used."""
    node.replace_all_uses_with(new)
    erase(node)


def erase(*nodes: fx.Node) -> None:
    """Erases pure nodes that have no users, and then their inputs likewise."""
    stack = list(nodes)
    while stack:
        node = stack.pop()
        if node._erased or node.users or not is_pure(node):
            continue
        stack += node.all_input_nodes
        node.graph.erase_node(node)


def eliminate_dead(graph: fx.Graph) -> int:
    """Erases all pure nodes that have no users. Returns how many."""
    before = len(graph.nodes)
    for node in reversed(graph.nodes):
        if not node.users and is_pure(node):
            graph.erase_node(node)
    return before - len(graph.nodes)


def top(graph: fx.Graph) -> fx.Node:
    """Returns the first node that is no placeholder. New weights are inserted before it, so that any node may read
    them."""
    return next(node for node in graph.nodes if node.op != "placeholder")


def hoist_weights(graph: fx.Graph) -> None:
    """Moves weights and constants to the top of the graph, so that a fused node may stand anywhere."""
    first = node = top(graph)
    if first.op == "get_attr":
        # most are there already; the first becomes the last of them, as if each other had been moved before it
        while node.next.op == "get_attr":
            node = node.next
        if node is not first:
            node.append(first)
    late = []
    node = first.next
    while node.op != "root":
        if node.op == "get_attr":
            late.append(node)
        node = node.next
    for node in late:
        first.prepend(node)


def weight_node(gm: fx.GraphModule, weight: Any, like: fx.Node) -> fx.Node:
    """Returns the node of a weight of the arena, one per weight. `like` is a weight of the same device and dtype."""
    cache: dict[int, fx.Node] = gm.__dict__.setdefault("_weight_nodes", {})
    node = cache.get(id(weight))
    if node is not None and not node._erased:
        return node
    name = f"_weight{len(cache)}"
    gm.register_buffer(name, weight.tensor, persistent=False)
    with gm.graph.inserting_before(top(gm.graph)):
        node = gm.graph.create_node("get_attr", name)
    node.meta["weight"] = weight
    node.meta["val"] = meta_like(like, weight.tensor.shape)
    cache[id(weight)] = node
    return node


def without_bias(conv: fx.Node) -> fx.Node:
    """Inserts the same convolution without its bias, which another operation is to add."""
    args = (*conv.args[:2], None, *conv.args[3:])
    return call(conv.graph, conv.target, args, conv, dict(conv.kwargs))


def without_linear_bias(linear: fx.Node) -> fx.Node:
    """Inserts the same linear without its bias, which another operation is to add."""
    return call(linear.graph, linear.target, linear.args[:2], linear)


def reshaped(graph: fx.Graph, node: fx.Node, size: tuple[int, ...]) -> fx.Node:
    """Returns `node` in another shape, reading the source of reshapes that lead to it."""
    while is_op(node, RESHAPE) and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    if shape(node) == size:
        return node
    return call(graph, aten.reshape.default, (node, list(size)), meta_like(node, size))
