"""The patcher of reForge 1.0.0v2 (`ldm_patched.modules.model_patcher`), as far as it decides what of a model is on the
GPU, in the same order of steps."""

from __future__ import annotations

import collections
import functools
import sys
import uuid
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from hosts.standins.a1111 import lora_delta

Backup = collections.namedtuple("Backup", ["weight", "inplace_update"])


def module_size(module: nn.Module) -> int:
    return sum(t.nbytes for t in module.state_dict().values())


class ModelPatcher:
    """`ldm_patched.modules.model_patcher.ModelPatcher`.

    Like the real one, `load()` adds LoRA twice to a weight that has it and has no room now. `MENDED` is without it: a
    model in parts with LoRA is loaded anew. LoRA in the layers of a model in parts is computed in float32, as a merged
    one is; the real one computes it in the layer's dtype.
    """

    MENDED = False

    def __init__(self, model: Any, load_device: torch.device, offload_device: Any = None, size: int = 0) -> None:
        self.model, self.load_device, self.size = model, load_device, size
        self.offload_device = offload_device or torch.device("cpu")
        self.patches: dict[str, list[tuple[str, float]]] = {}
        self.backup: dict[str, Backup] = {}
        self.patches_uuid = uuid.uuid4()
        self.parent: Any = None
        self.force_cast_weights = self.weight_inplace_update = False
        self.weight_wrapper_patches: dict[str, Any] = {}
        self.callbacks: dict[str, dict[Any, list[Callable[..., Any]]]] = {"on_load": {}}
        self.injections: dict[str, list[Any]] = {}
        self.hook_patches: dict[Any, Any] = {}
        self.current_hooks = self.forced_hooks = None
        self.model_options: dict[str, Any] = {"transformer_options": {}}
        for name, value in (
            ("model_loaded_weight_memory", 0), ("lowvram_patch_counter", 0), ("model_lowvram", False),
            ("current_weight_patches_uuid", None), ("device", self.offload_device),
        ):  # fmt: skip
            if name not in vars(self.model):
                setattr(self.model, name, value)
        self.model_size()

    def model_size(self) -> int:
        if self.size <= 0:
            self.size = sys.modules["ldm_patched.modules.model_management"].module_size(self.model)
        return self.size

    def loaded_size(self) -> int:
        return self.model.model_loaded_weight_memory

    def clone(self) -> ModelPatcher:
        other = type(self)(self.model, self.load_device, self.offload_device, self.size)
        other.patches = {key: [*found] for key, found in self.patches.items()}
        other.patches_uuid, other.backup, other.parent = self.patches_uuid, self.backup, self
        other.model_options = {"transformer_options": dict(self.model_options["transformer_options"])}
        return other

    def is_clone(self, other: Any) -> bool:
        return self.model is getattr(other, "model", None)

    def use_ejected(self) -> Any:
        return nullcontext()

    def get_all_callbacks(self, kind: str) -> list[Callable[..., Any]]:
        return [each for found in self.callbacks.get(kind, {}).values() for each in found]

    def add_patches(self, patches: dict[str, str], strength_patch: float = 1.0, **more: Any) -> None:
        assert not more.get("online_mode")
        names = self.model.state_dict()
        for key in patches.keys() & names.keys():
            self.patches.setdefault(key, []).append((patches[key], strength_patch))
        self.patches_uuid = uuid.uuid4()

    def _merged(self, key: str, weight: torch.Tensor) -> torch.Tensor:
        wide = weight.float()
        for name, strength in self.patches[key]:
            wide = wide + strength * lora_delta(name, key, wide)
        return wide.to(weight.dtype)

    def _set(self, key: str, value: torch.Tensor) -> None:
        path, _, name = key.rpartition(".")
        setattr(self.model.get_submodule(path), name, nn.Parameter(value, requires_grad=False))

    def patch_weight_to_device(self, key: str, device_to: Any = None, inplace_update: bool = False) -> None:
        if key not in self.patches:
            return
        path, _, name = key.rpartition(".")
        weight = getattr(self.model.get_submodule(path), name)
        if key not in self.backup:
            self.backup[key] = Backup(weight.to(device=self.offload_device), inplace_update)
        self._set(key, self._merged(key, weight.to(device_to)))

    def _load_list(self) -> list[Any]:
        loading = []
        for n, m in self.model.named_modules():
            params = [name for name, _ in m.named_parameters(recurse=False)]
            if params and len(params) == len(list(m.parameters())):
                size = sys.modules["ldm_patched.modules.model_management"].module_size(m)
                loading.append((size, n, m, params))
        return loading

    def load(
        self,
        device_to: Any = None,
        lowvram_model_memory: float = 0,
        force_patch_weights: bool = False,
        full_load: bool = False,
    ) -> None:
        with self.use_ejected():
            mem_counter = lowvram_counter = 0
            load_completely = []
            for module_mem, n, m, params in sorted(self._load_list(), key=lambda x: x[:2], reverse=True):
                fits = mem_counter + module_mem < lowvram_model_memory
                if not full_load and not fits and hasattr(m, "ldm_patched_cast_weights"):
                    lowvram_counter += 1
                    if hasattr(m, "prev_ldm_patched_cast_weights"):
                        continue
                    m.weight_function, m.bias_function = [], []
                    if f"{n}.weight" in self.patches:
                        m.weight_function = [functools.partial(self._merged, f"{n}.weight")]
                    m.prev_ldm_patched_cast_weights = m.ldm_patched_cast_weights
                    m.ldm_patched_cast_weights = True
                    continue
                self._wipe(m)
                if full_load or fits:
                    mem_counter += module_mem
                    load_completely.append((n, m, params))
            for n, m, params in load_completely:
                if getattr(m, "ldm_patched_patched_weights", False):
                    continue
                for param in params:
                    self.patch_weight_to_device(f"{n}.{param}", device_to=device_to)
                m.ldm_patched_patched_weights = True
            for _, m, _ in load_completely:
                m.to(device_to)
            self.model.model_lowvram = lowvram_counter > 0
            if not lowvram_counter and full_load:
                self.model.to(device_to)
                mem_counter = self.model_size()
            self.model.device = device_to
            self.model.model_loaded_weight_memory = mem_counter
            self.model.current_weight_patches_uuid = self.patches_uuid
            for callback in self.get_all_callbacks("on_load"):
                callback(self, device_to, lowvram_model_memory, force_patch_weights, full_load)

    def _wipe(self, m: Any) -> None:
        if hasattr(m, "prev_ldm_patched_cast_weights"):
            m.ldm_patched_cast_weights = m.prev_ldm_patched_cast_weights
            del m.prev_ldm_patched_cast_weights
        if hasattr(m, "weight_function"):
            m.weight_function, m.bias_function = [], []

    def unpatch_model(self, device_to: Any = None, unpatch_weights: bool = True) -> None:
        if not unpatch_weights:
            return
        if self.model.model_lowvram:
            for m in self.model.modules():
                self._wipe(m)
            self.model.model_lowvram, self.model.lowvram_patch_counter = False, 0
        for key, kept in self.backup.items():
            self._set(key, kept.weight)
        self.model.current_weight_patches_uuid = None
        self.backup.clear()
        if device_to is not None:
            self.model.to(device_to)
            self.model.device = device_to
        self.model.model_loaded_weight_memory = 0
        for m in self.model.modules():
            vars(m).pop("ldm_patched_patched_weights", None)

    def partially_unload(self, device_to: Any, memory_to_free: float = 0) -> int:
        with self.use_ejected():
            freed = 0
            for module_mem, n, m, params in sorted(self._load_list(), key=lambda x: x[:2]):
                if memory_to_free < freed:
                    break
                if not getattr(m, "ldm_patched_patched_weights", False):
                    continue
                castable = hasattr(m, "ldm_patched_cast_weights")
                keys = [key for param in params if (key := f"{n}.{param}") in self.backup]
                if keys and not castable:
                    continue
                for key in keys:
                    self._set(key, self.backup.pop(key).weight)
                m.to(device_to)
                if castable:
                    if f"{n}.weight" in self.patches:
                        if self.MENDED:
                            m.weight_function = []
                        m.weight_function.append(functools.partial(self._merged, f"{n}.weight"))
                    m.prev_ldm_patched_cast_weights = m.ldm_patched_cast_weights
                    m.ldm_patched_cast_weights = True
                m.ldm_patched_patched_weights = False
                freed += module_mem
            self.model.model_lowvram = True
            self.model.model_loaded_weight_memory -= freed
            return freed

    def partially_load(self, device_to: Any, extra_memory: float = 0, force_patch_weights: bool = False) -> float:
        current = self.model.current_weight_patches_uuid
        anew = force_patch_weights or self.MENDED and bool(self.patches) and self.model.model_lowvram
        unpatch = current is not None and (current != self.patches_uuid or anew)
        used = self.model.model_loaded_weight_memory
        self.unpatch_model(self.offload_device, unpatch_weights=unpatch)
        if unpatch:
            extra_memory += used - self.model.model_loaded_weight_memory
        if not self.model.model_lowvram and self.model.model_loaded_weight_memory > 0:
            return 0
        before = self.model.model_loaded_weight_memory
        whole = before + extra_memory > self.model_size()
        try:
            self.load(device_to, lowvram_model_memory=before + extra_memory, full_load=whole)
        except Exception:
            self.detach()
            raise
        return self.model.model_loaded_weight_memory - before

    def detach(self, unpatch_all: bool = True) -> None:
        if unpatch_all:
            self.unpatch_model(self.offload_device, unpatch_weights=unpatch_all)

    def current_loaded_device(self) -> Any:
        return self.model.device
