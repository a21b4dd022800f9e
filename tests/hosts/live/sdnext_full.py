"""Makes a diffusers pipeline of random weights as large as SD 1.5 or SDXL, in half precision.

    python sdnext_full.py MODELS_DIRECTORY sd15|sdxl

It is Diffusers/full below that directory, or Diffusers/full-xl. Run in SD.Next's folder, whose `configs` say how large
the parts are, and by its interpreter.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    EulerDiscreteScheduler,
    StableDiffusionPipeline,
    StableDiffusionXLPipeline,
    UNet2DConditionModel,
)
from torch import nn
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer
from uninitialised import uninitialised

NAMES = {"sd15": "full", "sdxl": "full-xl"}


def randomise(module: nn.Module) -> Any:
    """Weights that keep a signal's size, ones for norms, zeros for biases; in half precision."""
    norms = {id(norm.weight) for norm in module.modules() if isinstance(norm, (nn.GroupNorm, nn.LayerNorm))}
    with torch.no_grad():
        for weight in module.parameters():
            if weight.dim() > 1:
                reach = (3 / weight[0].numel()) ** 0.5
                weight.uniform_(-reach, reach)
            else:
                weight.fill_(1.0 if id(weight) in norms else 0.0)
    return module.half()


def main(folder: Path, model: str) -> None:
    """Write the pipeline."""
    torch.manual_seed(1)
    configs = Path("configs", model)

    def sized(kind: Any, name: str) -> Any:
        with uninitialised():
            return randomise(kind.from_config(kind.load_config(configs / name)))

    def encoder(kind: Any, name: str) -> Any:
        with uninitialised():
            return randomise(kind(CLIPTextConfig.from_pretrained(configs / name)))

    parts = {
        "unet": sized(UNet2DConditionModel, "unet"),
        "vae": sized(AutoencoderKL, "vae"),
        "scheduler": EulerDiscreteScheduler.from_config(EulerDiscreteScheduler.load_config(configs / "scheduler")),
        "text_encoder": encoder(CLIPTextModel, "text_encoder"),
        "tokenizer": CLIPTokenizer.from_pretrained(configs / "tokenizer"),
    }
    pipeline: Any
    if model == "sdxl":
        second = encoder(CLIPTextModelWithProjection, "text_encoder_2")
        words = CLIPTokenizer.from_pretrained(configs / "tokenizer_2")
        pipeline = StableDiffusionXLPipeline(**parts, text_encoder_2=second, tokenizer_2=words)
    else:
        nothing = {"safety_checker": None, "feature_extractor": None, "requires_safety_checker": False}
        pipeline = StableDiffusionPipeline(**parts, **nothing)
    pipeline.save_pretrained(folder / "Diffusers" / NAMES[model])


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), sys.argv[2])
