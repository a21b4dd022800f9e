"""Forge's GPU memory: plans must not hold what it frees or is about to use."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from sfast_ext.accelerator import Accelerator
from sfast_ext.hosts import gpu_room
from sfast_ext.hosts.attachment import Attachment, wrap
from sfast_ext.hosts.moves import fetch_weights, place_of
from sfast_ext.hosts.session import guarded
from sfast_ext.report import Report
from sfast_ext.runtime import graph_pool

_WHY = "the WebUI needs the GPU memory"


class ForgeMemory:
    """Frees the memory that Forge relies on.

    Forge moves a model to system memory where another needs the room, and for each change of LoRA: back on the GPU, it
    has other weights. Plans stay. The weights that they read stay on the GPU while there is room beside them for what
    Forge loads; they are else freed, and copied again at the next call.

    Args:
        attachment: has the accelerators of the UNets.
    """

    def __init__(self, attachment: Attachment, report: Report) -> None:
        self._attachment, self._report = attachment, report

    def install(self) -> list[Callable[[], None]]:
        """Wrap functions of Forge; returns what removes the wrappers."""
        from backend import memory_management
        from backend.patcher.base import ModelPatcher
        from modules import upscaler

        return [
            wrap(memory_management, "free_memory", self._free_memory),
            wrap(memory_management, "unload_all_models", self._unload_all),
            wrap(ModelPatcher, "load", self._load),
            wrap(ModelPatcher, "add_patches", self._add_patches),
            wrap(upscaler.Upscaler, "upscale", self._upscale),
        ]

    def _free_memory(self, original: Callable[..., Any], memory_required: float, *args: Any, **kwargs: Any) -> Any:
        result = original(memory_required, *args, **kwargs)
        # after it: what Forge has moved off the GPU may still be held by plans
        self._make_room(memory_required)
        return result

    def _unload_all(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        self._guarded(self._suspend)
        return result

    def _suspend(self) -> None:
        """Another checkpoint is about to be loaded, perhaps of the same architecture. Until then plans hold the weights
        of the one that Forge drops."""
        from backend import memory_management

        models = [accelerator.module for accelerator in self._attachment.accelerators()]
        held = sum(p.nbytes for model in models for p in model.parameters())
        if memory_management.get_free_memory(torch.device("cpu")) < 2 * held:
            self._attachment.release()
        else:
            self._attachment.suspend()

    def _load(self, original: Callable[..., Any], patcher: Any, device_to: Any = None, **more: Any) -> Any:
        place = place_of(device_to)
        if place is not None and place.type == "cuda":
            for accelerator in self._accelerators_in(patcher):
                whole = bool(more.get("full_load"))
                self._guarded(functools.partial(self._prepare, accelerator, patcher, place if whole else None))
        return original(patcher, device_to, **more)

    def _prepare(self, accelerator: Accelerator, patcher: Any, place: torch.device | None) -> None:
        """Before Forge moves a model to the GPU, in parts where no place is given: each weight that it patches is there
        twice until the next call."""
        weights = dict(patcher.model.named_parameters())
        patched = sum(weights[key].nbytes for key in patcher.patches if key in weights)
        graphs = functools.partial(graph_pool.make_room, self._report, _WHY)
        room = gpu_room.make_room(patched + gpu_room.WORKSPACE, [graphs])
        fetch_weights(accelerator, place if room else None, self._report, "Forge")

    def _add_patches(self, original: Callable[..., Any], patcher: Any, *args: Any, **kwargs: Any) -> Any:
        accelerators = self._accelerators_in(patcher)
        for accelerator in accelerators:
            # it calls state_dict() to read the names
            accelerator.restores_for_saving = False
        try:
            return original(patcher, *args, **kwargs)
        finally:
            for accelerator in accelerators:
                accelerator.restores_for_saving = True

    def _upscale(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._make_room(gpu_room.IDLE_RESERVE)
        return original(*args, **kwargs)

    def _accelerators_in(self, patcher: Any) -> list[Accelerator]:
        model = getattr(patcher, "model", None)
        return self._attachment.within(model) if isinstance(model, nn.Module) else []

    def _make_room(self, needed: float) -> None:
        if torch.cuda.is_available():
            givers = (lambda: graph_pool.make_room(self._report, _WHY), self._attachment.give_memory_back)
            self._guarded(lambda: gpu_room.make_room(needed, givers))

    def _guarded(self, action: Callable[[], object]) -> None:
        guarded(self._report, "memory", action)
