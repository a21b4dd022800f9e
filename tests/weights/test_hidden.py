"""Parameters in system memory that are empty ones on a GPU, while a host moves and changes their module."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from pretended_card import CPU, GPU, pretended_card
from torch import nn

from sfast_ext.weights.aside import Aside, Hidden


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    with pretended_card(monkeypatch, 1 << 20) as card:
        yield card


def asides(layer: nn.Module) -> list[Aside]:
    return [Aside("weight", [(layer._parameters, "weight")], layer.weight.shape, layer.weight.dtype)]


def test_what_a_host_moves_meanwhile_stays(card: Any) -> None:
    layer = nn.Linear(4, 4, bias=False)
    value, before = layer.weight, layer.weight.detach().clone()
    with Hidden(asides(layer), GPU):
        layer.to(GPU)
        assert value.is_cuda and not value.numel() and card.used == 0
    assert layer.weight is value and not value.is_cuda and torch.equal(value, before)


@pytest.mark.parametrize("replaced", [True, False])
def test_what_a_host_changes_meanwhile_leaves_the_gpu(card: Any, replaced: bool) -> None:
    layer = nn.Linear(4, 4, bias=False)
    value, before = layer.weight, layer.weight.detach().clone()
    (aside,) = asides(layer)
    aside.seen = ("as it was",)
    with Hidden([aside], GPU) as hidden:
        with hidden.shown(layer, "weight"):
            assert layer.weight is value and torch.equal(value, before)
            if replaced:
                layer.weight = nn.Parameter(before.to(GPU) + 1, requires_grad=False)
        assert layer.weight.is_cuda and not layer.weight.numel()
        # the host keeps what it has taken out
        assert not replaced or torch.equal(value, before)
        layer.to(GPU)
    assert layer.weight.device == CPU and torch.equal(layer.weight, before + replaced)
    assert (aside.seen is None) == replaced and card.used == 0


def test_an_error_of_the_host_leaves_the_values(card: Any) -> None:
    layer = nn.Linear(4, 4, bias=False)
    value, before = layer.weight, layer.weight.detach().clone()
    with pytest.raises(KeyError), Hidden(asides(layer), GPU) as hidden, hidden.shown(layer, "weight"):
        raise KeyError
    assert layer.weight is value and torch.equal(value, before)
    with Hidden(asides(layer), GPU) as hidden, hidden.shown(nn.Linear(2, 2), "weight"):
        assert not value.numel()
