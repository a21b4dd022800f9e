"""A module whose dictionary of parameters, buffers or submodules is replaced as a whole: no plan may miss that."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from sfast_ext import Accelerator, Config, accelerate

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
OTHER = torch.full((4, 4), 0.3)


class Gain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        # the same number in another dtype gives another result
        return x + (self.gain.double() + 1e-3).to(self.gain.dtype).float()


class Shifted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shift, self.inner = torch.ones(4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + self.shift


class Net(nn.Module):
    scales: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.inner = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4))
        self.norm, self.gain, self.shifted = nn.BatchNorm1d(4), Gain(), Shifted()
        self.register_buffer("scales", torch.ones(4))
        self.eval().requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.gain(self.shifted(self.inner(self.first(x)) * self.scales + self.norm(x)))


def copied(net: Net) -> None:
    """Equal at first."""
    vars(net.first)["_parameters"] = dict(net.first._parameters)
    run(net)
    net.first.weight = nn.Parameter(OTHER, requires_grad=False)


def one_of_a_copy(net: Net) -> None:
    vars(net.norm)["_buffers"] = {**net.norm._buffers, "running_mean": torch.full((4,), 3.0)}


CHANGES: dict[str, Callable[[Net], object]] = {
    "parameters": lambda net: vars(net.first).update(_parameters={"weight": nn.Parameter(OTHER), "bias": None}),
    "parameters by setattr": lambda net: setattr(
        net.first, "_parameters", {"weight": nn.Parameter(OTHER), "bias": net.first.bias}
    ),
    "parameters in another order": lambda net: vars(net.first).update(
        _parameters={"bias": net.first.bias, "weight": nn.Parameter(OTHER)}
    ),
    "parameters that were equal": copied,
    "next to a tensor": lambda net: vars(net.shifted).update(_modules={"inner": nn.Linear(4, 4)}),
    "one number in another dtype": lambda net: vars(net.gain).update(
        _parameters={"gain": nn.Parameter(net.gain.gain.bfloat16())}
    ),
    "buffers": lambda net: vars(net).update(_buffers={"scales": torch.full((4,), 3.0)}),
    "one buffer of several": one_of_a_copy,
    "submodules": lambda net: vars(net).update(_modules={**net._modules, "first": nn.Linear(4, 4)}),
    "submodules of a sequence": lambda net: vars(net.inner).update(_modules={"0": nn.Linear(4, 4)}),
    "all attributes": lambda net: vars(net.first).update(vars(nn.Linear(4, 4))),
}
SEEN_LATER: dict[str, Callable[[Net], object]] = {
    "the attributes": lambda net: setattr(net.first, "__dict__", vars(nn.Linear(4, 4))),
    "the model's attributes": lambda net: setattr(
        net, "__dict__", {**vars(net), "_buffers": {"scales": torch.full((4,), 3.0)}}
    ),
}


def run(net: Net) -> None:
    torch.testing.assert_close(net(X), Net.forward(net, X), rtol=1e-5, atol=1e-5)


def started(generations: bool) -> tuple[Net, Accelerator]:
    net = Net()
    accelerator = accelerate(net, Config(allow_cpu=True, drop_slower=False))
    if generations:
        accelerator.new_generation()
    for _ in range(3):
        run(net)
    assert accelerator.report.counter("captures") == 1
    return net, accelerator


@pytest.mark.parametrize("generations", [False, True])
@pytest.mark.parametrize("what", CHANGES)
@torch.no_grad()
def test_it_is_seen_at_the_next_call(what: str, generations: bool) -> None:
    net, accelerator = started(generations)
    CHANGES[what](net)
    for _ in range(3):
        run(net)
    # a tensor in both dictionaries may end all plans once
    assert accelerator.plans and accelerator.report.counter("captures") in (2, 3)
    # its plans follow the new one
    net.first.weight = nn.Parameter(OTHER * 2, requires_grad=False)
    run(net)
    net.first.weight.data.mul_(2)
    run(net)
    accelerator.release()
    run(net)


@pytest.mark.parametrize("what", SEEN_LATER)
@torch.no_grad()
def test_it_is_seen_in_the_next_generation(what: str) -> None:
    net, accelerator = started(True)
    SEEN_LATER[what](net)
    accelerator.new_generation()
    for _ in range(3):
        run(net)
    assert accelerator.plans
    accelerator.release()


@pytest.mark.parametrize("generations", [False, True])
@torch.no_grad()
def test_what_is_written_to_in_an_equal_one_is_followed(generations: bool) -> None:
    net, accelerator = started(generations)
    vars(net.first)["_parameters"] = dict(net.first._parameters)
    run(net)
    net.first.bias.data = torch.ones(4)
    run(net)
    net.first.weight.data.add_(1)
    run(net)
    vars(net.first)["_parameters"] = dict(net.first._parameters)
    net.first._parameters["bias"] = None
    run(net)
    accelerator.release()


@torch.no_grad()
def test_one_that_is_put_back_has_its_plan_again() -> None:
    net, accelerator = started(True)
    was = net.first._parameters
    vars(net.first)["_parameters"] = {"weight": nn.Parameter(OTHER), "bias": net.first.bias}
    for _ in range(3):
        run(net)
    vars(net.first)["_parameters"] = was
    for _ in range(3):
        run(net)
    was["weight"].data.add_(1)
    run(net)
    was["weight"] = nn.Parameter(OTHER * 2, requires_grad=False)
    run(net)
    assert accelerator.plans and accelerator.report.counter("captures") == 2
    accelerator.release()


@torch.no_grad()
def test_after_a_release_nothing_holds_the_one_that_was_replaced() -> None:
    net, accelerator = started(True)
    was = weakref.ref(net.first.weight)
    vars(net.first)["_parameters"] = {"weight": nn.Parameter(OTHER), "bias": net.first.bias}
    run(net)
    accelerator.release()
    gc.collect()
    assert was() is None
