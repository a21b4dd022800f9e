"""The words the passes are written in: match, guard, replace.

`node.meta["val"]` tells shape, dtype and device of a value. Its strides are those of the original forward: a
rewrite may change the layout of a value, never its logical content.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

aten: Any = torch.ops.aten

KERNELS = "sfast_ext.kernels"
HALF = (torch.float16, torch.bfloat16)
KERNEL_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def overloads(*names: str) -> frozenset[Any]:
    """The operators of that name ("packet.overload") that this torch has."""
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

# Composite operators that hand back their input, or a view of it, without saying so in their schema.
SILENT_ALIAS = overloads(
    "dropout", "feature_dropout", "alpha_dropout", "einsum", "type_as", "reshape_as", "view_as", "pad"
)
# Their results depend on how a value lies in memory, so no value may be laid out anew under them.
READS_STRIDES = overloads(
    "as_strided",
    "as_strided_",
    "view.dtype",
    "view_as_complex",
    "resize_",
    "set_.source_Tensor",
    "is_contiguous",
    "stride.int",
)


# --- match ---


def is_op(node: Any, ops: Iterable[Any]) -> bool:
    return isinstance(node, fx.Node) and node.op == "call_function" and node.target in ops


def argument(node: fx.Node, index: int, name: str, default: Any = None) -> Any:
    if len(node.args) > index:
        return node.args[index]
    return node.kwargs.get(name, default)


def value(node: Any) -> torch.Tensor | None:
    val = node.meta.get("val") if isinstance(node, fx.Node) else None
    return val if isinstance(val, torch.Tensor) else None


def shape(node: Any) -> tuple[int, ...] | None:
    """Shape in plain integers; None for what is no tensor or has a symbolic size."""
    val = value(node)
    if val is None:
        return None
    sizes = tuple(val.shape)
    return sizes if _INTEGERS.issuperset(map(type, sizes)) else None


def dtype(node: Any) -> torch.dtype | None:
    val = value(node)
    return None if val is None else val.dtype


def same_meta(a: Any, b: Any) -> bool:
    """Equal shape, dtype and device: one can stand for the other."""
    x, y = value(a), value(b)
    return (
        x is not None
        and y is not None
        and shape(a) == shape(b) is not None
        and x.dtype == y.dtype
        and x.device == y.device
    )


def only_user(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def is_number(x: Any) -> bool:
    return type(x) in (int, float)


def is_weight(node: Any) -> bool:
    return isinstance(node, fx.Node) and node.op == "get_attr" and node.meta.get("weight") is not None


# --- casts ---


def is_cast(node: Any) -> bool:
    """Changes the dtype and nothing else."""
    if not is_op(node, CAST) or not isinstance(node.args[0], fx.Node):
        return False
    old, new = value(node.args[0]), value(node)
    return old is not None and new is not None and old.dtype != new.dtype and old.device == new.device


def widens(old: torch.dtype | None, new: torch.dtype | None) -> bool:
    """Every value of `old` is a value of `new`."""
    if old == new:
        return True
    wide = {
        torch.float16: (torch.float32, torch.float64),
        torch.bfloat16: (torch.float32, torch.float64),
        torch.float32: (torch.float64,),
    }
    return new in wide.get(old, ()) if old is not None else False


def strip_lossless_casts(node: Any) -> Any:
    """The value under casts that lost nothing."""
    while is_cast(node) and widens(dtype(node.args[0]), dtype(node)):
        node = node.args[0]
    return node


# --- purity and mutation ---


def is_kernel(target: Any) -> bool:
    return getattr(target, "__module__", "").startswith(KERNELS)


def is_pure(node: fx.Node) -> bool:
    """Neither writes to a value, nor draws a random number, nor is anything unknown."""
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
    """Dropout and attention are tagged random, but are not when nothing is dropped."""
    name = node.target._schema.name
    if name.endswith("dropout"):
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


def _aliases(node: fx.Node) -> Iterator[fx.Node]:
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target in SILENT_ALIAS:
        yield from node.all_input_nodes
    elif any(result.alias_info is not None for result in target._schema.returns):
        for index, arg in enumerate(target._schema.arguments):
            if arg.alias_info is not None:
                yield from inputs(argument(node, index, arg.name))


def _kind(target: Any) -> str:
    if isinstance(target, torch._ops.OpOverload):
        return "writes" if target._schema.is_mutable else "pure"
    return "pure" if target is operator.getitem or is_kernel(target) else "unknown"


def mutated(graph: fx.Graph) -> set[fx.Node]:
    """Values that an in-place operation, or an unknown function, may write to: no pass touches them."""
    written: list[fx.Node] = []
    # a graph of thousands of nodes has some dozens of functions; by id, as their hashes take longer than the answer
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

    for node in graph.nodes:
        if node.op == "call_function":
            for other in _aliases(node):
                a, b = root(node), root(other)
                if a is not b:
                    parent[a] = b
    roots = {root(node) for node in written}
    return {node for node in graph.nodes if root(node) in roots}


# --- replace ---


def meta_like(like: Any, size: Iterable[int], dtype: torch.dtype | None = None) -> torch.Tensor | None:
    """A value for `meta["val"]`: the device (and fake mode) of node `like`, another shape or dtype."""
    val = value(like)
    if val is None:
        return None
    key = tuple(size), dtype or val.dtype, val.device
    mode = getattr(val, "fake_mode", None)
    # one stands for all that look alike: making one takes a millisecond
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
    """A call at the graph's insertion point; `val` is its value, or the node whose value it shares."""
    node = graph.create_node("call_function", function, args, kwargs or {})
    node.meta["val"] = val.meta.get("val") if isinstance(val, fx.Node) else val
    return node


def replace(node: fx.Node, new: fx.Node) -> None:
    """`new` takes all uses of `node`; `node`, and what only it needed, goes."""
    node.replace_all_uses_with(new)
    erase(node)


def erase(*nodes: fx.Node) -> None:
    """Takes nodes out that nobody uses any more, and then their inputs likewise."""
    stack = list(nodes)
    while stack:
        node = stack.pop()
        if node._erased or node.users or not is_pure(node):
            continue
        stack += node.all_input_nodes
        node.graph.erase_node(node)


def eliminate_dead(graph: fx.Graph) -> int:
    before = len(graph.nodes)
    for node in reversed(graph.nodes):
        if not node.users and is_pure(node):
            graph.erase_node(node)
    return before - len(graph.nodes)


def top(graph: fx.Graph) -> fx.Node:
    """The first node that is no placeholder: new weights go before it, known to the whole graph."""
    return next(node for node in graph.nodes if node.op != "placeholder")


def hoist_weights(graph: fx.Graph) -> None:
    """Weights and constants need nothing: first in the graph, they are at hand for any fused node."""
    first = node = top(graph)
    if first.op == "get_attr":
        # most are there already; the first of them goes last, as if the others had been put before it one by one
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
    """The one node of a weight of the arena; `like` is a weight of the same device and dtype."""
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
    """The same convolution, whose bias is left to another."""
    args = (*conv.args[:2], None, *conv.args[3:])
    return call(conv.graph, conv.target, args, conv, dict(conv.kwargs))


def without_linear_bias(linear: fx.Node) -> fx.Node:
    """The same linear layer, whose bias is left to another."""
    return call(linear.graph, linear.target, linear.args[:2], linear)


def reshaped(graph: fx.Graph, node: fx.Node, size: tuple[int, ...]) -> fx.Node:
    """`node` in another shape, looking through reshapes that lead to it."""
    while is_op(node, RESHAPE) and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    if shape(node) == size:
        return node
    return call(graph, aten.reshape.default, (node, list(size)), meta_like(node, size))
