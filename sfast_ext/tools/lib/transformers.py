"""Diffusion transformers of random weights in the shapes of the real ones, full size or tiny, and the arguments that a
pipeline of diffusers gives them."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from sfast_ext.tools.lib import models
from sfast_ext.tools.lib.models import TOKENS, randomise, without_initialisation

Inputs = tuple[tuple[Any, ...], dict[str, Any]]

_CLASSES = {
    "lumina2": "Lumina2Transformer2DModel",
    "z-image": "ZImageTransformer2DModel",
    "anima": "CosmosTransformer3DModel",
    "flux": "FluxTransformer2DModel",
    "chroma": "ChromaTransformer2DModel",
}
_CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "lumina2": {"cap_feat_dim": 2304, "axes_dim_rope": (32, 32, 32), "axes_lens": (300, 512, 512)},
    "z-image": {},
    "anima": {
        "num_attention_heads": 16, "attention_head_dim": 128, "text_embed_dim": 1024, "max_size": (128, 240, 240),
        "rope_scale": (1.0, 4.0, 4.0), "extra_pos_embed_type": None,
    },
    "flux": {"guidance_embeds": True},
    "chroma": {},
}  # fmt: skip
_PACKED: dict[str, Any] = {
    "in_channels": 16, "num_layers": 2, "num_single_layers": 2, "attention_head_dim": 16, "num_attention_heads": 2,
    "joint_attention_dim": 24, "axes_dims_rope": (4, 6, 6),
}  # fmt: skip
_TINY: dict[str, dict[str, Any]] = {
    "lumina2": {
        "sample_size": 16, "in_channels": 4, "hidden_size": 48, "num_layers": 2, "num_refiner_layers": 1,
        "num_attention_heads": 4, "num_kv_heads": 2, "multiple_of": 16, "axes_dim_rope": (4, 4, 4),
        "axes_lens": (300, 64, 64), "cap_feat_dim": 24,
    },
    "z-image": {
        "in_channels": 4, "dim": 48, "n_layers": 2, "n_refiner_layers": 1, "n_heads": 4, "n_kv_heads": 4,
        "cap_feat_dim": 24, "axes_dims": [4, 4, 4], "axes_lens": [512, 64, 64],
    },
    "anima": {
        "in_channels": 4, "out_channels": 4, "num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 2,
        "mlp_ratio": 2.0, "text_embed_dim": 24, "adaln_lora_dim": 8, "max_size": (4, 64, 64),
    },
    "flux": {**_PACKED, "pooled_projection_dim": 24},
    "chroma": {
        **_PACKED, "approximator_num_channels": 8, "approximator_hidden_dim": 16, "approximator_layers": 2,
    },
}  # fmt: skip


def is_transformer(name: str) -> bool:
    """Whether a name of `names.ALL` is that of a transformer."""
    return name.removeprefix("tiny-") in _CLASSES


def kind_of(model: nn.Module) -> str | None:
    """Which of the known transformers a module is; None for another module."""
    return next((kind for kind, name in _CLASSES.items() if type(model).__name__ == name), None)


def available(name: str) -> bool:
    """Whether the installed diffusers has the class of this transformer."""
    import diffusers

    return hasattr(diffusers, _CLASSES[name.removeprefix("tiny-")])


def random_transformer(
    name: str,
    seed: int = 0,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    **changes: Any,
) -> nn.Module:
    """A transformer of random weights, in evaluation mode; `tiny-` before its name for the small shape.

    Args:
        changes: of the arguments of its class, such as fewer layers.
    """
    return randomise(blank_transformer(name, dtype=dtype, device=device, **changes), seed).eval().requires_grad_(False)


def blank_transformer(
    name: str, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu", **changes: Any
) -> nn.Module:
    """A transformer whose weights are not initialised."""
    import diffusers

    kind = name.removeprefix("tiny-")
    config = {**_CONFIGURATIONS[kind], **(_TINY[kind] if name != kind else {}), **changes}
    if kind == "anima":
        _stand_in_for_torchvision()
    default = torch.get_default_dtype()
    try:
        # in half precision from the start: in float32 the largest would not fit
        torch.set_default_dtype(dtype)
        with without_initialisation(torch.device(device)):
            model = getattr(diffusers, _CLASSES[kind])(**config)
    finally:
        torch.set_default_dtype(default)
    for module in model.modules():
        _tables_to_cpu(module)
    return nn.Module.to(model, dtype)


def _tables_to_cpu(module: nn.Module) -> None:
    # tables that a pipeline has on the CPU were made on the device as well
    held = vars(module).get("freqs_cis")
    if isinstance(held, list):
        module.freqs_cis = [x.cpu() for x in held]


def _stand_in_for_torchvision() -> None:
    """The model takes one function of torchvision, which need not be installed."""
    from diffusers.models.transformers import transformer_cosmos

    if not hasattr(transformer_cosmos, "transforms"):
        functional = SimpleNamespace(resize=lambda x, size, interpolation: F.interpolate(x, size, mode=interpolation))
        modes = SimpleNamespace(NEAREST="nearest")
        transformer_cosmos.transforms = SimpleNamespace(functional=functional, InterpolationMode=modes)


def transformer_inputs(
    model: nn.Module,
    width: int = 64,
    height: int = 64,
    images: int = 1,
    *,
    tokens: int | tuple[int, ...] = TOKENS,
    seed: int = 0,
    timestep: float = 0.6,
) -> Inputs:
    """The arguments of one call, sizes in pixels.

    Args:
        tokens: of the prompt of each image; a tuple if they differ.
        timestep: from 0 to 1.
    """
    kind = kind_of(model)
    assert kind is not None
    weight = next(model.parameters())
    lengths = tokens if isinstance(tokens, tuple) else (tokens,) * images
    generator = torch.Generator("cpu").manual_seed(seed)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(weight.device, weight.dtype)

    t = torch.full((len(lengths),), timestep, device=weight.device)
    return _MAKERS[kind](model.config, noise, height // 8, width // 8, lengths, t)


def _lumina2(config: Any, noise: Any, h: int, w: int, tokens: tuple[int, ...], t: torch.Tensor) -> Inputs:
    longest = max(tokens)
    mask = torch.tensor([[1] * n + [0] * (longest - n) for n in tokens], device=t.device)
    sample = noise(len(tokens), config.in_channels, h, w)
    prompt = noise(len(tokens), longest, config.cap_feat_dim)
    return (sample, t, prompt), {
        "encoder_attention_mask": mask, "attention_kwargs": None, "return_dict": False,
    }  # fmt: skip


def _z_image(config: Any, noise: Any, h: int, w: int, tokens: tuple[int, ...], t: torch.Tensor) -> Inputs:
    latents = list(noise(len(tokens), config.in_channels, 1, h, w).unbind(0))
    return (latents, t, [noise(n, config.cap_feat_dim) for n in tokens]), {"return_dict": False}


def _anima(config: Any, noise: Any, h: int, w: int, tokens: tuple[int, ...], t: torch.Tensor) -> Inputs:
    sample = noise(len(tokens), config.in_channels, 1, h, w)
    padding = torch.zeros(1, 1, 8 * h, 8 * w, device=t.device, dtype=sample.dtype)
    prompt = noise(len(tokens), max(tokens), config.text_embed_dim)
    return (sample, t.to(sample.dtype), prompt), {"padding_mask": padding, "return_dict": False}


def _packed(config: Any, noise: Any, h: int, w: int, tokens: tuple[int, ...], t: torch.Tensor) -> Inputs:
    ids = torch.zeros(h // 2, w // 2, 3)
    ids[..., 1] += torch.arange(h // 2)[:, None]
    ids[..., 2] += torch.arange(w // 2)[None, :]
    sample = noise(len(tokens), h * w // 4, config.in_channels)
    return (sample,), {
        "timestep": t.to(sample.dtype),
        "encoder_hidden_states": noise(len(tokens), max(tokens), config.joint_attention_dim),
        "txt_ids": torch.zeros(max(tokens), 3, device=t.device, dtype=sample.dtype),
        "img_ids": ids.reshape(-1, 3).to(t.device, sample.dtype),
        "joint_attention_kwargs": {}, "return_dict": False,
    }  # fmt: skip


def _flux(config: Any, noise: Any, h: int, w: int, tokens: tuple[int, ...], t: torch.Tensor) -> Inputs:
    args, kwargs = _packed(config, noise, h, w, tokens, t)
    kwargs["pooled_projections"] = noise(len(tokens), config.pooled_projection_dim)
    kwargs["guidance"] = torch.full((len(tokens),), 3.5, device=t.device)
    return args, kwargs


def _chroma(config: Any, noise: Any, h: int, w: int, tokens: tuple[int, ...], t: torch.Tensor) -> Inputs:
    args, kwargs = _packed(config, noise, h, w, tokens, t)
    seen = torch.ones(len(tokens), max(tokens) + h * w // 4, dtype=torch.bool)
    for i, n in enumerate(tokens):
        seen[i, n + 1 : max(tokens)] = False
    kwargs["attention_mask"] = seen.to(t.device)
    return args, kwargs


_MAKERS: dict[str, Callable[..., Inputs]] = {
    "lumina2": _lumina2, "z-image": _z_image, "anima": _anima, "flux": _flux, "chroma": _chroma,
}  # fmt: skip


def inputs_of(model: nn.Module, width: int, height: int, images: int = 1, *, tokens: int = TOKENS) -> Inputs:
    """The arguments of one call of a UNet or of a transformer, sizes in pixels."""
    make: Callable[..., Inputs] = models.unet_inputs if kind_of(model) is None else transformer_inputs
    return make(model, width, height, images, tokens=tokens)


def result_of(found: Any) -> torch.Tensor:
    """The result of a call as one tensor: a list of images is stacked."""
    first = found[0] if isinstance(found, tuple) else found.sample
    return torch.stack(first) if isinstance(first, list) else first
