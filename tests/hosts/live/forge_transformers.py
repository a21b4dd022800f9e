"""A checkpoint of Lumina 2 for a real Forge Neo: run by its interpreter, in its directory, with the directory to fill.

    python forge_transformers.py OUT

Forge Neo knows the family by the width of the layers, 2,304, and counts them: here is one, with the four refiners that
are always there. Its text encoder is narrow; `NARROW` is an extension that has Forge Neo make such a one.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

TEXT = 64
"""Columns of what the text encoder gives."""
NARROW = f'''
from backend.nn.llm import llama

if llama.Gemma2_2B_Config().hidden_size != {TEXT}:
    fields = {{"hidden_size": {TEXT}, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 2}}
    config = llama.Gemma2_2B_Config(**fields, num_key_value_heads=1)
    llama.Gemma2_2B_Config = lambda: config
    llama.asdict = lambda given: {{}}
'''
"""The code of that extension. The WebUI compares the encoder's sizes with those of the large model; this does not."""
CONFIG = Path("backend/huggingface/neta-art/Neta-Lumina")


def main(out: Path) -> None:
    """Write the checkpoint and two LoRAs."""
    sys.argv[1:] = ["--cpu"]
    sys.path[:0] = [str(Path.cwd()), str(Path.cwd() / "modules_forge" / "packages")]
    from backend.nn.llm import llama
    from backend.nn.lumina import NextDiT
    from backend.nn.vae import IntegratedAutoencoderKL
    from backend.operations import using_forge_operations
    from forge_models import randomise
    from safetensors.torch import save_file

    for folder in ("Stable-diffusion", "Lora", "ControlNet", "VAE", "text_encoder", "embeddings"):
        (out / folder).mkdir(parents=True, exist_ok=True)
    exec(NARROW, {})
    with using_forge_operations(device=torch.device("cpu"), dtype=torch.float16, manual_cast_enabled=True):
        transformer = NextDiT(
            in_channels=16, dim=2304, n_layers=1, n_heads=24, n_kv_heads=8, qk_norm=True, cap_feat_dim=TEXT,
            axes_dims=[32, 32, 32], axes_lens=[300, 512, 512], ffn_dim_multiplier=4.0,
        )  # fmt: skip
        text = llama.Gemma2_2B({})
        vae = IntegratedAutoencoderKL.from_config(IntegratedAutoencoderKL.load_config(CONFIG / "vae"))
    weights = randomise("model.diffusion_model.", transformer, 1)
    for seed in (1, 2):
        save_file(lora(weights, 10 + seed), out / "Lora" / f"lumina-{seed}.safetensors")
    weights |= randomise("text_encoders.gemma2_2b.transformer.", text, 2)
    weights |= randomise("vae.", vae, 3)
    save_file(weights, out / "Stable-diffusion" / "lumina.safetensors")


def lora(weights: dict[str, torch.Tensor], seed: int) -> dict[str, torch.Tensor]:
    """One of the layer's products."""
    generator, found = torch.Generator().manual_seed(seed), {}
    for name, value in weights.items():
        layer = name.removeprefix("model.diffusion_model.").removesuffix(".weight")
        if layer.startswith("layers.0.") and value.dim() == 2 and "adaLN" not in layer:
            key, (rows, columns) = f"lora_unet_{layer.replace('.', '_')}", value.shape
            found[f"{key}.lora_down.weight"] = torch.randn(4, columns, generator=generator) * columns**-0.5
            found[f"{key}.lora_up.weight"] = torch.randn(rows, 4, generator=generator) * 0.5
            found[f"{key}.alpha"] = torch.tensor(4.0)
    return found


if __name__ == "__main__":
    main(Path(sys.argv[1]))
