"""The patcher of Forge Neo 2.26 (`backend/patcher/base.py`) and its layers (`backend/operations.py`), as far as they
decide what of a model is on the GPU, in the same order of steps."""

from __future__ import annotations

import collections
import functools
import uuid
from typing import Any

import torch
from torch import nn

from hosts.standins import a1111, forge, forge_shared
from hosts.standins.a1111 import lora_delta, weights
from sfast_ext.tools.lib import models

HALF = torch.bfloat16
Backup = collections.namedtuple("Backup", ["weight", "inplace_update"])
PINNED: dict[int, int] = {}
"""Bytes of memory that is pinned, by address: `backend.memory_management.PINNED_MEMORY`."""


class Layer(forge.Layer):
    """A layer whose weights come to where its input is, if they are cast in each call."""

    def cast(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weight, bias = super().cast(x)
        if self.parameters_manual_cast:
            weight, bias = weight.to(x.device, x.dtype), None if bias is None else bias.to(x.device, x.dtype)
        return weight, bias


class Linear(nn.Linear, Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, *self.patched(x))


class Conv2d(nn.Conv2d, Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._conv_forward(x, *self.patched(x))


class GroupNorm(nn.GroupNorm, Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.group_norm(x, self.num_groups, *self.patched(x), self.eps)


class LayerNorm(nn.LayerNorm, Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.layer_norm(x, self.normalized_shape, *self.patched(x), self.eps)


def make_unet(seed: int, channels: int, levels: int | None = None, dtype: torch.dtype = HALF) -> nn.Module:
    """A tiny UNet, all of whose layers may be cast."""
    return models.copied(_made(seed, channels, levels or a1111.by_default)).to(dtype)


# in float32, which tests of system memory do not count
@functools.lru_cache(maxsize=None)
def _made(seed: int, channels: int, levels: int) -> nn.Module:
    kind = forge.IntegratedUNet2DConditionModel
    unet = models.copied(forge.made(channels, kind, Linear, Conv2d, levels))
    for module in forge_shared.with_norms(unet, GroupNorm, LayerNorm).modules():
        if isinstance(module, Layer):
            module.parameters_manual_cast = False
    unet.load_state_dict(weights(unet, seed))
    return unet.eval().requires_grad_(False)


class KModel(forge_shared.Computed, forge.KModel):
    device = torch.device("cpu")


def _size(module: nn.Module) -> int:
    return sum(t.nbytes for t in module.state_dict().values())


class ModelPatcher:
    """`backend.patcher.base.ModelPatcher`.

    Like the real one, `load()` and `partially_unload()` give wrong images if they find a model in parts with LoRA, and
    another amount of memory: LoRA is added twice to a weight that has it and has no room now, and LoRA that is applied
    in each call is dropped from layers that are loaded already, or applied twice if these leave. `MENDED` is without
    it: a model in parts with LoRA is loaded anew.
    """

    MENDED = False

    def __init__(self, model: Any, load_device: torch.device, offload_device: Any = None, size: int = 0) -> None:
        self.model, self.load_device, self.size = model, load_device, size
        self.offload_device = offload_device or torch.device("cpu")
        self.patches: dict[str, list[tuple[str, float, bool]]] = {}
        self.backup: dict[str, Backup] = {}
        self.patches_uuid = uuid.uuid4()
        self.parent: Any = None
        self.pinned: set[str] = set()
        self.force_cast_weights = self.weight_inplace_update = False
        self.weight_wrapper_patches: dict[str, Any] = {}
        self.model_options: dict[str, Any] = {"transformer_options": {}}
        for name, value in (
            ("model_loaded_weight_memory", 0), ("lowvram_patch_counter", 0), ("model_lowvram", False),
            ("current_weight_patches_uuid", None), ("model_offload_buffer_memory", 0), ("device", self.offload_device),
        ):  # fmt: skip
            if name not in vars(self.model):
                setattr(self.model, name, value)

    def has_online_lora(self) -> bool:
        return any(any(patch[-1] for patch in patches) for patches in self.patches.values())

    def use_online_lora(self, key: str) -> bool:
        return any(patch[-1] for patch in self.patches.get(key, ()))

    def model_size(self) -> int:
        if self.size <= 0:
            self.size = _size(self.model)
        return self.size

    def loaded_size(self) -> int:
        return self.model.model_loaded_weight_memory

    def clone(self) -> ModelPatcher:
        other = type(self)(self.model, self.load_device, self.offload_device, self.model_size())
        other.patches = {key: [*found] for key, found in self.patches.items()}
        other.patches_uuid, other.backup, other.parent = self.patches_uuid, self.backup, self
        other.pinned = self.pinned
        other.model_options = {"transformer_options": dict(self.model_options["transformer_options"])}
        return other

    def is_clone(self, other: Any) -> bool:
        return self.model is getattr(other, "model", None)

    def add_patches(self, patches: dict[str, str], strength_patch: float = 1.0, *, online_mode: bool = False) -> None:
        names = self.model.state_dict()
        for key in patches.keys() & names.keys():
            self.patches.setdefault(key, []).append((patches[key], strength_patch, online_mode))
        self.patches_uuid = uuid.uuid4()

    def _merged(self, key: str, weight: torch.Tensor) -> torch.Tensor:
        wide = weight.float()
        for name, strength, _ in self.patches[key]:
            wide = wide + strength * lora_delta(name, key, wide)
        return wide.to(weight.dtype)

    def _at(self, key: str) -> tuple[nn.Module, str]:
        path, _, name = key.rpartition(".")
        return self.model.get_submodule(path), name

    def _set(self, key: str, value: torch.Tensor) -> None:
        layer, name = self._at(key)
        setattr(layer, name, nn.Parameter(value, requires_grad=False))

    def patch_weight_to_device(self, key: str, device_to: Any = None, inplace_update: bool = False) -> None:
        if key not in self.patches:
            return
        layer, name = self._at(key)
        weight = getattr(layer, name)
        if key not in self.backup:
            self.backup[key] = Backup(weight.to(device=self.offload_device), inplace_update)
        self._set(key, self._merged(key, weight.to(device_to)))

    def pin_weight_to_device(self, key: str) -> None:
        weight = self.model.get_parameter(key)
        if weight.device.type == "cpu":
            PINNED[weight.data_ptr()] = weight.nbytes
            self.pinned.add(key)

    def unpin_weight(self, key: str) -> None:
        if key in self.pinned:
            weight = self.model.get_parameter(key)
            if weight.device.type == "cpu" and PINNED.get(weight.data_ptr()) == weight.nbytes:
                del PINNED[weight.data_ptr()]
            self.pinned.remove(key)

    def unpin_all_weights(self) -> None:
        for key in list(self.pinned):
            self.unpin_weight(key)

    def _load_list(self) -> list[Any]:
        loading = []
        for n, m in self.model.named_modules():
            params = dict(m.named_parameters(recurse=False))
            if params and len(params) == len(list(m.parameters())):
                loading.append((_size(m), n, m, params))
        return loading

    def load(
        self,
        device_to: Any = None,
        lowvram_model_memory: float = 0,
        force_patch_weights: bool = False,
        full_load: bool = False,
    ) -> None:
        mem_counter = lowvram_counter = 0
        loading, load_completely, offloaded = self._load_list(), [], []
        loading.sort(key=lambda x: x[:2], reverse=True)
        for module_mem, n, m, params in loading:
            fits = mem_counter + 2 * module_mem < lowvram_model_memory
            if not full_load and not fits:
                lowvram_counter += 1
                if hasattr(m, "prev_parameters_manual_cast"):
                    continue
                m.weight_function, m.bias_function = [], []
                if f"{n}.weight" in self.patches:
                    m.weight_function = [lambda weight, key=f"{n}.weight": self._merged(key, weight)]
                m.prev_parameters_manual_cast = m.parameters_manual_cast
                m.parameters_manual_cast = True
                offloaded.append((n, params))
                continue
            if hasattr(m, "prev_parameters_manual_cast"):
                m.parameters_manual_cast = m.prev_parameters_manual_cast
                del m.prev_parameters_manual_cast
            m.weight_function, m.bias_function = [], []
            mem_counter += module_mem
            load_completely.append((n, m, params))
        for n, m, params in load_completely:
            if getattr(m, "forge_patched_weights", False):
                continue
            for param in params:
                key = f"{n}.{param}"
                if self.use_online_lora(key):
                    m.weight_function = [lambda weight, key=key: self._merged(key, weight)]
                    m.prev_parameters_manual_cast = m.parameters_manual_cast
                    m.parameters_manual_cast = True
                else:
                    self.unpin_weight(key)
                    self.patch_weight_to_device(key, device_to=device_to)
            m.forge_patched_weights = True
        for _, m, _ in load_completely:
            m.to(device_to)
        for n, params in offloaded:
            for param in params:
                self.pin_weight_to_device(f"{n}.{param}")
        self.model.model_lowvram = lowvram_counter > 0
        if not lowvram_counter and full_load:
            self.model.to(device_to)
            mem_counter = self.model_size()
        self.model.device = device_to
        self.model.model_loaded_weight_memory = mem_counter
        self.model.current_weight_patches_uuid = self.patches_uuid

    def unpatch_model(self, device_to: Any = None, unpatch_weights: bool = True) -> None:
        if not unpatch_weights:
            return
        self.unpin_all_weights()
        if self.model.model_lowvram:
            for m in self.model.modules():
                if hasattr(m, "prev_parameters_manual_cast"):
                    m.parameters_manual_cast = m.prev_parameters_manual_cast
                    del m.prev_parameters_manual_cast
                if hasattr(m, "weight_function"):
                    m.weight_function, m.bias_function = [], []
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
            vars(m).pop("forge_patched_weights", None)

    def partially_unload(self, device_to: Any, memory_to_free: float = 0, force_patch_weights: bool = False) -> int:
        freed = 0
        for module_mem, n, m, params in sorted(self._load_list(), key=lambda x: x[:2]):
            if memory_to_free < freed:
                break
            if not getattr(m, "forge_patched_weights", False):
                continue
            for param in params:
                if (key := f"{n}.{param}") in self.backup:
                    self._set(key, self.backup.pop(key).weight)
            m.to(device_to)
            if f"{n}.weight" in self.patches:
                if self.MENDED:
                    m.weight_function = []
                m.weight_function.append(lambda weight, key=f"{n}.weight": self._merged(key, weight))
            m.prev_parameters_manual_cast = m.parameters_manual_cast
            m.parameters_manual_cast, m.forge_patched_weights = True, False
            freed += module_mem
            for param in params:
                self.pin_weight_to_device(f"{n}.{param}")
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
        if extra_memory < 0 and not unpatch:
            self.partially_unload(self.offload_device, -extra_memory, force_patch_weights=force_patch_weights)
            return 0
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
