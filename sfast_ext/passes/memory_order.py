"""The order of a graph's operations, if memory counts.

The original computes a residual block's shortcut last, so the block's input stays until the end. Computed first, it
leaves the input's memory to the block's first norm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from torch import fx

from sfast_ext.kernels.backend import registry
from sfast_ext.kernels.backend.graph_memory import base_of, bytes_at, given_memory, owners
from sfast_ext.kernels.group_norm import add_group_norm, group_norm
from sfast_ext.kernels.pointwise import bias_add

from .in_place import give_memory
from .rewrite import is_op, is_pure, mutated

if TYPE_CHECKING:
    from .context import PassContext

_TRIES = 16  # changes of a graph: each takes some milliseconds
Change = Callable[[], None]


def memory_order(gm: fx.GraphModule, ctx: PassContext) -> int:
    """Moves operations to the place right after their last input, if the graph then needs less memory at one time.

    Pattern: a value that is held while the most memory is needed, and read later
    Replacement: the operations that read it come earlier

    Pattern: (sum, normed) = add_group_norm.launch(x, bias, residual, scale, ...), held while the most memory is needed
    Replacement: sum = bias_add.launch(x, bias, residual, scale); normed = group_norm.launch(sum, ...)

    After either, norms are given memory (`in_place`); then it is measured whether less is needed.
    """
    return 0 if ctx.most_bytes is None else _Search(gm.graph, ctx).run()


class _Search:
    def __init__(self, graph: fx.Graph, ctx: PassContext) -> None:
        self._graph, self._ctx = graph, ctx
        self._pinned = mutated(graph)
        self._left = _TRIES

    def run(self) -> int:
        """The number of changes that were kept."""
        count = self._moved()
        while any(self._helps(change) for change in self._splits()):
            count += 1
        return count

    def _need(self) -> tuple[int, int]:
        """The most bytes at one time, and how many operations make something then."""
        at, owner = bytes_at(self._graph), owners(list(self._graph.nodes))
        most = max(at, default=0)
        return most, sum(need == most and owner[node] is node for node, need in zip(self._graph.nodes, at))

    def _helps(self, change: Change) -> bool:
        """Makes a change, and takes it back if no less memory is needed."""
        if self._left <= 0:
            return False
        self._left -= 1
        before, state = self._need(), _State(self._graph)
        change()
        give_memory(self._graph, self._ctx)
        if self._need() < before:
            return True
        state.restore()
        return False

    def _moved(self) -> int:
        count = 0
        while any(self._helps(change) for change in self._moves()):
            count += 1
        return count

    def _moves(self) -> Iterator[Change]:
        """For each value that is held while the most memory is needed: all that reads it later comes before that."""
        nodes = list(self._graph.nodes)
        place, owner, at = {node: i for i, node in enumerate(nodes)}, owners(nodes), bytes_at(self._graph)
        peak = at.index(max(at))
        readers: dict[fx.Node, list[fx.Node]] = {}
        for node in nodes[peak + 1 :]:
            for source in dict.fromkeys(owner[x] for x in node.all_input_nodes):
                if place[source] < peak and source.op == "call_function" and owner[node] is not source:
                    readers.setdefault(source, []).append(node)
        for later in readers.values():
            if all(self._movable(node, place, peak) for node in later):

                def change(later: list[fx.Node] = later) -> None:
                    for node in later:
                        _bring_forward(node, place, peak)

                yield change

    def _movable(self, node: fx.Node, place: dict[fx.Node, int], peak: int) -> bool:
        """Whether a node may come before the place `peak`, with the views that it reads."""
        kernel = registry.of(node.target)
        writes = kernel is not None and (bool(kernel.updates) or given_memory(node) is not None)
        if node.op != "call_function" or not is_pure(node) or writes:
            return False
        if node in self._pinned or not self._pinned.isdisjoint(node.all_input_nodes):
            return False
        late = [x for x in node.all_input_nodes if place[x] >= peak]
        return all(base_of(x) is not None and self._movable(x, place, peak) for x in late)

    def _splits(self) -> Iterator[Change]:
        """For each norm whose sum is held while the most memory is needed: both apart, and moves after it."""
        nodes, at = list(self._graph.nodes), bytes_at(self._graph)
        owner, peak = owners(nodes), at.index(max(at))
        last = {owner[x]: place for place, node in enumerate(nodes) for x in node.all_input_nodes}
        for node in nodes[: peak + 1]:
            if not is_op(node, (add_group_norm.launch,)) or not self._divisible(node):
                continue
            if max(last.get(user, 0) for user in node.users) >= peak:

                def change(pair: fx.Node = node) -> None:
                    _take_apart(pair)
                    give_memory(self._graph, self._ctx)
                    self._moved()

                yield change

    def _divisible(self, pair: fx.Node) -> bool:
        taken = sorted(user.args[1] for user in pair.users)  # type: ignore[type-var]
        plain = not pair.kwargs.get("patches") and len(pair.args) == 8
        return plain and taken == [0, 1] and self._pinned.isdisjoint([pair, *pair.users])


def _bring_forward(node: fx.Node, place: dict[fx.Node, int], peak: int) -> None:
    for x in node.all_input_nodes:
        if place[x] >= peak:
            _bring_forward(x, place, peak)
    now = {each: i for i, each in enumerate(node.graph.nodes)}
    max(node.all_input_nodes, key=now.__getitem__).append(node)


def _take_apart(pair: fx.Node) -> None:
    """Makes the pair the sum, and what takes its second result the norm: a change that can be taken back."""
    total, normed = sorted(pair.users, key=lambda user: user.args[1])  # type: ignore[arg-type,return-value]
    options = {name: pair.kwargs[name] for name in ("silu", "out_dtype") if name in pair.kwargs}
    affine: Any = pair.args[4:]
    normed.target, normed.args, normed.kwargs = group_norm.launch, (pair, *affine), options
    total.replace_all_uses_with(pair)
    pair.target, pair.args, pair.kwargs = bias_add.launch, pair.args[:4], {}
    pair.meta["val"] = total.meta["val"]


class _State:
    """What changes alter of a graph."""

    def __init__(self, graph: fx.Graph) -> None:
        self._nodes = [(node, node.target, node.args, node.kwargs, node.meta.get("val")) for node in graph.nodes]

    def restore(self) -> None:
        """Take the changes back."""
        for (before, *_), (node, target, args, kwargs, val) in zip(self._nodes, self._nodes[1:]):
            before.append(node)
            node.target, node.args, node.kwargs = target, args, kwargs
            node.meta["val"] = val
