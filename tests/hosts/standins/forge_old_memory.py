"""Forge by lllyasviel with its memory management (`backend/memory_management.py`), as far as it decides what of a model
is on the GPU, in the same order of steps."""

from __future__ import annotations

import gc
import sys
from typing import Any

import torch
from torch import nn

from hosts.standins import a1111, forge, forge_neo_memory, forge_old, forge_shared
from hosts.standins.a1111 import weights
from hosts.standins.forge_old import LoadedModel, ModelPatcher
from sfast_ext.tools.lib import models

HALF = torch.bfloat16
IN_PARTS = 0.5
"""Of the tests' UNet: Forge leaves nearly a third of what is free to a forward, in addition to its reserve."""


class GroupNorm(forge_shared.GroupNorm, forge_old.Layer):
    pass


class LayerNorm(forge_shared.LayerNorm, forge_old.Layer):
    pass


def make_unet(seed: int, channels: int, levels: int | None = None, dtype: torch.dtype = HALF) -> nn.Module:
    """A tiny UNet, all of whose layers may be cast."""
    of = levels or a1111.by_default
    kind, linear, conv2d = forge_old.IntegratedUNet2DConditionModel, forge_old.Linear, forge_old.Conv2d
    unet = models.copied(forge.made(channels, kind, linear, conv2d, of))
    for module in forge_shared.with_norms(unet, GroupNorm, LayerNorm).modules():
        if isinstance(module, forge_old.Layer):
            module.parameters_manual_cast = False
    unet.load_state_dict(weights(unet, seed))
    return unet.to(dtype).eval().requires_grad_(False)


class KModel(forge_shared.Computed, forge_old.KModel):
    pass


class Host(forge_neo_memory.Managed, forge_old.Host):
    """The WebUI."""

    DTYPE = torch.float32

    def _managing(self) -> dict[str, Any]:
        return {
            **forge_old.Host._managing(self),
            "free_memory": self._free,
            "get_free_memory": self._free_bytes,
            "load_models_gpu": self._load_models,
            "current_loaded_models": self.current,
            "minimum_inference_memory": lambda: self.reserve,
        }

    def modules(self) -> dict[str, Any]:
        found = super().modules()

        def model_lora_keys_unet(model: Any, key_map: Any = None) -> list[str]:
            return list(model.state_dict())

        found["networks"].model_lora_keys_unet = model_lora_keys_unet  # type: ignore[attr-defined]
        return found

    def _drop(self) -> None:
        # what nobody holds is not moved, and goes with its patcher
        self.model_data.sd_model = None
        self.memory.unload_all_models()
        gc.collect()

    def _made(self, seed: int, channels: int, unet: Any) -> Any:
        unet = make_unet(seed, channels, dtype=self.DTYPE) if unet is None else unet
        return ModelPatcher(KModel(unet, self.DTYPE), self.place)

    def another(self, size: int, needed: int = 0) -> Any:
        # the WebUI holds its other models, and those that it does not would stay on the GPU as garbage
        self.others.append(super().another(size, needed))
        return self.others[-1]

    def __init__(self, settings: dict[str, Any], place: torch.device) -> None:
        super().__init__(settings, place)
        self.others: list[Any] = []

    def _module_of(self, size: int) -> nn.Module:
        return forge_shared.Another(size, forge_old.Linear)

    def lora(self, *args: Any, **kwargs: Any) -> None:
        sys.modules["networks"].model_lora_keys_unet(self.model_data.sd_model.original.model)
        super().lora(*args, **kwargs)

    def load_whole(self, patcher: Any) -> None:
        LoadedModel(patcher).model_load()

    def _load(self, patcher: Any) -> None:
        self.memory.load_models_gpu([patcher, *self.with_it], self.needed)

    with_it: tuple[Any, ...] = ()
    """Patchers of the ControlNets of the next image."""

    def _free(self, memory_required: float, device: Any, keep_loaded: Any = (), free_all: bool = False) -> None:
        for i in range(len(self.current) - 1, -1, -1):
            if sys.getrefcount(self.current[i].model) <= 2:
                self.current.pop(i).model_unload(avoid_model_moving=True)
        for i in range(len(self.current) - 1, -1, -1):
            if self.memory.get_free_memory(device) > memory_required:
                break
            if self.current[i].device == device and self.current[i] not in keep_loaded:
                self.current.pop(i).model_unload()

    def _unload_all(self) -> None:
        self.memory.free_memory(1e30, self.place, free_all=True)

    def _load_models(
        self, models: Any, memory_required: float = 0, hard_memory_preservation: float = 0
    ) -> None:
        needed = max(self.reserve, memory_required) + hard_memory_preservation
        for_forward = self.reserve + hard_memory_preservation
        to_load, there = [], []
        for patcher in models:
            loaded = self.memory.LoadedModel(patcher)
            if loaded in self.current:
                self.current.insert(0, self.current.pop(self.current.index(loaded)))
                there.append(loaded)
            else:
                to_load.append(loaded)
        if not to_load:
            self.memory.free_memory(needed, self.place, there)
            return
        for loaded in to_load:
            for i in reversed([i for i, each in enumerate(self.current) if loaded.model.is_clone(each.model)]):
                self.current.pop(i).model_unload(avoid_model_moving=True)
        required = 0.0
        for loaded in to_load:
            loaded.compute_inclusive_exclusive_memory()
            required += loaded.exclusive_memory + 0.25 * loaded.inclusive_memory
        self.memory.free_memory(required * 1.3 + needed, self.place, there)
        for loaded in to_load:
            kept, free = -1.0, self.memory.get_free_memory(self.place)
            if free - loaded.exclusive_memory - for_forward < 0:
                kept = self.memory.compute_model_gpu_memory_when_using_cpu_swap(free, for_forward)
                kept = loaded.inclusive_memory if loaded.inclusive_memory > 0 else kept
            loaded.model_load(kept)
            self.current.insert(0, loaded)


running = Host.running()
