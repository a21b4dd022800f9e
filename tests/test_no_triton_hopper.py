"""Plans for Hopper with and without Triton: the same nodes, and the same launches of kernels for Hopper."""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple

import pytest
import torch
from test_no_triton import Unwritten, copied, unet
from torch import fx
from torch.fx.node import map_aggregate

from benchmarks.compile_table import launches
from sfast_ext import kernels
from sfast_ext.call_signature import flatten_call
from sfast_ext.capture.capture import capture
from sfast_ext.kernels.attention import attention, query_attention
from sfast_ext.kernels.backend import nvrtc, size_prediction, triton_runtime
from sfast_ext.kernels.backend.cuda_libraries import Bindings
from sfast_ext.kernels.conv import conv2d
from sfast_ext.kernels.group_norm import conv_group_norm
from sfast_ext.kernels.linear import linear_geglu, linear_layer_norm
from sfast_ext.passes import PassContext, run_passes
from sfast_ext.passes.rewrite import is_kernel
from sfast_ext.tools.lib import models
from sfast_ext.weights.arena import WeightArena

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
BOTH = {linear_geglu, linear_layer_norm, conv_group_norm}
# model, width, height; whose nodes there are; whether boxes of a convolution differ in size: only Triton reads the
# statistics of such
CASES = [
    ("sd15", 512, 512, BOTH, False),
    ("sd15", 904, 520, BOTH | {conv2d}, True),
    ("sdxl", 1024, 1024, BOTH | {conv2d, query_attention}, False),
]
MADE_FOR_HOPPER = BOTH | {conv2d, query_attention}

pytestmark = pytest.mark.skipif(
    kernels.interpreted() or not triton_runtime.AVAILABLE, reason="needs Triton, and TRITON_INTERPRET unset"
)


class Plan(NamedTuple):
    nodes: list[str]
    kernels: set[Any]
    """Records of the kernels that nodes launch."""
    launched: set[tuple[str, tuple[tuple[str, int], ...]]]
    """Kernels for Hopper, with their constants."""


@pytest.fixture(autouse=True)
def bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """NVRTC and a driver, as far as a plan can tell."""
    monkeypatch.setattr(nvrtc, "bindings", lambda: Bindings(object(), object()))


def captured(name: str, width: int, height: int) -> tuple[fx.GraphModule, WeightArena]:
    module = unet(name)
    call = flatten_call(*models.unet_inputs(module, width, height), CPU)
    arena = WeightArena(module)
    return capture(module.forward, call, call.tensors(CPU), arena).graph_module, arena


def plan(graph_module: fx.GraphModule, arena: WeightArena, capability: int, *, triton: bool) -> Plan:
    with launches._card(capability), Unwritten():
        run_passes(graph_module, PassContext(arena, GPU, triton=triton))
        with contextlib.nullcontext() if triton else triton_runtime.without_triton():
            made = size_prediction.launched(size_prediction.calls(graph_module.graph), GPU).values()
    nodes = [node for node in graph_module.graph.nodes if node.op == "call_function"]
    return Plan(
        [described(node) for node in nodes],
        {node.target for node in nodes if is_kernel(node.target)},
        {(x.kernel.name, tuple(x.constants.items())) for x in made if getattr(x.kernel, "hopper", False)},
    )


def described(node: fx.Node) -> str:
    """What it calls, with the shapes of its operands and what else it is told."""
    operands = map_aggregate((node.args, node.kwargs), seen)
    return f"{getattr(node.target, '__module__', '')} {node.target} {operands}"


def seen(x: Any) -> Any:
    return map_aggregate(x.meta.get("val"), shape) if isinstance(x, fx.Node) else x


def shape(x: Any) -> Any:
    return (str(x.dtype), tuple(x.shape)) if isinstance(x, torch.Tensor) else x


def records(modules: set[Any]) -> set[Any]:
    return {module.launch for module in modules}


@pytest.mark.long(but=[2])
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[1]}x{case[2]}")
def test_the_nodes_are_those_with_triton(case: tuple[str, int, int, set[Any], bool]) -> None:
    *size, wanted, boxes_differ = case
    graph_module, arena = captured(*size)
    ours, theirs = (plan(copied(graph_module), arena, 90, triton=triton) for triton in (False, True))
    assert ours.nodes == theirs.nodes
    assert ours.kernels == theirs.kernels and records(wanted | {attention}) <= ours.kernels
    missing = theirs.launched - ours.launched
    assert not ours.launched - theirs.launched and bool(missing) == boxes_differ
    assert all(name == "conv2d" and dict(given)["GROUP"] for name, given in missing)
    assert {name for name, _ in ours.launched} == {name for name, _ in theirs.launched}


@pytest.mark.long(but=[1])
@pytest.mark.parametrize("capability", [80, 89, 100])
def test_another_card_has_none_of_them(capability: int) -> None:
    """On A100 and GeForce the product with GEGLU has another kernel."""
    ours = plan(*captured("sdxl", 1024, 1024), capability, triton=False)
    others = set() if capability == 100 else {linear_geglu}
    assert ours.kernels.isdisjoint(records(MADE_FOR_HOPPER - others)) and not ours.launched
    assert records(others) <= ours.kernels
    assert attention.launch in ours.kernels
