"""AUTOMATIC1111's VAE: ldm's own decoder and encoder, tiny, and how the WebUI calls them."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from sfast_ext.tools.lib import models

SHAPE: dict[str, Any] = {
    "ch": 32, "out_ch": 3, "ch_mult": (1, 2, 2), "num_res_blocks": 1, "attn_resolutions": [], "in_channels": 3,
    "resolution": 32, "z_channels": 4, "double_z": True, "dropout": 0.0,
}  # fmt: skip
SCALE = 4
"""Pixels of an image for each of its latent, along a side: half of a real one's."""


class AutoencoderKL(nn.Module):
    """ldm's, without what trains it."""

    def __init__(self) -> None:
        super().__init__()
        from ldm.modules.diffusionmodules import model

        self.encoder, self.decoder = model.Encoder(**SHAPE), model.Decoder(**SHAPE)
        self.quant_conv, self.post_quant_conv = nn.Conv2d(8, 8, 1), nn.Conv2d(4, 4, 1)

    @property
    def dtype(self) -> torch.dtype:
        """As the WebUI gives it."""
        return self.quant_conv.weight.dtype

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        """Mean and logarithm of the variance, of which `encode_first_stage` draws outside of the encoder."""
        return self.quant_conv(self.encoder(x))

    def decode(self, z: torch.Tensor) -> torch.Tensor:
        """An image."""
        return self.decoder(self.post_quant_conv(z))


def make_vae(seed: int) -> nn.Module:
    """One of random weights."""
    return models.copied(_made(seed))


@functools.lru_cache(maxsize=None)
def _made(seed: int) -> nn.Module:
    return models.randomise(models.copied(_shaped()), seed).eval().requires_grad_(False)


@functools.lru_cache(maxsize=None)
def _shaped() -> nn.Module:
    return AutoencoderKL()


@torch.no_grad()
def decode(sd_model: Any, latents: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The WebUI's decode_latent_batch: one by one, and once more in bfloat16 if nothing but NaN came."""
    vae = sd_model.first_stage_model
    found = torch.cat([vae.decode(latent.to(vae.dtype)) for latent in latents.split(1)])
    if torch.isnan(found).all() and vae.dtype == torch.float16:
        vae.to(torch.bfloat16)
        found = torch.cat([vae.decode(latent.to(torch.bfloat16)) for latent in latents.split(1)])
    return found.float().cpu()


@torch.no_grad()
def encode(sd_model: Any, image: torch.Tensor) -> torch.Tensor:
    """A latent that is drawn, as img2img and hires fix begin with."""
    vae = sd_model.first_stage_model
    moments = vae.encode(image.to(vae.dtype))
    mean, logvar = moments.float().cpu().chunk(2, 1)
    noise = torch.randn(mean.shape, generator=torch.Generator().manual_seed(3))
    return mean + noise * torch.exp(0.5 * logvar.clamp(-30, 20))


def doggettx(self: Any, x: torch.Tensor) -> torch.Tensor:
    """What the WebUI puts into the place of AttnBlock's forward, as its optimization of that name has it."""
    h = self.norm(x)
    q, k, v = self.q(h), self.k(h), self.v(h)
    b, c, height, width = q.shape
    q, k = q.reshape(b, c, height * width).permute(0, 2, 1), k.reshape(b, c, height * width)
    out = torch.zeros_like(k, device=q.device)
    weights = F.softmax(torch.bmm(q, k) * (int(c) ** (-0.5)), dim=2, dtype=q.dtype)
    out[:, :, 0 : q.shape[1]] = torch.bmm(v.reshape(b, c, height * width), weights.permute(0, 2, 1))
    out = self.proj_out(out.reshape(b, c, height, width))
    out += x
    return out


def set_circular(sd_model: Any, circular: bool) -> None:
    """The WebUI's apply_circular: seamless images."""
    for layer in sd_model.first_stage_model.modules():
        if type(layer) is nn.Conv2d:
            layer.padding_mode = "circular" if circular else "zeros"


def load_other(host: Any, sd_model: Any, seed: int, in_place: bool = True) -> None:
    """Another VAE into the same modules, on the CPU and back, as reload_vae_weights does it."""
    vae = sd_model.first_stage_model
    vae.to("cpu")
    state = make_vae(seed).state_dict()
    if in_place:
        vae.load_state_dict(state)
    else:
        vae.load_state_dict({k: v.clone() for k, v in state.items()}, assign=True)
    vae.to(host.place)
    host.fire("model_loaded", sd_model)
