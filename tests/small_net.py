"""A small network, and its calls."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sfast_ext import Config

CPU = Config(allow_cpu=True)
# fp32 sums in another order
EXACT = 1e-4


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 8, 3, padding=1)
        self.norm = nn.GroupNorm(2, 8)
        self.time = nn.Linear(1, 8)
        self.out = nn.Conv2d(8, 4, 3, padding=1)
        self.gain = 1.0

    def forward(self, x, t, scale: float = 1.0):
        t = t if torch.is_tensor(t) else torch.tensor(t)
        emb = self.time(t.float().reshape(-1, 1))
        h = nn.functional.silu(self.norm(self.conv(x) + emb[:, :, None, None]))
        return self.out(h) * scale * self.gain


def net(seed=0):
    torch.manual_seed(seed)
    return Net().eval()


def image(n=2, size=8):
    return torch.randn(n, 4, size, size)


def close(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=EXACT, atol=EXACT)


def run_twice(module, *args, **kwargs):
    """The first call is the original's; the second is the plan's."""
    module(*args, **kwargs)
    return module(*args, **kwargs)


def counters(acc):
    return acc.report.as_dict()["counters"]


def reasons(acc):
    return " | ".join(acc.report.as_dict()["reasons"])
