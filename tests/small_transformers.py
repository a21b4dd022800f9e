"""Transformers of diffusers with few and narrow layers, and calls of them as their pipelines make."""

from __future__ import annotations

import torch
from torch import nn

from sfast_ext.tools.lib import transformers
from sfast_ext.tools.lib.transformers import Inputs

KINDS = tuple(kind for kind in ("lumina2", "z-image", "anima", "flux", "chroma") if transformers.available(kind))
"""The kinds that this diffusers has."""


def transformer(kind: str, seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A small transformer with random weights, of which none is zero."""
    return transformers.random_transformer(f"tiny-{kind}", seed, dtype=dtype)


def inputs(
    model: nn.Module,
    size: tuple[int, int] = (8, 8),
    tokens: tuple[int, ...] = (5,),
    *,
    timestep: float = 0.5,
    seed: int = 0,
) -> Inputs:
    """The arguments of a call.

    Args:
        size: height and width of the latent image.
        tokens: of each prompt; as many as there are images.
    """
    height, width = size
    return transformers.transformer_inputs(
        model, 8 * width, 8 * height, tokens=tokens, seed=seed, timestep=timestep
    )
