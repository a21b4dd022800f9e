"""Modules that are saved whole while they are accelerated."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn

from sfast_ext import Config, accelerate, accelerator_of
from sfast_ext.runtime.verify import relative_error
from sfast_ext.tools.lib import models


def by_pickle(module: nn.Module) -> tuple[nn.Module, int]:
    data = pickle.dumps(module)
    return pickle.loads(data), len(data)


def by_torch(module: nn.Module) -> tuple[nn.Module, int]:
    file = io.BytesIO()
    torch.save(module, file)
    size = file.tell()
    file.seek(0)
    # torch before 2.4 takes it for granted
    return torch.load(file, weights_only=False), size


@pytest.mark.long(but=[0])
@torch.no_grad()
@pytest.mark.parametrize("saved", [by_pickle, by_torch])
def test_a_loaded_module_has_the_weights_and_nothing_of_ours(saved):
    unet = models.tiny_unet()
    args, kwargs = models.unet_inputs(unet)
    wanted = unet(*args, **kwargs)[0]
    _, size = saved(unet)
    accelerator = accelerate(unet, Config(allow_cpu=True))
    for _ in range(2):
        unet(*args, **kwargs)
    loaded, taken = saved(unet)
    # pickle alone writes what several tensors share once for each
    assert saved is by_pickle or taken < 1.02 * size + 2000
    assert accelerator_of(loaded) is None and not accelerator.report.as_dict()["reasons"]
    assert torch.equal(loaded(*args, **kwargs)[0], wanted)
    strides = {name: p.stride() for name, p in models.tiny_unet().named_parameters()}
    assert {name: p.stride() for name, p in loaded.named_parameters()} == strides
    # neither has a part in the other
    loaded.conv_in.weight.mul_(0)
    runs = accelerator.report.counter("eager_runs")
    assert relative_error([unet(*args, **kwargs)[0]], [wanted]) < 1e-4
    assert accelerator.report.counter("eager_runs") == runs + 1
    loaded.state_dict()


class Doubled:
    """A forward of a host's, of which a module keeps one for itself."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self, *args, **kwargs):
        return (2 * type(self.module).forward(self.module, *args, **kwargs)[0],)


@torch.no_grad()
@pytest.mark.parametrize("taken", [copy.deepcopy, lambda module: by_pickle(module)[0]], ids=["copied", "loaded"])
def test_a_forward_that_was_there_before_goes_with_the_module(taken):
    unet = models.tiny_unet()
    unet.forward = Doubled(unet)
    args, kwargs = models.unet_inputs(unet)
    wanted = unet(*args, **kwargs)[0]
    accelerate(unet, Config(allow_cpu=True))
    other = taken(unet)
    assert isinstance(vars(other)["forward"], Doubled) and vars(other)["forward"].module is other
    assert torch.equal(other(*args, **kwargs)[0], wanted)
