"""UNets distilled or pruned from the known ones: SSD-1B, Segmind's small and tiny SD, LCM, Turbo, Lightning."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers import UNet2DConditionModel

from sfast_ext import Config, accelerate
from sfast_ext.tools.lib import models

SDXL, SD15 = models.unet_config("tiny-sdxl"), models.unet_config("tiny-sd15")
VARIANTS: dict[str, dict[str, Any]] = {
    # fewer transformer blocks on the way down than up, none in the middle
    "SSD-1B": {
        **SDXL,
        "layers_per_block": 2,
        "mid_block_type": "UNetMidBlock2D",
        "transformer_layers_per_block": [1, [1, 1], [2, 2]],
        "reverse_transformer_layers_per_block": [[2, 2, 3], [2, 1, 1], 1],
    },
    "no middle block": {**SD15, "mid_block_type": None},
    # the guidance scale is an argument of the network
    "LCM": {**SD15, "time_cond_proj_dim": 16},
    # a distilled checkpoint of the usual shape, without guidance
    "Turbo, Lightning": SDXL,
}


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


@pytest.mark.long(but=[1, 3])
@pytest.mark.parametrize("variant", VARIANTS)
def test_it_runs_on_plans_and_gives_the_same(variant):
    unet = models.randomise(UNet2DConditionModel(**VARIANTS[variant]), 0).eval().requires_grad_(False)
    original = unet.forward
    accelerator = accelerate(unet, Config(allow_cpu=True, drop_slower=False))
    for width, steps in ((64, (999, 749, 499)), (96, (999, 249)), (64, (99,))):
        for step in steps:
            args, kwargs = models.unet_inputs(unet, width, 64, tokens=7, seed=step, timestep=step)
            if variant == "LCM":
                kwargs["timestep_cond"] = torch.randn(2, 16)
            if variant == "Turbo, Lightning":
                args = tuple(x[:1] if x.dim() else x for x in args)
                kwargs["encoder_hidden_states"] = kwargs["encoder_hidden_states"][:1]
                kwargs["added_cond_kwargs"] = {k: x[:1] for k, x in kwargs["added_cond_kwargs"].items()}
            expected = original(*args, **kwargs)[0]
            error = (unet(*args, **kwargs)[0] - expected).norm() / expected.norm()
            assert error < 1e-5
    status = accelerator.report.as_dict()
    assert status["counters"]["captures"] == 2 and status["counters"]["eager_runs"] >= 4
    assert not status["reasons"] and status["last_error"] is None
