"""Forge Neo 2.26 with its memory management (`backend/memory_management.py`), as far as it decides what of a model is
on the GPU, in the same order of steps."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any
from unittest import mock

import torch

from hosts.standins import forge, forge_shared
from hosts.standins.a1111 import _module
from hosts.standins.forge_neo_patcher import KModel, Layer, Linear, ModelPatcher, make_unet


class LoadedModel:
    """`backend.memory_management.LoadedModel`."""

    def __init__(self, model: ModelPatcher) -> None:
        self._model, self._parent = weakref.ref(model), model.parent
        self.device = model.load_device

    @property
    def model(self) -> Any:
        return self._model() or self._parent

    def model_memory(self) -> Any:
        return self.model.model_size()

    def model_loaded_memory(self) -> Any:
        return self.model.loaded_size()

    def model_offloaded_memory(self) -> Any:
        return self.model.model_size() - self.model.loaded_size()

    def model_memory_required(self, device: Any) -> Any:
        return self.model_offloaded_memory() if device == self.model.current_loaded_device() else self.model_memory()

    def model_load(self, lowvram_model_memory: float = 0) -> None:
        self.model.partially_load(self.device, lowvram_model_memory or 1e32)

    def model_unload(self, memory_to_free: float) -> bool:
        model = self.model
        if (
            memory_to_free < model.loaded_size()
            and model.partially_unload(model.offload_device, memory_to_free) >= memory_to_free
        ):
            return False
        model.detach()
        return True


class Managed(forge.Host):
    """A WebUI that loads models in parts. `reserve` bytes are what it leaves free for a forward."""

    FACTOR = 1.1
    """How much of what models take is to be free before they are loaded."""
    AGAIN = False
    """Whether it makes room a second time for the forward alone."""
    FLOOR = False
    """Whether a model that is on the GPU is never told to give something of it back when it is loaded."""
    reserve = 0

    def __init__(self, settings: dict[str, Any], place: torch.device) -> None:
        super().__init__(settings, place)
        self.current: list[LoadedModel] = []

    def _managing(self) -> dict[str, Any]:
        """Names of its memory management, and what they stand for."""
        return {
            "free_memory": self._free,
            "get_free_memory": self._free_bytes,
            "LoadedModel": LoadedModel,
            "load_models_gpu": self._load_models,
            "current_loaded_models": self.current,
        }

    def _drop(self) -> None:
        # it leaves the GPU before it is dropped
        kept = self.model_data.sd_model
        super()._drop()
        del kept

    def _free_bytes(self, device: Any = None) -> float:
        return torch.cuda.mem_get_info()[0] if getattr(device, "type", "") == "cuda" else 1 << 40

    def _free(self, memory_required: float, device: Any, keep_loaded: Any = ()) -> None:
        # a finalizer takes those out whose model is gone
        self.current[:] = [each for each in self.current if each.model is not None]
        rows = [(-each.model_offloaded_memory(), each.model_memory(), i) for i, each in enumerate(self.current)]
        gone = []
        for *_, i in sorted(rows):
            if self.current[i] in keep_loaded:
                continue
            free = self._free_bytes(device)
            if free > memory_required:
                break
            if self.current[i].model_unload(memory_required - free):
                gone.append(i)
        for i in sorted(gone, reverse=True):
            self.current.pop(i)

    def _unload_all(self) -> None:
        self.memory.free_memory(1e30, self.place)

    def _load_models(self, models: list[Any], memory_required: float = 0) -> None:
        extra = max(self.reserve, memory_required)
        to_load = []
        for patcher in models:
            known = next((each for each in self.current if each.model is patcher), None)
            to_load.append(known or LoadedModel(patcher))
        for loaded in to_load:
            self.current[:] = [each for each in self.current if not loaded.model.is_clone(each.model)]
        required = sum(each.model_memory_required(each.device) for each in to_load)
        self.memory.free_memory(required * self.FACTOR + extra, self.place)
        if self.AGAIN and self._free_bytes(self.place) < extra:
            self.memory.free_memory(extra, self.place)
        for loaded in to_load:
            there = loaded.model_loaded_memory()
            usable = max(0, self._free_bytes(self.place) + there - extra)
            loaded.model_load(max(0.1, usable - there) if self.FLOOR else (usable - there) or 0.1)
            self.current.insert(0, loaded)

    def _load(self, patcher: Any) -> None:
        self.memory.load_models_gpu([patcher], self.needed)

    needed = 0
    """Bytes that Forge expects a forward of the next image to take."""

    def _module_of(self, size: int) -> Any:
        return forge_shared.Another(size, Linear)

    def load_whole(self, patcher: Any) -> None:
        """All of a model comes to the GPU."""
        patcher.partially_load(self.place, 1e32)

    def patcher_of(self, size: int) -> Any:
        """The patcher of a model of so many bytes."""
        return type(self.model_data.sd_model.original)(self._module_of(size), self.place)

    def another(self, size: int, needed: int = 0) -> Any:
        """A text encoder or a VAE is loaded; its work takes so many bytes."""
        patcher = self.patcher_of(size)
        self.memory.load_models_gpu([patcher], needed)
        return patcher


class Host(Managed):
    """The WebUI."""

    LAYER = Layer
    DTYPE = torch.float32

    def modules(self) -> dict[str, ModuleType]:
        found = super().modules()
        for name, value in self._managing().items():
            setattr(found["backend.memory_management"], name, value)
        found["backend.patcher"].base = base = _module("backend.patcher.base", ModelPatcher=ModelPatcher)  # type: ignore[attr-defined]

        def model_lora_keys_unet(model: Any, key_map: Any = None) -> list[str]:
            return list(model.state_dict())

        names = _module("networks", model_lora_keys_unet=model_lora_keys_unet)
        return {**found, "backend.patcher.base": base, "networks": names}

    def _made(self, seed: int, channels: int, unet: Any) -> Any:
        unet = make_unet(seed, channels, dtype=self.DTYPE) if unet is None else unet
        return ModelPatcher(KModel(unet, self.DTYPE), self.place)

    def lora(self, *args: Any, **kwargs: Any) -> None:
        sys.modules["networks"].model_lora_keys_unet(self.model_data.sd_model.original.model)
        super().lora(*args, **kwargs)


@contextmanager
def running(place: torch.device | None = None, **settings: Any) -> Iterator[Host]:
    """The host in this process: its modules importable; all taken back at the end."""
    with mock.patch.object(forge, "Host", Host), forge.running(place, **settings) as host:
        assert isinstance(host, Host)
        yield host
