"""Modes and transforms around a module whose weights are in memory and layout of the arena: they see the weights, and
what is done to these must not depend on them."""

from __future__ import annotations

import copy

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call, functionalize, grad, hessian, jacfwd, jacrev, jvp, stack_module_state, vjp, vmap
from torch.utils._pytree import tree_leaves
from torch_states import latent, no_gradients, pair, reasons  # noqa: F401

from sfast_ext.weights.original_layout import is_plain

ONE = torch.ones(())


def weights_of(net):
    # with the original strides: torch cannot transform a group norm of what a channels-last weight gives
    return dict(net.state_dict())


X = latent()


def loss(net):
    return lambda weights, x=X: functional_call(net, weights, (x,)).square().sum()


def scaled(net):
    return lambda factor: loss(net)({name: p * factor for name, p in weights_of(net).items()})


BY_WEIGHTS = {
    "grad": lambda net: grad(loss(net))(weights_of(net)),
    "grad by one weight": lambda net: grad(lambda w: loss(net)({**weights_of(net), "conv.weight": w}))(net.conv.weight),
    "grad of each sample": lambda net: vmap(grad(loss(net)), (None, 0))(weights_of(net), X.unsqueeze(1)),
    "vjp": lambda net: vjp(loss(net), weights_of(net))[1](ONE),
    "grad by the parameters": lambda net: grad(loss(net))(dict(net.named_parameters())),
    "jvp": lambda net: jvp(loss(net), (weights_of(net),), (weights_of(net),)),
    "jacrev": lambda net: jacrev(loss(net))(weights_of(net)),
    "jacfwd": lambda net: jacfwd(scaled(net))(ONE),
    "hessian": lambda net: hessian(scaled(net))(ONE),
    "vmap": lambda net: vmap(loss(net))({name: torch.stack([p, 2 * p]) for name, p in weights_of(net).items()}),
    "vmap of two modules": lambda net: vmap(loss(net))(stack_module_state([net, copy.deepcopy(net)])[0]),
    "functionalize": lambda net: functionalize(loss(net))(weights_of(net)),
    "functionalize by the parameters": lambda net: functionalize(loss(net))(dict(net.named_parameters())),
    "grad with state_dict": lambda net: grad(lambda p: loss(net)({**net.state_dict(), **p}))(weights_of(net)),
}


def with_a_plan():
    ours, accelerator, twin = pair()
    for seed in range(2):
        ours(latent(seed))
    assert ours.conv.weight.is_contiguous(memory_format=torch.channels_last) and accelerator.plans
    return ours, accelerator, twin


@pytest.mark.parametrize("by", BY_WEIGHTS)
def test_a_transform_by_the_weights(by):
    ours, accelerator, twin = with_a_plan()
    with torch.enable_grad():
        found, expected = tree_leaves(BY_WEIGHTS[by](ours)), tree_leaves(BY_WEIGHTS[by](twin))
    assert len(found) == len(expected) > 0
    for here, there in zip(found, expected):
        torch.testing.assert_close(here, there, rtol=1e-4, atol=1e-4)
    assert "torch.func transforms the call" in reasons(accelerator)
    torch.testing.assert_close(ours(latent(3)), twin(latent(3)), rtol=1e-5, atol=1e-5)
    assert accelerator.report.as_dict()["last_error"] is None


@pytest.mark.parametrize("done", ["state_dict", "load_state_dict", "release"])
def test_the_layout_is_restored_among_fake_tensors(done):
    """Parameters that were restored as fake tensors would have no values any more."""
    ours, accelerator, twin = with_a_plan()
    own = dict(ours.named_parameters())
    values = weights_of(twin)
    with FakeTensorMode(allow_non_fake_inputs=True):
        if done == "release":
            accelerator.release()
        else:
            ours.state_dict()
    if done == "load_state_dict":
        ours.load_state_dict({name: 2 * p for name, p in values.items()})
        twin.load_state_dict({name: 2 * p for name, p in values.items()})
    for name, p in ours.named_parameters():
        assert p is own[name] and type(p.data) is torch.Tensor and torch.equal(p, dict(twin.named_parameters())[name])
    for seed in range(3):
        torch.testing.assert_close(ours(latent(seed)), twin(latent(seed)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("transform", [grad, vmap, functionalize])
def test_what_a_transform_wraps_is_not_plain(transform):
    seen = []

    def look(x):
        seen.append(is_plain(x))
        return x.sum()

    with torch.enable_grad():
        transform(look)(torch.ones(3))
    assert seen == [False]


@pytest.mark.parametrize("tensor", [torch.ones(3), torch.nn.Parameter(torch.ones(3)), torch.ones(3, device="meta")])
def test_others_are(tensor):
    assert is_plain(tensor)
