"""Makes what SD.Next needs for an image: two tiny diffusers pipelines of random weights, and a LoRA.

    python sdnext_models.py MODELS_DIRECTORY

Run by the host's own interpreter, for its diffusers and transformers.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL, EulerDiscreteScheduler, StableDiffusionPipeline, UNet2DConditionModel
from safetensors.torch import save_file
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

ADAPTED = ("to_q", "to_k", "to_v", "to_out.0", "ff.net.0.proj", "ff.net.2", "proj_in", "proj_out")
RANK = 4


def tokenizer() -> Any:
    """CLIP's tokenizer without merges: each byte is a token."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = [chr(c) for c in printable] + [chr(256 + i) for i in range(256 - len(printable))]
    words = [*letters, *(letter + "</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    with tempfile.TemporaryDirectory() as folder:
        vocabulary, merges = Path(folder, "vocab.json"), Path(folder, "merges.txt")
        vocabulary.write_text(json.dumps({word: i for i, word in enumerate(words)}), encoding="utf-8")
        merges.write_text("#version: 0.2\n", encoding="utf-8")
        return CLIPTokenizer(str(vocabulary), str(merges), model_max_length=77)


def text_model(words: Any, kind: Any = CLIPTextModel, width: int = 64) -> Any:
    """A text encoder over such a tokenizer."""
    end = len(words) - 1
    return kind(
        CLIPTextConfig(
            vocab_size=len(words),
            hidden_size=width,
            intermediate_size=128,
            num_hidden_layers=3,
            num_attention_heads=4,
            projection_dim=64,
            bos_token_id=end - 1,
            eos_token_id=end,
            pad_token_id=end,
        )
    )


def vae() -> Any:
    """A VAE that makes an image an eighth its size."""
    made = AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(16, 16, 32, 32),
        norm_num_groups=8,
        sample_size=128,
    )
    with torch.no_grad():
        made.decoder.conv_out.weight.mul_(3)
    return made


def unet(**changes: Any) -> Any:
    """A UNet of three levels, with `changes` to its settings."""
    shape = {
        "sample_size": 16,
        "layers_per_block": 1,
        "block_out_channels": (32, 64, 64),
        "norm_num_groups": 8,
        "down_block_types": ("CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
        "cross_attention_dim": 64,
        "attention_head_dim": 4,
    }
    made = UNet2DConditionModel(**{**shape, **changes})
    with torch.no_grad():
        for weight in made.parameters():
            weight.mul_(1.6 if weight.dim() > 1 else 1.0)
        made.conv_out.weight.mul_(2)
    return made


def scheduler(**changes: Any) -> Any:
    """Euler's sampler, with `changes` to its settings."""
    betas = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
    return EulerDiscreteScheduler(**{**betas, "steps_offset": 1, **changes})


def pipeline(seed: int, kind: Any = StableDiffusionPipeline, **changes: Any) -> Any:
    """A Stable Diffusion 1.5 in miniature whose images are not flat.

    Args:
        kind: the class of the pipeline.
        changes: what its UNet is to have otherwise.
    """
    torch.manual_seed(seed)
    words = tokenizer()
    parts = {"text_encoder": text_model(words), "unet": unet(**changes), "vae": vae(), "scheduler": scheduler()}
    return kind(**parts, tokenizer=words, safety_checker=None, feature_extractor=None, requires_safety_checker=False)


def lora(unet: Any) -> dict[str, torch.Tensor]:
    """A LoRA in the format of kohya's scripts, over the attention and feed-forward layers."""
    torch.manual_seed(7)
    found: dict[str, torch.Tensor] = {}
    for name, module in unet.named_modules():
        if not name.endswith(ADAPTED) or not hasattr(module, "weight"):
            continue
        key = "lora_unet_" + name.replace(".", "_")
        rows, columns, *kernel = module.weight.shape
        found[f"{key}.lora_down.weight"] = 0.3 * torch.randn(RANK, columns, *kernel)
        found[f"{key}.lora_up.weight"] = 0.3 * torch.randn(rows, RANK, *kernel)
        found[f"{key}.alpha"] = torch.tensor(float(RANK))
    return found


def write_lora(folder: Path, name: str, network: Any, version: str) -> None:
    (folder / "Lora").mkdir(parents=True, exist_ok=True)
    metadata = {"ss_network_module": "networks.lora", "ss_base_model_version": version}
    save_file(lora(network), str(folder / "Lora" / f"{name}.safetensors"), metadata=metadata)


def main(folder: Path) -> None:
    """Write all of it under the host's models folder."""
    for name, seed in (("tiny-a", 1), ("tiny-b", 2)):
        model = pipeline(seed)
        model.save_pretrained(folder / "Diffusers" / name)
    write_lora(folder, "strong", model.unet, "sd_v1")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
