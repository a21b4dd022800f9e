"""A small stand-in of reForge, next to those of Forge Neo and Forge Classic: the patcher of the one, the names of the
other.

Only what the adapter touches is here, and only behaviour that was seen in the WebUI itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hosts.standins import forge, forge_shared


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


class ModelPatcher:
    """Patches of weights for a model: merged if the weight goes to the GPU, else computed in each call."""

    # not inherited: a test takes methods away
    __init__ = forge.ModelPatcher.__init__  # type: ignore[assignment]
    clone, _merged = forge.ModelPatcher.clone, forge.ModelPatcher._merged
    model: Any

    def add_patches(self, patches: dict[str, str], strength_patch: float = 1.0, **more: Any) -> None:
        forge.ModelPatcher.add_patches(self, patches, strength_patch)  # type: ignore[arg-type]

    def load(
        self,
        device_to: Any = None,
        lowvram_model_memory: float = 0,
        force_patch_weights: bool = False,
        full_load: bool = False,
    ) -> None:
        kept, apart = 0.0, False
        for path, layer in [each for each in self.model.named_modules() if isinstance(each[1], Layer)]:
            size = sum(p.nbytes for p in layer.parameters())  # type: ignore[attr-defined]
            key = f"{path}.weight"
            if not full_load and kept + size >= lowvram_model_memory:
                apart = True
                if "prev_ldm_patched_cast_weights" not in vars(layer):
                    layer.prev_ldm_patched_cast_weights = layer.ldm_patched_cast_weights  # type: ignore[attr-defined]
                    layer.ldm_patched_cast_weights = True
                layer.weight_function = [functools.partial(self._merged, key)] if key in self.patches else []
                continue
            kept += size
            self._wipe(layer)
            if key in self.patches and key not in self.backup:
                # if the model is in system memory, this is the parameter itself
                self.backup[key] = layer.weight.to(self.offload_device)  # type: ignore[attr-defined]
                weight = self._merged(key, layer.weight.to(device_to))  # type: ignore[attr-defined]
                layer.weight = nn.Parameter(weight, requires_grad=False)  # type: ignore[attr-defined]
            layer.to(device_to)  # type: ignore[attr-defined]
        if not apart:
            self.model.to(device_to)
        self.model.model_lowvram = apart
        self.model.loaded, self.model.current_weight_patches_uuid = True, self.patches_uuid

    def _wipe(self, layer: Any) -> None:
        if "prev_ldm_patched_cast_weights" in vars(layer):
            layer.ldm_patched_cast_weights = layer.prev_ldm_patched_cast_weights
            del layer.prev_ldm_patched_cast_weights
        layer.weight_function, layer.bias_function = [], []

    def partially_unload(self, device_to: Any, memory_to_free: float = 0) -> float:
        """Layers go to system memory, until so much is freed."""
        freed = 0.0
        for path, layer in [each for each in self.model.named_modules() if isinstance(each[1], Layer)]:
            if freed > memory_to_free:
                break
            key = f"{path}.weight"
            if key in self.backup:
                layer.weight = nn.Parameter(self.backup.pop(key), requires_grad=False)  # type: ignore[attr-defined]
                layer.weight_function = [functools.partial(self._merged, key)]
            layer.to(device_to)  # type: ignore[attr-defined]
            freed += sum(p.nbytes for p in layer.parameters())  # type: ignore[attr-defined]
            layer.prev_ldm_patched_cast_weights = layer.ldm_patched_cast_weights  # type: ignore[attr-defined]
            layer.ldm_patched_cast_weights = True
        self.model.in_part = self.model.model_lowvram = True
        return freed

    def detach(self) -> None:
        forge.ModelPatcher.detach(self)  # type: ignore[arg-type]
        for layer in self.model.modules():
            if isinstance(layer, Layer):
                self._wipe(layer)
        self.model.model_lowvram = self.model.in_part = False

    def partially_load(self, device: Any, kept: float = -1) -> None:
        if self.model.current_weight_patches_uuid not in (None, self.patches_uuid):
            self.detach()
        if not self.model.loaded or self.model.in_part:
            self.load(device, lowvram_model_memory=kept, full_load=kept < 0)


class Host(forge_shared.LdmHost):
    """The WebUI."""

    LAYER = Layer
    VERSION = "1.0.0v2-v1.10.1RC"
    KIND, LINEAR, CONV2D = UNetModel, Linear, Conv2d
    MODEL, PATCHER = BaseModel, ModelPatcher

    def _load(self, patcher: ModelPatcher) -> None:
        self._measure(patcher)
        self.loaded[:] = [each for each in self.loaded if each.model is not patcher.model]
        patcher.partially_load(self.place, self.kept)
        self.loaded.append(patcher)


make_unet = Host.make_unet
running = Host.running(forge_shared.LDM)
