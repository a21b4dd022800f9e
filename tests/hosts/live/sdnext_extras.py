"""Makes a models folder for all features of SD.Next that are tested, tiny and of random weights.

    python sdnext_extras.py MODELS_DIRECTORY

The checkpoints of `sdnext_models.py`, the networks of `sdnext_loras.py`, and beside them ControlNets, a T2I-Adapter, an
IP-Adapter with its encoder of images, a VAE, a UNet, an inpainting checkpoint, one of another architecture, and a
textual inversion. Run by the host's own interpreter.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import sdnext_loras
import sdnext_models
import torch
from diffusers import (
    AutoencoderKL,
    ControlNetModel,
    DDIMScheduler,
    StableDiffusionInpaintPipeline,
    T2IAdapter,
    UNet2DConditionModel,
)
from safetensors.torch import save_file
from transformers import CLIPVisionConfig, CLIPVisionModelWithProjection

REVISION = "0" * 40
TOKENS = 4


def controlnet(unet: Any, seed: int) -> Any:
    """A ControlNet whose closing convolutions, zero by birth, have something to say."""
    torch.manual_seed(seed)
    network = ControlNetModel.from_unet(unet)
    with torch.no_grad():
        for weight in network.parameters():
            if weight.dim() > 1 and not weight.any():
                weight.normal_(0, 0.1)
    return network


def t2i_adapter() -> Any:
    """A T2I-Adapter for the three levels of the tiny UNet."""
    torch.manual_seed(12)
    sizes: dict[str, Any] = {"channels": [32, 64, 64], "num_res_blocks": 1, "downscale_factor": 8}
    adapter = T2IAdapter(in_channels=3, adapter_type="full_adapter", **sizes)
    with torch.no_grad():
        for weight in adapter.parameters():
            weight.mul_(2)
    return adapter


def ip_adapter(unet: Any) -> dict[str, torch.Tensor]:
    """An IP-Adapter as its authors' files have it: a projection, and keys and values of each cross-attention."""
    torch.manual_seed(13)
    width = unet.config.cross_attention_dim
    tensors = {
        "image_proj.proj.weight": 0.3 * torch.randn(TOKENS * width, 32),
        "image_proj.proj.bias": 0.3 * torch.randn(TOKENS * width),
        "image_proj.norm.weight": torch.ones(width),
        "image_proj.norm.bias": torch.zeros(width),
    }
    for i, name in enumerate(unet.attn_processors):
        if "attn2" in name:
            inner = unet.get_submodule(name.removesuffix(".processor")).inner_dim
            for what in ("k", "v"):
                tensors[f"ip_adapter.{i}.to_{what}_ip.weight"] = 0.5 * torch.randn(inner, width)
    return tensors


def snapshot(cache: Path, repository: str) -> Path:
    """Where a cache of the Hugging Face hub keeps a repository; it is then found without a network."""
    base = cache / f"models--{repository.replace('/', '--')}"
    (base / "refs").mkdir(parents=True, exist_ok=True)
    (base / "refs" / "main").write_text(REVISION)
    return base / "snapshots" / REVISION


def write_ip_adapter(unet: Any, folder: Path) -> None:
    torch.manual_seed(14)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = CLIPVisionConfig(**sizes, image_size=224, patch_size=56, projection_dim=32)
    CLIPVisionModelWithProjection(config).save_pretrained(folder / "image_encoder")
    save_file(ip_adapter(unet), str(folder / "ip-adapter_sd15.safetensors"))


def main(folder: Path) -> None:
    """Write all of it under the host's models folder."""
    sdnext_models.main(folder)
    sdnext_loras.main(folder)
    tiny, other = folder / "Diffusers" / "tiny-a", folder / "Diffusers" / "tiny-b"
    unet = UNet2DConditionModel.from_pretrained(tiny / "unet")
    for i, name in enumerate(("tiny-control", "tiny-control-2")):
        controlnet(unet, 10 + i).save_pretrained(folder / "control" / "controlnet" / name)
    t2i_adapter().save_pretrained(folder / "t2i-tiny")
    write_ip_adapter(unet, snapshot(folder / "huggingface", "h94/IP-Adapter") / "models")
    AutoencoderKL.from_pretrained(other / "vae").save_pretrained(folder / "VAE" / "tiny-vae")
    (folder / "UNET").mkdir(exist_ok=True)
    shutil.copy(other / "unet" / "diffusion_pytorch_model.safetensors", folder / "UNET" / "tiny-unet-b.safetensors")
    inpainting = sdnext_models.pipeline(3, StableDiffusionInpaintPipeline, in_channels=9)
    inpainting.save_pretrained(folder / "Diffusers" / "tiny-inpainting")
    narrow = sdnext_models.pipeline(4, block_out_channels=(32, 32, 64))
    # SD.Next gives a model that comes with Euler's sampler no other that takes no sigmas
    narrow.scheduler = DDIMScheduler.from_config(narrow.scheduler.config)
    narrow.save_pretrained(folder / "Diffusers" / "tiny-narrow")
    (folder / "embeddings").mkdir(exist_ok=True)
    torch.manual_seed(15)
    save_file({"emb_params": 2 * torch.randn(2, 64)}, str(folder / "embeddings" / "tinyword.safetensors"))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
