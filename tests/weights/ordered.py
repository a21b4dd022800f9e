"""A network whose weights plans lay channels-last, and how its results are compared with an untouched twin."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sfast_ext import Config, accelerate
from sfast_ext.runtime.verify import relative_error
from sfast_ext.weights import external_refs

COUNTS = external_refs.ALONE > 0
counting = pytest.mark.skipif(not COUNTS, reason="this torch does not count the uses of memory")


class Net(nn.Module):
    """Convolutions that are laid out channels-last (3x3) and others (1x1), and several results."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(4, 8, 3, padding=1)
        self.down = nn.Conv2d(8, 8, 3, stride=2, padding=1)
        self.narrow, self.wide = nn.Conv2d(8, 6, 1), nn.Conv2d(6, 8, 1)
        self.point = nn.Conv2d(8, 6, 1)
        self.last = nn.Conv2d(6, 4, 3, padding=1)
        self.out = nn.Linear(4, 5)

    def forward(self, x):
        first = self.first(x).relu()
        down = self.down(first)
        last = self.last(self.point(self.wide(self.narrow(down))))
        return last, [first, down], {"mean": self.out(last.mean((2, 3)))}


def made() -> Net:
    torch.manual_seed(0)
    return Net().eval().requires_grad_(False)


X = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(1))


def flat(result):
    last, residuals, more = result
    return [last, *residuals, more["mean"]]


def maps(net, x=X):
    """The results, and what a hook on each layer gets."""
    seen = []
    handles = [m.register_forward_hook(lambda _, i, o: seen.extend([*i, o])) for m in net.children()]
    try:
        return flat(net(x)) + seen
    finally:
        for handle in handles:
            handle.remove()


def alike(ours, theirs):
    assert [t.stride() for t in ours] == [t.stride() for t in theirs]
    assert all(relative_error([a], [b]) < 1e-5 for a, b in zip(ours, theirs))


@pytest.fixture(name="pair")
def planned_pair():
    net, twin = made(), made()
    accelerator = accelerate(net, Config(allow_cpu=True, drop_slower=False))
    with torch.no_grad():
        for _ in range(3):
            net(X)
        assert len(accelerator.plans) == 1
        yield net, twin, accelerator
    accelerator.release()
    assert [p.stride() for p in net.parameters()] == [p.stride() for p in twin.parameters()]


def disabled(net):
    owner = vars(net)["forward"].owner if "forward" in vars(net) else None
    if owner is None:
        return flat(net(X))
    config = owner.config
    owner.configure(Config(**{**vars(config), "enabled": False}))
    try:
        return flat(net(X))
    finally:
        owner.configure(config)


def original(net):
    owner = vars(net)["forward"].owner if "forward" in vars(net) else None
    return flat(net(X) if owner is None else owner.run_original(X))
