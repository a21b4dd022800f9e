"""What is other in Forge Neo 2.29, next to the stand-in of 2.26: its patcher computes LoRA in layers by functions that
were added to them, whose strength may change at each step; and guidance may run in two calls.

Only what the adapter touches is here. It was read in that release's files, and not run.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any
from unittest import mock

import torch

from hosts.standins import forge
from hosts.standins.a1111 import _module, lora_delta


class OnlineLoRAPatch:
    """One network in one layer."""

    def __init__(self, name: str, key: str, strength: float) -> None:
        self.name, self.key, self.patch = name, key, [[strength]]

    def __call__(self, weight: torch.Tensor) -> torch.Tensor:
        return weight + self.patch[0][0] * lora_delta(self.name, self.key, weight)


class ModelPatcher:
    """That of 2.26, with functions around weights."""

    unpin_all_weights = forge.ModelPatcher.unpin_all_weights
    detach, _merged = forge.ModelPatcher.detach, forge.ModelPatcher._merged
    partially_load = forge.ModelPatcher.partially_load
    patches: dict[str, Any]
    model: Any

    def __init__(self, model: Any, load_device: torch.device) -> None:
        forge.ModelPatcher.__init__(self, model, load_device)  # type: ignore[arg-type]
        self.weight_wrapper_patches: dict[str, list[OnlineLoRAPatch]] = {}

    def clone(self) -> ModelPatcher:
        other: Any = forge.ModelPatcher.clone(self)  # type: ignore[arg-type]
        other.weight_wrapper_patches = dict(self.weight_wrapper_patches)
        return other

    def add_patches(self, patches: dict[str, str], strength_patch: float = 1.0, *, online_mode: bool = False) -> None:
        forge.ModelPatcher.add_patches(self, {} if online_mode else patches, strength_patch)  # type: ignore[arg-type]
        for key, name in patches.items() if online_mode else ():
            found = self.weight_wrapper_patches.get(key, [])
            self.weight_wrapper_patches[key] = [*found, OnlineLoRAPatch(name, key, strength_patch)]

    def load(
        self, device_to: Any = None, lowvram_model_memory: float = 0, force_patch_weights: bool = False, full_load=False
    ) -> None:
        for layer in self.model.modules():
            if isinstance(layer, forge.Layer):
                layer.weight_function, layer.bias_function = [], []
        forge.ModelPatcher.load(self, device_to, full_load=full_load)  # type: ignore[arg-type]
        for key, functions in self.weight_wrapper_patches.items():
            self.model.get_submodule(key.rpartition(".")[0]).weight_function.extend(functions)
        # names of what it reads: model_lowvram, current_weight_patches_uuid
        assert self.model.current_weight_patches_uuid is not None or self.model.model_lowvram

    def partially_unload(
        self, device_to: Any, memory_to_free: float = 0, force_patch_weights: bool = False
    ) -> float:
        return forge.ModelPatcher.partially_unload(self, device_to, memory_to_free)  # type: ignore[arg-type]


class KModel(forge.KModel):
    """Calls the UNet once, or once for each side of guidance."""

    together = True

    def apply_model(self, x, t, c_concat=None, c_crossattn=None, control=None, transformer_options=None, **kwargs):
        if self.together:
            return super().apply_model(x, t, None, c_crossattn, control, transformer_options, **kwargs)
        found = []
        for side in (1, 0):
            own = {**transformer_options, "cond_or_uncond": [side], "cond_mark": torch.full((1,), float(side))}
            row = slice(side, side + 1)
            found.insert(0, super().apply_model(x[row], t[row], None, c_crossattn[row], None, own))
        return torch.cat(found)


class Host(forge.Host):
    """The WebUI."""

    def __init__(self, settings: dict[str, Any], place: torch.device) -> None:
        super().__init__(settings, place)
        self.version = _module("modules_forge.forge_version", version="neo", release="2.29.1")

    def modules(self) -> dict[str, ModuleType]:
        found = super().modules()
        found["backend.patcher"].base = base = _module("backend.patcher.base", ModelPatcher=ModelPatcher)  # type: ignore[attr-defined]
        return {**found, "backend.patcher.base": base}

    def _made(self, seed: int, channels: int, unet: Any) -> Any:
        return ModelPatcher(KModel(forge.make_unet(seed, channels) if unet is None else unet), self.place)

    def schedule(self, strength: float) -> None:
        """As an extension does before a step: LoRA in the layers gets another strength."""
        for functions in self.model_data.sd_model.forge_objects.unet.weight_wrapper_patches.values():
            for each in functions:
                each.patch[0][0] = strength


@contextmanager
def running(place: torch.device | None = None, **settings: Any) -> Iterator[Host]:
    """The host in this process: its modules importable; all taken back at the end."""
    with mock.patch.object(forge, "Host", Host), forge.running(place, **settings) as host:
        assert isinstance(host, Host)
        yield host
