"""A small stand-in of Forge Classic, beside that of Forge Neo: its module names, its patches, how it loads models.

Only what the adapter touches is here, and only behaviour that was seen in the WebUI itself.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hosts.standins import forge, forge_shared
from hosts.standins.a1111 import lora_delta


class Layer:
    """What Forge Classic gives each layer: its weights may be cast, or come to the GPU, in each call."""

    ldm_patched_cast_weights = False

    def given(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Weight and bias of this call."""
        if self.ldm_patched_cast_weights:
            return forge_shared.cast(self, x)
        return self.weight, self.bias  # type: ignore[attr-defined]


class Linear(forge_shared.Linear, Layer):
    pass


class Conv2d(forge_shared.Conv2d, Layer):
    pass


class UNetModel(forge.IntegratedUNet2DConditionModel):
    """Takes the same arguments as Forge Neo's."""


class BaseModel(forge.KModel):
    """What has the UNet and calls it."""


class ModelPatcher:
    """Patches of weights for a model, which clones share: merged when it is loaded."""

    def __init__(self, model: BaseModel, load_device: torch.device, keys: set[str] | None = None) -> None:
        self.model, self.load_device, self.offload_device = model, load_device, torch.device("cpu")
        self.patches: dict[str, list[tuple[str, float]]] = {}
        self.backup: dict[str, torch.Tensor] = {}
        self.model_options: dict[str, Any] = {"transformer_options": {}}
        self.model_keys = set(model.state_dict()) if keys is None else keys

    def clone(self) -> ModelPatcher:
        other = ModelPatcher(self.model, self.load_device, self.model_keys)
        other.patches = {key: [*found] for key, found in self.patches.items()}
        other.backup = self.backup
        other.model_options = {"transformer_options": dict(self.model_options["transformer_options"])}
        return other

    def add_patches(self, patches: dict[str, str], strength_patch: float = 1.0, **options: Any) -> None:
        for key in patches.keys() & self.model_keys:
            self.patches.setdefault(key, []).append((patches[key], strength_patch))

    def _set(self, key: str, weight: torch.Tensor) -> None:
        path, _, name = key.rpartition(".")
        setattr(self.model.get_submodule(path), name, nn.Parameter(weight, requires_grad=False))

    def patch_model(self, device_to: torch.device | None = None) -> BaseModel:
        found = self.model.state_dict() if self.patches else {}
        for key, patches in self.patches.items():
            weight = found[key]
            # if the model is in system memory, this is the weight itself
            self.backup.setdefault(key, weight.to(self.offload_device))
            merged = weight.to(device_to, copy=True)
            for name, strength in patches:
                merged += strength * lora_delta(name, key, merged)
            self._set(key, merged)
        if device_to is not None:
            self.model.to(device_to)
        return self.model

    def unpatch_model(self, device_to: torch.device | None = None) -> None:
        for key, weight in self.backup.items():
            self._set(key, weight)
        self.backup.clear()
        if device_to is not None:
            self.model.to(device_to)


class LoadedModel:
    """A model on the GPU, or with the weights of its later layers in system memory, from where they come in each
    call."""

    def __init__(self, model: ModelPatcher) -> None:
        self.model, self.device = model, model.load_device

    def model_load(self, async_kept_memory: float = -1) -> None:
        in_parts = async_kept_memory >= 0
        self.model.patch_model(None if in_parts else self.device)
        kept = 0
        for module in self.model.model.modules() if in_parts else ():
            if isinstance(module, Layer):
                module.prev_ldm_patched_cast_weights = module.ldm_patched_cast_weights
                module.ldm_patched_cast_weights = True
                size = sum(p.nbytes for p in module.parameters())  # type: ignore[attr-defined]
                fits = kept + size < async_kept_memory
                kept += size if fits else 0
                module.to(self.device if fits else self.model.offload_device)  # type: ignore[attr-defined]
            elif hasattr(module, "weight"):
                module.to(self.device)

    def model_unload(self, *, avoid_model_moving: bool = False) -> None:
        for layer in self._layers():
            if "prev_ldm_patched_cast_weights" in vars(layer):
                layer.ldm_patched_cast_weights = layer.prev_ldm_patched_cast_weights
                del layer.prev_ldm_patched_cast_weights
        self.model.unpatch_model(None if avoid_model_moving else self.model.offload_device)

    def _layers(self) -> list[Any]:
        return [each for each in self.model.model.modules() if isinstance(each, Layer)]


class Host(forge_shared.LdmHost):
    """The WebUI."""

    LAYER = Layer
    VERSION = "classic"
    KIND, LINEAR, CONV2D = UNetModel, Linear, Conv2d
    MODEL, PATCHER, LOADED = BaseModel, ModelPatcher, LoadedModel

    def _management(self) -> dict[str, Any]:
        unload = {"unload_all_models": lambda: self.memory.free_memory(float("inf"), self.place)}
        return {**super()._management(), **unload, "LoadedModel": LoadedModel, "free_memory": self._free_loaded}

    def _drop(self) -> None:
        """Meanwhile there is no model."""
        self.memory.unload_all_models()
        vars(self.model_data).pop("sd_model", None)


make_unet = Host.make_unet
running = Host.running(forge_shared.LDM)
