"""A small stand-in of Forge by lllyasviel, next to that of Forge Neo: where its LoRA is, and how it loads models.

Only what the adapter touches is here, and only behaviour that was seen in the WebUI itself.
"""

from __future__ import annotations

import sys
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


def merge_lora_to_weight(
    patches: Any, weight: Any, key: str = "online_lora", computation_dtype: Any = torch.float32
) -> Any:
    """`backend.patcher.lora.merge_lora_to_weight`."""
    return merged(key, patches, weight.to(computation_dtype)).to(weight.dtype)


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
            found = online["weight"]
            if isinstance(found, list):
                # as Forge's own loader has it
                merge = sys.modules["backend.patcher.lora"].merge_lora_to_weight
                return merge(patches=found, weight=weight, computation_dtype=weight.dtype), bias
            weight = merged(*found, weight)
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

    @torch.inference_mode()
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
        merge = sys.modules["backend.patcher.lora"]
        for (key, online), each in patches.items():
            layer = self.model.get_submodule(key.rpartition(".")[0])
            if online:
                layer.forge_online_loras = {"weight": (key, each)}  # type: ignore[assignment]
                self.online_backup.append(layer)
                continue
            weight = self.model.get_parameter(key)
            if key not in self.backup:
                # if the model is in system memory, this is the parameter itself
                self.backup[key] = weight.to(device=offload_device)
            try:
                made = merge.merge_lora_to_weight(each, weight, key, computation_dtype=torch.float32)
            except torch.cuda.OutOfMemoryError:
                self._to(dict.fromkeys(places, offload_device))
                made = merge.merge_lora_to_weight(each, weight, key, computation_dtype=torch.float32)
            self._set(key, nn.Parameter(made, requires_grad=False))
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
        self.object_patches: dict[str, Any] = {}
        self.object_patches_backup: dict[str, Any] = {}
        self.model_options: dict[str, Any] = {"transformer_options": {}}
        if not hasattr(model, "lora_loader"):
            model.lora_loader = LoraLoader(model)
        self.lora_loader = model.lora_loader

    def clone(self) -> ModelPatcher:
        other = type(self)(self.model, self.load_device)
        other.lora_patches, other.object_patches = dict(self.lora_patches), dict(self.object_patches)
        other.model_options = {"transformer_options": dict(self.model_options["transformer_options"])}
        return other

    def is_clone(self, other: Any) -> bool:
        return self.model is other.model

    def add_patches(self, patches: dict[str, str], strength: float = 1.0, *, online_mode: bool = False) -> None:
        (name,) = set(patches.values())
        self.lora_patches[(name, strength, 1.0, online_mode)] = patches

    def has_online_lora(self) -> bool:
        return any(online for *_, online in self.lora_patches)

    def refresh_loras(self) -> None:
        self.lora_loader.refresh(self.lora_patches, self.offload_device)

    def forge_patch_model(self, target_device: Any = None) -> Any:
        for name, value in self.object_patches.items():
            path, _, last = name.rpartition(".")
            owner = self.model.get_submodule(path)
            self.object_patches_backup.setdefault(name, getattr(owner, last))
            setattr(owner, last, value)
        if target_device is not None:
            self.model.to(target_device)
        return self.model

    def forge_unpatch_model(self, target_device: Any = None) -> None:
        if target_device is not None:
            self.model.to(target_device)
        for name, value in self.object_patches_backup.items():
            path, _, last = name.rpartition(".")
            setattr(self.model.get_submodule(path), last, value)
        self.object_patches_backup = {}


def module_size(module: nn.Module, exclude_device: Any = None, include_device: Any = None) -> int:
    """The bytes of its parameters, with or without those on a device."""
    counted = (p for p in module.parameters() if exclude_device is None or p.device != exclude_device)
    return sum(p.nbytes for p in counted if include_device is None or p.device == include_device)


def module_profile(model: nn.Module, kept: float) -> tuple[list[Any], list[Any], list[Any]]:
    """Which layers come to the GPU, which of them without their weights, and which do not."""
    layers, there, counted = [], [], 0.0
    for m in model.modules():
        if hasattr(m, "weight"):
            m.total_mem = module_size(m)  # type: ignore[assignment]
            m.weight_mem = m.weight.nbytes  # type: ignore[assignment]
            m.extra_mem = m.total_mem - m.weight_mem  # type: ignore[assignment,operator]
            (layers if isinstance(m, Layer) else there).append(m)
    counted, extras = sum(m.total_mem for m in there), []
    for m in sorted(layers, key=lambda each: each.extra_mem):
        if counted + m.extra_mem < kept:
            extras.append(m)
            layers.remove(m)
            counted += m.extra_mem
    for m in sorted(extras, key=lambda each: each.weight_mem):
        if counted + m.weight_mem < kept:
            there.append(m)
            extras.remove(m)
            counted += m.weight_mem
    return there, extras, layers


def compute_when_using_cpu_swap(current_free_mem: float, inference_memory: float) -> int:
    """`compute_model_gpu_memory_when_using_cpu_swap`."""
    most = current_free_mem - inference_memory
    return int(max(0, most / 1.3, most - 1280 * (1 << 20)))


class LoadedModel:
    """A model on the GPU, or with the weights of some layers in system memory, from where they come in each call."""

    def __init__(self, model: ModelPatcher) -> None:
        self.model, self.device, self.model_accelerated = model, model.load_device, False
        self.inclusive_memory = self.exclusive_memory = 0

    def compute_inclusive_exclusive_memory(self) -> None:
        self.inclusive_memory = module_size(self.model.model, include_device=self.device)
        self.exclusive_memory = module_size(self.model.model, exclude_device=self.device)

    def model_load(self, model_gpu_memory_when_using_cpu_swap: float = -1) -> Any:
        whole = model_gpu_memory_when_using_cpu_swap < 0
        try:
            self.real_model = self.model.forge_patch_model(self.device if whole else None)
        except Exception as exc:
            self.model.forge_unpatch_model(self.model.offload_device)
            self.model_unload()
            raise exc
        if not whole:
            self._in_parts(*module_profile(self.real_model, model_gpu_memory_when_using_cpu_swap))
            self.model_accelerated = True
        self.model.refresh_loras()
        return self.real_model

    def _in_parts(self, there: list[Any], extras: list[Any], others: list[Any]) -> None:
        for m in there:
            m.to(self.device)
        for m in others:
            m.prev_parameters_manual_cast, m.parameters_manual_cast = m.parameters_manual_cast, True
            m.to(self.model.offload_device)
        for m in extras:
            m.prev_parameters_manual_cast, m.parameters_manual_cast = m.parameters_manual_cast, True
            for name, value in m.named_parameters():
                place = self.model.offload_device if name == "weight" else self.device
                moved = value.to(place)
                moved = moved if isinstance(moved, nn.Parameter) else nn.Parameter(moved, requires_grad=False)
                setattr(m, name, moved)

    def model_unload(self, avoid_model_moving: bool = False) -> None:
        if self.model_accelerated:
            for m in self.real_model.modules():
                if hasattr(m, "prev_parameters_manual_cast"):
                    m.parameters_manual_cast = m.prev_parameters_manual_cast
                    del m.prev_parameters_manual_cast
            self.model_accelerated = False
        self.model.forge_unpatch_model(None if avoid_model_moving else self.model.offload_device)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LoadedModel) and self.model is other.model


class Host(forge_shared.Host):
    """The WebUI."""

    LAYER = Layer
    VERSION = "2.0.1v1.10.1"
    KIND, LINEAR, CONV2D = IntegratedUNet2DConditionModel, Linear, Conv2d
    MODEL, PATCHER, LOADED = KModel, ModelPatcher, LoadedModel

    def _managing(self) -> dict[str, Any]:
        """Names of its memory management, and what they stand for."""
        return {
            "LoadedModel": LoadedModel,
            "free_memory": self._free_loaded,
            "unload_all_models": lambda: self.memory.free_memory(1e30, self.place, free_all=True),
            "load_models_gpu": lambda models, memory_required=0, hard_memory_preservation=0: None,
            "current_loaded_models": self.on_the_gpu,
            "minimum_inference_memory": lambda: 0,
            "compute_model_gpu_memory_when_using_cpu_swap": compute_when_using_cpu_swap,
        }

    def modules(self) -> dict[str, ModuleType]:
        found = super().modules()
        management = found["backend.memory_management"]
        for name, value in self._managing().items():
            setattr(management, name, value)
        found["backend.patcher"].base = base = _module("backend.patcher.base", ModelPatcher=ModelPatcher)  # type: ignore[attr-defined]
        merging = {"LoraLoader": LoraLoader, "merge_lora_to_weight": merge_lora_to_weight}
        found["backend.patcher"].lora = lora = _module("backend.patcher.lora", **merging)  # type: ignore[attr-defined]
        return {**found, "backend.patcher.base": base, "backend.patcher.lora": lora}


make_unet = Host.make_unet
running = Host.running()
