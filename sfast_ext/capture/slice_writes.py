"""Writes of slices into a new tensor become a concatenation.

Memory-saving attention fills its result like this: `out = zeros(…)`, then `out[:, a:b] = …` for each slice. Slices
along several dimensions become nested concatenations.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from sfast_ext.capture import functionalize

aten: Any = torch.ops.aten

_NEW = ("zeros", "zeros_like", "new_zeros", "empty", "empty_like", "new_empty", "full", "full_like", "new_full", "ones")
_VIEWS = {aten.slice.Tensor, aten.alias.default}


_Box = dict[int, tuple[int, int]]
"""The range of a part by dimension. Dimensions that are not listed are complete."""


class _Write(NamedTuple):
    copy: fx.Node
    views: list[fx.Node]  # from the tensor to the written view
    box: _Box

    @property
    def value(self) -> fx.Node:
        return self.copy.args[1]  # type: ignore[return-value]


def join(graph: fx.Graph) -> int:
    """Replace such tensors. Returns their number. A tensor is left alone if it is read before the last write, or if the
    slices leave a gap or overlap."""
    count = 0
    order = {node: place for place, node in enumerate(graph.nodes)}
    written = Counter(_root(target) for node in graph.nodes if (target := functionalize.written(node)) is not None)
    for node in list(graph.nodes):
        if node in written and _is_new(node):
            count += _join(node, order, written)
    return count


def _join(base: fx.Node, order: dict[fx.Node, int], written: Counter[fx.Node]) -> int:
    writes: list[_Write] = []
    reads: list[fx.Node] = []
    if not _collect(base, [], writes, reads) or len(writes) != written[base]:
        return 0
    # a later write to a written value would not reach the concatenation
    if any(_root(write.value) in written for write in writes):
        return 0
    writes.sort(key=lambda write: order[write.copy])
    last = writes[-1].copy
    if any(order[node] < order[last] for node in reads):
        return 0
    size = tuple(base.meta["val"].shape)
    # of writes to the complete tensor the last one counts
    tree = _tiled(writes if writes[-1].box else writes[-1:], size, size)
    if tree is None:
        return 0
    graph = base.graph
    with graph.inserting_before(last.next):
        joined = _concatenated(graph, tree, base.meta["val"])
    for node in reads:
        node.replace_input_with(base, joined)
    for write in writes:
        for node in (write.copy, *reversed(write.views)):
            if not node._erased and not node.users:
                graph.erase_node(node)
    if not base.users:
        graph.erase_node(base)
    return 1


def _collect(node: fx.Node, views: list[fx.Node], writes: list[_Write], reads: list[fx.Node]) -> bool:
    """Collect the writes to `node`, also through slices, and its readers. False if it is used in another way."""
    for user in node.users:
        if user.target in _VIEWS and _is_written_only(user):
            if not _collect(user, [*views, user], writes, reads):
                return False
        elif _fills(user, node):
            box = _box(views)
            if box is None:
                return False
            writes.append(_Write(user, list(views), box))
        elif views or functionalize.written(user) is not None:
            return False
        else:
            reads.append(user)
    return True


def _is_written_only(view: fx.Node) -> bool:
    return bool(view.users) and all(
        _fills(user, view) or (user.target in _VIEWS and _is_written_only(user)) for user in view.users
    )


def _fills(node: fx.Node, target: fx.Node) -> bool:
    """Whether `node` copies another value into `target`, as an assignment to a slice does."""
    copies = node.op == "call_function" and node.target is aten.copy_.default
    return copies and node.args[0] is target and node.args[1] is not target and not node.users


def _box(views: Sequence[fx.Node]) -> _Box | None:
    """The part that a chain of slices selects. None if it is not a contiguous range."""
    found: _Box = {}
    for view in views:
        if view.target is aten.alias.default:
            continue
        source = view.args[0]
        assert isinstance(source, fx.Node)
        size = source.meta["val"].shape
        dim = _argument(view, 1, "dim", 0) % len(size)
        start, end = _argument(view, 2, "start", None), _argument(view, 3, "end", None)
        start, end = (0 if start is None else start), (sys.maxsize if end is None else end)
        if not all(type(x) is int for x in (start, end)) or _argument(view, 4, "step", 1) != 1:
            return None
        start, end, _ = slice(start, end).indices(size[dim])
        if (start, end) == (0, size[dim]):
            continue
        if dim in found or end <= start:
            return None
        found[dim] = start, end
    return found


class _Row(NamedTuple):
    """Parts side by side along a dimension."""

    dim: int
    parts: list[_Row | _Write]


def _tiled(writes: list[_Write], size: tuple[int, ...], part: tuple[int, ...], done: int = 0) -> _Row | _Write | None:
    """How writes tile a part of a tensor of this size, by dimension from `done` on. None if they leave a gap or
    overlap."""
    dim = min((d for write in writes for d in write.box if d >= done), default=None)
    if dim is None:
        fits = len(writes) == 1 and tuple(writes[0].value.meta["val"].shape) == part
        return writes[0] if fits else None
    groups: dict[tuple[int, int], list[_Write]] = {}
    for write in writes:
        groups.setdefault(write.box.get(dim, (0, size[dim])), []).append(write)
    at, parts = 0, []
    for start, end in sorted(groups):
        below = _tiled(groups[start, end], size, (*part[:dim], end - start, *part[dim + 1 :]), dim + 1)
        if start != at or below is None:
            return None
        parts.append(below)
        at = end
    return _Row(dim, parts) if at == size[dim] else None


def _concatenated(graph: fx.Graph, tree: _Row | _Write, val: torch.Tensor) -> fx.Node:
    """The concatenation of the written values, with the dtype of `val`."""
    if isinstance(tree, _Write):
        value = tree.value
        if value.meta["val"].dtype == val.dtype:
            return value
        cast = graph.call_function(aten.to.dtype, (value, val.dtype))
        cast.meta["val"] = value.meta["val"].new_empty(value.meta["val"].shape, dtype=val.dtype)
        return cast
    values = [_concatenated(graph, part, val) for part in tree.parts]
    if len(values) == 1:
        return values[0]
    joined = graph.call_function(aten.cat.default, (values, tree.dim))
    size = list(values[0].meta["val"].shape)
    size[tree.dim] = sum(value.meta["val"].shape[tree.dim] for value in values)
    joined.meta["val"] = val.new_empty(size)
    return joined


def _is_new(node: fx.Node) -> bool:
    name = getattr(getattr(node.target, "overloadpacket", None), "__name__", "")
    return node.op == "call_function" and name in _NEW and isinstance(node.meta.get("val"), torch.Tensor)


def _root(node: fx.Node) -> fx.Node:
    """The node at the root of a chain of views."""
    base: fx.Node | None = node
    while base is not None:
        node, base = base, functionalize.aliased(base)
    return node


def _argument(node: fx.Node, index: int, name: str, default: Any) -> Any:
    return node.args[index] if len(node.args) > index else node.kwargs.get(name, default)
