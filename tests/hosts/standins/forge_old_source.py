"""Forge's stand-in with the source of its own memory management, patcher and loader of LoRA, from a checkout of Forge
(`SFAST_FORGE_OLD_DIR`). None of its packages is needed."""

from __future__ import annotations

import ast
import os
import sys
import time
from enum import Enum
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from hosts.standins import forge_old_memory
from hosts.standins.a1111 import lora_delta

IN_PARTS = forge_old_memory.IN_PARTS
FOLDER = os.environ.get("SFAST_FORGE_OLD_DIR", "")
MANAGEMENT = (
    "bake_gguf_model", "module_size", "module_move", "build_module_profile", "LoadedModel", "unload_model_clones",
    "free_memory", "compute_model_gpu_memory_when_using_cpu_swap", "load_models_gpu", "load_model_gpu",
    "is_device_type", "is_device_cpu", "unload_all_models", "cast_to_device",
)  # fmt: skip
UTILS = ("set_attr_raw", "get_attr", "get_attr_with_parent", "tensor2parameter")
VRAMState = Enum("VRAMState", ["DISABLED", "NO_VRAM", "LOW_VRAM", "NORMAL_VRAM", "HIGH_VRAM", "SHARED"])


def take(file: str, names: tuple[str, ...], into: dict[str, Any]) -> None:
    """Define functions and classes of a file of Forge's in a module."""
    path = Path(FOLDER, file)
    tree = ast.parse(path.read_text(encoding="utf-8"))
    tree.body = [each for each in tree.body if getattr(each, "name", None) in names]
    exec(compile(tree, str(path), "exec"), into)


class Host(forge_old_memory.Host):
    """The WebUI."""

    def modules(self) -> dict[str, ModuleType]:
        found = super().modules()
        management, lora = found["backend.memory_management"], found["backend.patcher.lora"]
        base = found["backend.patcher.base"]
        utils = ModuleType("backend.utils")
        take("backend/utils.py", UTILS, utils.__dict__)
        vars(utils)["torch"] = torch
        vars(management).update(
            torch=torch, sys=sys, time=time, utils=utils, PIN_SHARED_MEMORY=False, ALWAYS_VRAM_OFFLOAD=False,
            VRAMState=VRAMState, vram_state=VRAMState.NORMAL_VRAM, lowvram_available=True, signal_empty_cache=False,
            is_intel_xpu=lambda: False, device_should_use_non_blocking=lambda device: False,
            soft_empty_cache=torch.cuda.empty_cache, get_torch_device=lambda: self.place,
            stream=SimpleNamespace(should_use_stream=lambda: False), get_free_memory=self._free_of,
        )  # fmt: skip
        take("backend/memory_management.py", MANAGEMENT, vars(management))
        vars(lora).update(
            torch=torch, memory_management=management, utils=utils, operations=SimpleNamespace(bnb_avaliable=False)
        )
        names = ("LoraLoader", "merge_lora_to_weight", "get_parameter_devices", "set_parameter_devices")
        take("backend/patcher/lora.py", names, vars(lora))
        vars(base).update(memory_management=management, utils=utils, LoraLoader=vars(lora)["LoraLoader"])
        vars(base).update(copy=__import__("copy"), inspect=__import__("inspect"))
        take("backend/patcher/base.py", ("ModelPatcher",), vars(base))
        return found

    def _free_of(self, device: Any = None, torch_free_too: bool = False) -> Any:
        free = self._free_bytes(device)
        return (free, 0) if torch_free_too else free

    def _made(self, seed: int, channels: int, unet: Any) -> Any:
        unet = forge_old_memory.make_unet(seed, channels, dtype=self.DTYPE) if unet is None else unet
        return self._patcher(forge_old_memory.KModel(unet, self.DTYPE))

    def _patcher(self, model: Any) -> Any:
        return sys.modules["backend.patcher.base"].ModelPatcher(model, self.place, torch.device("cpu"))

    def patcher_of(self, size: int) -> Any:
        return self._patcher(self._module_of(size))

    def load_whole(self, patcher: Any) -> None:
        self.memory.LoadedModel(patcher).model_load()

    def lora(self, online: bool = False, everywhere: bool = False, **multipliers: float) -> None:
        sys.modules["networks"].model_lora_keys_unet(self.model_data.sd_model.original.model)
        objects = self.model_data.sd_model.forge_objects
        objects.unet = self.model_data.sd_model.original
        for name, strength in multipliers.items():
            objects.unet = objects.unet.clone()
            patches = {}
            for path, layer in self.unet.named_modules():
                if isinstance(layer, self.LAYER):
                    key = f"diffusion_model.{path}.weight"
                    patches[key] = ("diff", (lora_delta(name, key, torch.empty(layer.weight.shape)),))
            objects.unet.add_patches(filename=name, patches=patches, strength_patch=strength, online_mode=online)


running = Host.running()
