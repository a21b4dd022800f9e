"""IP-Adapters: new modules at each loading, and new processors at each unloading."""

from __future__ import annotations

from typing import Any

import torch
from diffusers.models.attention_processor import AttnProcessor
from torch import nn


class IPAdapterAttnProcessor(nn.Module):
    """An attention processor with weights and a scale."""

    # as those of diffusers are told by
    __module__ = "diffusers.models.attention_processor"

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = AttnProcessor()
        self.to_k_ip = nn.ModuleList([nn.Linear(width, width)])
        self.scale = [1.0]

    def __call__(self, attn: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        found = self.inner(attn, hidden_states, *args, **kwargs)
        return found + self.scale[0] * self.to_k_ip[0](found)


def apply(pipe: Any, p: Any) -> bool:
    """Load what the job asks for, its weights told by a seed, or unload what is there."""
    if p.adapter is None:
        unapply(pipe)
        return False
    torch.manual_seed(p.adapter)
    for name, attention in _attentions(pipe.unet):
        made = IPAdapterAttnProcessor(attention.to_q.in_features) if name == "attn2" else type(attention.processor)()
        attention.set_processor(made)
    pipe.adapted = True
    _scale(pipe.unet, p.scale)
    return True


def unapply(pipe: Any) -> None:
    """Also after each job."""
    if getattr(pipe, "adapted", False):
        _scale(pipe.unet, 0.0)
        for _, attention in _attentions(pipe.unet):
            attention.set_processor(AttnProcessor())


def _scale(unet: Any, scale: float) -> None:
    for _, attention in _attentions(unet):
        if isinstance(attention.processor, IPAdapterAttnProcessor):
            attention.processor.scale = [scale]


def _attentions(unet: Any) -> list[tuple[str, Any]]:
    named = [(name.rpartition(".")[2], module) for name, module in unet.named_modules()]
    return [(name, module) for name, module in named if name in ("attn1", "attn2")]
