"""Launches of Triton's kernels that are repeated from a recording."""

from __future__ import annotations

import torch
from torch import Tensor, fx, nn

from sfast_ext.kernels.backend import triton_runtime
from sfast_ext.kernels.group_norm import group_norm
from sfast_ext.kernels.pointwise import add_layer_norm, geglu
from sfast_ext.plans.recorded_run import RecordedRun
from sfast_ext.plans.register_machine import Interpreter


def block(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    normed = group_norm.launch(x, 4, None, None, 1e-5, silu=True)
    rows = normed.permute(0, 2, 3, 1).reshape(2, -1, 32)
    return add_layer_norm.launch(geglu.launch(torch.cat([rows, y], -1)), rows, None, None, 1e-5)


def test_a_run_is_repeated(device, monkeypatch):
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    both = graph.call_function(block, (x, y))
    graph.output([graph.call_function(lambda pair, i: pair[i], (both, i)) for i in range(2)])
    program = Interpreter(fx.GraphModule(nn.Module(), graph))

    def inputs() -> list[Tensor]:
        image = torch.randn(2, 32, 3, 5, device=device).contiguous(memory_format=torch.channels_last)
        return [image, torch.randn(2, 15, 32, device=device)]

    with torch.no_grad():
        first = inputs()
        program(*first)
        run = RecordedRun(program, first)
        others = [inputs() for _ in range(2)]
        wanted = [program(*each) for each in others]
        decided = []
        monkeypatch.setattr(triton_runtime, "launch_kernel", lambda *args, **kwargs: decided.append(args))
        monkeypatch.setattr(group_norm, "launch", decided.append)
        for each, expected in zip(others, wanted, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(run(*each), expected, strict=True))
        assert not decided
