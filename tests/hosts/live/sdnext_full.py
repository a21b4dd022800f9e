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
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer

sys.path.append(str(Path(__file__).resolve().parents[3]))
from sfast_ext.tools.lib.models import randomise, without_initialisation

NAMES = {"sd15": "full", "sdxl": "full-xl"}
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def main(folder: Path, model: str) -> None:
    """Write the pipeline."""
    configs = Path("configs", model)

    def sized(kind: Any, name: str) -> Any:
        with without_initialisation(DEVICE):
            return randomise(kind.from_config(kind.load_config(configs / name)).half(), seed=1)

    def encoder(kind: Any, name: str) -> Any:
        with without_initialisation(DEVICE):
            return randomise(kind(CLIPTextConfig.from_pretrained(configs / name)).half(), seed=1)

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
