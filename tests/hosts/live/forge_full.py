"""A checkpoint of random weights, as large as SD 1.5 or SDXL, for a real Forge Neo or Classic: run by its interpreter,
in its directory.

    python forge_full.py OUT full|full-xl|full-pair

writes Stable-diffusion/full.safetensors or full-xl.safetensors in fp16 there, and next to the first one
ControlNet/control.safetensors as large as those of SD 1.5. With full-pair it writes one.safetensors and
other.safetensors as large as SD 1.5, and two LoRAs.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from forge_models import CONFIG, control, lora, of_classic, of_neo, randomise

UNETS: dict[str, dict[str, Any]] = {
    "full": {
        "channel_mult": [1, 2, 4, 4],
        "num_res_blocks": [2] * 4,
        "transformer_depth": [1, 1, 1, 1, 1, 1, 0, 0],
        "transformer_depth_output": [1] * 9 + [0] * 3,
        "transformer_depth_middle": 1,
        "context_dim": 768,
        "num_heads": 8,
    },
    "full-xl": {
        "channel_mult": [1, 2, 4],
        "num_res_blocks": [2] * 3,
        "transformer_depth": [0, 0, 2, 2, 10, 10],
        "transformer_depth_output": [0, 0, 0, 2, 2, 2, 10, 10, 10],
        "transformer_depth_middle": 10,
        "context_dim": 2048,
        "num_heads": -1,
        "num_head_channels": 64,
        "use_linear_in_transformer": True,
        "num_classes": "sequential",
        "adm_in_channels": 2816,
    },
}
BIG_G = (1280, 32)
"""Width and depth of SDXL's second text model, OpenCLIP's ViT-bigG/14."""


class OpenCLIP(torch.nn.Module):
    """The parameters of a text model of OpenCLIP's by its names; it computes nothing."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.positional_embedding = torch.nn.Parameter(torch.empty(77, width))
        self.text_projection = torch.nn.Parameter(torch.empty(width, width))
        self.logit_scale = torch.nn.Parameter(torch.ones([]))
        self.token_embedding = torch.nn.Embedding(49408, width)
        self.ln_final = torch.nn.LayerNorm(width)
        self.transformer = torch.nn.Module()
        self.transformer.resblocks = torch.nn.ModuleList(_block(width) for _ in range(depth))


def _block(width: int) -> torch.nn.Module:
    block = torch.nn.Module()
    block.ln_1, block.ln_2 = torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)
    block.attn = torch.nn.MultiheadAttention(width, width // 64)
    block.mlp = torch.nn.Module()
    block.mlp.c_fc = torch.nn.Linear(width, 4 * width)
    block.mlp.c_proj = torch.nn.Linear(4 * width, width)
    return block


def main(out: Path, name: str) -> None:
    make_unet, text, vae = of_neo() if CONFIG.is_dir() else of_classic()
    from safetensors.torch import save_file

    # torch's own initial values are not read, and take a minute
    sizes = UNETS["full" if name == "full-pair" else name]
    with torch.device("meta"):
        unet = make_unet(in_channels=4, model_channels=320, out_channels=4, use_spatial_transformer=True, **sizes)
        second = OpenCLIP(*BIG_G)
    parts = {"model.diffusion_model.": unet, "first_stage_model.": vae}
    if name != "full-xl":
        parts["cond_stage_model.transformer."] = text
    else:
        parts["conditioner.embedders.0.transformer."] = text
        parts["conditioner.embedders.1.model."] = second
    state = {}
    (out / "Stable-diffusion").mkdir(parents=True, exist_ok=True)
    for number, checkpoint in enumerate(("one", "other") if name == "full-pair" else (name,)):
        for seed, (prefix, model) in enumerate(parts.items()):
            state.update(randomise(prefix, model, seed + 10 * number))
        save_file(state, out / "Stable-diffusion" / f"{checkpoint}.safetensors")
    if name == "full-pair":
        (out / "Lora").mkdir(exist_ok=True)
        unet_alone = {key: value for key, value in state.items() if key.startswith("model.diffusion_model.")}
        for seed, called in ((10, "strong"), (11, "second")):
            save_file(lora(unet_alone, seed), out / "Lora" / f"{called}.safetensors")
    if name == "full":
        (out / "ControlNet").mkdir(exist_ok=True)
        widths = (320,) * 4 + (640,) * 3 + (1280,) * 5
        beside = {key: value.half() for key, value in control(state, 12, widths).items()}
        save_file(beside, out / "ControlNet" / "control.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), sys.argv[2])
