"""The loop of passes over single nodes: what it visits, what it skips, what it counts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, fx

from sfast_ext.passes import PassContext
from sfast_ext.passes.fusion import fusion, rewrite_each
from sfast_ext.passes.rewrite import call, overloads, replace

from .support import Traced, aten, randn

SIN, COS, NEG = overloads("sin"), overloads("cos"), overloads("neg")
X = randn(2, 3)


def to_cos(node: fx.Node) -> bool:
    with node.graph.inserting_before(node):
        new = call(node.graph, aten.cos.default, node.args, node)
    replace(node, new)
    return True


@fusion(SIN)
def sin_to_cos(node: fx.Node, pinned: set[fx.Node], ctx: PassContext) -> bool:
    """Pattern: sin(x)."""
    return to_cos(node)


def test_nodes_of_the_operators_are_rewritten_and_counted() -> None:
    traced = Traced(lambda x: x.sin().neg().sin(), X)
    assert traced.rewrite(sin_to_cos) == 2
    assert traced.ops() == {"cos": 2, "neg": 1}


def test_the_pass_has_the_name_and_the_documentation_of_its_function() -> None:
    assert sin_to_cos.__name__ == "sin_to_cos" and sin_to_cos.__doc__ == "Pattern: sin(x)."


def test_pinned_nodes_are_skipped() -> None:
    def forward(x: Tensor) -> Tensor:
        y = x.sin()
        y.add_(1)
        return y.sin()

    traced = Traced(forward, X)
    assert traced.rewrite(sin_to_cos) == 1  # the first is written to
    assert traced.ops()["sin"] == 1


def test_readers_of_pinned_nodes_are_skipped_if_asked_for() -> None:
    def forward(x: Tensor) -> Tensor:
        y = x.cos()
        y.add_(1)
        return y.sin() + x.sin()

    visited: list[fx.Node] = []

    def note(node: fx.Node, pinned: set[fx.Node], ctx: PassContext) -> bool:
        assert pinned
        visited.append(node)
        return False

    traced = Traced(forward, X)
    assert traced.rewrite(fusion(SIN)(note)) == 0 and len(visited) == 2
    visited.clear()
    assert traced.rewrite(fusion(SIN, skip_pinned_inputs=True)(note)) == 0
    assert [node.args[0].op for node in visited] == ["placeholder"]


def test_nodes_that_a_rewrite_inserts_are_not_visited() -> None:
    traced = Traced(lambda x: x.sin(), X)
    visited = 0

    def twice(node: fx.Node) -> bool:
        nonlocal visited
        visited += 1
        with node.graph.inserting_after(node):
            call(node.graph, aten.sin.default, node.args, node)
        return True

    assert rewrite_each(traced.graph, SIN, set(), twice) == visited == 1


def test_nodes_that_a_rewrite_erased_are_not_visited() -> None:
    """A pair is replaced with its first node; the second is gone by the time it would have its turn."""
    traced = Traced(lambda x: x.sin().neg().neg().cos(), X)

    def pair(node: fx.Node) -> bool:
        (user,) = node.users
        assert not node._erased and user.target in NEG
        replace(user, node.args[0])
        return True

    assert rewrite_each(traced.graph, NEG, set(), pair) == 1
    assert traced.ops() == {"sin": 1, "cos": 1}


def test_numbers_are_added_up() -> None:
    traced = Traced(lambda x: x.sin().sin(), X)
    assert rewrite_each(traced.graph, SIN, set(), lambda node: 3) == 6


def test_a_kernel_that_is_not_supported_leaves_the_graph_as_it_is() -> None:
    kernel: Any = SimpleNamespace(__name__="kernel")
    traced = Traced(lambda x: x.sin(), X)
    asked: list[Any] = []

    class Context(PassContext):
        def supported(self, *kernels: Any) -> bool:
            asked.append(kernels)
            return kernel not in kernels

    traced.ctx = Context(traced.arena, torch.device("cpu"), triton=True)
    assert traced.rewrite(fusion(SIN, needs=(kernel,))(lambda node, pinned, ctx: to_cos(node))) == 0
    assert traced.ops() == {"sin": 1} and asked == [(kernel,)]
    assert traced.rewrite(sin_to_cos) == 1


def test_weights_go_to_the_top_if_asked_for() -> None:
    weight = torch.nn.Parameter(randn(3))

    class Late(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = weight

        def forward(self, x: Tensor) -> Tensor:
            return x.sin() * self.weight

    def place(**options: Any) -> bool:
        traced = Traced(Late(), X)
        found = next(node for node in traced.graph.nodes if node.op == "get_attr")
        next(node for node in traced.graph.nodes if node.target in SIN).append(found)
        traced.rewrite(fusion(SIN, **options)(lambda node, pinned, ctx: False))
        return [node.op for node in traced.graph.nodes][1] == "get_attr"

    assert place(hoist=True) and not place()
