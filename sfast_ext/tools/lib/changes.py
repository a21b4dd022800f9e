"""What hosts do to the weights of a UNet between two images, done to any UNet: LoRA in three ways, checkpoints."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

RANK = 4
ATTENTION = ("to_q", "to_k", "to_v", "to_out.0", "q", "k", "v")


def targets(unet: nn.Module) -> Iterator[tuple[nn.Module, nn.Parameter]]:
    for name, module in unet.named_modules():
        if isinstance(module, nn.Linear) and name.endswith(ATTENTION):
            yield module, module.weight


def difference(weight: torch.Tensor, generator: torch.Generator, strength: float) -> torch.Tensor:
    # as a LoRA of rank RANK has it; made on the CPU, so that two models get the same
    rows, columns = weight.shape
    up = torch.randn(rows, RANK, generator=generator)
    down = torch.randn(RANK, columns, generator=generator)
    scale = strength * (RANK * columns) ** -0.5
    return (up.to(weight.device) @ down.to(weight.device) * scale).to(weight.dtype)


@torch.no_grad()
def lora_in_place(unet: nn.Module, seed: int, strength: float = 0.5) -> int:
    """As AUTOMATIC1111 does it: values are copied into the weights that are there. Returns how many weights changed."""
    generator = torch.Generator().manual_seed(seed)
    count = 0
    for _, weight in targets(unet):
        weight.copy_(weight + difference(weight, generator, strength))
        count += 1
    return count


@torch.no_grad()
def lora_replaced(unet: nn.Module, seed: int, strength: float = 0.5) -> int:
    """As SD.Next does it: new parameters take the place of the old."""
    generator = torch.Generator().manual_seed(seed)
    count = 0
    for module, weight in targets(unet):
        changed = weight + difference(weight, generator, strength)
        module.weight = nn.Parameter(changed, requires_grad=False)  # type: ignore[assignment]
        count += 1
    return count


@torch.no_grad()
def lora_of_diffusers(unet: nn.Module, seed: int) -> int:
    """A LoRA through diffusers and peft: adapters are put in, fused into the weights, and taken out again.

    Raises:
        ImportError: peft is not installed, or this diffusers has no such functions.
    """
    from peft import LoraConfig
    from peft.tuners.lora import LoraLayer

    adapter = LoraConfig(r=RANK, lora_alpha=RANK, target_modules=["to_q", "to_k", "to_v", "to_out.0"])
    for function in ("add_adapter", "fuse_lora"):
        if not hasattr(unet, function):
            raise ImportError(f"this diffusers has no {function}()")
    unet.add_adapter(adapter)  # type: ignore[operator]
    generator = torch.Generator().manual_seed(seed)
    layers = [module for module in unet.modules() if isinstance(module, LoraLayer)]
    for layer in layers:
        for parameter in (*layer.lora_A.parameters(), *layer.lora_B.parameters()):
            noise = torch.randn(parameter.shape, generator=generator) * 0.5 * parameter.shape[1] ** -0.5
            parameter.copy_(noise.to(parameter.device, parameter.dtype))
    unet.fuse_lora()  # type: ignore[operator]
    (unet.unload_lora if hasattr(unet, "unload_lora") else _unload(unet))()  # type: ignore[operator]
    unet.requires_grad_(False)
    return len(layers)


def _unload(unet: nn.Module):  # type: ignore[no-untyped-def]
    from diffusers.utils.peft_utils import recurse_remove_peft_layers

    return lambda: recurse_remove_peft_layers(unet)


def load_checkpoint(unet: nn.Module, state: dict[str, torch.Tensor]) -> None:
    """Other values into the same modules, where they are."""
    unet.load_state_dict(state)


def load_checkpoint_by_cpu(unet: nn.Module, state: dict[str, torch.Tensor]) -> None:
    """As AUTOMATIC1111 does it for a checkpoint of the same architecture: to the CPU, loaded there, and back."""
    device = next(unet.parameters()).device
    nn.Module.to(unet, "cpu")
    unet.load_state_dict(state)
    nn.Module.to(unet, device)
