"""Makes a diffusers pipeline of random weights as large as SD 1.5 or SDXL, in half precision.

    python sdnext_full.py MODELS_DIRECTORY sd15|sdxl|sd15-other

It is Diffusers/full below that directory, Diffusers/full-xl, or Diffusers/full-other, of other weights and with LoRAs
that fit full as well. Run in SD.Next's folder, whose `configs` say how large
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
from safetensors.torch import save_file
from sdnext_loras import layers, network
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer

sys.path.append(str(Path(__file__).resolve().parents[3]))
from sfast_ext.tools.lib.models import randomise, without_initialisation

NAMES = {"sd15": "full", "sdxl": "full-xl", "sd15-other": "full-other"}
KINDS = {"strong": "strong", "second": "strong", "loha": "loha", "dora": "dora"}
"""The LoRAs, and of which kind they are."""
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def main(folder: Path, model: str) -> None:
    """Write the pipeline."""
    configs, seed = Path("configs", model.removesuffix("-other")), 2 if model == "sd15-other" else 1

    def sized(kind: Any, name: str) -> Any:
        with without_initialisation(DEVICE):
            return randomise(kind.from_config(kind.load_config(configs / name)).half(), seed)

    def encoder(kind: Any, name: str) -> Any:
        with without_initialisation(DEVICE):
            return randomise(kind(CLIPTextConfig.from_pretrained(configs / name)).half(), seed)

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
    if model == "sd15-other":
        write_loras(folder / "Lora", parts["unet"], parts["text_encoder"])


def write_loras(folder: Path, unet: Any, text: Any) -> None:
    """LoRAs of the UNet and of the text model."""
    folder.mkdir(exist_ok=True)
    weights = {name: value.float().cpu() for name, value in layers(unet, text).items()}
    metadata = {"ss_network_module": "networks.lora", "ss_base_model_version": "sd_v1"}
    for number, (name, kind) in enumerate(KINDS.items()):
        save_file(network(kind, weights, 40 + number), str(folder / f"{name}.safetensors"), metadata=metadata)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), sys.argv[2])
