"""Memory management of Forge Neo and reForge for a UNet in 8 bits on a small card: the UNet is loaded as a whole, and
half-precision weights of its layers in 8 bits stay in system memory.

Forge asks what a model takes before it loads it, and loads it in parts if there is less room than that. Here it is told
what the UNet takes with 8-bit weights, and of weights that stay in system memory it moves empty ones. The first image
has no 8-bit weights: then the UNet comes in half precision, if there is room for it. If the original forward runs out
of memory later, Forge loads the UNet in parts, as it would have done at once, and the forward runs again.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from sfast_ext import host_gpu, torch_state
from sfast_ext.accelerator import Accelerator, accelerator_of
from sfast_ext.config import Config
from sfast_ext.eight_bits import RESIDENT, SMALL, refusal_of
from sfast_ext.hosts import gpu_room, reasons, system_memory
from sfast_ext.hosts.attachment import Attachment
from sfast_ext.hosts.forge.residence import Residence, bytes_of, held, leave, load_anew, needs, on_gpu, patched_bytes
from sfast_ext.hosts.installation import Installation
from sfast_ext.hosts.moves import place_of
from sfast_ext.hosts.session import guarded
from sfast_ext.plans.graph_pool import pool_of
from sfast_ext.reasons import Reason
from sfast_ext.report import Report, rehearsing
from sfast_ext.runtime.call_server import building
from sfast_ext.weights.aside import Hidden
from sfast_ext.weights.original_layout import live_tensor, set_data

ALL = 1e32
"""Forge's number of bytes for a model that is to be loaded as a whole."""
_HALF = frozenset({torch.float16, torch.bfloat16})
_WHY = "the WebUI needs the GPU memory"
_SHORT = "there was no room for all of the UNet in half precision: Forge loads it in parts from now on"


class ResidentUnet:
    """Loads the UNets of Forge.

    Args:
        residence: which of them are loaded so.
        unets: has their accelerators.
        config: gives the settings that hold now.
        unrestored: within, `state_dict()` of a model leaves its weights where they are.
    """

    def __init__(
        self,
        residence: Residence,
        unets: Attachment,
        config: Callable[[], Config],
        unrestored: Callable[[Any], contextlib.AbstractContextManager[None]],
        report: Report,
    ) -> None:
        self._residence, self._unets, self._config, self._report = residence, unets, config, report
        self._unrestored = unrestored
        self.installed = False
        self._loaded_models: Callable[[], Iterable[Any]] = list
        self._hidden: Hidden | None = None
        self._loads: nn.Module | None = None
        # of each UNet that is loaded as a whole: how Forge would load it, of a patcher, and with how many bytes
        self._whole: weakref.WeakKeyDictionary[nn.Module, tuple[weakref.ref[Any], Callable[[Any, float], Any], float]]
        self._whole = weakref.WeakKeyDictionary()
        # a UNet has no use for it a second time if memory ran out once
        self._refused: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._missing: weakref.WeakKeyDictionary[nn.Module, Reason] = weakref.WeakKeyDictionary()

    def install(self, host: Installation) -> None:
        """Wrap functions of Forge."""
        host.wrap("ModelPatcher.partially_load", self._partially_load)
        host.wrap("ModelPatcher.partially_unload", self._partially_unload)
        host.wrap("ModelPatcher.load", self._load)
        host.wrap("ModelPatcher.patch_weight_to_device", self._patch)
        host.wrap("ModelPatcher.loaded_size", self._loaded_size)
        host.wrap("LoadedModel.model_memory", self._model_memory)
        host.wrap("LoadedModel.model_offloaded_memory", self._offloaded_memory)
        management = host.found.place("current_loaded_models").owner
        self._loaded_models = lambda: management.current_loaded_models
        self.installed = True
        host.add(self._uninstall)

    def install_names(self, host: Installation) -> None:
        """A function that reads the names of weights, for LoRA."""
        host.wrap("model_lora_keys_unet", self._names)

    def _uninstall(self) -> None:
        self.installed, self._loaded_models = False, list

    def _names(self, original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
        with self._unrestored(model):
            return original(model, *args, **kwargs)

    def allows(self, unet: nn.Module | None, size: int) -> bool:
        """Whether weights of so many bytes may leave the GPU."""
        return unet is not None and unet in self._whole and system_memory.has_room_for(size)

    def follows(self, unet: nn.Module | None) -> bool:
        """Whether Forge's functions are those that are known, and the card has room for a UNet as a whole."""
        if unet is None or not self.installed or not self._residence.least or not torch.cuda.is_available():
            return self.installed
        return self._residence.suits(torch.cuda.get_device_properties(host_gpu.device()).total_memory, unet)

    def why_in_parts(self, unet: nn.Module) -> Reason | None:
        """Why Forge loaded a UNet in parts all the same; None if nothing is to be said of 8 bits."""
        return reasons.IN_PARTS_SHORT() if unet in self._refused else self._missing.get(unet)

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
        found = self._in_8_bits(model)
        if found is not None and model.model_loaded_weight_memory > 0:
            model.model_loaded_weight_memory = max(1, held(found, model))

    def _in_8_bits(self, model: Any) -> Accelerator | None:
        """The accelerator of a UNet that has 8-bit weights in place of those in half precision."""
        found = self._accelerator(model)
        resident = None if found is None else found.arena.resident
        if resident is None or resident.in_parts or not resident.banks or not self._is_on(found):
            return None
        return found

    def _accelerator(self, model: Any) -> Accelerator | None:
        unet = getattr(model, "diffusion_model", None)
        if type(unet).__name__ not in self._residence.networks:
            return None
        found = accelerator_of(unet)
        return found if isinstance(found, Accelerator) and self._unets.holds(unet) else None

    def _is_on(self, found: Accelerator | None) -> bool:
        config = self._config()
        on = config.enabled and config.eight_bits and config.resident is not False
        return on and found is not None and found.module not in self._refused and not found.parts

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
        found = self._accelerator(model)
        if found is None:
            return original(patcher, device_to, extra_memory, *args, **more)
        place, before = place_of(device_to), model.model_loaded_weight_memory
        usable, known = extra_memory + held(found, model), self._whole.get(found.module)
        if known is not None and not self._residence.shrinks and extra_memory < 1:
            # less than is there is never told
            usable = min(usable, known[2])
        if place is not None and self._fits(found, patcher, place, usable):
            found.arena.resident.in_parts, self._loads = False, model

            def in_parts(patcher: Any, most: float) -> Any:
                return original(patcher, device_to, most, *args, **more)

            self._whole[found.module] = weakref.ref(patcher), in_parts, usable
            # else weights come that are to stay, if 8 bits are on since now
            found.configure(self._config())
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

    def _loaded(self, place: torch.device, load: Callable[[], Any]) -> bool:
        """Whether a UNet was loaded as a whole. Weights that get LoRA need more room next to it while they are made,
        for which graphs and 8-bit weights give way: they are made again with the next plan."""
        for give in (lambda: self._free_plans(place), None):
            try:
                load()
                return True
            except torch.cuda.OutOfMemoryError:
                # Forge has moved the model to system memory
                if give is not None:
                    give()
        return False

    def _fits(self, found: Accelerator, patcher: Any, place: torch.device, usable: float) -> bool:
        """Whether a UNet is loaded as a whole in 8 bits, with so many bytes for its weights.

        Args:
            usable: what Forge would give to its weights.
        """
        model, unet = patcher.model, found.module
        self._missing.pop(unet, None)
        if place.type != "cuda" or not self._is_on(found) or place_of(patcher.offload_device) is not None:
            return False
        if self._residence.changed_otherwise(patcher) or not found.installed():
            return False
        size, kinds = bytes_of(model), {(type(p), p.dtype) for p in unet.parameters()}
        computed = self._residence.computed(model)
        if kinds != {(nn.Parameter, computed)} or computed not in _HALF or refusal_of(place) is not None:
            return False
        card = torch.cuda.get_device_properties(place).total_memory
        if card >= SMALL * bytes_of(unet) or not self._residence.suits(card, unet) or usable >= ALL / 2:
            # or the user wants all models to be loaded as a whole
            return False
        if not system_memory.has_room_for(patched_bytes(patcher)):
            return False
        if found.arena.resident.banks:
            return usable >= needs(found, model)
        free, needed = gpu_room.free_bytes() + held(found, model), size + gpu_room.WORKSPACE
        if free < needed:
            self._missing[unet] = reasons.IN_PARTS_FIRST(f"{needed / 2**30:.1f}", f"{free / 2**30:.1f}")
        return free >= needed and usable >= RESIDENT * size

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

    def _free_plans(self, device: torch.device) -> None:
        """Graphs and 8-bit weights give way, as far as they can: on a full card that may fail, and no image ends."""
        guarded(self._report, "memory", lambda: pool_of(device).make_room(self._report, _WHY))

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
            gpu_room.make_room(needed, [lambda: leave(found), *gpu_room.givers(needed, self._report, _WHY)])
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
        with found.keeping_aside(place) as self._hidden:
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

    def gave_way(self, unet: nn.Module | None) -> bool:
        """The original forward of a UNet is short of memory, which it would not be in parts. Whether it may run again.

        Not while the call is recorded or its plan is made: what is put back then would undo what Forge does here."""
        found = accelerator_of(unet) if unet is not None and unet in self._whole else None
        if found is None or rehearsing() or building() or torch_state.obstacle() is not None:
            return False
        self._refuse(found)
        return self.in_parts(found)

    def in_parts(self, found: Accelerator) -> bool:
        """Have Forge load a UNet as it would have done without 8 bits. Whether it did."""
        taken, patcher = self._whole.get(found.module), self._loader(found.module)
        self._whole.pop(found.module, None)
        if taken is None or patcher is None:
            return False
        found.arena.resident.in_parts = True
        if found.arena.resident.device is not None:
            self._free_plans(found.arena.resident.device)
        there = [p for p in found.module.parameters() if p.is_cuda]
        patcher.unpatch_model(patcher.offload_device, unpatch_weights=True)
        # Forge puts new objects in the place of those with LoRA, which the state of the call that is short refers to
        with torch.inference_mode(False), torch.no_grad():
            for value in (p for p in there if p.is_cuda):
                set_data(value, live_tensor(value).cpu())
        # a forward that finds weights in system memory leaves them as plans laid them
        guarded(self._report, "memory", found.arena.restore_layout_temporarily)
        torch.cuda.empty_cache()
        # others may have taken memory since it was loaded
        taken[1](patcher, max(1, min(taken[2], gpu_room.free_bytes() - gpu_room.WORKSPACE)))
        load_anew(patcher.model)
        return True

    def _refuse(self, found: Accelerator) -> None:
        self._refused.add(found.module)
        self._report.count("out_of_memory")
        self._report.event("8 bits", _SHORT)

    def _loader(self, unet: nn.Module) -> Any:
        """A patcher of a UNet that is loaded as a whole; None if it has left the GPU since."""
        taken = self._whole.get(unet)
        patcher = None if taken is None else taken[0]()
        if taken is not None and patcher is None:
            # a clone for one image, which is gone: Forge has one that it was made of
            others = (each.model for each in self._loaded_models())
            patcher = next((p for p in others if getattr(p.model, "diffusion_model", None) is unet), None)
        return patcher if patcher is not None and patcher.model.model_loaded_weight_memory else None

    def before(self, config: Config, unet: nn.Module | None) -> None:
        """A UNet is about to be accelerated by these settings, none if the session ends.

        All other UNets leave the GPU: their plans go to this one, or are dropped. Without 8 bits, weights that stayed
        in system memory come to the GPU if there is room for all of them; what is free may be in pieces. Forge loads
        them in parts otherwise."""
        for other in [each for each in self._whole if each is not unet and unet is not None]:
            guarded(self._report, "memory", lambda other=other: self._leaves(other))  # type: ignore[misc]
        if config.enabled and config.eight_bits:
            return
        for unet in list(self._whole):
            if (found := accelerator_of(unet)) is not None:
                guarded(self._report, "memory", lambda found=found: self._give_up(found))  # type: ignore[misc]

    def _leaves(self, unet: nn.Module) -> None:
        patcher = self._loader(unet)
        self._whole.pop(unet, None)
        if patcher is not None:
            # Forge takes weights for loaded that are in system memory
            patcher.unpatch_model(patcher.offload_device, unpatch_weights=True)

    def _give_up(self, found: Accelerator) -> None:
        patcher, resident = self._loader(found.module), found.arena.resident
        if patcher is None or resident.device is None:
            self._whole.pop(found.module, None)
            return
        model, size = patcher.model, bytes_of(patcher.model)
        pool_of(resident.device).make_room(self._report, _WHY)
        missing = size - on_gpu(model)
        # else it would stay as a whole, with too little room for its forward
        whole = self._residence.shrinks or self._whole[found.module][2] > size
        if whole and (not missing or gpu_room.free_bytes() >= missing + gpu_room.WORKSPACE):
            found.bring_weights_back()
        if not whole or on_gpu(model) < size:
            self.in_parts(found)
        else:
            self._whole.pop(found.module, None)
            model.model_loaded_weight_memory = on_gpu(model)
