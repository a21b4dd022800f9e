"""What is made of a captured forward: a plan, which is its graph after all passes on the weights of the arena; and the
outputs in float32, which a plan is compared with."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate

from sfast_ext import environment
from sfast_ext.call_signature import Call
from sfast_ext.capture.capture import Captured
from sfast_ext.config import Config
from sfast_ext.kernels.backend import nvrtc
from sfast_ext.kernels.backend.graph_memory import outgrowing, peak_bytes, step_bytes
from sfast_ext.kernels.backend.precompile import precompile
from sfast_ext.kernels.backend.triton_runtime import without_triton
from sfast_ext.kernels.group_norm import group_norm
from sfast_ext.passes import PassContext, run_passes
from sfast_ext.passes.eight_bits_selection import Selection
from sfast_ext.passes.layout_time import channels_last_pays
from sfast_ext.plans.plan import Plan
from sfast_ext.report import at
from sfast_ext.weights.arena import WeightArena

_ROUNDED = (torch.bfloat16, torch.float16)
PEAK_FACTOR = 2.5
"""The memory that a run in float32 takes, of the forward's own: values are twice as large, and one weight is converted
at a time."""


def make_plan(
    captured: Captured,
    call: Call,
    arena: WeightArena,
    device: torch.device,
    config: Config,
    selection: Selection | None = None,
) -> Plan:
    """The plan of a captured forward: its graph after all passes, with the kernels that device and config allow.

    Args:
        selection: which layers are computed with 8-bit integers; None: none are.
    """
    at("choice of kernels")
    # passes may read weights
    arena.order.plan()
    graph = captured.graph_module.graph
    triton = _uses_triton(graph, device, config)
    # each order of the original's operations needs as much at least
    most = step_bytes(graph) if config.rare_calls else None
    context = PassContext(arena, device, triton, faster_sums=config.faster_sums, most_bytes=most)
    context.eight_bits = selection
    if device.type == "cuda" and not context.supported(group_norm.launch):
        context.channels_last = arena.memoize("channels last", lambda: channels_last_pays(graph, device))
    fused = run_passes(captured.graph_module, context)
    with contextlib.nullcontext() if triton else without_triton():
        # needs shapes, which the plan removes from the graph
        precompile(graph, device)
    needed = peak_bytes(graph) if config.rare_calls else None
    at("binding of weights")
    tree, strides = captured.output_tree, captured.output_strides
    relieved = outgrowing(graph) if config.rare_calls and environment.is_small_card(device) else ()
    plan = Plan(call, captured.graph_module, tree, strides, device, fused, triton=triton, outgrowing=relieved)
    plan.edits, plan.peak_bytes = captured.edits, needed
    if plan.banks and plan.pool is not None:
        # what is short of memory finds them there
        plan.pool.spare.add(arena.banks)
    return plan


def _uses_triton(graph: fx.Graph, device: torch.device, config: Config) -> bool:
    if not config.triton or (not config.cuda_graphs and nvrtc.supported(device)):
        # without a CUDA graph the CPU launches: Triton in 40 us, the driver in 10 (docs/engineering-log/launches.md)
        return False
    return environment.triton_runs_on(device) and environment.triton_refusal(device, *_dtypes(graph)) is None


def _dtypes(graph: fx.Graph) -> set[torch.dtype]:
    """The dtypes of all values of a captured graph."""
    found = (node.meta.get("val") for node in graph.nodes)
    return {val.dtype for val in found if isinstance(val, torch.Tensor)}


class ExactRun(fx.Interpreter):
    """Runs a captured graph with every value in half precision in float32."""

    def run_node(self, n: fx.Node) -> Any:
        """The result of a node; half precision never leaves one."""
        return map_aggregate(super().run_node(n), _wide)

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The operation; a dtype that it is asked for is replaced as well."""
        return super().call_function(target, map_aggregate(args, _wide), map_aggregate(kwargs, _wide))  # type: ignore[arg-type]


def _wide(x: Any) -> Any:
    if isinstance(x, torch.Tensor):
        return x.float() if x.dtype in _ROUNDED else x
    return torch.float32 if x in _ROUNDED else x


def exact(graph_module: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The outputs of a captured graph in float32."""
    with torch.inference_mode(False), torch.no_grad(), _no_benchmark():
        return list(ExactRun(graph_module).run(*inputs, enable_io_processing=False))


@contextlib.contextmanager
def _no_benchmark() -> Iterator[None]:
    """cuDNN chooses by its heuristics: to time algorithms for convolutions that run once takes seconds."""
    cudnn = torch.backends.cudnn
    if not cudnn.benchmark or torch.backends.flags_frozen():
        yield
        return
    cudnn.benchmark = False
    try:
        yield
    finally:
        cudnn.benchmark = True
