"""A job: callbacks first, modifiers after them, LoRA inside, then the steps."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from modules import devices, hypertile, ipadapter, lora, script_callbacks, sd_offload, shared
from modules.modeldata import model_data


def process_images_inner(p: Any) -> Any:
    """A request: its result has what the answer's `info` is made of."""
    image = process_images(**p.options)
    return SimpleNamespace(images=[image], extra_generation_params=p.extra_generation_params)


def process_images(
    width: int = 8,
    height: int = 8,
    steps: int = 3,
    seed: int = 1,
    network: lora.Layers | None = None,
    multiplier: float = 0.0,
    hypertile_enabled: bool = False,
    apply: Callable[[Any], Any] | None = None,
    unapply: Callable[[Any], Any] | None = None,
    each_step: Callable[[Any, int], Any] | None = None,
    hires: bool = False,
    refine: bool = False,
    adapter: int | None = None,
    scale: float = 1.0,
) -> torch.Tensor:
    """An image, or its latent if there is no VAE, on the CPU; `apply` and `unapply` stand for the pipeline's
    modifiers."""
    script_callbacks.fire("before_process", SimpleNamespace())
    pipe = model_data.sd_model
    ipadapter.apply(pipe, SimpleNamespace(adapter=adapter, scale=scale))
    with hypertile.split_attention(pipe.unet, hypertile_enabled):
        passes = [pipe] * (2 if hires else 1) + [model_data.sd_refiner] * refine
        for number, pipe in enumerate(passes):
            latent = _pass(pipe, width, height, steps, seed + number, network, multiplier, apply, unapply, each_step)
    ipadapter.unapply(model_data.sd_model)
    return _decoded(model_data.sd_model, latent)


def _pass(
    pipe: Any,
    width: int,
    height: int,
    steps: int,
    seed: int,
    network: lora.Layers | None,
    multiplier: float,
    apply: Callable[[Any], Any] | None,
    unapply: Callable[[Any], Any] | None,
    each_step: Callable[[Any, int], Any] | None,
) -> torch.Tensor:
    if apply is not None:
        apply(pipe)
    sd_offload.apply_balanced_offload(pipe)
    if network is not None:
        lora.network_activate(pipe.unet, network, multiplier)
    generator = torch.Generator().manual_seed(seed)
    latent = torch.randn(1, pipe.unet.config.in_channels, height, width, generator=generator)
    context = torch.randn(2, 7, pipe.unet.config.cross_attention_dim, generator=generator)
    latent, context = (x.to(devices.device, pipe.unet.dtype) for x in (latent, context))
    with torch.no_grad():
        if hasattr(pipe, "text_encoder"):
            context = pipe.text_encoder(context)
        shared.state.begin("Inference")
        for step in range(steps):
            t = torch.tensor(900 - 200 * step, device=devices.device)
            both = torch.cat([latent, latent])
            added = _controlled(pipe, both, t, context)
            noise = pipe.unet(
                both,
                t,
                encoder_hidden_states=context,
                timestep_cond=None,
                cross_attention_kwargs=None,
                added_cond_kwargs=None,
                return_dict=False,
                **added,
            )[0]
            uncond, cond = noise.chunk(2)
            latent = latent - 0.1 * (uncond + 3.0 * (cond - uncond))
            if each_step is not None:
                each_step(pipe, step)
    if unapply is not None:
        unapply(pipe)
    return latent


def _controlled(pipe: Any, both: torch.Tensor, t: torch.Tensor, context: torch.Tensor) -> dict[str, Any]:
    """What a ControlNet of the pipeline adds to the UNet."""
    network = getattr(pipe, "controlnet", None)
    if network is None:
        return {}
    hint = torch.ones(2, 3, 2 * both.shape[2], 2 * both.shape[3]).to(both)
    down, mid = network(both, t, encoder_hidden_states=context, controlnet_cond=hint, return_dict=False)
    return {"down_block_additional_residuals": down, "mid_block_additional_residual": mid}


def _decoded(pipe: Any, latent: torch.Tensor) -> torch.Tensor:
    vae = getattr(pipe, "vae", None)
    if vae is None:
        return latent.to(devices.cpu)
    sd_offload.apply_balanced_offload(pipe)
    shared.state.begin("VAE Decode")
    with torch.no_grad():
        return vae.decode(latent.to(vae.dtype), return_dict=False)[0].to(devices.cpu)
