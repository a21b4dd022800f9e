"""Copies of layers whose weights are made of other tensors, and what is saved of them, while a model is accelerated."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from kitchen_standin import FP8, INT8, Net, QuantizedTensor
from torch import nn

from sfast_ext.weights.inner_tensors import InnerTensors, all_within
from weights.test_inner_tensors import Run, other, params


def deep_copy(weight, memo):
    """As a class would that can be copied. comfy_kitchen 0.2.40 cannot: `copy.deepcopy` of its weights raises."""
    made = weight.like(weight._qdata.clone(), scale=weight._params.scale.clone())
    return memo.setdefault(id(weight), nn.Parameter(made, requires_grad=False))


def rebuilt(codes, layout, fields):
    return nn.Parameter(QuantizedTensor(codes, layout, fields), requires_grad=False)


def by_torch(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def from_a_state_dict(net):
    made = Net()
    for name, value in by_torch(net.state_dict(keep_vars=True)).items():
        owner, _, slot = name.rpartition(".")
        setattr(made.get_submodule(owner), slot, value)
    return made


COPIES = {
    "layer": lambda net: copy.deepcopy(net.first),
    "copy of a copy": lambda net: copy.deepcopy(copy.deepcopy(net.first)),
    "model": lambda net: copy.deepcopy(net).first,
    "saved layer": lambda net: by_torch(net.first),
    "saved model": lambda net: by_torch(net).first,
    "saved state dict": lambda net: from_a_state_dict(net).first,
}


@pytest.mark.parametrize("layout", [INT8, FP8])
@pytest.mark.parametrize("how", COPIES)
def test_a_copy_is_right_and_has_other_tensors(monkeypatch, how, layout):
    monkeypatch.setattr(QuantizedTensor, "__deepcopy__", deep_copy, raising=False)
    monkeypatch.setattr(QuantizedTensor, "__reduce_ex__", lambda weight, _: (
        rebuilt, (weight._qdata, weight._layout_cls, weight._params)))  # fmt: skip
    on, twin = Run(Net(layout), torch.no_grad), Net(layout)
    on.equal(3)
    y = torch.randn(3, 16)
    made = COPIES[how](on.net)
    assert torch.equal(made(y), twin.first(y))
    # neither has a part in the other
    made.weight._qdata.view(torch.uint8).fill_(1)
    params(made).scale.mul_(3)
    with torch.no_grad():
        assert torch.equal(on.net.first(y), twin.first(y))
    on.equal()
    wrong = made(y).clone()
    on.net.first.weight = other(on.net.first)
    on.equal()
    assert torch.equal(made(y), wrong) and on.captures == 1 and not on.reasons
    on.accelerator.release()


def outcome(layer):
    try:
        return type(copy.deepcopy(layer))
    except Exception as exc:
        return type(exc), str(exc)


def test_a_class_that_cannot_be_copied_raises_what_it_does_without_us():
    on = Run(Net())
    on.equal(3)
    assert outcome(on.net.first) == outcome(Net().first)
    on.equal()
    on.accelerator.release()
    assert not any(isinstance(c, InnerTensors) and dict.__len__(c) for c in all_within(on.net.first))
