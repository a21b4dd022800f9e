"""A checkpoint of a transformer for a real Forge Neo: run by its interpreter, in its directory, with the family and the
directory to fill.

    python forge_transformers.py lumina2|z-image|anima|flux|chroma OUT

Forge Neo knows Lumina 2, Z-Image and Anima by the width of their layers, which is kept: there are few of them. Flux and
Chroma may have any. `NARROW` is an extension that has Forge Neo make text encoders and layers as they are in the file.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import torch

TEXT = 64
"""Columns of what the text encoder gives; of Anima, whose adapter has one width, all 1,024."""
CLIP = {"num_hidden_layers": 2, "intermediate_size": 96}
T5 = {"d_model": TEXT, "d_ff": 96, "num_heads": 2, "num_layers": 2}
NARROW = f'''
import functools, pathlib
import transformers
from backend import loader
from backend.nn.llm import llama
from huggingface_guess import detection

SMALL = {{"intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 1}}

if llama.Gemma2_2B_Config().num_hidden_layers != 3:
    for name, width in (("Gemma2_2B_Config", {TEXT}), ("Qwen3_4BConfig", {TEXT}), ("Qwen3_06BConfig", 1024)):
        setattr(llama, name, functools.partial(getattr(llama, name), hidden_size=width, **SMALL))
    # the WebUI compares an encoder's sizes with those of the large one
    llama.asdict = lambda given: {{}}
    found = detection.detect_unet_config

    def detect(weights, prefix):
        config = found(weights, prefix)
        kinds = {{"lumina2": ("noise_refiner.", "n_refiner_layers"), "anima": ("blocks.", "num_blocks")}}
        if config and config["image_model"] in kinds:
            layers, counted = kinds[config["image_model"]]
            config[counted] = detection.count_blocks(list(weights), prefix + layers + "{{}}.")
        if config and config["image_model"] == "chroma":
            guidance = prefix + "distilled_guidance_layer."
            config["out_dim"], config["hidden_dim"] = weights[guidance + "out_proj.weight"].shape
            config["n_layers"] = detection.count_blocks(list(weights), guidance + "layers.{{}}.")
        return config

    detection.detect_unet_config = detect
    read, clip = loader.read_arbitrary_config, transformers.CLIPTextConfig.from_pretrained
    t5, tokenizer = {T5}, transformers.T5TokenizerFast.from_pretrained

    def config_of(folder):
        given = read(folder)
        return {{**given, **t5}} if given.get("model_type") == "t5" else given

    def tokens_of(folder, *args, **kwargs):
        # a checkout without large files has that of Flux alone, which is the same
        if not pathlib.Path(folder, "tokenizer.json").exists() and not pathlib.Path(folder, "spiece.model").exists():
            folder = pathlib.Path(loader.HF, "black-forest-labs", "FLUX.1-dev", "tokenizer_2")
        return tokenizer(folder, *args, **kwargs)

    loader.read_arbitrary_config = config_of
    transformers.T5TokenizerFast.from_pretrained = tokens_of
    transformers.CLIPTextConfig.from_pretrained = functools.partial(clip, **{CLIP})
'''
"""The code of that extension."""
_NEXT_DIT: dict[str, Any] = {
    "in_channels": 16, "n_layers": 1, "n_refiner_layers": 1, "qk_norm": True, "cap_feat_dim": TEXT,
}  # fmt: skip
_LUMINA2: dict[str, Any] = {
    "dim": 2304, "n_heads": 24, "n_kv_heads": 8, "axes_dims": [32, 32, 32], "axes_lens": [300, 512, 512],
    "ffn_dim_multiplier": 4.0,
}  # fmt: skip
_Z_IMAGE: dict[str, Any] = {
    "dim": 3840, "n_heads": 30, "n_kv_heads": 30, "axes_dims": [32, 48, 48], "axes_lens": [1536, 512, 512],
    "rope_theta": 256.0, "ffn_dim_multiplier": 8 / 3, "z_image_modulation": True, "time_scale": 1000.0,
    "pad_tokens_multiple": 32,
}  # fmt: skip
_ANIMA: dict[str, Any] = {
    "in_channels": 16, "out_channels": 16, "patch_spatial": 2, "patch_temporal": 1, "model_channels": 2048,
    "num_blocks": 2,
}  # fmt: skip
_FLUX: dict[str, Any] = {
    "context_in_dim": TEXT, "hidden_size": 256, "mlp_ratio": 4.0, "num_heads": 2, "depth": 2, "depth_single_blocks": 2,
    "axes_dim": [16, 56, 56], "theta": 10000, "patch_size": 2, "qkv_bias": True,
}  # fmt: skip
_FIRST = ("layers.0.", "blocks.0.", "double_blocks.0.", "single_blocks.0.")
_FOLDERS = ("Stable-diffusion", "Lora", "ControlNet", "VAE", "text_encoder", "embeddings")


def modules(kind: str) -> dict[str, torch.nn.Module]:
    """The parts of a checkpoint by the beginnings of their names."""
    from backend.nn.anima import Anima, LLMAdapter
    from backend.nn.llm import llama
    from backend.nn.lumina import NextDiT
    from backend.nn.vae import IntegratedAutoencoderKL
    from backend.nn.wan_vae_2d import Qwen2DVAE

    if kind == "anima":
        return {
            "model.diffusion_model.": Anima(**_ANIMA),
            "model.diffusion_model.llm_adapter.": LLMAdapter(),
            "text_encoders.qwen3_06b.transformer.model.": llama.Qwen3_06B({}).model,
            "vae.": Qwen2DVAE(),
        }
    config = Path("backend/huggingface/neta-art/Neta-Lumina/vae")
    vae = IntegratedAutoencoderKL.from_config(IntegratedAutoencoderKL.load_config(config))
    if kind in ("flux", "chroma"):
        return {**packed(kind), "vae.": vae}
    lumina = kind == "lumina2"
    text = "gemma2_2b" if lumina else "qwen3_4b"
    return {
        "model.diffusion_model.": NextDiT(**_NEXT_DIT, **(_LUMINA2 if lumina else _Z_IMAGE)),
        f"text_encoders.{text}.transformer.": llama.Gemma2_2B({}) if lumina else llama.Qwen3_4B({}),
        "vae.": vae,
    }


def packed(kind: str) -> dict[str, torch.nn.Module]:
    """Flux or Chroma, and their text encoders."""
    from backend.nn.chroma import IntegratedChromaTransformer2DModel
    from backend.nn.clip import IntegratedCLIP
    from backend.nn.flux import IntegratedFluxTransformer2DModel
    from backend.nn.t5 import IntegratedT5
    from transformers import CLIPTextConfig, CLIPTextModel

    t5 = {"vocab_size": 32128, "dense_act_fn": "gelu_pytorch_tanh", "is_gated_act": True, "model_type": "t5", **T5}
    found: dict[str, torch.nn.Module] = {"text_encoders.t5xxl.": IntegratedT5(t5)}
    if kind == "chroma":
        sizes = {"in_channels": 64, "out_channels": 64, "in_dim": 64, "hidden_dim": 128, "n_layers": 2}
        model = IntegratedChromaTransformer2DModel(**_FLUX, **sizes, out_dim=256, vec_in_dim=None, txt_ids_dims=[])
        return {"model.diffusion_model.": model, **found}
    model = IntegratedFluxTransformer2DModel(
        **_FLUX, in_channels=16, out_channels=16, vec_in_dim=768, guidance_embed=True
    )
    clip = CLIPTextConfig.from_pretrained(Path("backend/huggingface/black-forest-labs/FLUX.1-dev/text_encoder"), **CLIP)
    found["text_encoders.clip_l."] = IntegratedCLIP(CLIPTextModel, clip, add_text_projection=True)
    return {"model.diffusion_model.": model, **found}


def main(kind: str, out: Path) -> None:
    """Write the checkpoint and two LoRAs."""
    sys.argv[1:] = ["--cpu"]
    sys.path[:0] = [str(Path.cwd()), str(Path.cwd() / "modules_forge" / "packages")]
    from backend.operations import using_forge_operations
    from forge_models import randomise
    from safetensors.torch import save_file

    for folder in _FOLDERS:
        (out / folder).mkdir(parents=True, exist_ok=True)
    exec(NARROW, {})
    weights: dict[str, torch.Tensor] = {}
    with using_forge_operations(device=torch.device("cpu"), dtype=torch.float16, manual_cast_enabled=True):
        for seed, (prefix, module) in enumerate(modules(kind).items()):
            weights |= randomise(prefix, module, seed)
    if kind in ("flux", "chroma"):
        # as checkpoints have them
        found = re.compile(r"(query_norm|key_norm|\.norms\.\d+)\.weight$")
        weights = {found.sub(r"\1.scale", name): value for name, value in weights.items()}
    for seed in (1, 2):
        save_file(lora(weights, 10 + seed), out / "Lora" / f"lora-{seed}.safetensors")
    save_file(weights, out / "Stable-diffusion" / f"{kind}.safetensors")


def lora(weights: dict[str, torch.Tensor], seed: int) -> dict[str, torch.Tensor]:
    """One of the products of the first layer that has one."""
    generator, found = torch.Generator().manual_seed(seed), {}
    for name, value in weights.items():
        layer = name.removeprefix("model.diffusion_model.").removesuffix(".weight")
        if layer.startswith(_FIRST) and value.dim() == 2 and "ada" not in layer and "_mod." not in layer:
            key, (rows, columns) = f"lora_unet_{layer.replace('.', '_')}", value.shape
            found[f"{key}.lora_down.weight"] = torch.randn(4, columns, generator=generator) * columns**-0.5
            found[f"{key}.lora_up.weight"] = torch.randn(rows, 4, generator=generator) * 0.5
            found[f"{key}.alpha"] = torch.tensor(4.0)
    return found


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
