"""Transformers of diffusers with few and narrow layers, and calls of them as their pipelines make."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import diffusers
import torch
from diffusers.models.transformers import transformer_cosmos
from torch import nn
from torch.nn import functional as F

if not hasattr(transformer_cosmos, "transforms"):
    # it takes one function of torchvision, which need not be installed
    resize = SimpleNamespace(resize=lambda x, size, interpolation: F.interpolate(x, size, mode=interpolation))
    modes = SimpleNamespace(NEAREST="nearest")
    transformer_cosmos.transforms = SimpleNamespace(functional=resize, InterpolationMode=modes)

Inputs = tuple[tuple[Any, ...], dict[str, Any]]

CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "lumina2": (
        "Lumina2Transformer2DModel",
        {
            "sample_size": 16, "in_channels": 4, "hidden_size": 48, "num_layers": 2, "num_refiner_layers": 1,
            "num_attention_heads": 4, "num_kv_heads": 2, "multiple_of": 16, "axes_dim_rope": (4, 4, 4),
            "axes_lens": (64, 64, 64), "cap_feat_dim": 24,
        },
    ),
    "z-image": (
        "ZImageTransformer2DModel",
        {
            "in_channels": 4, "dim": 48, "n_layers": 2, "n_refiner_layers": 1, "n_heads": 4, "n_kv_heads": 4,
            "cap_feat_dim": 24, "axes_dims": [4, 4, 4], "axes_lens": [256, 64, 64],
        },
    ),
    "anima": (
        "CosmosTransformer3DModel",
        {
            "in_channels": 4, "out_channels": 4, "num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 2,
            "mlp_ratio": 2.0, "text_embed_dim": 24, "adaln_lora_dim": 8, "max_size": (4, 64, 64),
            "rope_scale": (1.0, 4.0, 4.0), "concat_padding_mask": True, "extra_pos_embed_type": None,
        },
    ),
    "flux": (
        "FluxTransformer2DModel",
        {
            "in_channels": 16, "num_layers": 2, "num_single_layers": 2, "attention_head_dim": 16,
            "num_attention_heads": 2, "joint_attention_dim": 24, "pooled_projection_dim": 24, "guidance_embeds": True,
            "axes_dims_rope": (4, 6, 6),
        },
    ),
    "chroma": (
        "ChromaTransformer2DModel",
        {
            "in_channels": 16, "num_layers": 2, "num_single_layers": 2, "attention_head_dim": 16,
            "num_attention_heads": 2, "joint_attention_dim": 24, "axes_dims_rope": (4, 6, 6),
            "approximator_num_channels": 8, "approximator_hidden_dim": 16, "approximator_layers": 2,
        },
    ),
}  # fmt: skip
KINDS = tuple(kind for kind, (name, _) in CONFIGS.items() if hasattr(diffusers, name))
"""The kinds that this diffusers has."""


def transformer(kind: str, seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A small transformer with random weights, of which none is zero."""
    name, config = CONFIGS[kind]
    torch.manual_seed(seed)
    model = getattr(diffusers, name)(**config)
    with torch.no_grad():
        for parameter in model.parameters():
            spread = 0.5 / parameter.shape[-1] ** 0.5 if parameter.dim() > 1 else 0.1
            parameter.copy_(torch.randn_like(parameter) * spread + (parameter.dim() == 1))
    return nn.Module.to(model, dtype).eval().requires_grad_(False)


def inputs(
    kind: str,
    size: tuple[int, int] = (8, 8),
    tokens: tuple[int, ...] = (5,),
    *,
    timestep: float = 0.5,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Inputs:
    """The arguments of a call as the model's pipeline gives them.

    Args:
        size: height and width of the latent image.
        tokens: of each prompt; as many as there are images.
    """
    g = torch.Generator().manual_seed(seed)
    maker: Callable[..., Inputs] = _MAKERS[kind]

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g).to(dtype)

    return maker(randn, *size, tokens, torch.full((len(tokens),), timestep))


def _padded(randn: Any, tokens: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    longest = max(tokens)
    mask = torch.tensor([[1] * n + [0] * (longest - n) for n in tokens])
    return randn(len(tokens), longest, 24), mask


def _lumina2(randn: Any, h: int, w: int, tokens: tuple[int, ...], t: torch.Tensor) -> Inputs:
    prompt, mask = _padded(randn, tokens)
    return (), {
        "hidden_states": randn(len(tokens), 4, h, w), "timestep": t, "encoder_hidden_states": prompt,
        "encoder_attention_mask": mask, "attention_kwargs": None, "return_dict": False,
    }  # fmt: skip


def _z_image(randn: Any, h: int, w: int, tokens: tuple[int, ...], t: torch.Tensor) -> Inputs:
    latents = list(randn(len(tokens), 4, 1, h, w).unbind(0))
    return (latents, t, [randn(n, 24) for n in tokens]), {"return_dict": False}


def _anima(randn: Any, h: int, w: int, tokens: tuple[int, ...], t: torch.Tensor) -> Inputs:
    prompt, _ = _padded(randn, tokens)
    return (), {
        "hidden_states": randn(len(tokens), 4, 1, h, w), "timestep": t.to(prompt.dtype),
        "encoder_hidden_states": prompt, "padding_mask": torch.zeros(1, 1, 8 * h, 8 * w, dtype=prompt.dtype),
        "return_dict": False,
    }  # fmt: skip


def _packed(randn: Any, h: int, w: int, tokens: tuple[int, ...], t: torch.Tensor) -> Inputs:
    prompt, _ = _padded(randn, tokens)
    ids = torch.zeros(h // 2, w // 2, 3)
    ids[..., 1] += torch.arange(h // 2)[:, None]
    ids[..., 2] += torch.arange(w // 2)[None, :]
    return (), {
        "hidden_states": randn(len(tokens), h * w // 4, 16), "timestep": t.to(prompt.dtype),
        "encoder_hidden_states": prompt, "txt_ids": torch.zeros(max(tokens), 3, dtype=prompt.dtype),
        "img_ids": ids.reshape(-1, 3).to(prompt.dtype), "joint_attention_kwargs": {}, "return_dict": False,
    }  # fmt: skip


def _flux(randn: Any, h: int, w: int, tokens: tuple[int, ...], t: torch.Tensor) -> Inputs:
    args, kwargs = _packed(randn, h, w, tokens, t)
    kwargs["pooled_projections"] = randn(len(tokens), 24)
    kwargs["guidance"] = torch.full((len(tokens),), 3.5)
    return args, kwargs


def _chroma(randn: Any, h: int, w: int, tokens: tuple[int, ...], t: torch.Tensor) -> Inputs:
    args, kwargs = _packed(randn, h, w, tokens, t)
    seen = torch.ones(len(tokens), max(tokens) + h * w // 4, dtype=torch.bool)
    for i, n in enumerate(tokens):
        seen[i, n + 1 : max(tokens)] = False
    kwargs["attention_mask"] = seen
    return args, kwargs


_MAKERS = {"lumina2": _lumina2, "z-image": _z_image, "anima": _anima, "flux": _flux, "chroma": _chroma}
