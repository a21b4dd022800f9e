"""Plans for a machine without Triton: PyTorch's own operations, no more than the original has, none on the CPU."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from diffusers import UNet2DConditionModel
from torch import fx
from torch.fx.node import map_aggregate
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from sfast_ext.call_signature import flatten_call
from sfast_ext.capture.capture import capture
from sfast_ext.kernels.attention import attention
from sfast_ext.passes import PassContext, run_passes
from sfast_ext.passes.rewrite import is_kernel
from sfast_ext.plans.register_machine import Interpreter
from sfast_ext.tools.lib import models
from sfast_ext.weights.arena import WeightArena

CPU, META = torch.device("cpu"), torch.device("meta")
# of the benchmark: model, width, height, images. Without kernels of ours no pass asks how large a size is, only
# whether it divides
CASES = [
    ("sd15", 904, 520, 1),
    ("sdxl", 832, 1216, 4),
]
# one of each kind of block: a further one is the same once more
SHALLOW = {"layers_per_block": 1}
SHALLOW_XL = {**SHALLOW, "transformer_layers_per_block": (1, 1, 2)}
# what makes no kernel run
FREE = ("empty", "detach", "device", "_efficientzerotensor")


class Operations(TorchDispatchMode):
    """Counts what would launch a kernel, and notes what has operands or results on the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()
        self.on_the_cpu: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        views = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
        if not views and name not in FREE:
            self.count[name] += 1
        if any(x.device.type == "cpu" for x in tree_flatten((args, kwargs, out))[0] if isinstance(x, torch.Tensor)):
            self.on_the_cpu.append(str(func))
        return out


class Unwritten(TorchDispatchMode):
    """Large tensors are made, and no values are copied to them: those of `unet`'s weights are nobody's."""

    LARGE = 1 << 16
    """Elements. Small ones are written: they are constants that passes compute with."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if args and type(args[0]) in (torch.Tensor, torch.nn.Parameter) and args[0].numel() >= self.LARGE:
            if func is torch.ops.aten.clone.default:
                return torch.empty_like(args[0], **kwargs)
            if func is torch.ops.aten.copy_.default:
                return args[0]
        return func(*args, **kwargs)


def run(gm: fx.GraphModule, inputs: list[torch.Tensor]) -> Operations:
    """The graph over tensors without memory: its weights and constants are such too."""
    for name in {str(node.target) for node in gm.graph.nodes if node.op == "get_attr"}:
        tensor = getattr(gm, name)
        for registry in (gm._parameters, gm._buffers):
            registry.pop(name, None)
        gm.__dict__[name] = tensor.detach().to(META)
    for node in gm.graph.nodes:
        # the device that it was recorded on stands for the GPU
        node.args, node.kwargs = map_aggregate((node.args, node.kwargs), lambda x: META if x == CPU else x)
    function, seen, given = Interpreter(gm), Operations(), [x.to(META) for x in inputs]
    with torch.no_grad(), seen:
        function(*given)
    return seen


def unet(name: str) -> torch.nn.Module:
    """Of real widths, with weights that nobody has written yet and that take no memory therefore."""
    torch.set_default_dtype(torch.float16)
    try:
        with models.without_initialisation(CPU):
            config = models.unet_config(name) | (SHALLOW_XL if name == "sdxl" else SHALLOW)
            return UNet2DConditionModel(**config).eval().requires_grad_(False)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.long(but=[0])
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[1]}x{case[2]}x{case[3]}")
def test_no_operation_more_than_the_original_and_nothing_on_the_cpu(case) -> None:
    module = unet(case[0])
    call = flatten_call(*models.unet_inputs(module, *case[1:]), CPU)
    inputs = call.tensors(CPU)
    arena = WeightArena(module)
    captured = capture(module.forward, call, inputs, arena).graph_module
    before = run(copied(captured), inputs)
    # channels-last changes the layout of weights, and without it none is changed back
    for last in (False, True):
        ours = copied(captured)
        with Unwritten():
            run_passes(ours, PassContext(arena, CPU, triton=False, channels_last=last))
        after = run(ours, inputs)
        assert not after.on_the_cpu and not before.on_the_cpu
        assert after.count.total() <= before.count.total()
        kernels = {node.target for node in ours.graph.nodes if node.op == "call_function" and is_kernel(node.target)}
        assert kernels <= {attention.launch}


def copied(gm: fx.GraphModule) -> fx.GraphModule:
    """Another graph of the same weights."""
    copy = fx.Graph()
    copy.output(copy.graph_copy(gm.graph, {}))
    return fx.GraphModule(gm, copy)
