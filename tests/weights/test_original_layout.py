from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

from sfast_ext.weights.arena import WeightArena
from sfast_ext.weights.original_layout import Homes

ROWS, COLUMNS = (6, 1), (1, 4)


@pytest.fixture
def homes():
    return Homes()


def laid(homes: Homes) -> nn.Parameter:
    """A parameter that the arena laid out in columns."""
    parameter = nn.Parameter(torch.arange(24.0).view(4, 6), requires_grad=False)
    parameter.data = parameter.t().contiguous().t()
    homes.note(parameter, ROWS, ["weight"])
    return parameter


def test_a_tensor_is_brought_home(homes):
    parameter = laid(homes)
    assert homes.of(parameter) == ROWS and not homes.at_home(parameter, ROWS)
    homes.bring(parameter, ROWS)
    assert parameter.stride() == ROWS and torch.equal(parameter, torch.arange(24.0).view(4, 6))
    assert homes.of(parameter) is None and homes.at_home(parameter, ROWS)


def test_strides_go_on_to_what_is_computed_from_a_tensor(homes):
    parameter = laid(homes)
    replaced = nn.Parameter(parameter * 2, requires_grad=False)
    assert replaced.stride() == COLUMNS and homes.of(replaced) is None
    assert homes.of(replaced, ["weight"]) == ROWS
    parameter.data = parameter * 2
    assert homes.of(parameter) == ROWS
    homes.forget()
    assert homes.of(replaced, ["weight"]) is None


def test_a_layout_that_the_arena_did_not_give_is_the_hosts(homes):
    parameter = laid(homes)
    assert homes.of(parameter.t()) == parameter.t().stride()
    parameter.data = parameter.contiguous()
    assert homes.of(parameter, ["weight"]) is None


def test_nothing_is_kept_alive(homes):
    parameter = laid(homes)
    gone = weakref.ref(parameter)
    alias = parameter.data
    del parameter
    gc.collect()
    homes.sweep()
    assert gone() is None and not homes.moved() and homes.of(alias) == ROWS
    del alias
    homes.sweep()
    assert not homes._memory and not homes._moved


def test_a_layout_that_the_host_chooses_after_a_release_is_kept():
    net = nn.Sequential(nn.Conv2d(4, 6, 3))
    arena = WeightArena(net)
    for home in (torch.contiguous_format, torch.channels_last):
        net.to(memory_format=home)
        arena.index()
        assert arena.channels_last(arena.locate(net[0].weight))
        arena.release()
        assert net[0].weight.is_contiguous(memory_format=home)
