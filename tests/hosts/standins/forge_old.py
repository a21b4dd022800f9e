"""A small stand-in of Forge by lllyasviel, next to that of Forge Neo: where its LoRA is, and how it loads models.

Only what the adapter touches is here, and only behaviour that was seen in the WebUI itself.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import nn

from hosts.standins import forge, forge_shared
from hosts.standins.a1111 import _module, lora_delta


def merged(key: str, patches: list[tuple[str, float]], weight: torch.Tensor) -> torch.Tensor:
    """A weight with LoRA in it, in separate memory."""
    weight = weight.clone()
    for name, strength in patches:
        weight += strength * lora_delta(name, key, weight)
    return weight


class Layer:
    """What Forge gives each layer: its weights may be cast in each call, and LoRA may be computed in it."""

    parameters_manual_cast = False

    def given(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Weight and bias of this call."""
        weight, bias = self.weight, self.bias  # type: ignore[attr-defined]
        if self.parameters_manual_cast:
            weight, bias = forge_shared.cast(self, x)
        online = getattr(self, "forge_online_loras", None)
        if online is not None and "weight" in online:
            weight = merged(*online["weight"], weight)
        return weight, bias


class Linear(forge_shared.Linear, Layer):
    pass


class Conv2d(forge_shared.Conv2d, Layer):
    pass


class IntegratedUNet2DConditionModel(forge.IntegratedUNet2DConditionModel):
    """Takes the same arguments as Forge Neo's."""


class KModel(nn.Module):
    """What has the UNet and calls it."""

    storage_dtype = computation_dtype = torch.float32
    apply_model = forge.KModel.apply_model

    def __init__(self, unet: nn.Module) -> None:
        super().__init__()
        self.diffusion_model = unet


class LoraLoader:
    """The LoRA that a model's weights have, and the weights without."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.backup, self.loaded_hash = model, {}, str([])
        self.online_backup: list[Any] = []

    def _set(self, key: str, weight: nn.Parameter) -> None:
        path, _, name = key.rpartition(".")
        setattr(self.model.get_submodule(path), name, weight)

    def refresh(self, lora_patches: dict[Any, dict[str, Any]], offload_device: torch.device) -> None:
        """What the weights had is put back, and what they get is merged where they are."""
        hashes = str(list(lora_patches.keys()))
        if hashes == self.loaded_hash:
            return
        places = {key: p.device for key, p in self.model.named_parameters()}
        for layer in set(self.online_backup):
            del layer.forge_online_loras
        self.online_backup = []
        for key, weight in self.backup.items():
            parameter = isinstance(weight, nn.Parameter)
            self._set(key, weight if parameter else nn.Parameter(weight, requires_grad=False))
        self.backup = {}
        self._to(places)
        patches: dict[tuple[str, bool], list[tuple[str, float]]] = {}
        for (name, strength, _, online), found in lora_patches.items():
            for key in found:
                patches.setdefault((key, online), []).append((name, strength))
        for (key, online), each in patches.items():
            layer = self.model.get_submodule(key.rpartition(".")[0])
            if online:
                layer.forge_online_loras = {"weight": (key, each)}  # type: ignore[assignment]
                self.online_backup.append(layer)
                continue
            weight = self.model.get_parameter(key)
            # if the model is in system memory, this is the parameter itself
            self.backup[key] = weight.to(device=offload_device)
            self._set(key, nn.Parameter(merged(key, each, weight), requires_grad=False))
        self._to(places)
        self.loaded_hash = hashes

    def _to(self, places: dict[str, torch.device]) -> None:
        for key, place in places.items():
            weight = self.model.get_parameter(key)
            if weight.device != place:
                self._set(key, nn.Parameter(weight.to(place), requires_grad=False))


class ModelPatcher:
    """LoRA for a model, whose loader clones share."""

    def __init__(self, model: Any, load_device: torch.device) -> None:
        self.model, self.load_device, self.offload_device = model, load_device, torch.device("cpu")
        self.lora_patches: dict[tuple[str, float, float, bool], dict[str, Any]] = {}
        self.model_options: dict[str, Any] = {"transformer_options": {}}
        if not hasattr(model, "lora_loader"):
            model.lora_loader = LoraLoader(model)
        self.lora_loader = model.lora_loader

    def clone(self) -> ModelPatcher:
        other = ModelPatcher(self.model, self.load_device)
        other.lora_patches = dict(self.lora_patches)
        other.model_options = {"transformer_options": dict(self.model_options["transformer_options"])}
        return other

    def add_patches(self, patches: dict[str, str], strength: float = 1.0, *, online_mode: bool = False) -> None:
        (name,) = set(patches.values())
        self.lora_patches[(name, strength, 1.0, online_mode)] = patches

    def refresh_loras(self) -> None:
        self.lora_loader.refresh(self.lora_patches, self.offload_device)


class LoadedModel:
    """A model on the GPU, or with the weights of its later layers in system memory, from where they come in each
    call."""

    def __init__(self, model: ModelPatcher) -> None:
        self.model, self.device, self.in_parts = model, model.load_device, False

    def model_load(self, model_gpu_memory_when_using_cpu_swap: float = -1) -> None:
        kept, self.in_parts = 0.0, model_gpu_memory_when_using_cpu_swap >= 0
        if not self.in_parts:
            self.model.model.to(self.device)
        for module in self.model.model.modules() if self.in_parts else ():
            if isinstance(module, Layer):
                module.total_mem = sum(p.nbytes for p in module.parameters())  # type: ignore[attr-defined]
                if kept + module.total_mem < model_gpu_memory_when_using_cpu_swap:
                    kept += module.total_mem
                    module.to(self.device)  # type: ignore[attr-defined]
                    continue
                module.prev_parameters_manual_cast = module.parameters_manual_cast
                module.parameters_manual_cast = True
                module.to(self.model.offload_device)  # type: ignore[attr-defined]
            elif hasattr(module, "weight"):
                module.to(self.device)
        self.model.refresh_loras()

    def model_unload(self, avoid_model_moving: bool = False) -> None:
        for module in self.model.model.modules() if self.in_parts else ():
            if "prev_parameters_manual_cast" in vars(module):
                module.parameters_manual_cast = module.prev_parameters_manual_cast
                del module.prev_parameters_manual_cast
        if not avoid_model_moving:
            self.model.model.to(self.model.offload_device)


class Host(forge_shared.Host):
    """The WebUI."""

    LAYER = Layer
    VERSION = "2.0.1v1.10.1"
    KIND, LINEAR, CONV2D = IntegratedUNet2DConditionModel, Linear, Conv2d
    MODEL, PATCHER, LOADED = KModel, ModelPatcher, LoadedModel

    def modules(self) -> dict[str, ModuleType]:
        found = super().modules()
        management = found["backend.memory_management"]
        management.LoadedModel, management.free_memory = LoadedModel, self._free_loaded  # type: ignore[attr-defined]
        management.unload_all_models = lambda: self.memory.free_memory(1e30, self.place, free_all=True)  # type: ignore[attr-defined]
        found["backend.patcher"].base = base = _module("backend.patcher.base", ModelPatcher=ModelPatcher)  # type: ignore[attr-defined]
        found["backend.patcher"].lora = lora = _module("backend.patcher.lora", LoraLoader=LoraLoader)  # type: ignore[attr-defined]
        return {**found, "backend.patcher.base": base, "backend.patcher.lora": lora}


make_unet = Host.make_unet
running = Host.running()
