from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

from sfast_ext.weights.arena import WeightArena
from sfast_ext.weights.original_layout import OriginalLayouts

ROWS, COLUMNS = (6, 1), (1, 4)


@pytest.fixture
def layouts():
    return OriginalLayouts()


def laid(layouts: OriginalLayouts) -> nn.Parameter:
    """A parameter that the arena laid out in columns."""
    parameter = nn.Parameter(torch.arange(24.0).view(4, 6), requires_grad=False)
    parameter.data = parameter.t().contiguous().t()
    layouts.record(parameter, ROWS, ["weight"])
    return parameter


def test_a_tensor_is_brought_home(layouts):
    parameter = laid(layouts)
    assert layouts.strides_of(parameter) == ROWS and not layouts.is_original(parameter, ROWS)
    layouts.restore(parameter, ROWS)
    assert parameter.stride() == ROWS and torch.equal(parameter, torch.arange(24.0).view(4, 6))
    assert layouts.strides_of(parameter) is None and layouts.is_original(parameter, ROWS)


def test_a_tensor_of_inference_mode_is_brought_home(layouts):
    with torch.inference_mode():
        parameter = nn.Parameter(torch.zeros(4, 6), requires_grad=False)
    # as `Module.to` gives it outside of inference mode
    parameter.data = torch.arange(24.0).view(4, 6).t().contiguous().t()
    layouts.record(parameter, ROWS, ["weight"])
    layouts.restore(parameter, ROWS)
    assert parameter.stride() == ROWS and torch.equal(parameter.detach(), torch.arange(24.0).view(4, 6))


def test_strides_go_on_to_what_is_computed_from_a_tensor(layouts):
    parameter = laid(layouts)
    replaced = nn.Parameter(parameter * 2, requires_grad=False)
    assert replaced.stride() == COLUMNS and layouts.strides_of(replaced) is None
    assert layouts.strides_of(replaced, ["weight"]) == ROWS
    parameter.data = parameter * 2
    assert layouts.strides_of(parameter) == ROWS
    layouts.forget()
    assert layouts.strides_of(replaced, ["weight"]) is None


def test_a_layout_that_the_arena_did_not_give_is_the_hosts(layouts):
    parameter = laid(layouts)
    assert layouts.strides_of(parameter.t()) == parameter.t().stride()
    parameter.data = parameter.contiguous()
    assert layouts.strides_of(parameter, ["weight"]) is None


@pytest.mark.parametrize(
    ("data", "kept"),
    [
        (lambda p: p.contiguous(), False),
        (lambda p: torch.empty_strided((4, 6), (12, 2)).copy_(p), False),
        (lambda p: p.clone(), True),
        (lambda p: torch.empty(0), True),  # away
        (lambda p: p[:2], True),
    ],
)
def test_what_a_release_keeps_of_a_tensor(layouts, data, kept):
    parameter = laid(layouts)
    columns = parameter.data.clone()
    parameter.data = data(parameter.data)
    layouts.forget()
    parameter.data = columns
    assert layouts.strides_of(parameter, ["weight"]) == (ROWS if kept else None)


def test_nothing_is_kept_alive(layouts):
    parameter = laid(layouts)
    gone = weakref.ref(parameter)
    alias = parameter.data
    del parameter
    gc.collect()
    layouts.sweep()
    assert gone() is None and not layouts.moved() and layouts.strides_of(alias) == ROWS
    del alias
    layouts.sweep()
    assert not layouts._memory and not layouts._moved


def test_a_layout_that_the_host_chooses_after_a_release_is_kept():
    net = nn.Sequential(nn.Conv2d(4, 6, 3))
    arena = WeightArena(net)
    for home in (torch.contiguous_format, torch.channels_last):
        net.to(memory_format=home)
        arena.index()
        assert arena.channels_last(arena.locate(net[0].weight))
        arena.release()
        assert net[0].weight.is_contiguous(memory_format=home)
