"""A graph as a list of calls: what its code says, no more memory, and code if it runs often."""

from __future__ import annotations

import gc
import operator
import weakref

import pytest
import torch
from torch import Tensor, fx, nn

from sfast_ext.passes.rewrite import aten
from sfast_ext.plans.register_machine import _COMPILE_AFTER, Interpreter

X, Y = torch.randn(4, 6), torch.randn(4, 6)


class Graph:
    """Of two inputs; `add` puts a call into it."""

    def __init__(self) -> None:
        self.root, self.graph = nn.Module(), fx.Graph()
        self.x, self.y = self.graph.placeholder("x"), self.graph.placeholder("y")

    def add(self, function, *args, **kwargs):
        return self.graph.call_function(function, args, kwargs)

    def module(self, *outputs):
        self.graph.output(list(outputs))
        return fx.GraphModule(self.root, self.graph)


def alike(gm, *inputs):
    program = Interpreter(gm)
    wanted, given = gm(*inputs), program(*inputs)
    assert len(given) == len(wanted)
    for a, b in zip(given, wanted):
        assert torch.equal(a, b)
    return program


def test_arguments_of_all_kinds():
    g = Graph()
    g.root.weight = nn.Parameter(torch.randn(6, 6))
    g.root.deeper = nn.Module()
    g.root.deeper.register_buffer("bias", torch.randn(6))
    weight, bias = g.graph.get_attr("weight"), g.graph.get_attr("deeper.bias")
    one = g.add(aten.linear.default, g.x, weight, bias)
    both = g.add(aten.cat.default, [one, g.y], -1)
    parts = g.add(aten.split.Tensor, both, 6, dim=1)
    first, last = g.add(operator.getitem, parts, 0), g.add(operator.getitem, parts, 1)
    least = g.add(aten.clamp.Tensor, first, min=last)
    three = g.add(aten.stack.default, (least, g.add(aten.zeros_like.default, least), last))
    shaped = g.add(aten.reshape.default, three, [3, 24])
    nothing = g.add(aten.ones.default, [2, 2])
    tied = g.add(operator.getitem, three, (slice(None), 1))
    gm = g.module(shaped, nothing, tied, g.x, weight)
    with torch.no_grad():
        alike(gm, X, Y)


def test_structures_of_values():
    def total(parts: dict[str, list[Tensor]], among: slice) -> Tensor:
        assert type(parts["some"]) is list
        return sum(parts["some"][among])

    g = Graph()
    some = {"some": [g.x, g.y, g.add(aten.sin.default, g.x)]}
    end = g.add(operator.getitem, [1, 2], 1)
    alike(g.module(g.add(total, some, slice(1, end)), g.add(total, some, among=slice(0, 3))), X, Y)


def test_constants_are_what_they_were_at_each_run():
    g = Graph()
    program = alike(g.module(g.add(aten.add.Tensor, g.x, g.y, alpha=3)), X, Y)
    torch.testing.assert_close(program(Y, X)[0], Y + 3 * X)


def test_values_are_let_go_when_nobody_reads_them_any_more():
    alive: list[weakref.ref[Tensor]] = []

    def made(x: Tensor) -> Tensor:
        assert sum(ref() is not None for ref in alive) <= 1  # x
        y = x + 1
        alive.append(weakref.ref(y))
        return y

    g = Graph()
    x = g.add(aten.add.Tensor, g.x, g.y)
    for _ in range(5):
        x = g.add(made, x)
        g.add(made, x)  # that nobody reads at all
    Interpreter(g.module(x))(X, Y)
    assert sum(ref() is not None for ref in alive) == 0


def test_a_value_that_is_read_twice_stays():
    g = Graph()
    one = g.add(aten.sin.default, g.x)
    two = g.add(aten.cos.default, one)
    alike(g.module(g.add(aten.add.Tensor, two, one), g.add(aten.mul.Tensor, one, one)), X, Y)


def test_what_runs_often_becomes_code():
    g = Graph()
    gm = g.module(g.add(aten.add.Tensor, g.x, g.y))
    recompiled, own = [], gm.recompile
    gm.recompile = lambda: (recompiled.append(True), own())[1]
    program = Interpreter(gm)
    for i in range(_COMPILE_AFTER + 3):
        assert torch.equal(program(X, Y)[0], X + Y)
        assert len(recompiled) == (i >= _COMPILE_AFTER)


def test_it_runs_the_graph_as_it_is_though_the_code_is_old():
    g = Graph()
    gm = g.module(g.add(aten.add.Tensor, g.x, g.y))
    (node,) = [n for n in gm.graph.nodes if n.op == "call_function"]
    node.target = aten.mul.Tensor
    program = Interpreter(gm)
    for _ in range(_COMPILE_AFTER + 2):
        assert torch.equal(program(X, Y)[0], X * Y)


def test_weights_are_let_go_with_it():
    g = Graph()
    g.root.register_buffer("weight", torch.randn(4, 6))
    gm = g.module(g.add(aten.add.Tensor, g.x, g.graph.get_attr("weight")))
    program, weight = Interpreter(gm), weakref.ref(gm.weight)
    del gm.weight, g
    gc.disable()
    try:
        program(X, Y)
        assert weight() is not None
        del program
        assert weight() is None
    finally:
        gc.enable()


def test_other_nodes_are_refused():
    g = Graph()
    with pytest.raises(NotImplementedError, match="call_method"):
        Interpreter(g.module(g.graph.call_method("sin", (g.x,))))


def test_too_few_inputs_are_an_error():
    g = Graph()
    with pytest.raises(ValueError):
        Interpreter(g.module(g.x))(X)


def test_a_run_goes_on_while_others_make_code():
    programs, within = [], []

    def others(x: Tensor) -> Tensor:
        if not within:
            within.append(True)
            for _ in range(_COMPILE_AFTER + 1):
                programs[0](X, Y)
        return x

    g = Graph()
    program = Interpreter(g.module(g.add(aten.add.Tensor, g.add(others, g.x), g.y)))
    programs.append(program)
    assert torch.equal(program(X, Y)[0], X + Y) and program._machine is None
    assert torch.equal(program(Y, X)[0], X + Y)


def test_the_cache_is_given_back_before_chosen_nodes_in_each_run(monkeypatch):
    g, said = Graph(), []
    first = g.add(lambda x: said.append("first") or x + 1, g.x)
    second = g.add(lambda x: said.append("second") or 2 * x, first)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: said.append("given back"))
    program = Interpreter(g.module(second), [second])
    for _ in range(_COMPILE_AFTER + 2):
        said.clear()
        assert torch.equal(program(X, Y)[0], 2 * (X + 1)) and said == ["first", "given back", "second"]

    def refuse():
        raise RuntimeError("captures_underway.empty() INTERNAL ASSERT FAILED")

    monkeypatch.setattr(torch.cuda, "empty_cache", refuse)
    assert torch.equal(program(X, Y)[0], 2 * (X + 1))
