"""Arguments as a host describes them: what a forward does not read, what must not be recorded, what it empties."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sfast_ext import Config, Hooks
from sfast_ext.accelerator import Accelerator


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


class Net(nn.Module):
    """Empties the list that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x, control=None, options=None):
        out = self.layer(x)
        while control is not None and control["output"]:
            out = out + control["output"].pop()
        return out


def read(args, kwargs):
    options = kwargs.get("options") or {}
    if "patch" in options:
        return "a patch works inside"
    return args, {k: v for k, v in kwargs.items() if k != "options"}


def accelerated(**config):
    torch.manual_seed(0)
    net = Net().eval()
    hooks = Hooks(arguments=read, consumed=frozenset({"control"}))
    accelerator = Accelerator(net, Config(allow_cpu=True, **config), hooks=hooks).install()
    return net, accelerator


def control():
    return {"output": [torch.ones(2, 4), torch.full((2, 4), 2.0)]}


def test_what_is_not_read_is_no_part_of_a_plan():
    net, accelerator = accelerated()
    x = torch.randn(2, 4)
    for steps in (3, 4, 5):
        expected = net.layer(x) + 3
        found = net(x, control=control(), options={"sigmas": torch.zeros(steps), "object": object()})
        torch.testing.assert_close(found, expected)
    assert len(accelerator.plans) == 1 and accelerator.report.counter("captures") == 1
    assert accelerator.report.counter("eager_runs") == 2


def test_a_reason_bypasses_the_call_and_the_original_gets_everything():
    net, accelerator = accelerated()
    seen = []
    net.layer.register_forward_pre_hook(lambda *_: seen.append(True))
    x = torch.randn(2, 4)
    torch.testing.assert_close(net(x, options={"patch": len}), net.layer(x))
    assert not accelerator.plans and accelerator.report.as_dict()["reasons"] == {"a patch works inside": 1}
    assert len(seen) == 2


@pytest.mark.parametrize("check", ["first", "always"])
def test_lists_that_the_forward_empties_are_whole_in_each_of_its_runs(check):
    net, accelerator = accelerated(check=check)
    x = torch.randn(2, 4)
    for _ in range(3):
        given = control()
        torch.testing.assert_close(net(x, control=given), net.layer(x) + 3)
        assert len(given["output"]) == 2
    (plan,) = accelerator.plans.values()
    assert plan.error is not None and plan.error < 1e-5


def test_an_error_in_the_hook_is_reported_and_the_original_runs():
    net, accelerator = accelerated()
    accelerator.hooks.arguments = lambda args, kwargs: 1 / 0
    x = torch.randn(2, 4)
    torch.testing.assert_close(net(x), net.layer(x))
    assert "arguments of the host" in str(accelerator.report.as_dict()["last_error"])


def test_the_host_s_random_numbers_are_those_that_it_had_without_us():
    """Forge draws an inpainting's noise at each step, from torch's own generator."""
    net, accelerator = accelerated()
    torch.manual_seed(5)
    expected = torch.randn(3)
    torch.manual_seed(5)
    net(torch.randn(2, 4, generator=torch.Generator().manual_seed(1)))
    assert accelerator.report.counter("captures") == 1
    torch.testing.assert_close(torch.randn(3), expected, rtol=0, atol=0)
