"""Functionalization of a captured graph.

In-place operations become out-of-place if that is safe. Otherwise the affected values are marked. Writes to
something that outlives the call are refused.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from sfast_ext import reasons
from sfast_ext.reasons import Reason

aten = torch.ops.aten


def functionalize(graph_module: fx.GraphModule) -> Reason | None:
    """Rewrite `a.add_(b)` to `a.add(b)`, and a cast if `b` has a wider dtype, if nothing else shares the memory of `a`.
    Returns a reason to refuse, or None.

    Nodes whose memory a remaining in-place operation may write are marked with meta["mutated"].
    """
    graph = graph_module.graph
    root: dict[fx.Node, fx.Node] = {}
    family: dict[fx.Node, list[fx.Node]] = {}
    writes = []
    for node in graph.nodes:
        base = aliased(node)
        root[node] = root[base] if base is not None else node
        family.setdefault(root[node], []).append(node)
        if written(node):
            writes.append(node)
    if not writes:
        return None
    replaced = False
    order = {n: i for i, n in enumerate(graph.nodes)}
    for node in writes:
        target = written(node)
        assert target is not None
        source = root[target]
        if source.op == "get_attr":
            return reasons.WRITES_WEIGHT(node.target)
        if source.op == "placeholder":
            return reasons.WRITES_ARGUMENT(node.target)
        if source.target in _OF_A_LIST and not _multiplies(source):
            return reasons.WRITES_PERHAPS(node.target)
        overload = _out_of_place(node)
        mine = [n for n in family[source] if _descends(n, node)]
        alone = all(n is target or n in mine for n in family[source])
        same = _shape(node) == _shape(target) and _dtype(node) == _dtype(target)
        made = _result(overload, node) if overload is not None and alone and same else None
        if made is None:
            for n in family[source]:
                n.meta["mutated"] = True
            continue
        node.target = overload
        result = node if made.dtype == _dtype(node) else _cast_back(node, made)
        order[result] = order[node]
        for user in list(target.users):
            if user is not node and order[user] > order[node]:
                user.replace_input_with(target, result)
        replaced = True
        # the result has its own memory now
        family[source] = [n for n in family[source] if n not in mine]
        family[result] = [result, *(n for n in mine if n is not node)]
        root[node] = node
        for n in family[result]:
            root[n] = result
    if replaced:
        graph.lint()
        graph_module.recompile()
    return None


def _schema_aliases(node: fx.Node, *, write: bool) -> fx.Node | None:
    schema = getattr(node.target, "_schema", None)
    if node.op != "call_function" or schema is None:
        return None
    for i, argument in enumerate(schema.arguments):
        info = argument.alias_info
        if info is None or (write and not info.is_write):
            continue
        value = node.args[i] if i < len(node.args) else node.kwargs.get(argument.name)
        if isinstance(value, fx.Node):
            return value
    return None


_CONVERSIONS = {aten.to.dtype, aten.to.dtype_layout, aten.to.device, aten.to.other, aten.type_as.default}
# Composite views have no alias annotation at this level; others alias their input only sometimes.
_MAY_ALIAS = {
    *_CONVERSIONS, aten.reshape.default, aten.contiguous.default, aten.flatten.using_ints, aten.dropout.default,
    aten.chunk.default, aten.expand_as.default, aten.view_as.default, aten.reshape_as.default, aten.data.default,
    aten.alpha_dropout.default, aten.feature_dropout.default, aten.feature_alpha_dropout.default,
    aten.atleast_1d.default, aten.atleast_2d.default, aten.atleast_3d.default, aten.sum_to_size.default,
    aten.conj_physical.default, aten.unsafe_chunk.default, aten.unsafe_split.Tensor,
    aten.unsafe_split_with_sizes.default,
}  # fmt: skip
# their results may be views of any of a list of tensors
_OF_A_LIST = {
    aten.broadcast_tensors.default, aten.meshgrid.default, aten.meshgrid.indexing, aten.einsum.default,
    aten.atleast_1d.Sequence, aten.atleast_2d.Sequence, aten.atleast_3d.Sequence,
}  # fmt: skip


def _multiplies(node: fx.Node) -> bool:
    """Whether a result is a product, in new memory: `einsum` of several operands. Of one it may be a view."""
    operands = node.args[1] if len(node.args) > 1 else node.kwargs.get("tensors")
    return node.target is aten.einsum.default and isinstance(operands, (list, tuple)) and len(operands) > 1


def _is_a_copy(node: fx.Node) -> bool:
    """Whether a conversion has separate memory. Not by strides and devices: a plan's inputs and weights may have
    others than those of the original."""
    if node.target not in _CONVERSIONS:
        return False
    before = _dtype(node.args[0])  # type: ignore[arg-type]
    converts = before is not None and _dtype(node) not in (None, before)
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    given = {**dict(zip(names, node.args)), **node.kwargs}
    return converts or given.get("copy") is True


def aliased(node: fx.Node) -> fx.Node | None:
    """The node whose memory the result may share."""
    if node.op != "call_function" or _is_a_copy(node):
        return None
    found = _schema_aliases(node, write=False)
    if found is not None:
        return found
    named = str(node.target) == "<built-in function getitem>"
    if (node.target in _MAY_ALIAS or named) and node.args and isinstance(node.args[0], fx.Node):
        return node.args[0]
    return None


def _descends(node: fx.Node | None, ancestor: fx.Node) -> bool:
    while node is not None and node is not ancestor:
        node = aliased(node)
    return node is ancestor


def written(node: fx.Node) -> fx.Node | None:
    """The node whose memory is written."""
    return _schema_aliases(node, write=True)


def _out_of_place(node: fx.Node) -> object | None:
    name = node.target._schema.name.split("::")[-1]  # type: ignore[union-attr]
    if not name.endswith("_") or name.endswith("__"):
        return None
    packet = getattr(aten, name[:-1], None)
    return getattr(packet, node.target._overloadname, None) if packet is not None else None  # type: ignore[union-attr]


def _result(overload: object, node: fx.Node) -> torch.Tensor | None:
    """What an out-of-place operation gives for the arguments of a node, on the meta device: its dtype may be wider than
    that of the first one, which an in-place operation keeps. None if that is not known."""

    def like(x: fx.Node) -> Any:
        val = x.meta.get("val")
        return torch.empty(val.shape, dtype=val.dtype, device="meta") if isinstance(val, torch.Tensor) else val

    try:
        made = overload(*map_arg(node.args, like), **map_arg(node.kwargs, like))  # type: ignore[operator]
    except Exception:
        return None
    return made if isinstance(made, torch.Tensor) else None


def _cast_back(node: fx.Node, made: torch.Tensor) -> fx.Node:
    """A cast to the dtype that a node had in place, read by all of its users."""
    val = node.meta["val"]
    with node.graph.inserting_after(node):
        cast = node.graph.call_function(aten.to.dtype, (node, val.dtype))
    node.replace_all_uses_with(cast, delete_user_cb=lambda user: user is not cast)
    cast.meta["val"], node.meta["val"] = val, torch.empty_like(val, dtype=made.dtype)
    return cast


def _shape(node: fx.Node) -> tuple[int, ...] | None:
    val = node.meta.get("val")
    return tuple(val.shape) if isinstance(val, torch.Tensor) else None


def _dtype(node: fx.Node) -> torch.dtype | None:
    val = node.meta.get("val")
    return val.dtype if isinstance(val, torch.Tensor) else None
