"""Small networks, and a kernel that Python code registers, for tests of the states of torch around a call."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from sfast_ext import Config, accelerate


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 8, 3, padding=1)
        self.norm = nn.GroupNorm(2, 8)
        self.out = nn.Linear(8, 8)

    def forward(self, x):
        return self.out(F.silu(self.norm(self.conv(x))).flatten(2).transpose(1, 2))


def latent(seed=0):
    return torch.randn(2, 4, 6, 6, generator=torch.Generator().manual_seed(seed))


def pair(cls=Net):
    """An accelerated module, its accelerator, and an untouched twin."""
    torch.manual_seed(0)
    ours, twin = cls().eval().requires_grad_(False), cls().eval().requires_grad_(False)
    twin.load_state_dict(ours.state_dict())
    return ours, accelerate(ours, Config(allow_cpu=True, drop_slower=False)), twin


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


def reasons(accelerator):
    return " ".join(accelerator.report.as_dict()["reasons"])


def runs(accelerator):
    return accelerator.report.counter("eager_runs")


@contextlib.contextmanager
def registered(operator, key, function, space="aten", schema=None):
    """A kernel of Python code, as long as the `with` block lasts."""
    kept = torch.library.Library(space, "IMPL" if schema is None else "DEF")
    try:
        if schema is not None:
            kept.define(schema)
        kept.impl(operator, function, key)
        yield
    finally:
        if hasattr(kept, "_destroy"):
            kept._destroy()
        # before, the end of the object was that of its kernels
        del kept
