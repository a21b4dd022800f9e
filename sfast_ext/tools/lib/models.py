"""Models of random weights in the shapes of the real ones, full size or tiny, and the inputs a WebUI gives them.

diffusers is imported when a model is made, not before: the extension itself does not need it.
"""

from __future__ import annotations

import copy
import functools
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from sfast_ext.tools.lib.names import NAMES, TINY_NAMES

TOKENS = 77
_NEVER_CHANGES = (int, float, bool, str, type(None), torch.dtype, torch.device)

_SD15: dict[str, Any] = {
    "sample_size": 64,
    "in_channels": 4,
    "out_channels": 4,
    "layers_per_block": 2,
    "block_out_channels": (320, 640, 1280, 1280),
    "down_block_types": ("CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
    "cross_attention_dim": 768,
    "attention_head_dim": 8,
}
_SDXL: dict[str, Any] = {
    "sample_size": 128,
    "in_channels": 4,
    "out_channels": 4,
    "layers_per_block": 2,
    "block_out_channels": (320, 640, 1280),
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    "cross_attention_dim": 2048,
    "transformer_layers_per_block": (1, 2, 10),
    "attention_head_dim": (5, 10, 20),
    "use_linear_projection": True,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 256,
    "projection_class_embeddings_input_dim": 2816,
}

CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "sd15": _SD15,
    "sd15-inpaint": {**_SD15, "in_channels": 9},
    "sd21": {
        **_SD15,
        "sample_size": 96,
        "cross_attention_dim": 1024,
        "attention_head_dim": (5, 10, 20, 20),
        "use_linear_projection": True,
    },
    "sdxl": _SDXL,
    "sdxl-refiner": {
        **_SDXL,
        "block_out_channels": (384, 768, 1536, 1536),
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        "cross_attention_dim": 1280,
        "transformer_layers_per_block": 4,
        "attention_head_dim": (6, 12, 24, 24),
        "projection_class_embeddings_input_dim": 2560,
    },
}
"""Arguments of diffusers' UNet2DConditionModel for each of NAMES."""

# Head sizes stay multiples of 8 and channels multiples of norm_num_groups, as in the real ones; the tiny SDXL text
# embedding is 32 wide and each of its six numbers 8.
_TINY_SHAPE: dict[str, Any] = {"sample_size": 8, "norm_num_groups": 16, "layers_per_block": 1}
_TINY: dict[str, dict[str, Any]] = {
    "sd15": {"block_out_channels": (32, 32, 64, 64), "cross_attention_dim": 32, "attention_head_dim": 4},
    "sd21": {"block_out_channels": (32, 32, 64, 64), "cross_attention_dim": 48, "attention_head_dim": (2, 2, 4, 4)},
    "sdxl": {
        "block_out_channels": (32, 48, 64),
        "cross_attention_dim": 64,
        "transformer_layers_per_block": (1, 1, 2),
        "attention_head_dim": (2, 3, 4),
        "addition_time_embed_dim": 8,
        "projection_class_embeddings_input_dim": 32 + 6 * 8,
    },
    "sdxl-refiner": {
        "block_out_channels": (32, 48, 64, 64),
        "cross_attention_dim": 64,
        "transformer_layers_per_block": 2,
        "attention_head_dim": (2, 3, 4, 4),
        "addition_time_embed_dim": 8,
        "projection_class_embeddings_input_dim": 32 + 5 * 8,
    },
}
_TINY["sd15-inpaint"] = _TINY["sd15"]

REFINER_NUMBERS = 5
"""Numbers of size conditioning that SDXL's refiner takes; the base model takes 6."""


def unet_config(name: str) -> dict[str, Any]:
    """The arguments of UNet2DConditionModel for a name, `tiny-` before it for the small shape.

    Raises:
        ValueError: the name is none of NAMES or TINY_NAMES.
    """
    plain = name[len("tiny-") :] if name.startswith("tiny-") else name
    if plain not in CONFIGURATIONS:
        raise ValueError(f"no model is called {name!r}; there are {', '.join(NAMES + TINY_NAMES)}")
    config = dict(CONFIGURATIONS[plain])
    if plain != name:
        config.update(_TINY_SHAPE)
        config.update(_TINY[plain])
    return config


_patching = threading.RLock()


@contextmanager
def without_initialisation(device: torch.device) -> Iterator[None]:
    """Modules that this thread makes are on this device, and their weights left as memory has them."""
    thread = threading.get_ident()

    def for_others(original: Callable[[Any], None]) -> Callable[[Any], None]:
        def reset_parameters(module: Any) -> None:
            if threading.get_ident() != thread:
                original(module)

        return reset_parameters

    # the default initialisation of SDXL takes longer on a CPU than all the rest; every value is replaced anyhow
    # one thread at a time: another would take what is in place of a method for the method
    with _patching:
        kinds = nn.Linear, nn.Conv2d, nn.GroupNorm, nn.LayerNorm, nn.Embedding
        reset = [(cls, cls.reset_parameters) for cls in kinds]
        try:
            for cls, original in reset:
                cls.reset_parameters = for_others(original)  # type: ignore[assignment,method-assign]
            with torch.device(device):
                yield
        finally:
            for cls, original in reset:
                cls.reset_parameters = original  # type: ignore[method-assign]


@torch.no_grad()
def randomise(module: nn.Module, seed: int) -> nn.Module:
    """Fill a module with random weights that keep activations near one, none of them zero; a seed gives the same."""
    generators: dict[torch.device, torch.Generator] = {}
    for name, value in module.named_parameters():
        if value.device not in generators:
            generators[value.device] = torch.Generator(value.device).manual_seed(seed)
        noise = torch.randn(value.shape, generator=generators[value.device], device=value.device, dtype=torch.float32)
        if value.dim() > 1:
            noise *= value[0].numel() ** -0.5
        else:
            noise *= 0.1
            if name.endswith("weight"):
                noise += 1
        value.copy_(noise)
    return module


def random_unet(
    name: str, seed: int = 0, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> nn.Module:
    """A UNet2DConditionModel of random weights, in evaluation mode."""
    from diffusers import UNet2DConditionModel

    with without_initialisation(torch.device(device)):
        unet = UNet2DConditionModel(**unet_config(name))
    nn.Module.to(unet, dtype)  # past the warning of diffusers' own about modules to be kept in fp32: there are none
    return randomise(unet, seed).eval().requires_grad_(False)


@functools.lru_cache(maxsize=None)
def _tiny_unet(name: str, seed: int) -> nn.Module:
    return random_unet(f"tiny-{name}", seed)


def tiny_unet(name: str = "sd15", seed: int = 0) -> nn.Module:
    """A fresh copy of a tiny UNet in fp32 on the CPU: sd15, sd15-inpaint, sd21, sdxl or sdxl-refiner."""
    return copied(_tiny_unet(name.replace("tiny-", ""), seed))


def copied(module: nn.Module, memo: dict[int, Any] | None = None) -> Any:
    """What copy.deepcopy gives, in a quarter of the time: most attributes of a module are empty or never change."""
    memo = {} if memo is None else memo
    if id(module) in memo:
        return memo[id(module)]
    new: Any = object.__new__(type(module))
    memo[id(module)] = new
    for name, value in vars(module).items():
        kind = type(value)
        if kind in _NEVER_CHANGES:
            vars(new)[name] = value
        elif name == "_modules":
            vars(new)[name] = kind((key, part and copied(part, memo)) for key, part in value.items())
        else:
            empty = kind in (dict, set, OrderedDict) and not value
            vars(new)[name] = kind() if empty else copy.deepcopy(value, memo)
    return new


def random_state(module: nn.Module, seed: int) -> dict[str, torch.Tensor]:
    """Another checkpoint of the same architecture: what load_state_dict takes."""
    return {k: v.detach().clone() for k, v in randomise(copied(module), seed).state_dict().items()}


def unet_inputs(
    unet: nn.Module,
    width: int = 64,
    height: int = 64,
    images: int = 1,
    *,
    tokens: int = TOKENS,
    seed: int = 0,
    timestep: float = 601,
) -> tuple[tuple[torch.Tensor, torch.Tensor], dict[str, Any]]:
    """The arguments of one call under classifier-free guidance: two rows for each image, sizes in pixels."""
    config: Any = unet.config
    weight = next(unet.parameters())
    rows = 2 * images

    generator = torch.Generator("cpu").manual_seed(seed)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(weight.device, weight.dtype)

    sample = noise(rows, config.in_channels, height // 8, width // 8)
    t = torch.tensor(timestep, device=weight.device)
    kwargs: dict[str, Any] = {
        "encoder_hidden_states": noise(rows, tokens, config.cross_attention_dim),
        "return_dict": False,
    }
    if config.addition_embed_type == "text_time":
        each = config.addition_time_embed_dim
        numbers = REFINER_NUMBERS if _is_refiner(config) else 6
        text = config.projection_class_embeddings_input_dim - numbers * each
        ids = [float(height), float(width), 0.0, 0.0, float(height), float(width)][:numbers]
        kwargs["added_cond_kwargs"] = {
            "text_embeds": noise(rows, text),
            "time_ids": torch.tensor([ids] * rows, device=weight.device, dtype=weight.dtype),
        }
    return (sample, t), kwargs


def _is_refiner(config: Any) -> bool:
    # the widths leave no other sign: 2560 = 1280 + 5 * 256 against the base model's 2816 = 1280 + 6 * 256
    return len(config.block_out_channels) == 4
