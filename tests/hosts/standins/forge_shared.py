"""What the stand-ins of Forges share beyond `forge`, most of it Forge by lllyasviel, Forge Classic and reForge."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar
from unittest import mock

import torch
from torch import nn

from hosts.standins import a1111, forge, forge_secondary
from hosts.standins.a1111 import _module, weights
from sfast_ext.tools.lib import models

LDM = ("modules", "modules_forge", "ldm_patched")
"""The packages of a program that has `ldm_patched` in place of `backend`."""


class Linear(nn.Linear):
    """Takes the weight and bias of each call from the program's `Layer`."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, *self.given(x))  # type: ignore[operator]


class Conv2d(nn.Conv2d):
    """See `Linear`."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._conv_forward(x, *self.given(x))  # type: ignore[operator]


class GroupNorm(nn.GroupNorm):
    """See `Linear`."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.group_norm(x, self.num_groups, *self.given(x), self.eps)  # type: ignore[operator]


class LayerNorm(nn.LayerNorm):
    """See `Linear`."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.layer_norm(x, self.normalized_shape, *self.given(x), self.eps)  # type: ignore[operator]


def with_norms(unet: nn.Module, group_norm: type[nn.Module], layer_norm: type[nn.Module]) -> nn.Module:
    """A UNet whose normalisations are a program's."""
    for module in unet.modules():
        for torchs, kind in ((nn.GroupNorm, group_norm), (nn.LayerNorm, layer_norm)):
            if isinstance(module, torchs):
                module.__class__ = kind
    return unet


class Another(nn.Module):
    """A text encoder or a VAE, of so many bytes in half precision.

    Args:
        linear: the program's layer.
    """

    def __init__(self, size: int, linear: type[nn.Linear]) -> None:
        super().__init__()
        self.layer = linear(1, max(1, size // 2), bias=False, dtype=torch.bfloat16)


class Computed:
    """A model around a UNet that is computed in another dtype than its latents have."""

    def __init__(self, unet: nn.Module, dtype: torch.dtype) -> None:
        super().__init__(unet)  # type: ignore[call-arg]
        self.computation_dtype = self.storage_dtype = dtype

    def apply_model(self, x, t, c_concat=None, c_crossattn=None, control=None, transformer_options=None, **kwargs):
        x, context = x.to(self.computation_dtype), c_crossattn.to(self.computation_dtype)
        return super().apply_model(x, t, None, context, control, transformer_options, **kwargs).float()


def cast(layer: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The weight and bias of a layer as its input is."""
    bias = layer.bias
    return layer.weight.to(x.device, x.dtype), None if bias is None else bias.to(x.device, x.dtype)


class Host(forge.Host):
    """The WebUI.

    A subclass has a `KIND` of UNet with layers `LINEAR` and `CONV2D`, a `MODEL` around it, a `PATCHER` of that, and
    `LOADED`, which has a patcher whose model is on the GPU.
    """

    VERSION: ClassVar[str]
    KIND: ClassVar[type[nn.Module]]
    LINEAR: ClassVar[type[nn.Linear]]
    CONV2D: ClassVar[type[nn.Conv2d]]
    MODEL: ClassVar[type[nn.Module]]
    PATCHER: ClassVar[Any]
    LOADED: ClassVar[Any]

    def __init__(self, settings: dict[str, Any], place: torch.device) -> None:
        super().__init__(settings, place)
        self.version = _module("modules_forge.forge_version", version=self.VERSION)
        self.on_the_gpu: list[Any] = []
        self.kept = -1.0
        """What the UNet may have of the GPU's memory; below 0 all of it."""

    @classmethod
    def make_unet(cls, seed: int, channels: int = 32, levels: int | None = None) -> nn.Module:
        """A tiny UNet, none of its weights zero."""
        return models.copied(cls._made_once(seed, channels, levels or a1111.by_default))

    @classmethod
    @functools.lru_cache(maxsize=None)
    def _made_once(cls, seed: int, channels: int, levels: int) -> nn.Module:
        unet = models.copied(forge.made(channels, cls.KIND, cls.LINEAR, cls.CONV2D, levels))
        unet.load_state_dict(weights(unet, seed))
        return unet.eval().requires_grad_(False)

    @classmethod
    def running(cls, tops: tuple[str, ...] = forge.TOPS) -> Callable[..., AbstractContextManager[Any]]:
        """The stand-in's own `running`: the host in this process, its modules importable; all taken back at the end."""

        @contextmanager
        def run(place: torch.device | None = None, **settings: Any) -> Iterator[Any]:
            with (
                mock.patch.object(forge, "Host", cls),
                mock.patch.object(forge, "TOPS", tops),
                forge.running(place, **settings) as host,
            ):
                assert isinstance(host, cls)
                yield host

        return run

    def _made(self, seed: int, channels: int, unet: nn.Module | None) -> Any:
        return self.PATCHER(self.MODEL(self.make_unet(seed, channels) if unet is None else unet), self.place)

    def _free_loaded(self, memory_required: float, device: Any, keep_loaded: Any = (), free_all: bool = False) -> None:
        for loaded in [each for each in self.on_the_gpu if each not in keep_loaded]:
            self.on_the_gpu.remove(loaded)
            loaded.model_unload()

    def _load(self, patcher: Any) -> None:
        """A clone of what is loaded is not moved there and back."""
        if any(each.model is patcher for each in self.on_the_gpu):
            return
        for loaded in [each for each in self.on_the_gpu if each.model.model is patcher.model]:
            self.on_the_gpu.remove(loaded)
            loaded.model_unload(avoid_model_moving=True)
        loaded = self.LOADED(patcher)
        self._measure(patcher)
        loaded.model_load(self.kept)
        self.on_the_gpu.append(loaded)

    def _measure(self, patcher: Any) -> None:
        """What the program does before it loads a model."""


class LdmHost(Host):
    """A WebUI that has `ldm_patched` in place of `backend`."""

    def modules(self) -> dict[str, ModuleType]:
        found = {name: each for name, each in super().modules().items() if name.partition(".")[0] != "backend"}
        name = "ldm_patched.modules"
        inner = {
            "model_management": _module(f"{name}.model_management", **self._management()),
            "model_patcher": _module(f"{name}.model_patcher", ModelPatcher=self.PATCHER),
            "controlnet": forge_secondary.modules(name)[f"{name}.controlnet"],
        }
        found["ldm_patched"] = _module("ldm_patched")
        found[name] = _module(name, __path__=[str(Path(__file__).parent)], **inner)
        return {**found, **{f"{name}.{each}": module for each, module in inner.items()}}

    def _management(self) -> dict[str, Any]:
        return {
            "free_memory": self._free,
            "unload_all_models": lambda: self._unload_all(),
            "get_free_memory": lambda device: self.system_memory,
            "module_size": lambda module, exclude_device=None: sum(t.nbytes for t in module.state_dict().values()),
        }

    @property
    def memory(self) -> Any:
        return sys.modules["ldm_patched.modules.model_management"]

    def _measure(self, patcher: Any) -> None:
        self.memory.module_size(patcher.model)
