"""VAEs of random weights in the shapes of the real ones, full size or tiny."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from sfast_ext.tools.lib.models import randomise, without_initialisation

PARTS = ("decoder", "encoder")
LATENT_CHANNELS, IMAGE_CHANNELS = 4, 3

_FULL: dict[str, Any] = {"block_out_channels": (128, 256, 512, 512), "layers_per_block": 2, "norm_num_groups": 32}
_TINY: dict[str, Any] = {"block_out_channels": (16, 16, 32, 32), "layers_per_block": 1, "norm_num_groups": 8}
CONFIGURATIONS: dict[str, dict[str, Any]] = {"sd": _FULL, "tiny-sd": _TINY}
"""What differs in the arguments of diffusers' AutoencoderKL, by name. SD 1, SD 2 and SDXL have one shape."""


def random_vae(
    name: str = "sd", seed: int = 0, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> nn.Module:
    """An AutoencoderKL of random weights, in evaluation mode."""
    from diffusers import AutoencoderKL

    shape = CONFIGURATIONS[name]
    levels = len(shape["block_out_channels"])
    with without_initialisation(torch.device(device)):
        vae = AutoencoderKL(
            in_channels=IMAGE_CHANNELS,
            out_channels=IMAGE_CHANNELS,
            latent_channels=LATENT_CHANNELS,
            down_block_types=("DownEncoderBlock2D",) * levels,
            up_block_types=("UpDecoderBlock2D",) * levels,
            sample_size=512,
            **shape,
        )
    nn.Module.to(vae, dtype)
    return randomise(vae, seed).eval().requires_grad_(False)


def part_input(
    part: str,
    width: int,
    height: int,
    images: int = 1,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> torch.Tensor:
    """What the decoder or the encoder takes for images of this size: a latent, or the images."""
    channels, divisor = (LATENT_CHANNELS, 8) if part == "decoder" else (IMAGE_CHANNELS, 1)
    generator = torch.Generator("cpu").manual_seed(seed)
    shape = (images, channels, height // divisor, width // divisor)
    return torch.randn(shape, generator=generator).to(device, dtype)
