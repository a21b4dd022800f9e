"""UNets of Forge in 8 bits on a small card: they are loaded as a whole, and half-precision weights of their layers in 8
bits stay in system memory. What Forge, Forge Neo and reForge have in common.

Forge asks what a model takes before it loads it, and loads it in parts if there is less room than that. Here it is told
what the UNet takes with 8-bit weights, and of weights that stay in system memory it moves empty ones. In the first
image those wait there that the first plan may have in 8 bits, see `lean_calls`; if none can, the UNet comes in half
precision, if there is room for it. If the original forward runs out of memory later, Forge loads the UNet in parts, as
it would have done at once, and the forward runs again.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import nn

from sfast_ext import host_gpu, torch_state
from sfast_ext.accelerator import Accelerator, accelerator_of
from sfast_ext.config import Config
from sfast_ext.eight_bits import RESIDENT, SMALL, refusal_of
from sfast_ext.hosts import gpu_room, reasons, system_memory
from sfast_ext.hosts.attachment import Attachment
from sfast_ext.hosts.forge.residence import Residence, about, awaits, bytes_of, held, needs, on_gpu
from sfast_ext.hosts.installation import Installation
from sfast_ext.hosts.moves import place_of
from sfast_ext.hosts.session import guarded
from sfast_ext.plans.graph_pool import pool_of
from sfast_ext.reasons import Reason
from sfast_ext.report import Report, rehearsing
from sfast_ext.runtime.building import building
from sfast_ext.weights.original_layout import live_tensor, set_data

ALL = 1e32
"""Forge's number of bytes for a model that is to be loaded as a whole."""
WHY = "the WebUI needs the GPU memory"
_HALF = frozenset({torch.float16, torch.bfloat16})
_SHORT = "there was no room for all of the UNet: Forge loads it in parts from now on"


class Whole(NamedTuple):
    """How Forge would load a UNet that is loaded as a whole.

    Attributes:
        patcher: that of the load.
        in_parts: loads it so, of a loader (see `ResidentUnet.loader`), with so many bytes.
        usable: bytes that Forge would have given to its weights.
    """

    patcher: weakref.ref[Any]
    in_parts: Callable[[Any, float], Any]
    usable: float


class ResidentUnet:
    """Loads the UNets of Forge.

    A subclass wraps Forge's functions, and says how Forge unloads a UNet.

    Args:
        residence: which of them are loaded so.
        unets: has their accelerators.
        config: gives the settings that hold now.
        unrestored: within, `state_dict()` of a model leaves its weights where they are.
        attach: gives a UNet its accelerator, if it is the one that makes the steps and *8 bits* are on.

    Attributes:
        changes: how often a UNet took another form while an image was made.
    """

    def __init__(
        self,
        residence: Residence,
        unets: Attachment,
        config: Callable[[], Config],
        unrestored: Callable[[Any], contextlib.AbstractContextManager[None]],
        attach: Callable[[nn.Module], object],
        report: Report,
    ) -> None:
        self._residence, self._unets, self._config, self._report = residence, unets, config, report
        self._unrestored, self._attach = unrestored, attach
        self.installed, self.changes = False, 0
        self._loaded_models: Callable[[], Iterable[Any]] = list
        self._whole: weakref.WeakKeyDictionary[nn.Module, Whole] = weakref.WeakKeyDictionary()
        # a UNet has no use for it a second time if memory ran out once
        self._refused: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._missing: weakref.WeakKeyDictionary[nn.Module, Reason] = weakref.WeakKeyDictionary()
        # of which it is asked if weights may leave the GPU, before it is decided
        self._asked_of: nn.Module | None = None

    def install(self, host: Installation) -> None:
        """Wrap functions of Forge."""
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
        whole = unet is not None and (unet in self._whole or unet is self._asked_of)
        return whole and system_memory.has_room_for(size)

    def follows(self, unet: nn.Module | None) -> bool:
        """Whether Forge's functions are those that are known, and the card has room for a UNet as a whole."""
        if unet is None or not self.installed or not self._residence.least or not torch.cuda.is_available():
            return self.installed
        return self._residence.suits(torch.cuda.get_device_properties(host_gpu.device()).total_memory, unet)

    def why_in_parts(self, unet: nn.Module) -> Reason | None:
        """Why Forge loaded a UNet in parts all the same; None if nothing is to be said of 8 bits."""
        return reasons.IN_PARTS_SHORT() if unet in self._refused else self._missing.get(unet)

    # which UNets

    def _in_8_bits(self, model: Any) -> Accelerator | None:
        """The accelerator of a UNet that has 8-bit weights in place of those in half precision, or is to have them with
        its first plan, for which these are in system memory."""
        found = self._accelerator(model)
        if found is None or found.arena.resident.in_parts or not self._is_on(found):
            return None
        return found if found.arena.resident.banks or awaits(found) else None

    def _about_to_load(self, model: Any) -> Accelerator | None:
        """The accelerator of a UNet, which may get it only now: if the extension was off when the checkpoint came."""
        unet = self._unet(model)
        if unet is not None and not self._unets.holds(unet):
            guarded(self._report, "memory", lambda: self._attach(unet))
        return self._accelerator(model)

    def _unet(self, model: Any) -> Any:
        unet = getattr(model, "diffusion_model", None)
        return unet if type(unet).__name__ in self._residence.networks else None

    def _accelerator(self, model: Any) -> Accelerator | None:
        unet = self._unet(model)
        if unet is None:
            return None
        found = accelerator_of(unet)
        return found if isinstance(found, Accelerator) and self._unets.holds(unet) else None

    def _is_on(self, found: Accelerator | None) -> bool:
        config = self._config()
        on = config.enabled and config.eight_bits and config.resident is not False
        return on and found is not None and found.module not in self._refused and not found.parts

    def _may(self, found: Accelerator, patcher: Any, place: torch.device | None) -> bool:
        """Whether a UNet may be loaded as a whole in 8 bits, whatever memory is free on the GPU."""
        model, unet = patcher.model, found.module
        if place is None or place.type != "cuda" or not self._is_on(found):
            return False
        if place_of(patcher.offload_device) is not None:
            return False
        if self._residence.changed_otherwise(patcher) or not found.installed():
            return False
        kinds, computed = {(type(p), p.dtype) for p in unet.parameters()}, self._residence.computed(model)
        if kinds != {(nn.Parameter, computed)} or computed not in _HALF or refusal_of(place) is not None:
            return False
        card = torch.cuda.get_device_properties(place).total_memory
        if card >= SMALL * bytes_of(unet) or not self._residence.suits(card, unet):
            return False
        return system_memory.has_room_for(self._patched_bytes(patcher))

    def _patched_bytes(self, patcher: Any) -> int:
        """What weights take that get LoRA, next to those without it."""
        patched = self._residence.patched(patcher)
        return sum(p.nbytes for key, p in patcher.model.named_parameters() if key in patched) if patched else 0

    def _fits(
        self, found: Accelerator, patcher: Any, place: torch.device | None, usable: float, freed: float = 0
    ) -> bool:
        """Whether a UNet is loaded as a whole in 8 bits, with so many bytes for its weights.

        Args:
            usable: what Forge would give to its weights.
            freed: bytes of other models that would leave the GPU for it.
        """
        model, unet = patcher.model, found.module
        self._missing.pop(unet, None)
        if usable >= ALL / 2 or not self._may(found, patcher, place):
            # or the user wants all models to be loaded as a whole
            return False
        # else weights come that are to stay, if 8 bits are on since now
        found.configure(self._config())
        if found.arena.resident.banks:
            return usable >= needs(found, model)
        aside = self._aside_at_first(found, place)
        first = about(model, aside)
        share = first if aside else RESIDENT * first
        free = gpu_room.free_bytes() + freed + held(found, model)
        # next to it Forge leaves some for a forward
        needed = max(first + gpu_room.WORKSPACE, share + free - usable)
        if free < needed:
            self._missing[unet] = reasons.IN_PARTS_FIRST(f"{needed / 2**30:.1f}", f"{free / 2**30:.1f}")
        return free >= needed

    def _aside_at_first(self, found: Accelerator, place: torch.device | None) -> int:
        """Bytes of the weights that wait in system memory for the first plan of a UNet which is loaded as a whole; 0:
        all of it comes in half precision."""
        unet = found.module
        if place is None or unet in self._whole and on_gpu(unet) and not awaits(found):
            # they have come for a call without a plan, as they would again
            return 0
        self._asked_of = unet
        try:
            return found.expected_aside(place)
        finally:
            self._asked_of = None

    def _begin(self, found: Accelerator, place: torch.device, leave: Callable[[], object]) -> None:
        """A UNet is about to be loaded as a whole. If its weights are to wait in system memory for the first plan, what
        Forge has loaded of it by itself leaves the GPU."""
        unet, resident = found.module, found.arena.resident
        if unet not in self._whole and on_gpu(unet) and self._aside_at_first(found, place):
            leave()
        if not resident.banks and not on_gpu(unet):
            # its weights may be others since it was loaded before
            resident.forget()

    # loading

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

    def _free_plans(self, device: torch.device) -> None:
        """Graphs and 8-bit weights give way, as far as they can: on a full card that may fail, and no image ends."""
        guarded(self._report, "memory", lambda: pool_of(device).make_room(self._report, WHY))

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
        taken, loader = self._whole.get(found.module), self.loader(found.module)
        self._whole.pop(found.module, None)
        if taken is None or loader is None:
            return False
        resident = found.arena.resident
        resident.in_parts = True
        if resident.device is not None:
            self._free_plans(resident.device)
        there = [p for p in found.module.parameters() if p.is_cuda]
        self._unload(loader)
        # Forge puts new objects in the place of those with LoRA, which the state of the call that is short refers to
        with torch.inference_mode(False), torch.no_grad():
            for value in (p for p in there if p.is_cuda):
                set_data(value, live_tensor(value).cpu())
        # a forward that finds weights in system memory leaves them as plans laid them
        guarded(self._report, "memory", found.arena.restore_layout_temporarily)
        torch.cuda.empty_cache()
        # others may have taken memory since it was loaded
        taken.in_parts(loader, max(1, min(taken.usable, gpu_room.free_bytes() - gpu_room.WORKSPACE)))
        self.changes += 1
        return True

    def _refuse(self, found: Accelerator) -> None:
        self._refused.add(found.module)
        self._report.count("out_of_memory")
        self._report.event("8 bits", _SHORT)

    def loader(self, unet: nn.Module) -> Any:
        """What Forge loads and unloads a UNet with that is loaded as a whole; None if it has left the GPU since."""
        raise NotImplementedError

    def _unload(self, loader: Any) -> None:
        """Have Forge move a UNet to system memory."""
        raise NotImplementedError

    def _model_of(self, loader: Any) -> Any:
        """The model around a UNet."""
        raise NotImplementedError

    def _note(self, model: Any) -> None:
        """Tell Forge that all weights of a model that are on the GPU are loaded."""

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
        loader = self.loader(unet)
        self._whole.pop(unet, None)
        if loader is not None:
            # Forge takes weights for loaded that are in system memory
            self._unload(loader)

    def _give_up(self, found: Accelerator) -> None:
        loader, resident = self.loader(found.module), found.arena.resident
        if loader is None or resident.device is None:
            self._whole.pop(found.module, None)
            return
        model = self._model_of(loader)
        size = bytes_of(model)
        pool_of(resident.device).make_room(self._report, WHY)
        missing = size - on_gpu(model)
        # else it would stay as a whole, with too little room for its forward
        whole = self._residence.shrinks or self._whole[found.module].usable > size
        if whole and (not missing or gpu_room.free_bytes() >= missing + gpu_room.WORKSPACE):
            found.bring_weights_back()
        if not whole or on_gpu(model) < size:
            self.in_parts(found)
        else:
            self._whole.pop(found.module, None)
            self._note(model)
