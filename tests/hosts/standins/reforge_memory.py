"""reForge 1.0.0v2 with its memory management (`ldm_patched.modules.model_management`), as far as it decides what of
a model is on the GPU, in the same order of steps."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn

from hosts.standins import a1111, forge, forge_neo_memory, forge_shared, reforge
from hosts.standins.a1111 import weights
from sfast_ext.tools.lib import models

HALF = torch.bfloat16


class GroupNorm(forge_shared.GroupNorm, reforge.Layer):
    pass


class LayerNorm(forge_shared.LayerNorm, reforge.Layer):
    pass


def make_unet(seed: int, channels: int, levels: int | None = None, dtype: torch.dtype = HALF) -> nn.Module:
    """A tiny UNet, all of whose layers may be cast."""
    of = levels or a1111.by_default
    unet = models.copied(forge.made(channels, reforge.UNetModel, reforge.Linear, reforge.Conv2d, of))
    forge_shared.with_norms(unet, GroupNorm, LayerNorm)
    unet.load_state_dict(weights(unet, seed))
    unet.dtype = dtype
    return unet.to(dtype).eval().requires_grad_(False)


class BaseModel(reforge.BaseModel):
    device = torch.device("cpu")
    manual_cast_dtype: torch.dtype | None = None
    current_patcher: Any = None

    def get_dtype(self) -> torch.dtype:
        return self.diffusion_model.dtype

    def apply_model(self, x, t, c_concat=None, c_crossattn=None, control=None, transformer_options=None, **kwargs):
        x, context = x.to(self.get_dtype()), c_crossattn.to(self.get_dtype())
        return super().apply_model(x, t, None, context, control, transformer_options, **kwargs).float()


class Host(forge_neo_memory.Managed, reforge.Host):
    """The WebUI."""

    FACTOR, AGAIN, FLOOR = 1.3, True, True
    DTYPE = torch.float32

    def _management(self) -> dict[str, Any]:
        return {**super()._management(), **self._managing()}

    def _made(self, seed: int, channels: int, unet: Any) -> Any:
        unet = make_unet(seed, channels, dtype=self.DTYPE) if unet is None else unet
        return self.PATCHER(BaseModel(unet), self.place)

    def lora(self, *args: Any, **kwargs: Any) -> None:
        sys.modules["ldm_patched.modules.lora"].model_lora_keys_unet(self.model_data.sd_model.original.model)
        super().lora(*args, **kwargs)

    def _module_of(self, size: int) -> nn.Module:
        return forge_shared.Another(size, reforge.Linear)


running = Host.running(forge_shared.LDM)
