"""Memory management of Forge Neo and reForge for a UNet in 8 bits on a small card, see `resident`. They note in a model
how much of it is on the GPU, load and unload its layers one by one, and make weights with LoRA as they come."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import nn

from sfast_ext.accelerator import Accelerator
from sfast_ext.hosts import gpu_room
from sfast_ext.hosts.forge.residence import bytes_of, held, leave, load_anew, needs, on_gpu
from sfast_ext.hosts.forge.resident import ALL, WHY, ResidentUnet, Whole
from sfast_ext.hosts.installation import Installation
from sfast_ext.hosts.moves import place_of
from sfast_ext.hosts.session import guarded
from sfast_ext.weights.aside import Hidden


class ResidentLayers(ResidentUnet):
    """Loads the UNets of Forge Neo and reForge."""

    _hidden: Hidden | None = None
    _loads: nn.Module | None = None

    def install(self, host: Installation) -> None:
        """Wrap functions of Forge."""
        host.wrap("ModelPatcher.partially_load", self._partially_load)
        host.wrap("ModelPatcher.partially_unload", self._partially_unload)
        host.wrap("ModelPatcher.load", self._load)
        host.wrap("ModelPatcher.patch_weight_to_device", self._patch)
        host.wrap("ModelPatcher.loaded_size", self._loaded_size)
        host.wrap("LoadedModel.model_memory", self._model_memory)
        host.wrap("LoadedModel.model_offloaded_memory", self._offloaded_memory)
        super().install(host)

    # what Forge asks

    def _model_memory(self, original: Callable[..., Any], loaded: Any) -> Any:
        model = loaded.model.model
        found = self._in_8_bits(model)
        return original(loaded) if found is None else max(0, needs(found, model) - found.arena.banks.held)

    def _offloaded_memory(self, original: Callable[..., Any], loaded: Any) -> Any:
        model = loaded.model.model
        found = self._in_8_bits(model)
        return original(loaded) if found is None else max(0, needs(found, model) - held(found, model))

    def _loaded_size(self, original: Callable[..., Any], patcher: Any) -> Any:
        self._count(patcher.model)
        return original(patcher)

    def _count(self, model: Any) -> None:
        """Note in the model what of it is on the GPU, while it is loaded. Forge reads it there."""
        found = self._accelerator(model)
        # all of its weights may have come for a call without a plan
        ours = found is not None and (found.module in self._whole or self._in_8_bits(model) is found)
        if found is not None and ours and model.model_loaded_weight_memory > 0:
            model.model_loaded_weight_memory = max(1, held(found, model))

    # what Forge does

    def _partially_load(
        self,
        original: Callable[..., Any],
        patcher: Any,
        device_to: Any,
        extra_memory: float = 0,
        *args: Any,
        **more: Any,
    ) -> Any:
        model = patcher.model
        found = self._about_to_load(model)
        if found is None:
            return original(patcher, device_to, extra_memory, *args, **more)
        place, before = place_of(device_to), model.model_loaded_weight_memory
        usable, known = extra_memory + held(found, model), self._whole.get(found.module)
        if known is not None and not self._residence.shrinks and extra_memory < 1:
            # less than is there is never told
            usable = min(usable, known.usable)
        if place is not None and self._fits(found, patcher, place, usable):
            self._begin(found, place, lambda: patcher.unpatch_model(patcher.offload_device, unpatch_weights=True))
            found.arena.resident.in_parts, self._loads = False, model

            def in_parts(patcher: Any, most: float) -> None:
                original(patcher, device_to, most, *args, **more)
                load_anew(patcher.model)

            self._whole[found.module] = Whole(weakref.ref(patcher), in_parts, usable)
            try:
                if self._loaded(place, lambda: original(patcher, device_to, ALL, *args, **more)):
                    self._count(model)
                    return model.model_loaded_weight_memory - before
                self._refuse(found)
            finally:
                self._loads = None
        was_whole = self._whole.pop(found.module, None) is not None
        try:
            return original(patcher, device_to, self._as_forge_has_it(found, patcher, usable, was_whole), *args, **more)
        finally:
            found.arena.resident.in_parts = bool(model.model_lowvram)
            if was_whole:
                load_anew(model)

    def _as_forge_has_it(self, found: Accelerator, patcher: Any, usable: float, was_whole: bool) -> float:
        """Before Forge loads a UNet in half precision: nothing of it is on the GPU that Forge does not know of. Returns
        how many more bytes of those for its weights it may take: what failed before may have moved it off the GPU."""
        model, resident = patcher.model, found.arena.resident
        if resident and not resident.in_parts and resident.device is not None:
            self._free_plans(resident.device)
            resident.in_parts = True
            if model.model_loaded_weight_memory > 0:
                if any(not p.is_cuda for p in found.module.parameters()):
                    # Forge takes them for loaded
                    patcher.unpatch_model(patcher.offload_device, unpatch_weights=True)
                else:
                    model.model_loaded_weight_memory = on_gpu(model)
        stays = was_whole and not self._residence.shrinks and model.model_loaded_weight_memory > 0
        if stays and usable <= bytes_of(model):
            # as a whole, which leaves too little room for its forward
            patcher.unpatch_model(patcher.offload_device, unpatch_weights=True)
        return usable - held(found, model)

    def _partially_unload(
        self,
        original: Callable[..., Any],
        patcher: Any,
        device_to: Any,
        memory_to_free: float = 0,
        *args: Any,
        **more: Any,
    ) -> Any:
        found = self._in_8_bits(patcher.model)
        if found is None:
            return original(patcher, device_to, memory_to_free, *args, **more)
        freed = 0.0

        def give() -> None:
            nonlocal freed
            before = gpu_room.free_bytes()
            needed = before + memory_to_free
            gpu_room.make_room(needed, [lambda: leave(found), *gpu_room.givers(needed, self._report, WHY)])
            freed = max(0.0, gpu_room.free_bytes() - before)

        guarded(self._report, "memory", give)
        self._count(patcher.model)
        # if that is too little, Forge moves all of it to system memory
        return int(freed)

    def _load(self, original: Callable[..., Any], patcher: Any, device_to: Any = None, *args: Any, **more: Any) -> Any:
        found = self._accelerator(patcher.model) if patcher.model is self._loads else None
        place = place_of(device_to)
        if found is None or place is None:
            return original(patcher, device_to, *args, **more)
        if (unpin := getattr(patcher, "unpin_all_weights", None)) is not None:
            # while Forge Neo finds the memory that it has pinned of those in parts
            unpin()
        with found.keeping_aside(place, early=True) as self._hidden:
            try:
                return original(patcher, device_to, *args, **more)
            finally:
                self._hidden = None

    def _patch(self, original: Callable[..., Any], patcher: Any, key: str, *args: Any, **more: Any) -> Any:
        """A weight with LoRA is made on the GPU, one at a time, and leaves it."""
        hidden, model = self._hidden, self._loads
        if hidden is None or model is None or patcher.model is not model or key not in patcher.patches:
            return original(patcher, key, *args, **more)
        path, _, name = key.rpartition(".")
        with hidden.shown(model.get_submodule(path), name):
            return original(patcher, key, *args, **more)

    # the way back

    def loader(self, unet: nn.Module) -> Any:
        """A patcher of a UNet that is loaded as a whole; None if it has left the GPU since."""
        taken = self._whole.get(unet)
        patcher = None if taken is None else taken.patcher()
        if taken is not None and patcher is None:
            # a clone for one image, which is gone: Forge has one that it was made of
            others = (each.model for each in self._loaded_models() if each.model is not None)
            patcher = next((p for p in others if getattr(p.model, "diffusion_model", None) is unet), None)
        return patcher if patcher is not None and patcher.model.model_loaded_weight_memory else None

    def _unload(self, loader: Any) -> None:
        loader.unpatch_model(loader.offload_device, unpatch_weights=True)

    def _model_of(self, loader: Any) -> Any:
        return loader.model

    def _note(self, model: Any) -> None:
        model.model_loaded_weight_memory = on_gpu(model)
