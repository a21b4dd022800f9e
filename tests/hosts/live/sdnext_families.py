"""Makes a tiny checkpoint of random weights of each family that SD.Next loads beside Stable Diffusion 1.5.

    python sdnext_families.py MODELS_DIRECTORY

Stable Diffusion 2 with velocities, SDXL, another SDXL, its refiner, instruct-pix2pix, and a LoRA for SDXL. Run by the
host's own interpreter.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import sdnext_models
import torch
from diffusers import (
    StableDiffusionInstructPix2PixPipeline,
    StableDiffusionXLImg2ImgPipeline,
    StableDiffusionXLPipeline,
)
from transformers import CLIPTextModelWithProjection

TIME = 8
"""Width of the embedding of each number that SDXL is told about an image."""

SECOND = 784
"""Width of SDXL's second text encoder; at 768 and less SD.Next takes it for that of Stable Diffusion 1."""


def stable_diffusion_2(seed: int) -> Any:
    """As version 2.1 in 768²: linear projections, heads of equal width, and velocities for noise."""
    made = sdnext_models.pipeline(seed, use_linear_projection=True, attention_head_dim=(2, 4, 4))
    made.scheduler = sdnext_models.scheduler(prediction_type="v_prediction")
    return made


def xl_unet(width: int, numbers: int) -> Any:
    """A UNet as SDXL's.

    Args:
        width: of the prompt's embedding.
        numbers: how many it is told about the image.
    """
    return sdnext_models.unet(
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        transformer_layers_per_block=(1, 1, 2),
        attention_head_dim=(2, 4, 4),
        use_linear_projection=True,
        cross_attention_dim=width,
        addition_embed_type="text_time",
        addition_time_embed_dim=TIME,
        projection_class_embeddings_input_dim=64 + numbers * TIME,
    )


def xl(seed: int, *, refiner: bool = False) -> Any:
    """SDXL in miniature; or its refiner, which has but the second text encoder, and is told how much to please."""
    torch.manual_seed(seed)
    words = sdnext_models.tokenizer()
    parts = {
        "text_encoder": None if refiner else sdnext_models.text_model(words),
        "tokenizer": None if refiner else words,
        "text_encoder_2": sdnext_models.text_model(words, CLIPTextModelWithProjection, SECOND),
        "tokenizer_2": words,
        "unet": xl_unet(SECOND, 5) if refiner else xl_unet(64 + SECOND, 6),
        "vae": sdnext_models.vae(),
        "scheduler": sdnext_models.scheduler(),
    }
    if refiner:
        return StableDiffusionXLImg2ImgPipeline(**parts, requires_aesthetics_score=True)
    return StableDiffusionXLPipeline(**parts)


def main(folder: Path) -> None:
    """Write all of it under the host's models folder."""
    base = xl(42)
    for name, made in {
        "tiny-2": stable_diffusion_2(41),
        "tiny-xl": base,
        "tiny-xl-b": xl(43),
        "tiny-xl-refiner": xl(44, refiner=True),
        "tiny-pix2pix": sdnext_models.pipeline(45, StableDiffusionInstructPix2PixPipeline, in_channels=8),
    }.items():
        made.save_pretrained(folder / "Diffusers" / name)
    sdnext_models.write_lora(folder, "strong-xl", base.unet, "sdxl_base_v1-0")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
