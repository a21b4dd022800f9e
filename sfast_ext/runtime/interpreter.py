"""Runs an FX graph as a flat list of calls.

To build the list takes a tenth of the time that Python needs to compile the graph's code. A plan with a CUDA graph runs
its graph three times. A graph that runs more often is compiled.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

_COMPILE_AFTER = 8  # runs

Registers = list[Any]


class _Step(NamedTuple):
    function: Callable[..., Any]
    args: Callable[[Registers], Sequence[Any]]
    names: tuple[str, ...]  # of keyword arguments
    values: Callable[[Registers], Sequence[Any]]
    register: int  # of the result
    dead: tuple[int, ...]  # registers that are not read again


class Interpreter:
    """Runs the current graph of a graph module.

    Args:
        graph_module: has call_function nodes only. Its attributes are read now.
    """

    def __init__(self, graph_module: fx.GraphModule) -> None:
        self._graph_module = graph_module
        self._runs = 0
        self._code: Callable[..., Any] = _no_code
        self._registers: Registers = []  # weights, constants, and space for values
        self._inputs: list[int] = []
        steps: list[_Step] = []
        self._output: Callable[[Registers], Any] = _nothing
        self._places: dict[fx.Node, int] = {}
        last = _last_uses(graph_module.graph)
        for node in graph_module.graph.nodes:
            self._add(node, last.get(node, []), steps)
        self._places.clear()
        self._listed: tuple[Registers, list[_Step]] | None = self._registers, steps
        self._tensors = list({id(x): x for x in self._registers if isinstance(x, torch.Tensor)}.values())
        self._registers = []

    def __call__(self, *inputs: torch.Tensor) -> Any:
        """The graph's flat outputs."""
        self._runs += 1
        if self._runs == _COMPILE_AFTER + 1:
            self._graph_module.recompile()
            self._code, self._listed = self._graph_module.forward, None
        listed = self._listed  # another thread may set it to None
        if listed is None:
            return self._code(*inputs)
        kept, steps = listed
        registers = kept.copy()
        for place, x in zip(self._inputs, inputs, strict=True):
            registers[place] = x
        del inputs
        for function, args, names, values, register, dead in steps:
            registers[register] = function(*args(registers), **dict(zip(names, values(registers))))
            for place in dead:
                registers[place] = None
        return self._output(registers)

    def tensors(self) -> list[torch.Tensor]:
        """The tensors that the graph reads besides its inputs, each once."""
        return self._tensors

    def _add(self, node: fx.Node, read_last: list[fx.Node], steps: list[_Step]) -> None:
        if node.op == "output":
            self._output = self._maker(node.args[0])
            return
        if node.op == "get_attr":
            self._places[node] = self._keep(functools.reduce(getattr, str(node.target).split("."), self._graph_module))
            return
        register = self._places[node] = self._keep(None)
        if node.op == "placeholder":
            self._inputs.append(register)
            return
        if node.op != "call_function":
            raise NotImplementedError(f"a graph with {node.op}")
        dead = tuple(self._places[n] for n in read_last if n.op != "get_attr")
        args, values = self._together(node.args), self._together(list(node.kwargs.values()))
        assert callable(node.target)
        steps.append(_Step(node.target, args, tuple(node.kwargs), values, register, dead))

    def _keep(self, value: Any) -> int:
        self._registers.append(value)
        return len(self._registers) - 1

    def _together(self, args: Sequence[Any]) -> Callable[[Registers], Sequence[Any]]:
        """A function that reads all arguments of a call."""
        places = [place for place in map(self._place, args) if place is not None]
        if len(places) < len(args):
            makers = [self._maker(arg) for arg in args]
            return lambda registers: [make(registers) for make in makers]
        if not places:
            return _nothing
        if len(places) == 1:
            (only,) = places
            return lambda registers: (registers[only],)
        return operator.itemgetter(*places)

    def _place(self, arg: Any) -> int | None:
        """The register of an argument. None if it has to be built of several values."""
        if isinstance(arg, fx.Node):
            return self._places[arg]
        return None if _nodes(arg) else self._keep(arg)

    def _maker(self, arg: Any) -> Callable[[Registers], Any]:
        place = self._place(arg)
        if place is not None:
            return operator.itemgetter(place)
        if type(arg) in (list, tuple, fx.immutable_collections.immutable_list):
            makers, kind = [self._maker(item) for item in arg], tuple if type(arg) is tuple else list
            return lambda registers: kind([make(registers) for make in makers])
        if isinstance(arg, dict):
            named = {name: self._maker(item) for name, item in arg.items()}
            return lambda registers: {name: make(registers) for name, make in named.items()}
        places = {n: self._places[n] for n in _nodes(arg)}  # of a slice
        return lambda registers: fx.node.map_arg(arg, lambda n: registers[places[n]])


def _nothing(registers: Registers) -> Sequence[Any]:
    return ()


def _no_code(*inputs: torch.Tensor) -> Any:
    raise AssertionError("this graph has no code yet")


def _nodes(arg: Any) -> list[fx.Node]:
    found: list[fx.Node] = []
    fx.node.map_arg(arg, found.append)
    return found


def _last_uses(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """By node: the nodes whose results are not read after it, itself included if nobody reads it."""
    seen: set[fx.Node] = set()
    found: dict[fx.Node, list[fx.Node]] = {}
    for node in reversed(graph.nodes):
        if node.op == "output":
            seen.update(node.all_input_nodes)
            continue
        new = [n for n in (node, *node.all_input_nodes) if n not in seen]
        seen.update(new)
        found[node] = new
    return found
