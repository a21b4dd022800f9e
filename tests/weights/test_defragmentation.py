"""Weights that stay on the GPU get other memory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from pretended_card import GPU, Card, pretended_card
from torch import nn

from sfast_ext.weights import defragmentation
from sfast_ext.weights.original_layout import memory_of


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Iterator[Card]:
    with torch.no_grad(), pretended_card(monkeypatch, 1 << 20) as found:
        yield found


def made() -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Conv2d(2, 3, 3), nn.BatchNorm1d(3)).half()
    # two parameters on one memory, and one twice
    net[1].weight = nn.Parameter(net[0].weight.data.view(8, 8))
    net[2].bias = net[1].bias
    return net


def test_parameters_get_other_memory_with_the_same_values(card: Card) -> None:
    net, twin = made(), made()
    net.to(GPU)
    both = net[0].weight.data
    net[1].weight.data = both
    net[3].weight.data = net[3].weight.data.contiguous(memory_format=torch.channels_last)
    net[4].to("cpu")
    net[2].register_buffer("seen", net[2].weight.data[:2])
    before = {name: (id(p), memory_of(p), p.stride(), p._version) for name, p in net.named_parameters()}
    held = card.allocated
    defragmentation.defragment([net, net[0]])
    for name, p in net.named_parameters():
        number, memory, strides, version = before[name]
        assert id(p) == number and p.stride() == strides and p._version == version, name
        stays = name in ("0.weight", "1.weight", "2.weight") or p.device.type == "cpu"
        assert (memory_of(p) == memory) == stays, name
        assert torch.equal(p.cpu(), twin.get_parameter(name)), name
    assert card.allocated == held and net[4].weight.device.type == "cpu" and net[2].bias is net[1].bias


@pytest.mark.parametrize("fails", ["move_to_gpu", "to_system_memory", "empty_cache"])
def test_if_anything_fails_all_are_on_the_gpu(card: Card, monkeypatch: pytest.MonkeyPatch, fails: str) -> None:
    net, twin = made(), made()
    net.to(GPU)

    def full(*_: object) -> None:
        raise MemoryError("no memory")

    monkeypatch.setattr(torch.cuda if fails == "empty_cache" else defragmentation, fails, full)
    with pytest.raises(MemoryError):
        defragmentation.defragment([net, net[0]])
    for name, p in net.named_parameters():
        assert p.device.type == "cuda" and torch.equal(p.cpu(), twin.get_parameter(name)), name
