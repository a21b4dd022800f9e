"""Tiny random models of SD 2 and of SDXL, base and refiner; used by `a1111_models.py`.

Their text model is OpenCLIP's, of an architecture that open_clip is told of in the WebUI as well, by `REGISTER`. Its
tokenizer comes with open_clip.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

TEXT = "tiny-text"
WIDTH = 64
TIMES = 32  # numbers of a size or a crop become this many channels
REGISTER = """
import open_clip
from modules import paths

open_clip.add_model_config(f"{paths.models_path}/open_clip")
"""
SD2 = "repositories/stable-diffusion-stability-ai/configs/stable-diffusion/v2-inference-v.yaml"
SDXL = "repositories/generative-models/configs/inference"
# name, configuration, channels
CHECKPOINTS = [
    ("second", SD2, 32),
    ("xl", f"{SDXL}/sd_xl_base.yaml", 32),
    ("xl-other", f"{SDXL}/sd_xl_base.yaml", 32),
    ("xl-refiner", f"{SDXL}/sd_xl_refiner.yaml", 32),
]


def write_text_model(folder: Path) -> None:
    """The architecture of the text model, as open_clip keeps its own."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "embed_dim": WIDTH,
        "vision_cfg": {"image_size": 32, "layers": 1, "width": WIDTH, "patch_size": 32},
        "text_cfg": {"context_length": 77, "vocab_size": 49408, "width": WIDTH, "heads": 4, "layers": 2},
    }
    (folder / f"{TEXT}.json").write_text(json.dumps(config), encoding="utf-8")


def shrink(config: Any, clip: Path, channels: int) -> Any:
    """One of the WebUI's configurations of these models, made small."""
    params = config.model.params
    params.first_stage_config.params.ddconfig.update(ch=32, num_res_blocks=1, attn_type="vanilla")
    if "cond_stage_config" in params:
        params.unet_config.params.update(model_channels=channels, num_head_channels=16, context_dim=WIDTH)
        params.cond_stage_config.params.update(arch=TEXT, version=None)
        return config
    context = pooled = 0
    for embedder in params.conditioner_config.params.emb_models:
        if embedder.target.endswith(".FrozenCLIPEmbedder"):
            embedder.params.update(version=str(clip), layer_idx=1)
            context += WIDTH
        elif embedder.target.endswith(".FrozenOpenCLIPEmbedder2"):
            embedder.params.update(arch=TEXT, version=None)
            context += WIDTH
            pooled += WIDTH
        else:
            embedder.params.outdim = TIMES
            pooled += TIMES * (1 if embedder.input_key == "aesthetic_score" else 2)
    unet = params.network_config.params
    depth = unet.transformer_depth
    many = not isinstance(depth, int)
    unet.update(
        model_channels=channels,
        num_head_channels=16,
        context_dim=context if many else [context] * 2,
        transformer_depth=[min(2, level) for level in depth] if many else 2,
        adm_in_channels=pooled,
        spatial_transformer_attn_type="softmax",
    )
    return config


def write(out: Path, clip: Path, randomise: Any, low_rank: Any) -> None:
    """The checkpoints with their configurations, and a LoRA for each of the first two."""
    sys.path[:0] = [str(Path.cwd() / "repositories" / "generative-models")]
    import open_clip
    import torch
    from ldm.util import instantiate_from_config
    from omegaconf import OmegaConf
    from safetensors.torch import save_file

    write_text_model(out / "open_clip")
    open_clip.add_model_config(out / "open_clip")
    for seed, (name, file, channels) in enumerate(CHECKPOINTS, 20):
        config = shrink(OmegaConf.load(file), clip, channels)
        OmegaConf.save(config, out / "Stable-diffusion" / f"{name}.yaml")
        state = randomise(instantiate_from_config(config.model), seed=seed)
        save_file(state, out / "Stable-diffusion" / f"{name}.safetensors")
        if name in ("second", "xl"):
            generator = torch.Generator().manual_seed(seed)
            tensors = lora(state, lambda *shape: torch.randn(shape, generator=generator), low_rank)  # noqa: B023
            save_file(tensors, out / "Lora" / f"for-{name}.safetensors")


def lora(state: dict[str, Any], random: Any, low_rank: Any) -> dict[str, Any]:
    """A LoRA on the attention of the UNet, by the names that its layers have in the WebUI."""
    tensors: dict[str, Any] = {}
    for path, weight in state.items():
        if path.startswith("model.diffusion_model.") and ".to_" in path and path.endswith(".weight"):
            layer = path.removeprefix("model.diffusion_model.").removesuffix(".weight").replace(".", "_")
            tensors |= {f"lora_unet_{layer}.{part}": value for part, value in low_rank(weight, random, 1.0).items()}
    return tensors
