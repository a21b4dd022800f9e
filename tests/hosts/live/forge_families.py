"""SD 2.1 and SDXL in small, and IP-Adapters, for a real Forge of any kind: run by its interpreter, in its directory.

    python forge_families.py OUT

writes what `forge_models.py` writes for its first checkpoint, and two.safetensors, of SD 2.1 with v-prediction, if the
program has SD 2, xl.safetensors, strong-xl.safetensors, a LoRA for it, IP-Adapters for "one" and "xl", and a model that
sees images for them. The UNets have the blocks of the originals, all as wide as the first; Forge knows them by these.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from forge_full import BIG_G, UNETS, OpenCLIP
from forge_models import CHECKPOINTS, CONFIG, lora, of_classic, of_neo, randomise
from forge_models import main as make_first

WIDTH = 320
H = (1024, 24)
"""Width and depth of SD 2's text model, OpenCLIP's ViT-H/14."""
TWO = {
    **UNETS["full"],
    "channel_mult": [1] * 4,
    "context_dim": 1024,
    "num_heads": -1,
    "num_head_channels": 64,
    "use_linear_in_transformer": True,
}
XL = {**UNETS["full-xl"], "channel_mult": [1] * 3}
V_PREDICTION = "model.diffusion_model.output_blocks.11.1.transformer_blocks.0.norm1.bias"
"""The parameter by whose spread Forge tells SD 2.1 from SD 2.0."""
SEES = 768
"""Width of what a model that sees images says of one: CLIP's ViT-L/14."""
OF_ONE, OF_XL = 16, 70
"""Cross attentions that an IP-Adapter for SD 1.5 or SDXL has weights for; the last of the former is the middle's, which
is twice as wide in the checkpoint "one"."""


def has_two() -> bool:
    """Whether this program has SD 2 of any width."""
    return Path("backend/huggingface/stabilityai/stable-diffusion-2-1").exists()


def main(out: Path) -> None:
    from safetensors.torch import save_file
    from transformers import CLIPVisionConfig, CLIPVisionModelWithProjection

    make_first(out, CHECKPOINTS[:1])
    make_unet, text, vae = of_neo() if CONFIG.is_dir() else of_classic()
    common: dict[str, Any] = {"in_channels": 4, "model_channels": WIDTH, "out_channels": 4}
    seen = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16}
    with torch.device("meta"):
        two, xl = (make_unet(**common, use_spatial_transformer=True, **more) for more in (TWO, XL))
        of_two, of_xl = OpenCLIP(*H), OpenCLIP(*BIG_G)
        sees = CLIPVisionModelWithProjection(CLIPVisionConfig(**seen, patch_size=14, projection_dim=SEES))
    first = randomise("first_stage_model.", vae, 9)
    checkpoints = out / "Stable-diffusion"
    if has_two():
        weights = randomise("model.diffusion_model.", two, 20)
        weights[V_PREDICTION] *= 4
        save_file(
            {**weights, **randomise("cond_stage_model.model.", of_two, 21), **first}, checkpoints / "two.safetensors"
        )
    weights = randomise("model.diffusion_model.", xl, 22)
    texts = {
        **randomise("conditioner.embedders.0.transformer.", text, 8),
        **randomise("conditioner.embedders.1.model.", of_xl, 23),
    }
    save_file({**weights, **texts, **first}, checkpoints / "xl.safetensors")
    save_file(lora(weights, 24), out / "Lora" / "strong-xl.safetensors")
    save_file(ip_adapter(OF_ONE, 768, 25, 2 * WIDTH), out / "ControlNet" / "ip-adapter.safetensors")
    save_file(ip_adapter(OF_XL, 2048, 26, WIDTH), out / "ControlNet" / "ip-adapter-xl.safetensors")
    (out / "ControlNetPreprocessor").mkdir()
    save_file(randomise("", sees, 27), out / "ControlNetPreprocessor" / "CLIP-ViT-H-14.safetensors")


def ip_adapter(count: int, context: int, seed: int, last: int) -> dict[str, torch.Tensor]:
    """An IP-Adapter with keys and values for so many cross attentions, whose last is of another width."""
    generator = torch.Generator().manual_seed(seed)

    def matrix(out: int, into: int) -> torch.Tensor:
        return torch.randn((out, into), generator=generator) * into**-0.5

    tensors = {
        "image_proj.proj.weight": matrix(4 * context, SEES),
        "image_proj.proj.bias": torch.zeros(4 * context),
        "image_proj.norm.weight": torch.ones(context),
        "image_proj.norm.bias": torch.zeros(context),
    }
    for number in range(count):
        for name in ("k", "v"):
            width = last if number == count - 1 else WIDTH
            tensors[f"ip_adapter.{2 * number + 1}.to_{name}_ip.weight"] = matrix(width, context)
    return tensors


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
