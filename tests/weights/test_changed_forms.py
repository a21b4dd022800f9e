"""A parameter that has another form on the same memory: no plan may run as if it had the old one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from sfast_ext import Config, accelerate


class Net(nn.Module):
    """Its result has the forms of what it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.wide, self.line = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(16))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        wide = (self.wide * torch.arange(self.wide.shape[-1])).sum(-1)
        return self.a(x).mean() + wide, (self.line + 1).sum(-1)


def to(name: str, form: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Net], None]:
    def change(net: Net) -> None:
        held = getattr(net, name)
        held.data = form(held.data)

    return change


CHANGES = {
    "fewer and longer rows": to("wide", lambda t: t.view(4, 16)),
    "more and shorter rows": to("wide", lambda t: t.view(16, 4)),
    "one row": to("wide", lambda t: t.view(1, 64)),
    "one column": to("wide", lambda t: t.view(64, 1)),
    "a line": to("wide", lambda t: t.view(64)),
    "one more dimension in front": to("wide", lambda t: t.unsqueeze(0)),
    "one more dimension behind": to("wide", lambda t: t.unsqueeze(-1)),
    "three dimensions": to("wide", lambda t: t.view(2, 4, 8)),
    "transposed": to("wide", lambda t: t.t()),
    "one row for all": to("wide", lambda t: t[:1].expand(8, 8)),
    "one column for all": to("wide", lambda t: t[:, :1].expand(8, 8)),
    "one number for all": to("line", lambda t: t[:1].expand(16)),
    "each second column": to("wide", lambda t: t[:, ::2]),
    "fewer rows": to("wide", lambda t: t[:5]),
    "fewer columns": to("wide", lambda t: t[:, :5]),
    "a shorter line": to("line", lambda t: t[:5]),
    "rows of a line": to("line", lambda t: t.view(4, 4)),
    "a column of a line": to("line", lambda t: t.view(16, 1)),
    "each second of a line": to("line", lambda t: t[::2]),
}


@pytest.mark.parametrize("generations", [False, True])
@pytest.mark.parametrize("how", CHANGES)
@torch.no_grad()
def test_it_is_followed(how: str, generations: bool) -> None:
    torch.manual_seed(0)
    net, x = Net(), torch.randn(2, 8)
    acc = accelerate(net, Config(allow_cpu=True, triton=False))
    if generations:
        acc.new_generation()
    for _ in range(4):
        net(x)
    assert acc.report.counter("eager_runs") > 1
    CHANGES[how](net)
    if generations:
        acc.new_generation()
    for _ in range(3):
        for found, wanted in zip(net(x), Net.forward(net, x)):
            assert found.shape == wanted.shape and torch.allclose(found, wanted, atol=1e-5)
    wide, line = (held.clone() for held in (net.wide, net.line))
    acc.release()
    assert torch.equal(net.wide, wide) and torch.equal(net.line, line)


@torch.no_grad()
def test_the_same_form_is_no_change() -> None:
    net, x = Net(), torch.randn(2, 8)
    acc = accelerate(net, Config(allow_cpu=True, triton=False))
    for _ in range(3):
        net(x)
    runs = acc.report.counter("eager_runs")
    net.wide.data = net.wide.data.view(8, 8)
    for _ in range(3):
        net(x)
    assert acc.report.counter("eager_runs") == runs + 3 and acc.report.counter("captures") == 1
