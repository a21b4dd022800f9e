"""torch.utils.swap_tensors, as Module.to and load_state_dict call it if the user asked torch for it."""

from __future__ import annotations

import copy
import weakref

import pytest
import torch
from torch import nn

from sfast_ext import Config, accelerate

swaps = pytest.mark.skipif(not hasattr(torch.utils, "swap_tensors"), reason="this torch swaps no tensors")
pytestmark = swaps


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 8, 3, padding=1)
        self.q, self.k, self.v = (nn.Linear(8, 8, bias=False) for _ in range(3))
        self.register_buffer("scale", torch.full((8,), 0.5))

    def forward(self, x):
        x = self.conv(x).flatten(2).transpose(1, 2) * self.scale
        return self.q(x) + self.k(x) * self.v(x)


def made(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net().eval().requires_grad_(False)


X = torch.randn(2, 4, 6, 6, generator=torch.Generator().manual_seed(1))


def by_hand(net):
    other = made(3)
    for mine, theirs in zip(net.parameters(), other.parameters()):
        torch.utils.swap_tensors(mine, theirs)


def one_by_hand(net):
    torch.utils.swap_tensors(net.conv.weight, nn.Parameter(net.conv.weight * 2, requires_grad=False))


CHANGES = {
    "double": lambda net: net.double(),
    "half and back": lambda net: net.half().float(),
    "bfloat16 and back": lambda net: net.bfloat16().float(),
    "double and back": lambda net: net.double().float(),
    "to": lambda net: net.to(torch.float64),
    "channels last": lambda net: net.to(memory_format=torch.channels_last),
    "load": lambda net: net.load_state_dict(made(7).state_dict()),
    "assign": lambda net: net.load_state_dict(made(7).state_dict(), assign=True),
    "of its own": lambda net: net.load_state_dict({k: v * 2 for k, v in net.state_dict().items()}),
    "by hand": by_hand,
    "one by hand": one_by_hand,
    "apply": lambda net: net._apply(lambda t: t * 2),
    "to empty": lambda net: net.to_empty(device="cpu").load_state_dict(made(7).state_dict()),
    "a layer": lambda net: net.q.double().float(),
}


@torch.no_grad()
@pytest.mark.parametrize("swap", [True, False])
@pytest.mark.parametrize("change", CHANGES)
def test_tensors_can_be_swapped(change, swap):
    net, twin = made(), made()
    accelerator = accelerate(net, Config(allow_cpu=True, drop_slower=False))
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(swap)
    try:
        x = X
        for _ in range(3):
            for _ in range(3):
                assert torch.allclose(net(x), twin(x), rtol=1e-3, atol=1e-4)
            for each in (net, twin):
                CHANGES[change](each)
            x = X.to(twin.conv.weight.dtype)
        assert torch.allclose(net(x), twin(x), rtol=1e-3, atol=1e-4)
        copy.deepcopy(net).double()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)
        accelerator.release()
    assert [p.dtype for p in net.parameters()] == [p.dtype for p in twin.parameters()]


@torch.no_grad()
def test_no_parameter_has_a_weak_reference():
    net = made()
    accelerator = accelerate(net, Config(allow_cpu=True, drop_slower=False))
    for side in (6, 6, 6, 8, 8):
        net(torch.randn(1, 4, side, side))
        assert not any(weakref.getweakrefs(t) for t in [*net.parameters(), *net.buffers()])
    net.conv.weight = nn.Parameter(net.conv.weight * 2, requires_grad=False)
    net(X)
    accelerator.release()
    assert not any(weakref.getweakrefs(t) for t in [*net.parameters(), *net.buffers()])
