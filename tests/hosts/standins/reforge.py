"""A small stand-in of reForge, next to those of Forge Neo and Forge Classic: the patcher of the one, the names of the
other.

Only what the adapter touches is here, and only behaviour that was seen in the WebUI itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import nn

from hosts.standins import forge, forge_secondary, forge_shared
from hosts.standins.a1111 import _module
from hosts.standins.reforge_patcher import ModelPatcher


class Layer:
    """What reForge gives each layer: its weights may be cast, or patched, in each call."""

    ldm_patched_cast_weights = False
    weight_function: list[Callable[[torch.Tensor], torch.Tensor]] = []
    bias_function: list[Callable[[torch.Tensor], torch.Tensor]] = []

    def given(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Weight and bias of this call."""
        weight, bias = self.weight, self.bias  # type: ignore[attr-defined]
        if self.ldm_patched_cast_weights or self.weight_function or self.bias_function:
            weight, bias = forge_shared.cast(self, x)
            for function in self.weight_function:
                weight = function(weight)
        return weight, bias


class Linear(forge_shared.Linear, Layer):
    pass


class Conv2d(forge_shared.Conv2d, Layer):
    pass


class UNetModel(forge.IntegratedUNet2DConditionModel):
    """Runs the functions around it, of its options."""

    def forward(self, x, timesteps=None, context=None, y=None, control=None, transformer_options=None, **kwargs):
        around = transformer_options.get("wrappers", {}).get("diffusion_model", {})
        call = functools.partial(super().forward, **kwargs)
        for function in [each for found in around.values() for each in found]:
            call = functools.partial(function, call)
        return call(x, timesteps, context, y, control, transformer_options)


class BaseModel(forge.KModel):
    """What has the UNet and calls it."""


class Host(forge_shared.LdmHost):
    """The WebUI."""

    LAYER = Layer
    VERSION = "1.0.0v2-v1.10.1RC"
    KIND, LINEAR, CONV2D = UNetModel, Linear, Conv2d
    MODEL, PATCHER = BaseModel, ModelPatcher

    def modules(self) -> dict[str, ModuleType]:
        found = super().modules()
        package, inner = (
            "ldm_patched.modules",
            {"sd": {"VAE": forge_secondary.VAE}, "lora": {"model_lora_keys_unet": _names}},
        )
        for name, values in inner.items():
            module = found[f"{package}.{name}"] = _module(f"{package}.{name}", **values)
            setattr(found[package], name, module)
        return found

    def _management(self) -> dict[str, Any]:
        memory = {"LoadedModel": forge.LoadedModel, "current_loaded_models": []}
        return {**super()._management(), **memory, "load_models_gpu": lambda models, memory_required=0: None}

    def _load(self, patcher: ModelPatcher) -> None:
        self._measure(patcher)
        self.loaded[:] = [each for each in self.loaded if each.model is not patcher.model]
        patcher.partially_load(self.place, 1e32 if self.kept < 0 else self.kept)
        self.loaded.append(patcher)


def _names(model: nn.Module, key_map: Any = None) -> list[str]:
    return list(model.state_dict())


make_unet = Host.make_unet
running = Host.running(forge_shared.LDM)
