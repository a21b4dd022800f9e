"""Memory management of Forge for a UNet in 8 bits on a small card, see `resident`. It loads and unloads models as a
whole, reads the device of each parameter, and makes each weight with LoRA after the move, on its device."""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from sfast_ext.accelerator import Accelerator
from sfast_ext.hosts import gpu_room
from sfast_ext.hosts.forge.residence import bytes_of, held, leave, needs, on_gpu
from sfast_ext.hosts.forge.resident import WHY, ResidentUnet, Whole
from sfast_ext.hosts.installation import Installation
from sfast_ext.hosts.moves import place_of
from sfast_ext.hosts.session import guarded

_ALL = 1e30
"""Forge's number of bytes if all models are to leave the GPU."""


class _Call(threading.local):
    """What this thread loads. A preview may be decoded at the same time as an image.

    Attributes:
        patchers: those that are loaded at once.
        preserved: bytes that are left free in addition to those that Forge leaves for each image.
        model: the one with a UNet that is loaded as a whole in 8 bits; None: none is.
        place: the GPU that it comes to.
    """

    patchers: Sequence[Any] = ()
    preserved: float = 0
    model: nn.Module | None = None
    place: torch.device | None = None


class ResidentModels(ResidentUnet):
    """Loads the UNets of Forge."""

    _management: Any = None

    def install(self, host: Installation) -> None:
        """Wrap functions of Forge."""
        self._call = _Call()
        # in parts, and left for all of it to come
        self._tried: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._management = host.found.place("current_loaded_models").owner
        host.wrap("load_models_gpu", self._load_models)
        host.wrap("free_memory", self._free_memory)
        host.wrap("LoadedModel.compute_inclusive_exclusive_memory", self._compute_sizes)
        host.wrap("LoadedModel.model_load", self._load)
        host.wrap("ModelPatcher.forge_patch_model", self._move)
        host.wrap("merge_lora_to_weight", self._merge)
        super().install(host)

    # what Forge asks

    def _load_models(
        self,
        original: Callable[..., Any],
        models: Any,
        memory_required: float = 0,
        hard_memory_preservation: float = 0,
        *args: Any,
        **more: Any,
    ) -> Any:
        call, models = self._call, list(models)
        before = call.patchers, call.preserved
        call.patchers, call.preserved = models, hard_memory_preservation
        try:
            for patcher in models:
                guarded(self._report, "memory", lambda patcher=patcher: self._leave_parts(patcher))  # type: ignore[misc]
            return original(models, memory_required, hard_memory_preservation, *args, **more)
        finally:
            call.patchers, call.preserved = before

    def _leave_parts(self, patcher: Any) -> None:
        """Forge does not load again what is loaded: a UNet in parts leaves, if it would come as a whole now."""
        model = patcher.model
        found, loader = self._about_to_load(model), self.loader(getattr(model, "diffusion_model", None))
        if found is None or loader is None or loader.model is not patcher or not loader.model_accelerated:
            return
        if found.module in self._tried:
            # there was less room than it seemed
            return
        place, said = place_of(loader.device), self._missing.get(found.module)
        every = [each.model.model for each in self._loaded_models()]
        # what Forge would move off the GPU for it
        freed = sum(on_gpu(each) for each in every if all(each is not p.model for p in self._call.patchers))
        usable = gpu_room.free_bytes() + held(found, model) + freed - self._left_free()
        if self._fits(found, patcher, place, usable, freed):
            self._tried.add(found.module)
            self._unlist(loader)
            self._unload(loader)
        elif said is not None:
            self._missing[found.module] = said

    def _compute_sizes(self, original: Callable[..., Any], loaded: Any) -> Any:
        model, place = loaded.model.model, place_of(loaded.device)
        found = self._in_8_bits(model)
        if found is not None and not self._asked(functools.partial(self._may, found, loaded.model, place)):
            if self._end(found):
                # next to a rest that is on the GPU Forge would load no more than that rest
                model.to(loaded.model.offload_device)
                torch.cuda.empty_cache()
            found = None
        result = original(loaded)
        if found is not None:
            there = held(found, model)
            loaded.inclusive_memory, loaded.exclusive_memory = there, max(0, needs(found, model) - there)
        return result

    def _asked(self, ask: Callable[[], bool]) -> bool:
        """What is answered; no if that fails: Forge loads a model all the same."""
        answers: list[bool] = []
        guarded(self._report, "memory", lambda: answers.append(ask()))
        return any(answers)

    # what Forge does

    def _free_memory(self, original: Callable[..., Any], memory_required: float, *args: Any, **more: Any) -> Any:
        kept = args[1] if len(args) > 1 else more.get("keep_loaded", ())
        guarded(self._report, "memory", lambda: self._give(memory_required, kept))
        return original(memory_required, *args, **more)

    def _give(self, needed: float, kept: Sequence[Any]) -> None:
        """Forge moves models off the GPU one after the other until there is room, a UNet perhaps last: its graphs and
        8-bit weights give way first.

        Args:
            kept: what is loaded and stays.
        """
        stay = [each.model.model for each in kept] + [each.model for each in self._call.patchers]
        for loader in [loader for unet in self._whole if (loader := self.loader(unet)) is not None]:
            found = self._in_8_bits(loader.model.model)
            if any(each is loader.model.model for each in stay):
                continue
            if needed >= _ALL:
                # one that nobody refers to any more Forge would leave there, until garbage is collected
                self._unlist(loader)
                self._unload(loader)
            elif found is not None:
                gpu_room.make_room(
                    needed, [functools.partial(leave, found), *gpu_room.givers(needed, self._report, WHY)]
                )

    def _load(self, original: Callable[..., Any], loaded: Any, kept: float = -1, **more: Any) -> Any:
        """Load a model, in parts if that many bytes of it come to the GPU."""
        kept = next(iter(more.values()), kept)
        model = loaded.model.model
        found = self._accelerator(model)
        if found is None:
            return original(loaded, self._next_to_unets(loaded, kept))
        place, usable = place_of(loaded.device), gpu_room.free_bytes() + held(found, model) - self._left_free()
        fits = functools.partial(self._fits, found, loaded.model, place, usable)
        # none at all is what the user asked for
        if kept != 0 and place is not None and self._asked(fits):
            self._begin(found, place, lambda: model.to(loaded.model.offload_device))
            found.arena.resident.in_parts = False

            def in_parts(loaded: Any, most: float) -> None:
                original(loaded, max(1, self._management.compute_model_gpu_memory_when_using_cpu_swap(most, 0)))

            self._whole[found.module] = Whole(weakref.ref(loaded.model), in_parts, usable)
            with self._as_a_whole(model, place):
                if self._loaded(place, lambda: original(loaded, -1)):
                    self._tried.discard(found.module)
                    return loaded.real_model
            self._refuse(found)
        was_whole = self._whole.pop(found.module, None) is not None
        if self._end(found):
            kept = self._as_forge_does(found, loaded, kept)
        if was_whole:
            # what is in parts finds weights as plans laid them
            guarded(self._report, "memory", found.arena.restore_layout_temporarily)
        try:
            return original(loaded, kept)
        finally:
            found.arena.resident.in_parts = kept >= 0

    @contextlib.contextmanager
    def _as_a_whole(self, model: nn.Module, place: torch.device) -> Iterator[None]:
        """Within, a model with a UNet in 8 bits is loaded."""
        self._call.model, self._call.place = model, place
        try:
            yield
        finally:
            self._call.model = self._call.place = None

    def _left_free(self) -> float:
        """Bytes that Forge leaves free for a forward."""
        return float(self._management.minimum_inference_memory() + self._call.preserved)

    def _end(self, found: Accelerator) -> bool:
        """Before Forge loads a UNet in half precision: nothing of it is on the GPU that Forge does not know of. Whether
        anything was."""
        resident = found.arena.resident
        if not resident or resident.in_parts or resident.device is None:
            return False
        self._free_plans(resident.device)
        resident.in_parts = True
        return True

    def _next_to_unets(self, loaded: Any, kept: float) -> float:
        """How much of another model is loaded: next to it a UNet of the same image takes what it waits for."""
        models = [each.model for each in self._call.patchers]
        unets = [(found, each) for each in models if (found := self._in_8_bits(each)) is not None]
        waits = sum(max(0, needs(found, each) - held(found, each)) for found, each in unets)
        if kept >= 0 or not waits:
            return kept
        return self._with_room(gpu_room.free_bytes() - waits, loaded.exclusive_memory)

    def _as_forge_does(self, found: Accelerator, loaded: Any, kept: float) -> float:
        """How much of a UNet Forge would load that is not on the GPU; it was told of 8-bit weights, and has moved other
        models by that."""
        model = loaded.model.model
        model.to(loaded.model.offload_device)
        found.give_memory_back()
        torch.cuda.empty_cache()
        if kept == 0:
            return kept
        return self._with_room(gpu_room.free_bytes(), bytes_of(model))

    def _with_room(self, free: float, needed: float) -> float:
        """How much of a model Forge loads if so many bytes are free: -1, all of it, if they are enough."""
        left = self._left_free()
        if free - needed - left >= 0:
            return -1
        return float(max(1, self._management.compute_model_gpu_memory_when_using_cpu_swap(free, left)))

    def _move(self, original: Callable[..., Any], patcher: Any, target: Any = None, *args: Any, **more: Any) -> Any:
        place = place_of(target)
        found = self._accelerator(patcher.model) if patcher.model is self._call.model else None
        if found is None or place is None:
            return original(patcher, target, *args, **more)
        # only here: Forge keeps what it finds in place of a weight that gets LoRA
        with found.keeping_aside(place, early=True):
            return original(patcher, target, *args, **more)

    def _merge(
        self, original: Callable[..., Any], patches: Any, weight: torch.Tensor, *args: Any, **more: Any
    ) -> Any:
        """A weight with LoRA that stays in system memory is made on the GPU, one at a time."""
        place = self._call.place
        if place is None or weight.device.type != "cpu":
            return original(patches, weight, *args, **more)
        try:
            return original(patches, weight.to(place), *args, **more).to("cpu")
        except torch.cuda.OutOfMemoryError:
            # Forge would move all of the model to system memory for it
            self._report.count("out_of_memory")
        return original(patches, weight, *args, **more)

    # the way back

    def loader(self, unet: nn.Module) -> Any:
        """What Forge has of a UNet that is loaded; None if it has left the GPU since."""
        every = list(self._loaded_models())
        return next((each for each in every if getattr(each.model.model, "diffusion_model", None) is unet), None)

    def _unload(self, loader: Any) -> None:
        loader.model_unload()

    def _model_of(self, loader: Any) -> Any:
        return loader.model.model

    def _leaves(self, unet: nn.Module) -> None:
        loader = self.loader(unet)
        try:
            super()._leaves(unet)
        finally:
            self._unlist(loader)

    def in_parts(self, found: Accelerator) -> bool:
        """See `ResidentUnet.in_parts`. If that fails, Forge loads the UNet when it is used next."""
        loader = self.loader(found.module)
        try:
            return super().in_parts(found)
        except BaseException:
            self._unlist(loader)
            raise

    def _unlist(self, loader: Any) -> None:
        """What leaves the GPU is loaded again when it is used."""
        listed = self._management.current_loaded_models
        if any(each is loader for each in listed):
            listed.remove(loader)
