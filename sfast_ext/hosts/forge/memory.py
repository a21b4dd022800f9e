"""Forge's GPU memory: plans must not hold what it frees or is about to use."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from sfast_ext.accelerator import Accelerator
from sfast_ext.hosts import gpu_room
from sfast_ext.hosts.attachment import Attachment
from sfast_ext.hosts.installation import Installation
from sfast_ext.hosts.moves import fetch_weights, place_of
from sfast_ext.hosts.session import guarded
from sfast_ext.hosts.vae_memory import VaeMemory
from sfast_ext.report import Report

_WHY = "the WebUI needs the GPU memory"


class ForgeMemory:
    """Frees the memory that Forge relies on.

    Forge moves a model to system memory if another needs the room, and for each change of LoRA: back on the GPU, it
    has other weights. Plans stay. The weights that they read stay on the GPU while there is room next to them for what
    Forge loads; they are else freed, and copied again at the next call.

    Args:
        attachments: have the accelerators of the networks, those first whose memory is freed first.
    """

    def __init__(self, attachments: Sequence[Attachment], report: Report) -> None:
        self._attachments, self._report = tuple(attachments), report
        self._vaes = VaeMemory(self._make_room_in_one)
        self._free_bytes: Callable[[torch.device], float] = lambda _device: 0.0

    def install(self, host: Installation) -> None:
        """Wrap functions of Forge."""
        self._free_bytes = host.found["get_free_memory"]
        host.wrap("free_memory", self._free_memory)
        host.wrap("unload_all_models", self._unload_all)
        host.wrap("Upscaler.upscale", self._upscale)
        self._install_loading(host)
        host.add(self._vaes.release)

    def watch(self, vae: nn.Module | None) -> None:
        """On a small card, leave memory to other programs while this VAE runs, and no other. Forge makes room for the
        VAE alone, in pieces."""
        self._vaes.watch([vae] if gpu_room.is_tight() else ())

    def _make_room_in_one(self, needed: float, in_one: bool) -> None:
        if in_one:
            self.make_room(needed, in_one)

    def _install_loading(self, host: Installation) -> None:
        host.wrap("ModelPatcher.load", self._load)
        host.wrap("ModelPatcher.partially_unload", self._partially_unload)
        host.wrap("ModelPatcher.add_patches", self._without_restoring)

    def _free_memory(self, original: Callable[..., Any], memory_required: float, *args: Any, **kwargs: Any) -> Any:
        result = original(memory_required, *args, **kwargs)
        # after it: what Forge has moved off the GPU may still be held by plans
        self.make_room(memory_required)
        return result

    def _unload_all(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        self._guarded(self._suspend)
        return result

    def _suspend(self) -> None:
        """Another checkpoint is about to be loaded, perhaps of the same architecture. Until then plans hold the weights
        of the one that Forge drops."""
        models = [accelerator.module for each in self._attachments for accelerator in each.accelerators()]
        held = sum(p.nbytes for model in models for p in model.parameters())
        short = self._free_bytes(torch.device("cpu")) < 2 * held
        for each in self._attachments:
            each.release() if short else each.suspend()

    def _load(self, original: Callable[..., Any], patcher: Any, device_to: Any = None, **more: Any) -> Any:
        place = place_of(device_to)
        if place is not None and place.type == "cuda":
            accelerators, whole = self._accelerators_in(patcher), bool(more.get("full_load"))
            if accelerators and whole:
                self._guarded(functools.partial(self._unpin, patcher))
            for accelerator in accelerators:
                self._guarded(functools.partial(self._prepare, accelerator, patcher, place if whole else None))
        return original(patcher, device_to, **more)

    def _unpin(self, patcher: Any) -> None:
        """Forge would do it as it moves each weight; afterwards it does not find the memory that it pinned."""
        patcher.unpin_all_weights()

    def _prepare(self, accelerator: Accelerator, patcher: Any, place: torch.device | None) -> None:
        """Before Forge moves a model to the GPU, in parts if no place is given: each weight that it patches is there
        twice until the next call."""
        weights = dict(patcher.model.named_parameters())
        patched = self._patched(patcher)
        twice = sum(weights[key].nbytes for key in patched if key in weights and self._patches(weights[key]))
        needed = accelerator.vacant_bytes + twice + gpu_room.WORKSPACE
        room = gpu_room.make_room(needed, gpu_room.givers(needed, self._report, _WHY))
        if not room:
            self._clear(patcher)
        fetch_weights(accelerator, place if room else None, self._report, "Forge")

    def _partially_unload(self, original: Callable[..., Any], patcher: Any, *args: Any, **kwargs: Any) -> Any:
        freed = original(patcher, *args, **kwargs)
        # at once: Forge looks how much is free before it moves the next model
        for accelerator in self._accelerators_in(patcher):
            self._guarded(accelerator.give_memory_back)
        return freed

    def _patched(self, patcher: Any) -> Iterable[str]:
        """The names of the weights that Forge patches."""
        return patcher.patches

    def _patches(self, weight: torch.Tensor) -> bool:
        """Whether Forge patches this weight as it loads the model: those that stayed on the GPU are patched."""
        return not weight.is_cuda

    def _clear(self, patcher: Any) -> None:
        """The model is in system memory already."""

    def _without_restoring(self, original: Callable[..., Any], patcher: Any, *args: Any, **kwargs: Any) -> Any:
        """A function that calls `state_dict()` of the model to read names, sizes or weights as they lie."""
        with self.unrestored(getattr(patcher, "model", None)):
            return original(patcher, *args, **kwargs)

    def _module_size(self, original: Callable[..., Any], module: Any, *args: Any, **kwargs: Any) -> Any:
        with self.unrestored(module):
            return original(module, *args, **kwargs)

    @contextlib.contextmanager
    def unrestored(self, model: Any) -> Iterator[None]:
        """Within, `state_dict()` of a model leaves its weights where they are."""
        within = self._within(model)
        before = [(each, each.restores_for_saving) for each in within]
        for accelerator, _ in before:
            accelerator.restores_for_saving = False
        try:
            yield
        finally:
            for accelerator, restores in before:
                accelerator.restores_for_saving = restores

    def _upscale(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.make_room(gpu_room.IDLE_RESERVE)
        return original(*args, **kwargs)

    def _accelerators_in(self, patcher: Any) -> list[Accelerator]:
        return self._within(getattr(patcher, "model", None))

    def _within(self, model: Any) -> list[Accelerator]:
        if not isinstance(model, nn.Module):
            return []
        return [found for each in self._attachments for found in each.within(model)]

    def make_room(self, needed: float, in_one: bool = False) -> None:
        """Have plans give memory back until so many bytes are free, in one block if asked for."""
        if torch.cuda.is_available():
            others = [each.give_memory_back for each in self._attachments]
            self._guarded(lambda: gpu_room.give_way(needed, in_one, others, self._report, _WHY))

    def _guarded(self, action: Callable[[], object]) -> None:
        guarded(self._report, "memory", action)


class ReforgeMemory(ForgeMemory):
    """The same in reForge, which pins no weights, and reads the sizes of modules from their `state_dict()`."""

    def _install_loading(self, host: Installation) -> None:
        super()._install_loading(host)
        host.wrap("module_size", self._module_size)

    def _unpin(self, patcher: Any) -> None:
        """Nothing is pinned that is on the GPU later."""


class WholeMemory(ForgeMemory):
    """The same in Forge and in Forge Classic, which load a model with `LoadedModel.model_load`."""

    def _install_loading(self, host: Installation) -> None:
        host.wrap("LoadedModel.model_load", self._load_model)

    def _load_model(self, original: Callable[..., Any], loaded: Any, kept: float = -1, **more: Any) -> Any:
        kept = next(iter(more.values()), kept)
        place = loaded.device if kept < 0 else None  # in parts if memory is kept
        if loaded.device.type == "cuda":
            for accelerator in self._accelerators_in(loaded.model):
                self._guarded(functools.partial(self._prepare, accelerator, loaded.model, place))
        return original(loaded, kept)

    def _patches(self, weight: torch.Tensor) -> bool:
        """It patches them all."""
        return True

    def _clear(self, patcher: Any) -> None:
        """Weights that no LoRA patched are on the GPU still, in the memory that plans read."""
        patcher.model.to(patcher.offload_device)


class OldMemory(WholeMemory):
    """The same in Forge, where LoRA stays in weights that leave the GPU and come back."""

    def _patched(self, patcher: Any) -> Iterable[str]:
        loader = patcher.lora_loader
        if str(list(patcher.lora_patches)) == loader.loaded_hash:
            return ()
        return {*loader.backup, *(key for found in patcher.lora_patches.values() for key in found)}

    def _patches(self, weight: torch.Tensor) -> bool:
        """Those of layers in 8 bits stay in system memory."""
        residents = [each.arena.resident for of in self._attachments for each in of.accelerators()]
        asides = (each for each in residents if each.banks and not each.in_parts)
        return weight.is_cuda or not any(each.is_aside(weight) for each in asides)


class ClassicMemory(WholeMemory):
    """The same in Forge Classic, which reads the sizes of a model from its `state_dict()` each time that it makes room,
    and the weights that it patches."""

    def _install_loading(self, host: Installation) -> None:
        super()._install_loading(host)
        host.wrap("module_size", self._module_size)
        host.wrap("ModelPatcher.patch_model", self._patch_model)

    def _patch_model(self, original: Callable[..., Any], patcher: Any, *args: Any, **kwargs: Any) -> Any:
        if self._accelerators_in(patcher):
            self._guarded(functools.partial(_back_up, patcher))
        return self._without_restoring(original, patcher, *args, **kwargs)


def _back_up(patcher: Any) -> None:
    """If a model is not moved, Forge's backup of a weight is the very memory that plans read: a copy is in its
    place."""
    place = place_of(patcher.offload_device)
    for name, weight in patcher.model.named_parameters():
        if name in patcher.patches and name not in patcher.backup and place_of(weight.device) == place:
            patcher.backup[name] = weight.detach().clone()
