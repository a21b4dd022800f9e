"""What is known of a graph before it runs: a summary of its operations, which of its results share memory; and the
binding of its attributes to the memory that the plan reads. The memory that its values need:
`kernels.backend.graph_memory`."""

from __future__ import annotations

import hashlib
import operator
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from sfast_ext.kernels.backend import registry
from sfast_ext.kernels.backend.graph_memory import given_argument
from sfast_ext.weights.banks import Bank
from sfast_ext.weights.original_layout import is_plain, memory_of
from sfast_ext.weights.weight import Weight


def readonly(graph_module: fx.GraphModule, tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Those of a graph's attributes that no kernel of it writes to."""
    found: list[fx.Node] = []
    for node in graph_module.graph.nodes:
        kernel = registry.of(node.target)
        if kernel is not None:
            places = kernel.updates if kernel.writes is None else (kernel.writes, *kernel.updates)
            fx.node.map_arg([given_argument(kernel, node, place) for place in places], found.append)
    names = [str(node.target) for node in found if node.op == "get_attr"]
    written = {id(operator.attrgetter(name)(graph_module)) for name in names}
    return [x for x in tensors if id(x) not in written]


_NARROW = {torch.int8, torch.float8_e4m3fn, torch.float8_e5m2}


_CASTS = {"aten::to", "aten::_to_copy"}
_BEFORE_A_CAST = {"aten::clamp", "aten::clamp_min", "aten::clamp_max", "aten::view", "aten::reshape", "aten::clone"}
_TO_CODES = {"aten::round", "aten::div", "aten::mul", "aten::floor"}
"""What makes codes of values: a scale or its reciprocal, a rounding."""


def rounds_inputs(graph: fx.Graph) -> bool:
    """Whether products of a graph read 8 bits and what follows from an input. They round that input, here or in an
    operation of a library, so two correct results differ by more than one that keeps the bits of half precision."""
    following, whole = set[fx.Node](), set[fx.Node]()
    for node in graph.nodes:
        given = node.all_input_nodes
        if node.op == "placeholder":
            val = node.meta.get("val")
            # a mask of 8 bits is what it is
            (following if isinstance(val, torch.Tensor) and val.is_floating_point() else whole).add(node)
        elif not following.isdisjoint(given) and not _tells(node):
            following.add(node)
            narrow = (x for x in given if _dtype(x) in _NARROW)
            if node.op == "call_function" and not whole.issuperset(narrow):
                return True
        elif not whole.isdisjoint(given) or not following.isdisjoint(given):
            whole.add(node)
    return False


def _tells(node: fx.Node) -> bool:
    """Whether a node makes a mask, or whole numbers, of what is not a code: no value of its input is rounded by it."""
    dtype = _dtype(node)
    if dtype != torch.int8 or _name(node) not in _CASTS:
        return dtype == torch.bool
    source: Any = node.args[0]
    while _name(source) in _CASTS | _BEFORE_A_CAST:
        source = source.args[0]
    return _name(source) not in _TO_CODES


def _dtype(node: fx.Node) -> torch.dtype | None:
    return getattr(node.meta.get("val"), "dtype", None)


def _name(node: fx.Node) -> str:
    return getattr(getattr(node.target, "_schema", None), "name", "")


def operation_counts(graph: fx.Graph) -> dict[str, int]:
    """The number of occurrences of each operation by name, the most frequent first."""
    names = (operation_name(node.target) for node in graph.nodes if node.op == "call_function")
    return dict(Counter(names).most_common())


def digest(graph_module: fx.GraphModule) -> str:
    """A hash of all operations and the data flow between them.

    Equal for two graphs that apply the same operations with the same arguments to the same inputs and weights. The
    order of independent nodes and the names of nodes do not matter. Weights are compared by `Weight.path`, constants by
    dtype and shape.
    """
    marks: dict[fx.Node, str] = {}
    inputs = 0
    for node in graph_module.graph.nodes:
        if node.op == "placeholder":
            what: Any = ("input", inputs)
            inputs += 1
        elif node.op == "get_attr":
            what = _attribute(graph_module, node)
        else:
            what = operation_name(node.target), *fx.node.map_arg((node.args, _sorted(node.kwargs)), marks.__getitem__)
        marks[node] = _hash(repr(what))
    return _hash(" ".join(sorted(marks.values())))


def operation_name(target: Any) -> str:
    """`aten.linear.default` for an operator, module and name for a Python function."""
    if isinstance(target, (str, torch._ops.OpOverload)):
        return str(target)
    return f"{target.__module__}.{target.__qualname__}"


def _attribute(graph_module: fx.GraphModule, node: fx.Node) -> Any:
    weight = node.meta.get("weight")
    if weight is not None:
        return "weight", weight.path
    constant = operator.attrgetter(str(node.target))(graph_module)
    return "constant", str(constant.dtype), tuple(constant.shape)


def _sorted(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {key: kwargs[key] for key in sorted(kwargs)}


def _hash(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


class View(NamedTuple):
    """A result in the memory of another.

    Args:
        base: the number of the other one.
        stride: None if it is the same object.
        offset: in elements, from the first one of the other.
    """

    base: int
    stride: tuple[int, ...] | None = None
    offset: int = 0


def shared_results(outputs: Sequence[torch.Tensor], *, alike: bool = True) -> dict[int, View]:
    """Which results of the original lie in the memory of others, by their number.

    Args:
        alike: whether a plan's results have the same strides. If not, only those that are the same object are found.
    """
    first = {id(x): i for i, x in reversed([*enumerate(outputs)])}
    same = {i: View(first[id(x)]) for i, x in enumerate(outputs) if first[id(x)] != i}
    if not alike:
        return same
    found: dict[int, View] = {}
    bases: list[int] = []
    # a larger one is no part of a smaller one
    for i in sorted(set(range(len(outputs))) - same.keys(), key=lambda i: (-outputs[i].numel(), i)):
        view = next((view for j in bases if (view := _view(outputs[i], outputs[j], j)) is not None), None)
        if view is None:
            bases.append(i)
        else:
            found[i] = view
    # these last: they may be the same as a view
    return {**found, **same}


def has_gaps(leaf: torch.Tensor) -> bool:
    """Whether the strides of a tensor do not follow from their order, which the signature has."""
    return leaf.stride() != torch.empty_like(leaf, device="meta").stride()


def lent(outputs: Sequence[torch.Tensor], others: Iterable[torch.Tensor]) -> frozenset[int]:
    """Which results of the original lie in the memory of other tensors, by their number."""
    memory = {memory_of(x) for x in others if is_plain(x)}
    return frozenset(i for i, x in enumerate(outputs) if is_plain(x) and memory_of(x) in memory)


def hand_out(own: list[torch.Tensor], shapes: Sequence[torch.Tensor], views: dict[int, View]) -> None:
    """Replace those of a plan's results that are views. `shapes` has tensors of the same shapes."""
    for i, (base, stride, offset) in views.items():
        own[i] = own[base] if stride is None else own[base].as_strided(shapes[i].shape, stride, offset)


def _view(x: torch.Tensor, base: torch.Tensor, number: int) -> View | None:
    plain = x.layout is torch.strided and base.layout is torch.strided and x.dtype == base.dtype and x.numel()
    if not plain or x.device != base.device or _span(base) != base.numel():
        return None
    if x.untyped_storage().data_ptr() != base.untyped_storage().data_ptr():
        return None
    offset = x.storage_offset() - base.storage_offset()
    return View(number, tuple(x.stride()), offset) if 0 <= offset <= _span(base) - _span(x) else None


def _span(x: torch.Tensor) -> int:
    """The elements of memory from the first one to the last one."""
    return 1 + sum((n - 1) * step for n, step in zip(x.shape, x.stride()))


def bind_attributes(graph_module: fx.GraphModule) -> tuple[list[Weight], list[Bank]]:
    """Make the graph's attributes the live tensors of the arena and the tensors of banks. Returns the weights and the
    banks that it reads."""
    weights: dict[int, Weight] = {}
    banks: dict[int, Bank] = {}
    used = set()
    for node in graph_module.graph.nodes:
        if node.op != "get_attr":
            continue
        used.add(node.target)
        weight, bank = node.meta.get("weight"), node.meta.get("bank")
        if weight is not None:
            weights[id(weight)] = weight
            _plain_attribute(graph_module, node.target, weight.tensor)
        elif bank is not None:
            banks[id(bank)] = bank
            _plain_attribute(graph_module, node.target, node.meta["held"])
        else:
            _plain_attribute(graph_module, node.target, getattr(graph_module, node.target).detach())
    for name in [*graph_module._parameters, *graph_module._buffers]:
        if name not in used:
            # a weight that was packed: this reference would keep its old memory
            delattr(graph_module, name)
    for name, value in list(graph_module.__dict__.items()):
        if isinstance(value, torch.Tensor) and name not in used:
            delattr(graph_module, name)
    # the graph has a name for each node that was erased as well (findings/torch_fx_graph_keeps_erased_nodes.sh)
    names = getattr(getattr(graph_module.graph, "_graph_namespace", None), "_obj_to_name", ())
    named = (node for node in names if isinstance(node, fx.Node))
    for node in [*graph_module.graph.nodes, *named]:
        # fake tensors are not needed any more, and keep the whole fake mode alive; weights that no plan reads keep the
        # parameters of a module that is gone
        node.meta.clear()
    return list(weights.values()), list(banks.values())


def _plain_attribute(graph_module: fx.GraphModule, name: str, tensor: torch.Tensor) -> None:
    for known in (graph_module._parameters, graph_module._buffers):
        known.pop(name, None)
    graph_module.__dict__[name] = tensor
