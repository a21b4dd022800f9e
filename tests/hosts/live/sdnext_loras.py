"""Makes a tiny network of every kind that SD.Next's LoRA loader knows, for the UNet and text model of `tiny-a`.

    python sdnext_loras.py MODELS_DIRECTORY

Run by the host's own interpreter, after `sdnext_models.py`. What is in a file of each kind is the same for every host.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from a1111_loras import KINDS
from diffusers import UNet2DConditionModel
from safetensors.torch import save_file
from torch import nn
from transformers import CLIPTextModel

UNET = (".attn1.to_q", ".attn1.to_k", ".attn1.to_v", ".attn2.to_k", ".attn2.to_out.0", "ff.net.2", "proj_in", ".conv1")
TEXT = ("mlp.fc1", "mlp.fc2")


def layers(unet: Any, text: Any) -> dict[str, torch.Tensor]:
    """Kohya's names of linear layers and convolutions, and their weights."""
    found = {}
    for prefix, network, ends in (("lora_unet_", unet, UNET), ("lora_te_text_model_", text, TEXT)):
        for name, module in network.named_modules():
            if isinstance(module, (nn.Linear, nn.Conv2d)) and name.endswith(ends):
                found[prefix + name.removeprefix("text_model.").replace(".", "_")] = module.weight.detach()
    return found


def network(kind: str, weights: dict[str, torch.Tensor], seed: int) -> dict[str, torch.Tensor]:
    """A network of one kind over these layers; the text model's part is weak, that the UNet's shows."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for key, weight in weights.items():
        strength = 0.1 if key.startswith("lora_te") else 1.0
        made = KINDS[kind](weight, lambda *shape: torch.randn(shape, generator=generator), strength)
        tensors.update({f"{key}.{name}": value.contiguous() for name, value in (made or {}).items()})
    return tensors


def norms(unet: Any) -> dict[str, torch.Tensor]:
    """Differences of the weights and biases of norms."""
    torch.manual_seed(31)
    found = {}
    for name, module in unet.named_modules():
        if isinstance(module, nn.GroupNorm) and name.endswith(".norm1"):
            key = f"lora_unet_{name.replace('.', '_')}"
            found[f"{key}.w_norm"], found[f"{key}.b_norm"] = (0.5 * torch.randn(module.num_channels) for _ in "wb")
    return found


def full(unet: Any) -> dict[str, torch.Tensor]:
    """Differences of whole weights, with those of biases."""
    torch.manual_seed(32)
    found = {}
    for name, module in unet.named_modules():
        if name.endswith((".attn1.to_out.0", ".conv2")):
            key = f"lora_unet_{name.replace('.', '_')}"
            found[f"{key}.diff"] = torch.randn_like(module.weight) * module.weight[0].numel() ** -0.5
            found[f"{key}.diff_b"] = 0.3 * torch.randn_like(module.bias)
    return found


def main(folder: Path) -> None:
    """Write one file of each kind under the host's models folder."""
    tiny = folder / "Diffusers" / "tiny-a"
    unet = UNet2DConditionModel.from_pretrained(tiny / "unet")
    weights = layers(unet, CLIPTextModel.from_pretrained(tiny / "text_encoder"))
    (folder / "Lora").mkdir(parents=True, exist_ok=True)
    made = {kind: network(kind, weights, 20 + i) for i, kind in enumerate(KINDS)}
    # "strong" is what `sdnext_models.py` calls its own
    made["linear-conv"] = made.pop("strong")
    made.update(norms=norms(unet), full=full(unet))
    metadata = {"ss_network_module": "networks.lora", "ss_base_model_version": "sd_v1"}
    for name, tensors in made.items():
        save_file(tensors, str(folder / "Lora" / f"{name}.safetensors"), metadata=metadata)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
