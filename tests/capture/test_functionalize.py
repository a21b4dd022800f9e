"""Writes to weights and arguments are refused, writes to copies of them are not."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sfast_ext.call_signature import flatten_call
from sfast_ext.capture.capture import CaptureRefused, capture
from sfast_ext.weights.arena import WeightArena

CPU = torch.device("cpu")


class Weighted(nn.Module):
    def __init__(self, write, dtype=torch.float16):
        super().__init__()
        self.weight = nn.Parameter(torch.arange(1.0, 5.0).to(dtype), requires_grad=False)
        self.register_buffer("scale", torch.full((4,), 0.5))
        self.write = write

    def forward(self, x):
        return self.write(self, x)


def captured(write, x, **options):
    module = Weighted(write, **options).eval()
    call = flatten_call((x,), {}, CPU)
    before, given = module.weight.clone(), x.clone()
    with torch.no_grad():
        try:
            found = capture(module.forward, call, call.tensors(CPU), WeightArena(module))
        finally:
            assert torch.equal(module.weight, before) and torch.equal(x, given)
        ours, theirs = found.graph_module(*call.tensors(CPU))[0], module(x)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    assert torch.equal(module.weight, before) and torch.equal(x, given)


X = torch.randn(2, 4)


def added(h, wide, other):
    h += wide
    view = h.view(4, 2)
    h *= other
    return view.reshape(2, 4) @ torch.ones(4, 4, dtype=h.dtype), h


IN_PLACE = {
    "a sum": lambda m, x: added(x * 2, torch.linspace(0, 1, 4), m.weight)[0],
    "its result": lambda m, x: added(x * 2, torch.linspace(0, 1, 4), torch.full((2, 4), 0.3))[1],
    "a number": lambda m, x: (x * 2).mul_(1 / 3),
    "a tensor without dimensions": lambda m, x: (x * 2).add_(torch.tensor(1 / 3)),
    "scaled": lambda m, x: (x * 2).addcmul_(x, x, value=0.1).add_(torch.linspace(0, 1, 4), alpha=0.7),
    "a slice": lambda m, x: sliced_sum(x * 2),
}
"""Forge adds float32 residuals of a ControlNet to the UNet's values in half precision."""


def sliced_sum(h):
    h[:, :2] += torch.linspace(0, 1, 2)
    return h @ torch.ones(4, 4, dtype=h.dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", IN_PLACE)
def test_what_is_written_in_place_keeps_its_dtype(name, dtype):
    captured(IN_PLACE[name], X.to(dtype), dtype=dtype)

COPIES = {
    "a product by einsum": lambda m, x: x + torch.einsum("i,i->i", m.weight, m.weight).mul_(2),
    "to dtype": lambda m, x: x + m.weight.to(torch.float32).mul_(m.scale),
    "to of the buffer's dtype": lambda m, x: x + m.weight.to(m.scale.dtype).add_(1),
    "float": lambda m, x: x + m.weight.float().sub_(1),
    "double": lambda m, x: x + m.weight.double().div_(3).float(),
    "type": lambda m, x: x + m.weight.type(torch.float32).mul_(2),
    "type_as": lambda m, x: x + m.weight.type_as(x).mul_(2),
    "to another": lambda m, x: x + m.weight.to(x).mul_(2),
    "to device and dtype": lambda m, x: x + m.weight.to("cpu", torch.float32).mul_(2),
    "copy=True": lambda m, x: x + m.weight.to(torch.float16, copy=True).mul_(2),
    "a view of a copy": lambda m, x: x + m.weight.to(torch.float32).view(2, 2).mul_(2).view(4),
    "a slice of a copy": lambda m, x: sliced(m.weight.to(torch.float32)) + x,
    "clone": lambda m, x: x + m.weight.clone().mul_(2),
    "a converted argument": lambda m, x: x.to(torch.float64).mul_(2).float() + m.weight,
    "a copied argument": lambda m, x: x.to(torch.float32, copy=True).mul_(2) + m.weight,
    "there and back": lambda m, x: x + m.scale.to(torch.float16).to(torch.float32).mul_(2),
}


def sliced(weight):
    weight[:2] *= 3
    return weight


@pytest.mark.parametrize("name", COPIES)
def test_a_write_to_a_copy_is_no_write_to_a_weight_or_an_argument(name):
    captured(COPIES[name], X)


THE_SAME = {
    "to its own dtype": lambda m, x: x + m.weight.to(torch.float32).mul_(2),
    "float": lambda m, x: x + m.weight.float().mul_(2),
    "to nothing new": lambda m, x: x + m.weight.to("cpu").mul_(2),
    "type_as": lambda m, x: x + m.weight.type_as(x).mul_(2),
    "copy=False": lambda m, x: x + m.weight.to(torch.float32, copy=False).mul_(2),
    "contiguous": lambda m, x: x + m.weight.contiguous().mul_(2),
    "reshape": lambda m, x: x + m.weight.reshape(2, 2).mul_(2).view(4),
    "detach": lambda m, x: x + m.weight.detach().mul_(2),
    "data": lambda m, x: x + m.weight.data.mul_(2),
    "atleast_2d": lambda m, x: x + torch.atleast_2d(m.weight).mul_(2),
    "unsafe_chunk": lambda m, x: x + torch.unsafe_chunk(m.weight, 2)[0].mul_(2).sum(),
    "unsafe_split": lambda m, x: x + torch.unsafe_split(m.weight, 2)[0].mul_(2).sum(),
    "broadcast_tensors": lambda m, x: x + torch.broadcast_tensors(m.weight, m.scale)[0].mul_(2),
    "einsum": lambda m, x: x + torch.einsum("i->i", m.weight).mul_(2),
    "meshgrid": lambda m, x: x + torch.meshgrid(m.weight, indexing="ij")[0].mul_(2),
    "the argument": lambda m, x: x.to(torch.float32).mul_(2) + m.weight,
    "the argument as contiguous": lambda m, x: x.contiguous().mul_(2) + m.weight,
    "the argument in another layout": lambda m, x: x.to(torch.float32, memory_format=torch.preserve_format).mul_(2),
}


@pytest.mark.parametrize("name", THE_SAME)
def test_a_write_to_a_weight_or_an_argument_under_another_name_is_refused(name):
    with pytest.raises(CaptureRefused, match="writes to|neither an argument nor a weight"):
        captured(THE_SAME[name], X, dtype=torch.float32)
