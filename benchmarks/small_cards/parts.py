"""The parts of a model, of random weights and real widths: UNet, VAE and text encoders."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from sfast_ext.tools.lib import models

TINY = "tiny-"
_VAE: dict[str, Any] = {"block_out_channels": (128, 256, 512, 512), "layers_per_block": 2}
_TINY_VAE: dict[str, Any] = {"block_out_channels": (8, 8, 16, 16), "layers_per_block": 1, "norm_num_groups": 4}
# hidden size, layers, heads
_ENCODERS = {
    "sd15": [(768, 12, 12)],
    "sdxl": [(768, 12, 12), (1280, 32, 20)],
    "tiny-sd15": [(32, 1, 2)],
    "tiny-sdxl": [(32, 1, 2), (32, 1, 2)],
}
NAMES = tuple(_ENCODERS)
VOCABULARY, TINY_VOCABULARY = 49408, 64
SCALE = 0.18215
"""Of a latent against what a VAE takes."""


@dataclass
class Parts:
    """A model on one device."""

    name: str
    unet: Any
    vae: Any
    encoders: list[Any]

    def ids(self, device: torch.device) -> torch.Tensor:
        """Two prompts."""
        generator = torch.Generator().manual_seed(3)
        words = TINY_VOCABULARY if self.name.startswith(TINY) else VOCABULARY
        return torch.randint(words, (2, models.TOKENS), generator=generator).to(device)

    def latent(self, width: int, height: int) -> torch.Tensor:
        """The noise that an image begins with, on the CPU."""
        generator = torch.Generator().manual_seed(width * height)
        return torch.randn(1, self.unet.config.in_channels, height // 8, width // 8, generator=generator)


def build(name: str, device: torch.device, dtype: torch.dtype) -> Parts:
    """Make a model where it is wanted: on a GPU that takes seconds."""
    from diffusers import AutoencoderKL

    unet = models.random_unet(name, dtype=dtype, device=device)
    with _made(device, dtype):
        vae = AutoencoderKL(
            **(_TINY_VAE if name.startswith(TINY) else _VAE),
            down_block_types=("DownEncoderBlock2D",) * 4,
            up_block_types=("UpDecoderBlock2D",) * 4,
            latent_channels=4,
        )
        encoders = [_encoder(name, number, *sizes) for number, sizes in enumerate(_ENCODERS[name])]
    for number, module in enumerate((vae, *encoders)):
        models.randomise(module, 1 + number).eval().requires_grad_(False)
    return Parts(name, unet, vae, encoders)


def _encoder(name: str, number: int, width: int, layers: int, heads: int) -> nn.Module:
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

    config = CLIPTextConfig(
        vocab_size=TINY_VOCABULARY if name.startswith(TINY) else VOCABULARY,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        projection_dim=width,
        hidden_act="gelu" if number else "quick_gelu",
    )
    return CLIPTextModelWithProjection(config) if number else CLIPTextModel(config)


def conditioning(parts: Parts, outputs: list[Any], width: int, height: int) -> dict[str, Any]:
    """What the UNet takes of the text encoders' results, as its keyword arguments.

    Args:
        outputs: of the encoders, with hidden states.
    """
    if len(outputs) == 1:
        return {"encoder_hidden_states": outputs[0].last_hidden_state}
    context = torch.cat([output.hidden_states[-2] for output in outputs], -1)
    numbers = torch.tensor([[height, width, 0, 0, height, width]] * 2, device=context.device, dtype=context.dtype)
    added = {"text_embeds": outputs[1].text_embeds, "time_ids": numbers}
    return {"encoder_hidden_states": context, "added_cond_kwargs": added}


class Conditioner(nn.Module):
    """All text encoders of a model: AUTOMATIC1111 moves them together."""

    def __init__(self, encoders: list[Any]) -> None:
        super().__init__()
        self.encoders = nn.ModuleList(encoders)

    def forward(self, ids: torch.Tensor) -> list[Any]:
        return [encoder(ids, output_hidden_states=True) for encoder in self.encoders]


@contextmanager
def _made(device: torch.device, dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(before)
