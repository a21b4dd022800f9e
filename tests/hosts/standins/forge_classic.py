"""A small stand-in of Forge Classic, beside that of Forge Neo: its module names, its patches, how it loads models.

Only what the adapter touches is here, and only behaviour that was seen in the WebUI itself.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch import nn

from hosts.standins import forge, forge_beside
from hosts.standins.a1111 import _module, lora_delta, weights
from sfast_ext.tools.lib import models


class Layer:
    """What Forge Classic gives each layer: its weights may be cast, or come to the GPU, in each call."""

    ldm_patched_cast_weights = False

    def given(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Weight and bias of this call."""
        weight, bias = self.weight, self.bias  # type: ignore[attr-defined]
        if self.ldm_patched_cast_weights:
            weight, bias = weight.to(x.device, x.dtype), None if bias is None else bias.to(x.device, x.dtype)
        return weight, bias


class Linear(nn.Linear, Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, *self.given(x))


class Conv2d(nn.Conv2d, Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._conv_forward(x, *self.given(x))


class UNetModel(forge.IntegratedUNet2DConditionModel):
    """Takes the same arguments as Forge Neo's."""


def make_unet(seed: int, channels: int = 32) -> nn.Module:
    """A tiny UNet, none of its weights zero."""
    unet = models.copied(forge.made(channels, UNetModel, Linear, Conv2d))
    unet.load_state_dict(weights(unet, seed))
    return unet.eval().requires_grad_(False)


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
            # where the model is in system memory, this is the weight itself
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

    def model_load(self, async_kept_memory: int = -1) -> None:
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


class Host(forge.Host):
    """The WebUI."""

    LAYER = Layer

    def __init__(self, settings: dict[str, Any], place: torch.device) -> None:
        super().__init__(settings, place)
        self.version = _module("modules_forge.forge_version", version="classic")
        self.on_the_gpu: list[LoadedModel] = []
        self.kept = -1
        """What the UNet may have of the GPU's memory; below 0 all of it."""

    def modules(self) -> dict[str, ModuleType]:
        found = {name: each for name, each in super().modules().items() if name.partition(".")[0] != "backend"}
        management = _module(
            "ldm_patched.modules.model_management",
            LoadedModel=LoadedModel,
            free_memory=self._free_memory,
            unload_all_models=lambda: self.memory.free_memory(float("inf"), self.place),
            get_free_memory=lambda device: self.system_memory,
            module_size=lambda module, exclude_device=None: sum(t.nbytes for t in module.state_dict().values()),
        )
        patcher = _module("ldm_patched.modules.model_patcher", ModelPatcher=ModelPatcher)
        inner = {"model_management": management, "model_patcher": patcher}
        found["ldm_patched"] = _module("ldm_patched")
        found["ldm_patched.modules"] = _module("ldm_patched.modules", __path__=[str(Path(__file__).parent)], **inner)
        inner["controlnet"] = forge_beside.modules("ldm_patched.modules")["ldm_patched.modules.controlnet"]
        return {**found, **{f"ldm_patched.modules.{name}": each for name, each in inner.items()}}

    @property
    def memory(self) -> Any:
        return sys.modules["ldm_patched.modules.model_management"]

    def _drop(self) -> None:
        """Meanwhile there is no model."""
        self.memory.unload_all_models()
        vars(self.model_data).pop("sd_model", None)

    def _made(self, seed: int, channels: int, unet: nn.Module | None) -> Any:
        return ModelPatcher(BaseModel(make_unet(seed, channels) if unet is None else unet), self.place)

    def _free_memory(self, memory_required: float, device: Any, keep_loaded: Any = ()) -> None:
        for loaded in [each for each in self.on_the_gpu if each not in keep_loaded]:
            self.on_the_gpu.remove(loaded)
            loaded.model_unload()

    def _load(self, patcher: ModelPatcher) -> None:
        """A clone of what is loaded is not moved there and back."""
        if any(each.model is patcher for each in self.on_the_gpu):
            return
        for loaded in [each for each in self.on_the_gpu if each.model.model is patcher.model]:
            self.on_the_gpu.remove(loaded)
            loaded.model_unload(avoid_model_moving=True)
        loaded = LoadedModel(patcher)
        self.memory.module_size(patcher.model)
        loaded.model_load(self.kept)
        self.on_the_gpu.append(loaded)


@contextmanager
def running(place: torch.device | None = None, **settings: Any) -> Iterator[Host]:
    """The host in this process: its modules importable; all taken back at the end."""
    with (
        mock.patch.object(forge, "Host", Host),
        mock.patch.object(forge, "TOPS", ("modules", "modules_forge", "ldm_patched")),
        forge.running(place, **settings) as host,
    ):
        assert isinstance(host, Host)
        yield host
