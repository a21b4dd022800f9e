"""The original runs while a plan is made, and there is no room to give weights the host's order."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from sfast_ext import Config, accelerate
from sfast_ext.weights.host_order import ModuleOrder


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.out = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.nn.functional.silu(self.conv(x)))


@pytest.mark.parametrize("error", [torch.cuda.OutOfMemoryError, RuntimeError])
@torch.no_grad()
def test_the_caller_gets_the_originals_result(monkeypatch: pytest.MonkeyPatch, error: type[Exception]) -> None:
    torch.manual_seed(0)
    net = Net().eval()
    sizes = [torch.randn(n, 8, m, m) for n, m in ((1, 8), (2, 8), (1, 16), (3, 4))]
    wanted = [net(x) for x in sizes]
    acc = accelerate(net, Config(allow_cpu=True, triton=False))
    net(sizes[0])
    real, raised = ModuleOrder.host, []

    @contextlib.contextmanager
    def full(self: ModuleOrder) -> Iterator[None]:
        if not raised:
            raised.append(1)
            raise error("CUDA out of memory")
        with real(self):
            yield

    monkeypatch.setattr(ModuleOrder, "host", full)
    for x, right in zip(sizes[1:], wanted[1:]):
        # of each size: while its plan is made, and by the plan
        raised.clear()
        for _ in range(2):
            assert torch.allclose(net(x), right, atol=1e-5)
        assert raised
    assert acc.plans and acc.report.counter("replays") + acc.report.counter("eager_runs") > 0
