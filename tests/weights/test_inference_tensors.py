"""Weights made under `torch.inference_mode`, as hosts do that load or merge under it."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
from torch import nn

from sfast_ext import Config, accelerate
from sfast_ext.runtime.verify import relative_error
from sfast_ext.tools.lib import models
from sfast_ext.weights.original_layout import live_tensor, set_data

pytestmark = pytest.mark.usefixtures("two_levels")
MODES = [torch.no_grad, torch.inference_mode]


def merged(net: nn.Module, factor: float) -> None:
    """New weights under inference mode, as of a LoRA that is merged."""
    with torch.inference_mode():
        for module in net.modules():
            if isinstance(module, (nn.Linear, nn.Conv2d)):
                module.weight = nn.Parameter(module.weight * factor, requires_grad=False)


class Pair:
    """A UNet that is accelerated and its twin that is not."""

    def __init__(self, mode: type[contextlib.AbstractContextManager[None]]) -> None:
        self.mode = mode
        self.unet, self.twin = (models.tiny_unet() for _ in range(2))

    def accelerated(self) -> Pair:
        self.accelerator = accelerate(self.unet, Config(allow_cpu=True))
        return self

    def alike(self, width: int = 64) -> bool:
        args, kwargs = models.unet_inputs(self.unet, width, 64)
        for _ in range(2):
            with self.mode():
                ours, wanted = (net(*args, **kwargs)[0] for net in (self.unet, self.twin))
                assert relative_error([ours], [wanted]) < 1e-4
        return True

    def ran(self) -> bool:
        """Whether plans ran, and nothing failed."""
        report = self.accelerator.report.as_dict()
        return bool(report["counters"].get("eager_runs")) and not report["reasons"] and report["last_error"] is None


@pytest.mark.long(but=[0])
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.__name__)
def test_weights_that_are_merged_under_it(mode):
    pair = Pair(mode).accelerated()
    assert pair.alike()
    for net in (pair.unet, pair.twin):
        merged(net, 1.01)
    assert pair.alike() and pair.alike(128)
    # whatever takes a view of a parameter
    state = pair.unet.state_dict()
    for (name, ours), theirs in zip(state.items(), pair.twin.state_dict().values()):
        assert torch.equal(ours, theirs), name
    copy.deepcopy(pair.unet)
    assert pair.alike(192) and pair.alike() and pair.ran()
    pair.accelerator.release()
    assert pair.alike() and pair.alike(256)
    assert pair.unet.conv_in.weight.is_inference()


@pytest.mark.long(but=[1])
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.__name__)
def test_a_model_that_is_made_under_it(mode):
    with torch.inference_mode():
        pair = Pair(mode)
    pair.accelerated()
    assert pair.alike() and pair.alike(128)
    with torch.inference_mode():
        for net in (pair.unet, pair.twin):
            for parameter in net.parameters():
                parameter.mul_(0.99)
    assert pair.alike() and pair.alike(128)
    # ordinary weights take the place of some
    for net in (pair.unet, pair.twin):
        net.conv_in.weight = nn.Parameter(net.conv_in.weight.detach().clone() * 1.5, requires_grad=False)
    assert pair.alike() and pair.ran()
    pair.accelerator.release()
    assert pair.alike() and all(p.is_inference() for name, p in pair.unet.named_parameters() if "conv_in.w" not in name)


@pytest.mark.parametrize("made", MODES, ids=lambda mode: mode.__name__)
@pytest.mark.parametrize("given", MODES, ids=lambda mode: mode.__name__)
def test_a_tensor_stays_what_it_is(made, given):
    with made():
        tensor = nn.Parameter(torch.zeros(3, 4), requires_grad=False)
    with given():
        data = torch.arange(12.0).reshape(4, 3).T
    set_data(tensor, data)
    assert tensor.is_inference() == (made is torch.inference_mode)
    assert tensor.data_ptr() == data.data_ptr() and tensor.stride() == data.stride()
    assert torch.equal(tensor.detach(), data) and type(tensor) is nn.Parameter
    live = live_tensor(tensor)
    live.add_(1)
    assert not live.is_inference() and tensor[0, 0] == 1 and live.data_ptr() == data.data_ptr()
