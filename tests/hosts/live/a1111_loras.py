"""Tiny networks of every kind that AUTOMATIC1111's Lora extension knows; used by `a1111_models.py`.

The names of the tensors are what extensions-builtin/Lora/network_*.py look for.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path

import torch

Tensors = dict[str, torch.Tensor]
Random = Callable[..., torch.Tensor]

PARTS = [f"attn{i}.to_{what}" for i in (1, 2) for what in ("q", "k", "v", "out.0")] + ["ff.net.0.proj", "ff.net.2"]
TEXT = "cond_stage_model.transformer.text_model.encoder.layers"


def unet_layers() -> dict[str, str]:
    """Kohya's name -> ldm's path: the first two levels and the middle, linear layers and convolutions."""
    layers = {}
    for level in (0, 1):
        for i in (0, 1):
            block = 1 + 3 * level + i
            layers[f"lora_unet_down_blocks_{level}_resnets_{i}_conv1"] = f"input_blocks.{block}.0.in_layers.2"
            for part in PARTS:
                kohya = part.replace(".", "_")
                layers[f"lora_unet_down_blocks_{level}_attentions_{i}_transformer_blocks_0_{kohya}"] = (
                    f"input_blocks.{block}.1.transformer_blocks.0.{part}"
                )
    layers["lora_unet_mid_block_resnets_0_time_emb_proj"] = "middle_block.0.emb_layers.1"
    layers["lora_unet_mid_block_attentions_0_proj_in"] = "middle_block.1.proj_in"
    return {key: f"model.diffusion_model.{path}" for key, path in layers.items()}


def text_layers(state: Tensors) -> dict[str, str]:
    """The same for the feed-forward layers of the text model."""
    parts = {(i, part): f"{TEXT}.{i}.mlp.{part}" for i in (0, 1) for part in ("fc1", "fc2")}
    return {
        f"lora_te_text_model_encoder_layers_{i}_mlp_{part}": path
        for (i, part), path in parts.items()
        if f"{path}.weight" in state
    }


def low_rank(weight: torch.Tensor, random: Random, strength: float, rank: int = 4) -> Tensors:
    out, rest = weight.shape[0], weight.shape[1:]
    return {
        "lora_down.weight": random(rank, *rest) * (rest.numel() ** -0.5),
        "lora_up.weight": random(out, rank, *([1] * (weight.dim() - 2))) * strength * 0.5,
        "alpha": torch.tensor(float(rank)),
    }


def loha(weight: torch.Tensor, random: Random, strength: float) -> Tensors:
    out, flat = weight.shape[0], weight[0].numel()
    tensors = {"alpha": torch.tensor(4.0)}
    for i in (1, 2):
        tensors[f"hada_w{i}_a"] = random(out, 4) * strength
        tensors[f"hada_w{i}_b"] = random(4, flat) * flat**-0.25 * 0.3
    return tensors


def lokr(weight: torch.Tensor, random: Random, strength: float) -> Tensors:
    out, rest = weight.shape[0], weight.shape[1:]
    second = random(out // 4, rest[0] // 4, *rest[1:]) * rest.numel() ** -0.5
    return {"lokr_w1": random(4, 4), "lokr_w2": second * strength}


def whole(weight: torch.Tensor, random: Random, strength: float) -> Tensors:
    return {"diff": random(*weight.shape) * strength * weight[0].numel() ** -0.5}


def ia3(weight: torch.Tensor, random: Random, strength: float) -> Tensors | None:
    if weight.dim() != 2:
        return None
    return {"weight": random(weight.shape[0]) * strength, "on_input": torch.tensor(False)}


def oft(weight: torch.Tensor, random: Random, strength: float) -> Tensors:
    blocks = 4
    size = weight.shape[0] // blocks
    return {"oft_blocks": random(blocks, size, size) * strength, "alpha": torch.tensor(10.0)}


def glora(weight: torch.Tensor, random: Random, strength: float) -> Tensors | None:
    if weight.dim() != 2:
        return None
    out, into = weight.shape
    return {
        "a1.weight": random(4, into) * strength * 0.5,
        "a2.weight": random(into, 4) * into**-0.5,
        "b1.weight": random(4, into) * into**-0.5,
        "b2.weight": random(out, 4) * strength * 0.5,
        "alpha": torch.tensor(4.0),
    }


def dora(weight: torch.Tensor, random: Random, strength: float) -> Tensors:
    # the extension takes the norm over all but the second dimension
    norm = weight.transpose(0, 1).flatten(1).norm(dim=1).reshape(1, -1, *([1] * (weight.dim() - 2)))
    return {**low_rank(weight, random, strength), "dora_scale": norm * (1 + 0.3 * random(*norm.shape))}


KINDS: dict[str, Callable[[torch.Tensor, Random, float], Tensors | None]] = {
    "strong": low_rank,
    "loha": loha,
    "lokr": lokr,
    "whole": whole,
    "ia3": ia3,
    "oft": oft,
    "glora": glora,
    "dora": dora,
}


def network(kind: str, state: Tensors, seed: int, strength: float = 1.0) -> Tensors:
    """A network of one kind on UNet and text model."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    layers = unet_layers() if kind == "strong" else {**unet_layers(), **text_layers(state)}
    for key, path in layers.items():
        made = KINDS[kind](state[f"{path}.weight"], lambda *shape: torch.randn(shape, generator=generator), strength)
        tensors.update({f"{key}.{name}": value.contiguous() for name, value in (made or {}).items()})
    return tensors


def norms(state: Tensors, seed: int) -> Tensors:
    """Differences of norms: weights and biases."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for i in (0, 1):
        shape = state[f"model.diffusion_model.input_blocks.{1 + i}.0.in_layers.0.weight"].shape
        for name in ("w_norm", "b_norm"):
            tensors[f"lora_unet_down_blocks_0_resnets_{i}_norm1.{name}"] = torch.randn(shape, generator=generator)
    return tensors


def full(state: Tensors, seed: int) -> Tensors:
    """Differences of whole weights, and of a bias if there is one: the WebUI cannot take back one that it added."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for part in ("attn1.to_q", "attn2.to_k", "attn2.to_out.0"):
        key = f"lora_unet_down_blocks_0_attentions_0_transformer_blocks_0_{part.replace('.', '_')}"
        weight = state[f"model.diffusion_model.input_blocks.1.1.transformer_blocks.0.{part}.weight"]
        tensors[f"{key}.diff"] = torch.randn(weight.shape, generator=generator) * 0.2
        if part == "attn2.to_out.0":
            tensors[f"{key}.diff_b"] = torch.randn(weight.shape[0], generator=generator) * 2
    return tensors


def write(state: Tensors, folder: Path, kinds: Collection[str] | None = None) -> None:
    """One file of each kind, or of these alone."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    for i, kind in enumerate(KINDS):
        if kinds is None or kind in kinds:
            save_file(network(kind, state, seed=3 + 10 * i), folder / f"{kind}.safetensors")
    if kinds is not None:
        return
    save_file(norms(state, seed=5), folder / "norms.safetensors")
    save_file(full(state, seed=4), folder / "full.safetensors")
