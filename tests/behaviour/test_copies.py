"""Copies of an accelerated module run their own layers."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn

from sfast_ext import Config, accelerate, accelerator_of


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.out = nn.Linear(4, 4)
        self.factor = 1.0

    def forward(self, x):
        return self.out(self.conv(x).mean((2, 3))) * self.factor


X = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(1))


def made() -> Net:
    torch.manual_seed(0)
    return Net().eval().requires_grad_(False)


def by_copy(net):
    return copy.copy(net)


def by_replica(net):
    replica = net._replicate_for_data_parallel()
    # as torch.nn.parallel.replicate does, one device after the other
    replica._modules = {name: child._replicate_for_data_parallel() for name, child in net._modules.items()}
    for name, child in replica._modules.items():
        child._parameters = {key: p.clone() for key, p in net._modules[name]._parameters.items()}
    return replica


def by_dictionary(net):
    other = type(net)()
    other.__dict__.update(net.__dict__)
    return other


def by_copied_dictionary(net):
    other = type(net).__new__(type(net))
    other.__dict__ = dict(net.__dict__)
    return other


def by_reduce(net):
    function, arguments, state = net.__reduce_ex__(4)[:3]
    other = function(*arguments)
    other.__setstate__(state)
    return other


def by_copy_of_a_copy(net):
    return copy.copy(copy.copy(net))


def by_pickled_copy(net):
    return pickle.loads(pickle.dumps(copy.copy(net)))


def by_saved_copy(net):
    file = io.BytesIO()
    torch.save(copy.copy(net), file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def by_copied_copy(net):
    return copy.deepcopy(copy.copy(net))


def by_copied_copied_copy(net):
    return copy.deepcopy(copy.deepcopy(copy.copy(net)))


def by_copy_in_a_list(net):
    return copy.deepcopy([net, copy.copy(net)])[1]


COPIES = [
    by_copy, by_replica, by_dictionary, by_copied_dictionary, by_reduce, by_copy_of_a_copy, by_pickled_copy,
    by_saved_copy, by_copied_copy, by_copied_copied_copy, by_copy_in_a_list,
]  # fmt: skip


def factor(net):
    net.factor = 3.0


def layer(net):
    net._modules = {**net._modules, "out": nn.Identity()}


def weights(net):
    other = nn.Linear(4, 4)
    other.weight = nn.Parameter(torch.full((4, 4), 0.5), requires_grad=False)
    other.bias = None
    net._modules = {**net._modules, "out": other}


def nothing(net):
    pass


@pytest.fixture
def used():
    net = made()
    accelerator = accelerate(net, Config(allow_cpu=True, drop_slower=False))
    with torch.no_grad():
        for _ in range(3):
            net(X)
        assert accelerator.plans
        yield net, accelerator
    accelerator.release()


@pytest.mark.parametrize("change", [nothing, factor, layer, weights])
@pytest.mark.parametrize("copied", COPIES)
def test_a_copy_runs_its_own_layers(used, copied, change):
    net, accelerator = used
    twin = made()
    other, others_twin = copied(net), copied(twin)
    calls = accelerator.calls
    for each in (other, others_twin):
        change(each)
    for _ in range(2):
        assert torch.allclose(other(X), others_twin(X), atol=1e-6)
        assert torch.allclose(net(X), twin(X), atol=1e-6)
    # the original is served by its plan as before, and only that
    assert accelerator.calls == calls + 2 and not accelerator.report.as_dict()["reasons"]
    for each in (net, twin):
        each.factor = 5.0
    for _ in range(2):
        assert torch.allclose(other(X), others_twin(X), atol=1e-6)
        assert torch.allclose(net(X), twin(X), atol=1e-5)
    accelerator.release()
    assert torch.allclose(other(X), others_twin(X), atol=1e-6)


@pytest.mark.parametrize("copied", COPIES)
def test_a_copy_may_be_accelerated_too(used, copied):
    net, _ = used
    other, twin = copied(net), made()
    factor(other), factor(twin)
    again = accelerate(other, Config(allow_cpu=True, drop_slower=False))
    for _ in range(3):
        assert torch.allclose(other(X), twin(X), atol=1e-5)
        assert torch.allclose(net(X), twin(X) / 3, atol=1e-5)
    assert again.plans and accelerator_of(net) is not again
    again.release()
    assert torch.allclose(other(X), twin(X), atol=1e-5) and torch.allclose(net(X), twin(X) / 3, atol=1e-5)


def test_a_forward_that_was_given_to_another_module_runs_the_one_that_it_is_of(used):
    net, accelerator = used
    torch.manual_seed(5)
    other, proxy = Net().eval(), nn.Identity()
    other.forward = proxy.forward = net.forward
    calls = accelerator.calls
    for _ in range(2):
        assert torch.equal(other(X), net(X)) and torch.equal(proxy(X), net(X))
    assert accelerator.calls == calls + 8


def test_hooks_and_direct_calls_of_the_original_use_its_plan(used):
    net, accelerator = used
    copies = [copy.copy(net)]
    runs = accelerator.report.counter("eager_runs")
    net.forward(X)
    handle = net.register_forward_hook(lambda *_: None)
    net(X)
    handle.remove()
    assert accelerator.report.counter("eager_runs") == runs + 2 and len(copies) == 1


def test_a_copy_is_saved_with_the_hosts_strides(used):
    net, _ = used
    other = copy.copy(net)
    net(X)
    assert [v.stride() for v in other.state_dict().values()] == [v.stride() for v in made().state_dict().values()]


def test_a_forward_from_before_goes_with_the_copy_as_it_did():
    def wrapped(x):
        return type(net).forward(net, x) + 1

    results = []
    for ours in (False, True):
        net = made()
        net.forward = wrapped
        accelerator = accelerate(net, Config(allow_cpu=True)) if ours else None
        other = copy.copy(net)
        factor(other)
        with torch.no_grad():
            # without us the copy's wrapper runs the original
            results.append([other(X), net(X)])
        if accelerator is not None:
            accelerator.release()
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(*results))
