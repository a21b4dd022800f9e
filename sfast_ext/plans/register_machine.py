"""A register machine: runs a flat list of steps over numbered registers.

An `Interpreter` runs an FX graph on it; a `RecordedRun` repeats what a run did. To build the list takes a tenth of the
time that Python needs to compile the graph's code. A plan with a CUDA graph runs its graph three times. A graph that
runs more often is compiled.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

_COMPILE_AFTER = 8  # runs

Registers = list[Any]
Step = Callable[[Registers, int], None]
"""Takes the registers and the handle of the current stream."""
Steps = list[tuple[Step, tuple[int, ...]]]
"""Each with the registers that no later step reads."""


class Machine(NamedTuple):
    """Steps, and the registers that they start from.

    Attributes:
        start: weights, constants, and None for the values to come.
        inputs: the registers of the inputs.
        result: reads the result.
    """

    start: Registers
    inputs: Sequence[int]
    steps: Steps
    result: Callable[[Registers], Any]

    def load(self, inputs: Sequence[Any]) -> Registers:
        """The registers of a new run."""
        registers = self.start.copy()
        for register, x in zip(self.inputs, inputs, strict=True):
            registers[register] = x
        return registers

    def run(self, registers: Registers, stream: int = 0) -> Any:
        """The result of a run."""
        for step, dead in self.steps:
            step(registers, stream)
            for register in dead:
                registers[register] = None
        return self.result(registers)


class Assembler(ABC):
    """Gives values registers and makes steps that read them. A subclass says what stands for a value."""

    def __init__(self) -> None:
        self.start: Registers = []

    @abstractmethod
    def register_of(self, x: Any) -> int | None:
        """The register of a value. None if `x` does not stand for a value."""

    @abstractmethod
    def has_values(self, structure: Any) -> bool:
        """Whether a structure contains values."""

    @abstractmethod
    def other_reader(self, structure: Any) -> Callable[[Registers], Any]:
        """`reader` of a structure that is no list, tuple or dict."""

    def new_register(self, constant: Any = None) -> int:
        """A further register, which starts with this."""
        self.start.append(constant)
        return len(self.start) - 1

    def call(self, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], result: int) -> Step:
        """Calls a function of values and constants, and stores what it returns."""
        read, names, named = self.readers(args), tuple(kwargs), self.readers(list(kwargs.values()))

        def step(registers: Registers, stream: int) -> None:
            registers[result] = function(*read(registers), **dict(zip(names, named(registers))))

        def plain(registers: Registers, stream: int) -> None:
            registers[result] = function(*read(registers))

        return step if names else plain

    def readers(self, args: Sequence[Any]) -> Callable[[Registers], Sequence[Any]]:
        """A function that reads all arguments of a call."""
        found = [register for register in map(self._single, args) if register is not None]
        if len(found) < len(args):
            makers = [self.reader(arg) for arg in args]
            return lambda registers: [make(registers) for make in makers]
        if not found:
            return _nothing
        if len(found) == 1:
            (only,) = found
            return lambda registers: (registers[only],)
        return operator.itemgetter(*found)

    def reader(self, structure: Any) -> Callable[[Registers], Any]:
        """A function that makes a structure of values, with constants as they are."""
        register = self._single(structure)
        if register is not None:
            return operator.itemgetter(register)
        if type(structure) in (list, tuple, fx.immutable_collections.immutable_list):
            makers, kind = [self.reader(item) for item in structure], tuple if type(structure) is tuple else list
            return lambda registers: kind([make(registers) for make in makers])
        if isinstance(structure, dict):
            named = {name: self.reader(item) for name, item in structure.items()}
            return lambda registers: {name: make(registers) for name, make in named.items()}
        return self.other_reader(structure)

    def _single(self, arg: Any) -> int | None:
        """The register of an argument. None if it has to be built of several values."""
        register = self.register_of(arg)
        return register if register is not None or self.has_values(arg) else self.new_register(arg)


class Interpreter:
    """Runs the current graph of a graph module.

    Args:
        graph_module: has call_function nodes only. Its attributes are read now.
        after_release: nodes before which the allocator gives back what it holds for nobody.
    """

    def __init__(self, graph_module: fx.GraphModule, after_release: Collection[fx.Node] = ()) -> None:
        self._graph_module = graph_module
        self._runs = 0
        self._code: Callable[..., Any] = _no_code
        self._compiles = not after_release
        machine = _GraphAssembler(graph_module, after_release).machine()
        self._tensors = list({id(x): x for x in machine.start if isinstance(x, torch.Tensor)}.values())
        self._machine: Machine | None = machine

    def __call__(self, *inputs: torch.Tensor) -> Any:
        """The graph's flat outputs."""
        self._runs += 1
        if self._compiles and self._runs == _COMPILE_AFTER + 1:
            self._graph_module.recompile()
            self._code, self._machine = self._graph_module.forward, None
        machine = self._machine  # another thread may set it to None
        if machine is None:
            return self._code(*inputs)
        registers = machine.load(inputs)
        del inputs
        return machine.run(registers)

    def tensors(self) -> list[torch.Tensor]:
        """The tensors that the graph reads in addition to its inputs, each once."""
        return self._tensors


class _GraphAssembler(Assembler):
    """Nodes stand for values."""

    def __init__(self, graph_module: fx.GraphModule, after_release: Collection[fx.Node]) -> None:
        super().__init__()
        self._graph_module, self._after_release = graph_module, after_release
        self._registers: dict[fx.Node, int] = {}

    def machine(self) -> Machine:
        """That of the graph."""
        graph = self._graph_module.graph
        inputs: list[int] = []
        steps: Steps = []
        result: Callable[[Registers], Any] = _nothing
        last = _last_uses(graph)
        for node in graph.nodes:
            if node.op == "output":
                result = self.reader(node.args[0])
            elif node.op == "get_attr":
                attribute = functools.reduce(getattr, str(node.target).split("."), self._graph_module)
                self._registers[node] = self.new_register(attribute)
            elif node.op == "placeholder":
                self._registers[node] = self.new_register()
                inputs.append(self._registers[node])
            elif node.op == "call_function":
                register = self._registers[node] = self.new_register()
                dead = tuple(self._registers[n] for n in last[node] if n.op != "get_attr")
                if node in self._after_release:
                    steps.append((release_cached, ()))
                steps.append((self.call(node.target, node.args, node.kwargs, register), dead))
            else:
                raise NotImplementedError(f"a graph with {node.op}")
        return Machine(self.start, inputs, steps, result)

    def register_of(self, x: Any) -> int | None:
        return self._registers[x] if isinstance(x, fx.Node) else None

    def has_values(self, structure: Any) -> bool:
        return bool(_nodes(structure))

    def other_reader(self, structure: Any) -> Callable[[Registers], Any]:
        # a slice
        registers_of = {n: self._registers[n] for n in _nodes(structure)}
        return lambda registers: fx.node.map_arg(structure, lambda n: registers[registers_of[n]])


def release_cached(registers: Registers, stream: int) -> None:
    """A step: gives back what the allocator holds for nobody."""
    # torch 2.1 refuses while a CUDA graph is captured
    with contextlib.suppress(RuntimeError):
        torch.cuda.empty_cache()


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


@contextlib.contextmanager
def plan_mode(device: torch.device) -> Iterator[None]:
    """The modes under which plans run: no autograd, and no autocast, as its casts are nodes of the graph.

    cuDNN's benchmark mode stays as the host set it. Benchmarking takes 0.5 to 1 s of a first call and found no faster
    algorithm on an NVIDIA H200, for SD 1.5 at 512x512 and for SDXL. Other cards were not measured
    (docs/engineering-log).
    """
    # inference tensors could not be written to outside of inference mode
    with torch.inference_mode(False), torch.no_grad(), torch.autocast(device.type, enabled=False):
        yield
