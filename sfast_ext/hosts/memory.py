"""Whether the GPU has room for weights that stay where plans read them while the host believes them elsewhere."""

from __future__ import annotations

import math

import torch
from torch import nn

DECODING = 6 << 30
"""Bytes that decoding and text encoders may want beside the UNet: a large picture through SDXL's VAE."""


def free() -> float:
    """Bytes that this process may still take on the current GPU; infinite where there is none."""
    if not torch.cuda.is_available():
        return math.inf
    cached = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    return torch.cuda.mem_get_info()[0] + cached


def may_stay(module: nn.Module) -> bool:
    """Whether a module's weights may stay on the GPU while what comes after it runs."""
    held = 0 if _on_gpu(module) else _size(module)
    return free() >= held + DECODING


def may_be_joined(module: nn.Module) -> bool:
    """Whether a second module of this size fits beside the first."""
    return free() >= 1.5 * _size(module)


def _size(module: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in module.parameters())


def _on_gpu(module: nn.Module) -> bool:
    return any(p.is_cuda for p in module.parameters())
