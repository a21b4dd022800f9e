"""Graphs to rewrite, and what to compare the rewritten ones with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_map_only

from sfast_ext.call_signature import flatten_call
from sfast_ext.capture import fake_trace
from sfast_ext.capture.capture import capture
from sfast_ext.passes import PassContext, run_passes
from sfast_ext.passes.rewrite import CONV, is_op
from sfast_ext.plans.register_machine import Interpreter
from sfast_ext.tools.lib import models
from sfast_ext.weights.arena import WeightArena

aten: Any = torch.ops.aten
Pass = Callable[[fx.GraphModule, PassContext], int]

OTHER_CONVOLUTIONS: list[dict[str, Any]] = [
    {"stride": 2},
    {"padding": 0},
    {"padding": "same"},
    {"kernel_size": 1, "padding": 0},
    {"kernel_size": 5, "padding": 2},
    {"kernel_size": (3, 1), "padding": (1, 0)},
    {"dilation": 2, "padding": 2},
    {"groups": 4},
]
"""What makes another convolution of one of 3x3 with a row of zeros around."""


def _half_on_the_cpu() -> bool:
    try:
        torch.ones(2, 2, dtype=torch.float16) @ torch.ones(2, 2, dtype=torch.float16)
    except RuntimeError:
        return False
    return True


HALF_ON_THE_CPU = _half_on_the_cpu()
"""Whether this torch multiplies in float16 on a CPU. 2.1 does not: graphs are rewritten there, and not run."""


class Whole:
    """A UNet of half precision as a graph after all passes, as they are with Triton, beside one of full precision."""

    def __init__(self, model: str, half: torch.dtype) -> None:
        self.unet, exact = models.random_unet(model, dtype=half), models.random_unet(model)
        exact.load_state_dict(self.unet.state_dict())
        args, kwargs = models.unet_inputs(self.unet, 128, 128)
        wide, named = tree_map_only(Tensor, lambda t: t.float() if t.is_floating_point() else t, (args, kwargs))
        cpu = torch.device("cpu")
        arena, call = WeightArena(self.unet), flatten_call(args, kwargs, cpu)
        self._inputs = call.tensors(cpu)
        with torch.no_grad():
            self.gm = capture(self.unet.forward, call, self._inputs, arena).graph_module
            self._wanted = exact(*wide, **named)[0]
            self.error_before = relative(self.gm(*self._inputs)[0], self._wanted)
        self.counts = run_passes(self.gm, PassContext(arena, cpu, triton=True))
        self.gm.graph.lint()

    def error(self) -> float:
        """Of the graph as it is, against full precision."""
        with torch.no_grad():
            return relative(Interpreter(self.gm)(*self._inputs)[0], self._wanted)


class Traced:
    """A module's forward as a graph whose weights belong to an arena, and what the module itself said."""

    def __init__(self, module: nn.Module | Callable[..., Any], *inputs: torch.Tensor) -> None:
        root = module if isinstance(module, nn.Module) else nn.Module()
        self.inputs = inputs
        with torch.no_grad():
            try:
                self.expected = module(*inputs)
            except RuntimeError:
                if HALF_ON_THE_CPU or all(x.dtype != torch.float16 for x in inputs):
                    raise
                self.expected = None
            # node for node what make_fx gives, sooner
            self.gm = fake_trace.record(module, inputs)
        fake_trace.finish_lazy_codegen(self.gm)
        self.arena = WeightArena(root)
        self.arena.index()
        self.ctx = PassContext(self.arena, torch.device("cpu"), triton=True)
        fakes = next(n.meta["val"] for n in self.graph.nodes if n.op == "placeholder").fake_mode
        for node in self.graph.nodes:
            if node.op == "get_attr":
                tensor = getattr(self.gm, node.target)
                node.meta["weight"] = self.arena.locate(tensor)
                node.meta.setdefault("val", fakes.from_tensor(tensor.detach(), static_shapes=True))

    @property
    def graph(self) -> fx.Graph:
        return self.gm.graph

    def rewrite(self, *passes: Pass) -> int:
        """Applies the passes; the count of the last one."""
        count = 0
        for function in passes:
            count = function(self.gm, self.ctx)
        self.graph.lint()
        self.gm.recompile()
        for node in self.graph.nodes:  # what the metadata say is what passes match on: it must be true
            assert isinstance(node.meta.get("val"), (torch.Tensor, tuple, list)) or node.op == "output", node
        return count

    def outputs(self) -> list[Tensor]:
        """What the graph gives for the inputs."""
        with torch.no_grad():
            out = self.gm(*self.inputs)
        return [out] if isinstance(out, Tensor) else list(out)

    def error(self) -> float:
        """Relative error of the graph against the module; the largest of its outputs. In float16 it needs
        HALF_ON_THE_CPU."""
        with torch.no_grad():
            actual, expected = self.gm(*self.inputs), self.expected
        if isinstance(expected, torch.Tensor):
            actual, expected = [actual], [expected]
        assert [(a.dtype, a.shape) for a in actual] == [(e.dtype, e.shape) for e in expected]
        return max(relative(a, e) for a, e in zip(actual, expected, strict=True))

    def ops(self) -> Counter[str]:
        """How often each operation is in the graph, by its short name; a kernel by its module's name."""
        return Counter(name(node) for node in self.graph.nodes if node.op == "call_function")

    def launches(self, kernel: ModuleType) -> list[fx.Node]:
        """The calls of a kernel's launch function."""
        return [node for node in self.graph.nodes if node.target is kernel.launch]

    def convolutions(self) -> list[fx.Node]:
        """Those that are PyTorch's."""
        return [node for node in self.graph.nodes if is_op(node, CONV)]

    def find(self, wanted: str) -> list[fx.Node]:
        return [node for node in self.graph.nodes if node.op == "call_function" and name(node) == wanted]


def randn(*shape: int) -> torch.Tensor:
    """The same numbers in each run, whatever ran before."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


def relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-12))


def name(node: fx.Node) -> str:
    target: Any = node.target
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.name.split("::")[1]
    module = getattr(target, "__module__", "")
    return module.rpartition(".")[2] if module.startswith("sfast_ext.kernels") else target.__name__
