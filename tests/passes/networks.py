"""Tiny UNets of real code, in the shapes of the models people use."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from sfast_ext.tools.lib import models

NETWORKS = ("sd15", "sd15-inpaint", "sd21", "sdxl", "sdxl-refiner", "ldm")


def network(kind: str) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """A UNet and the arguments of one call."""
    if kind == "ldm":
        return ldm()
    unet = models.tiny_unet(kind)
    # 16x16 latents: the deepest level still has more than one pixel, and so a layout
    return unet, *models.unet_inputs(unet, width=128, height=128, tokens=11)


def ldm() -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    pytest.importorskip("ldm")
    from ldm.modules.diffusionmodules.openaimodel import UNetModel

    torch.manual_seed(0)
    unet = UNetModel(
        image_size=8,
        in_channels=4,
        out_channels=4,
        model_channels=32,
        attention_resolutions=[1, 2],
        num_res_blocks=1,
        channel_mult=[1, 2],
        num_heads=4,
        use_spatial_transformer=True,
        transformer_depth=1,
        context_dim=24,
        use_checkpoint=False,
        legacy=False,
    ).eval()
    models.randomise(unet, 0)  # its last layers start at zero, which would hide what comes before
    return unet, (torch.randn(2, 4, 8, 8), torch.tensor([5, 7]), torch.randn(2, 11, 24)), {}
