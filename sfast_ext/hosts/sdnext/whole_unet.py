"""SD.Next's balanced offload for a UNet in 8 bits on a small card: it comes to the GPU as a whole.

SD.Next maps a network to the GPU up to its high watermark. The layers above it are brought there in each forward, and
no plan can be made of that. In 8 bits half of the weights stay in system memory, and the rest has room.

The first image has no 8-bit weights: then the UNet comes in half precision, if all of it and a forward have room once
the other networks have left. If memory runs out all the same, it leaves, SD.Next's own map holds from then on, and the
forward runs again.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from sfast_ext import torch_state
from sfast_ext.accelerator import Accelerator, accelerator_of
from sfast_ext.config import Config
from sfast_ext.eight_bits import SMALL, refusal_of
from sfast_ext.hosts import gpu_room, reasons, system_memory
from sfast_ext.hosts.attachment import Attachment
from sfast_ext.hosts.installation import Installation
from sfast_ext.hosts.moves import place_of
from sfast_ext.hosts.sdnext.refusals import layers_bypass_reason
from sfast_ext.hosts.session import guarded
from sfast_ext.plans.graph_pool import pool_of
from sfast_ext.reasons import Reason
from sfast_ext.report import Report, rehearsing
from sfast_ext.runtime.building import building
from sfast_ext.weights.original_layout import is_plain

_HALF = frozenset({torch.float16, torch.bfloat16})
_WHY = "SD.Next needs the GPU memory"
_SHORT = "there was no room for all of the UNet: SD.Next moves parts of it layer by layer from now on"


class WholeUnet:
    """Decides how UNets are dispatched.

    Args:
        unets: have the accelerators of the networks that may come as a whole.
        refusal: why calls of a network will be bypassed however it is dispatched; None if they will not.
        make_room: frees memory until so many bytes are free; returns whether they are.
    """

    def __init__(
        self,
        unets: Sequence[Attachment],
        refusal: Callable[[nn.Module], Reason | None],
        make_room: Callable[[float], bool],
        report: Report,
    ) -> None:
        self._unets, self._refusal, self._make_room, self._report = unets, refusal, make_room, report
        self._take_off: Callable[..., Any] | None = None
        # of each that SD.Next maps in parts, of its last dispatch: whether it came as a whole, and was going to
        self._dispatched: weakref.WeakKeyDictionary[nn.Module, tuple[bool, bool]] = weakref.WeakKeyDictionary()
        # of no use for it a second time if memory ran out once
        self._refused: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._missing: weakref.WeakKeyDictionary[nn.Module, Reason] = weakref.WeakKeyDictionary()
        self.changes = 0
        """How often a network came as a whole that had come in parts, and the other way round."""

    def install(self, host: Installation) -> None:
        """Use SD.Next's function that takes a network off the GPU. The next call of the network dispatches it anew."""
        self._take_off = host.found["apply_balanced_offload_to_module"]
        host.add(self._uninstall)

    def _uninstall(self) -> None:
        self._take_off = None

    def holds(self, unet: nn.Module | None) -> bool:
        """Whether a UNet came as a whole that SD.Next maps in parts."""
        return unet is not None and self._dispatched.get(unet, (False, False))[0]

    def why_in_parts(self, unet: nn.Module) -> Reason | None:
        """Why a UNet came in parts all the same; None if nothing is to be said of 8 bits."""
        found = accelerator_of(unet)
        if found is None or not _is_on(found.config):
            return None
        return reasons.OFFLOAD_SHORT() if unet in self._refused else self._missing.get(unet)

    # as SD.Next dispatches it

    def places(self, unet: Any, places: Any) -> dict[str, Any] | None:
        """The map with which a network is dispatched in place of SD.Next's; None if SD.Next's holds.

        Args:
            places: SD.Next's map.
        """
        chosen: list[Any] = []
        guarded(self._report, "memory", lambda: chosen.extend(self._chosen(unet, places)))
        return {"": chosen[0]} if chosen else None

    def _chosen(self, unet: Any, places: Any) -> list[Any]:
        """The GPU where all of a network goes; empty if SD.Next's map holds."""
        found = self._accelerator(unet)
        if found is None or not isinstance(places, dict):
            return []
        gpu = _gpu_beside_memory(places)
        if gpu is None:
            self._dispatched.pop(unet, None)
            found.arena.resident.in_parts = len(set(places.values())) > 1
            return []
        place = place_of(gpu)
        assert place is not None
        self._missing.pop(unet, None)
        asked = _is_on(found.config)
        whole = asked and self._serves(found, place) and self._fits(found, place)
        if self._dispatched.get(unet, (False, False))[0] != whole:
            self.changes += 1
        self._dispatched[unet] = whole, asked
        resident = found.arena.resident
        resident.in_parts = not whole
        if not whole and resident.device is not None and resident.banks:
            # what SD.Next's map counts on
            pool_of(resident.device).make_room(self._report, _WHY)
        return [gpu] if whole else []

    def _accelerator(self, unet: Any) -> Accelerator | None:
        if self._take_off is None or not isinstance(unet, nn.Module):
            return None
        found = accelerator_of(unet)
        held = isinstance(found, Accelerator) and any(each.holds(unet) for each in self._unets)
        return found if held and isinstance(found, Accelerator) else None

    def _serves(self, found: Accelerator, place: torch.device) -> bool:
        """Whether a plan in 8 bits can be made whose half-precision weights stay in system memory."""
        unet, size = found.module, _bytes(found.module)
        total = torch.cuda.get_device_properties(place).total_memory
        small = total < SMALL * size if found.config.resident is None else found.config.resident
        if not small or unet in self._refused or found.parts or refusal_of(place) is not None:
            return False
        # another dispatch has left its hooks, or others lay the weights
        if any(not is_plain(p) or p.is_meta or p.dim() > 1 and p.dtype not in _HALF for p in unet.parameters()):
            return False
        if self._refusal(unet) is not None:
            return False
        if is_tied(unet):
            # none may stay, see `Offload`
            return False
        available, needed = system_memory.available_bytes(), size + system_memory.MARGIN
        if available < system_memory.RESERVE:
            # what leaves it for the GPU is not kept there, see `WeightMoves`
            available += _bytes(unet, "cpu")
        if found.arena.resident.banks or available >= needed:
            return True
        self._missing[unet] = reasons.OFFLOAD_NO_SYSTEM_ROOM(_gb(needed), _gb(available))
        return False

    def _fits(self, found: Accelerator, place: torch.device) -> bool:
        """Whether there is room on the GPU for all that is not to stay in system memory, and for a forward."""
        unet, resident, banks = found.module, found.arena.resident, found.arena.banks
        needed, there = _bytes(unet) + gpu_room.WORKSPACE, _bytes(unet, "cuda")
        # a call that is bypassed needs all weights, and banks give way to them
        if torch_state.obstacle() is None:
            # as integers they take half as much
            needed -= self.expected_aside(found, place) // 2
            if resident.banks:
                needed -= gpu_room.spared(found, unet)
            there += banks.held
        missing = needed - there
        most = torch.cuda.mem_get_info(place)[0] + torch.cuda.memory_reserved(place)
        if missing <= most and self._make_room(missing):
            return True
        self._missing[unet] = reasons.OFFLOAD_NO_ROOM(_gb(needed), _gb(min(most, gpu_room.free_bytes())))
        return False

    def expected_aside(self, found: Accelerator, place: torch.device) -> int:
        """Bytes of half-precision weights that are expected to stay in system memory for the call for which a network
        comes to the GPU, as it makes the first plan; 0: none. A call that is bypassed needs all of them."""
        bypassed = torch_state.obstacle() or self._refusal(found.module)
        return 0 if bypassed else found.expected_aside(place)

    def did_not_fit(self, unet: nn.Module) -> None:
        """Memory ran out while all of a UNet came: SD.Next's map holds from now on, with nothing of it on the GPU."""
        self._refuse(unet)
        self._as_host_has_it(unet)
        self._dispatched[unet] = False, True
        self.changes += 1

    # the way back

    def gave_way(self, unet: nn.Module | None) -> bool:
        """The original forward of a UNet is short of memory, which it would not be in parts. Whether it may run again.

        Not while the call is recorded or its plan is made: what is put back then would undo what SD.Next does here."""
        if unet is None or not self.holds(unet) or self._take_off is None:
            return False
        if rehearsing() or building() or torch_state.obstacle() is not None:
            return False
        self._refuse(unet)
        self._as_host_has_it(unet)
        # as before a forward: it comes by SD.Next's map
        hook: Any = unet._hf_hook
        hook.pre_forward(unet)
        return not self.holds(unet)

    def _refuse(self, unet: nn.Module) -> None:
        self._refused.add(unet)
        self._report.count("out_of_memory")
        self._report.event("8 bits", _SHORT)

    def _as_host_has_it(self, unet: nn.Module) -> None:
        """A UNet leaves the GPU, and what plans hold of it."""
        found = accelerator_of(unet)
        resident = None if found is None else found.arena.resident
        if resident is not None:
            resident.in_parts = True
            if resident.device is not None:
                pool_of(resident.device).make_room(self._report, _WHY)
        assert self._take_off is not None
        self._take_off(unet, force=True)
        if found is not None:
            # a forward that finds weights in system memory leaves them as plans laid them
            guarded(self._report, "memory", found.arena.restore_layout_temporarily)
        torch.cuda.empty_cache()

    def follow(self, unet: nn.Module | None, config: Config) -> None:
        """Settings are about to hold for a UNet, which is not called meanwhile. If it would come another way with them,
        it leaves the GPU, and its next call dispatches it anew.

        Args:
            config: those with which nothing is accelerated if the UNet is about to be released.
        """
        if unet is not None and self._take_off is not None:
            guarded(self._report, "memory", lambda: self._follow(unet, config))

    def release(self) -> None:
        """Nothing is accelerated any more."""
        for unet in list(self._dispatched):
            self.follow(unet, Config(enabled=False))

    def _follow(self, unet: nn.Module, config: Config) -> None:
        whole, asked = self._dispatched.get(unet, (False, False))
        wanted, found = _is_on(config), accelerator_of(unet)
        if unet in self._refused and found is not None and found.plans:
            found.forget_plans(_SHORT)
            found.arena.resident.forget()
        if whole:
            leaves = not wanted
        else:
            # one that nothing was accelerated of is not known here
            leaves = wanted and not asked and unet not in self._refused
            leaves = leaves and layers_bypass_reason(unet) == reasons.OFFLOAD_OF_PARTS()
        if not wanted:
            self._dispatched.pop(unet, None)
        if leaves and gpu_room.on_gpu(unet) and _is_balanced(unet):
            # once: if something else is in the way, it comes in parts again
            self._dispatched[unet] = False, wanted
            self._as_host_has_it(unet)


def _is_on(config: Config) -> bool:
    return config.enabled and config.eight_bits and config.resident is not False


def _is_balanced(unet: nn.Module) -> bool:
    """Whether a network is under balanced offload still."""
    from modules import shared

    return getattr(shared.opts, "diffusers_offload_mode", "none") == "balanced" and hasattr(unet, "_hf_hook")


def _gpu_beside_memory(places: dict[str, Any]) -> Any:
    """The GPU of a map that has system memory in addition, and nothing else; None for other maps."""
    others = {str(where): where for where in places.values()}
    if others.pop("cpu", None) is None or len(others) != 1:
        return None
    (gpu,) = others.values()
    place = place_of(gpu)
    return gpu if place is not None and place.type == "cuda" else None


def _bytes(module: nn.Module, kind: str | None = None) -> int:
    """What its weights take, or those of them on a kind of device."""
    return sum(p.nbytes for p in module.parameters() if kind is None or p.device.type == kind)


def is_tied(module: nn.Module) -> bool:
    """Whether a parameter has several names."""
    return sum(1 for _ in module.named_parameters(remove_duplicate=False)) > sum(1 for _ in module.parameters())


def _gb(size: float) -> str:
    return f"{size / 2**30:.1f}"
