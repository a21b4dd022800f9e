"""Memory of weights that no plan reads, after the host has moved the module to system memory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from pretended_card import GPU, Card, pretended_card
from torch import nn

from sfast_ext import Config, accelerate
from sfast_ext.hosts import moves
from sfast_ext.hosts.moves import WeightMoves
from sfast_ext.plans.graph_pool import MB, GraphPool
from sfast_ext.report import Report
from sfast_ext.runtime import plan_builder, verify


class Net(nn.Module):
    """Layers of which plans pack some, lay some out, and read others as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(16, 16, 3, padding=1)
        self.q, self.k = nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False)
        self.out = nn.Linear(16, 16)
        # no plan reads them
        self.other, self.further = nn.Linear(64, 64), nn.Conv2d(32, 32, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv(x).permute(0, 2, 3, 1).flatten(1, 2)
        return self.out(self.q(y) * self.k(y).tanh())


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Iterator[Card]:
    monkeypatch.setattr(verify, "milliseconds", lambda run, device, times=1: float(run() is None) + 1)
    monkeypatch.setattr(plan_builder, "unsupported", lambda device, dtypes: None)
    with torch.no_grad(), pretended_card(monkeypatch, 64 * MB) as found:
        yield found
        assert not found.faults


@pytest.mark.parametrize("refused", [False, True])
@pytest.mark.parametrize("back", ["the same values", "others"])
def test_it_is_freed_and_the_module_comes_back(card: Card, refused: bool, back: str) -> None:
    torch.manual_seed(0)
    net = Net().to("cuda")
    acc = accelerate(net, Config(triton=False))
    x = torch.randn(2, 16, 8, 8)
    wanted = net(x.to("cuda")).cpu()
    net(x.to("cuda"))
    assert acc.plans
    if refused:
        # as far as a build comes that fails before its plan is bound
        acc.arena.index()
    else:
        net(torch.randn(1, 16, 4, 4).to("cuda"))
    net.to("cpu")
    acc.give_memory_back()
    # what plans read again has a place that takes some bytes
    assert card.allocated < 1024
    if back == "others":
        net.out.weight.mul_(2.0)
        net.conv.weight.neg_()
        before, wanted = wanted, Net.forward(net, x)
        assert not torch.equal(before, wanted)
    net.to("cuda")
    for _ in range(3):
        assert torch.allclose(net(x.to("cuda")).cpu(), wanted, atol=1e-4)
    assert acc.report.counter("errors") == 0


def test_what_is_on_the_gpu_stays_known(card: Card) -> None:
    net = Net().to("cuda")
    acc = accelerate(net, Config(triton=False))
    net(torch.randn(2, 16, 8, 8).to("cuda"))
    acc.arena.index()
    before = set(map(id, acc.arena._tracked.known()))
    acc.give_memory_back()
    assert set(map(id, acc.arena._tracked.known())) == before


class Full(GraphPool):
    """A pool with memory to free."""

    def __init__(self) -> None:
        super().__init__(GPU)
        self.freed = 0

    @property
    def holds_memory(self) -> bool:
        return not self.freed

    def make_room(self, report: Report, why: str = "", banks: float = 0) -> None:
        self.freed += 1


@pytest.mark.parametrize("failures", [0, 1, 2])
def test_a_move_that_finds_no_memory_gets_that_of_graphs(
    card: Card, monkeypatch: pytest.MonkeyPatch, failures: int
) -> None:
    pool, left, report = Full(), [failures], Report()
    monkeypatch.setattr(moves, "pool_of", lambda device: pool)

    def move() -> str:
        if left[0]:
            left[0] -= 1
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        return "moved"

    def to_gpu() -> str:
        return str(WeightMoves(report).to_gpu(nn.Linear(2, 2), GPU, move))

    if failures > 1:
        with pytest.raises(torch.cuda.OutOfMemoryError):
            to_gpu()
    else:
        assert to_gpu() == "moved"
    assert pool.freed == min(1, failures)
