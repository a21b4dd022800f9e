"""Tiny random models of SD 2 and of SDXL, base and refiner; used by `a1111_models.py`.

Their text model is OpenCLIP's, of an architecture that open_clip is told of in the WebUI as well, by `REGISTER`. Its
tokenizer comes with open_clip.

    python a1111_xl.py MODELS

run by the WebUI's interpreter, in its directory, adds to the models that are there what InstantID needs: a checkpoint
as deep as SDXL, InstantID's two files, and another ControlNet.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

TEXT = "tiny-text"
WIDTH = 64
FACE = 2048  # channels of a token of an IP-Adapter, by which the extension tells SDXL
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


def shrink(config: Any, clip: Path, channels: int, deepest: int = 2) -> Any:
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
        transformer_depth=[min(deepest, level) for level in depth] if many else 2,
        adm_in_channels=pooled,
        spatial_transformer_attn_type="softmax",
    )
    return config


def full(clip: Path) -> Any:
    """SDXL's configuration, with this folder for the first of its text models."""
    from omegaconf import OmegaConf

    config = OmegaConf.load(f"{SDXL}/sd_xl_base.yaml")
    params = config.model.params
    params.network_config.params.spatial_transformer_attn_type = "softmax"
    params.first_stage_config.params.ddconfig.attn_type = "vanilla"
    for embedder in params.conditioner_config.params.emb_models:
        if embedder.target.endswith(".FrozenCLIPEmbedder"):
            embedder.params.version = str(clip)
        elif embedder.target.endswith(".FrozenOpenCLIPEmbedder2"):
            embedder.params.version = None
    return config


def write(out: Path, clip: Path, randomise: Any, low_rank: Any) -> None:
    """The checkpoints with their configurations, and a LoRA for each of the first two."""
    import torch
    from safetensors.torch import save_file

    write_text_model(out / "open_clip")
    for seed, (name, file, channels) in enumerate(CHECKPOINTS, 20):
        state = write_checkpoint(out, clip, randomise, name, file, channels, seed)
        if name in ("second", "xl"):
            generator = torch.Generator().manual_seed(seed)
            tensors = lora(state, lambda *shape: torch.randn(shape, generator=generator), low_rank)  # noqa: B023
            save_file(tensors, out / "Lora" / f"for-{name}.safetensors")


def write_checkpoint(
    out: Path, clip: Path, randomise: Any, name: str, file: str, channels: int, seed: int, deepest: int = 2
) -> dict[str, Any]:
    """One checkpoint with its configuration; its weights."""
    repositories = Path.cwd() / "repositories"
    sys.path[:0] = [str(repositories / "generative-models"), str(repositories / "stable-diffusion-stability-ai")]
    import open_clip
    from ldm.util import instantiate_from_config
    from omegaconf import OmegaConf
    from safetensors.torch import save_file

    open_clip.add_model_config(out / "open_clip")
    config = shrink(OmegaConf.load(file), clip, channels, deepest)
    OmegaConf.save(config, out / "Stable-diffusion" / f"{name}.yaml")
    state = randomise(instantiate_from_config(config.model), seed=seed)
    save_file(state, out / "Stable-diffusion" / f"{name}.safetensors")
    return state


def write_instant_id(out: Path) -> None:
    """What InstantID needs, by the names that the extension goes by; in fp16, as one part cannot be small."""
    import torch
    from a1111_models import control, randomise
    from safetensors.torch import save_file

    state = write_checkpoint(out, out / "clip", randomise, "xl-deep", f"{SDXL}/sd_xl_base.yaml", 32, 30, deepest=10)
    generator = torch.Generator().manual_seed(31)

    def linear(rows: int, columns: int) -> torch.Tensor:
        return torch.randn((rows, columns), generator=generator) * columns**-0.5

    def save(name: str, tensors: dict[str, torch.Tensor]) -> None:
        save_file({k: v.half() for k, v in tensors.items()}, out / "ControlNet" / f"{name}.safetensors")

    levels = (1, 1, 1, 1, 2, 2, 2, 4, 4)
    beside = control(state, seed=32, levels=levels)
    # the extension takes one that is less deep for another kind, with a width of the context of its own
    shallow = {k: v for k, v in beside.items() if ".transformer_blocks." not in k or ".transformer_blocks.0." in k}
    save("tiny-control-xl", shallow)
    faces = {k: linear(len(v), FACE) if ".attn2.to_k." in k or ".attn2.to_v." in k else v for k, v in beside.items()}
    save("control_instant_id_sdxl", faces)
    save("ip-adapter_instant_id_sdxl", face_adapter(state, linear))


def face_adapter(state: dict[str, Any], linear: Any) -> dict[str, Any]:
    """InstantID's IP-Adapter: an embedding of 512 as 16 tokens, and keys and values for each cross attention."""
    import torch

    wide = 1280  # as the extension builds it, whatever the file says
    shapes = {"proj_in": (wide, 512), "proj_out": (FACE, wide)}
    norms = {"norm_out": FACE}
    for i in range(4):
        shapes |= {f"layers.{i}.0.to_q": (wide, wide), f"layers.{i}.0.to_kv": (2 * wide, wide)}
        shapes |= {f"layers.{i}.0.to_out": (wide, wide), f"layers.{i}.1.1": (4 * wide, wide)}
        shapes |= {f"layers.{i}.1.3": (wide, 4 * wide)}
        norms |= {f"layers.{i}.0.norm1": wide, f"layers.{i}.0.norm2": wide, f"layers.{i}.1.0": wide}
    tensors = {f"image_proj.{name}.weight": linear(*shape) for name, shape in shapes.items()}
    tensors["image_proj.latents"] = linear(16, wide)[None]
    tensors |= {f"image_proj.{name}.bias": torch.zeros(shapes[name][0]) for name in ("proj_in", "proj_out")}
    for name, width in norms.items():
        tensors |= {f"image_proj.{name}.weight": torch.ones(width), f"image_proj.{name}.bias": torch.zeros(width)}
    blocks = [f"input_blocks.{i}" for i in (4, 5, 7, 8)] + [f"output_blocks.{i}" for i in range(6)] + ["middle_block"]
    keys = [k for block in blocks for k in state if f".{block}.1." in k and k.endswith(".attn2.to_k.weight")]
    for i, key in enumerate(keys):
        for part in ("k", "v"):
            tensors[f"ip_adapter.{2 * i + 1}.to_{part}_ip.weight"] = 2 * linear(len(state[key]), FACE)
    return tensors


def lora(state: dict[str, Any], random: Any, low_rank: Any) -> dict[str, Any]:
    """A LoRA on the attention of the UNet, by the names that its layers have in the WebUI."""
    tensors: dict[str, Any] = {}
    for path, weight in state.items():
        if path.startswith("model.diffusion_model.") and ".to_" in path and path.endswith(".weight"):
            layer = path.removeprefix("model.diffusion_model.").removesuffix(".weight").replace(".", "_")
            tensors |= {f"lora_unet_{layer}.{part}": value for part, value in low_rank(weight, random, 1.0).items()}
    return tensors


if __name__ == "__main__":
    write_instant_id(Path(sys.argv[1]).resolve())
