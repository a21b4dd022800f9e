"""SD.Next's balanced offload: modules that leave the GPU and come back, and what needs the memory in between.

The weights that plans read stay on the GPU when SD.Next moves the model to the CPU, as long as what runs next has room
next to them. If there is no room, memory is freed: that of the CUDA graphs first, then that of the weights. The plans
are kept.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from sfast_ext import host_gpu
from sfast_ext.accelerator import Accelerator
from sfast_ext.hosts import gpu_room
from sfast_ext.hosts.attachment import Attachment
from sfast_ext.hosts.installation import Installation
from sfast_ext.hosts.moves import WeightMoves, fetch_weights, place_of, staying
from sfast_ext.hosts.sdnext.whole_unet import WholeUnet, is_tied
from sfast_ext.hosts.session import guarded
from sfast_ext.hosts.vae_memory import VaeMemory
from sfast_ext.reasons import Reason
from sfast_ext.report import Report
from sfast_ext.runtime import shortages

_WHY = "SD.Next needs the GPU memory"


class Offload:
    """Frees the memory that SD.Next relies on.

    Args:
        attachments: have the accelerators of the networks that it moves.
        vaes: those of VAEs. They run once for an image: the memory of their plans goes whenever they are moved off.
        unets: of the networks, those that may come to the GPU as a whole, see `WholeUnet`.
        refusal: see there.
    """

    def __init__(
        self,
        attachments: Sequence[Attachment],
        report: Report,
        vaes: Sequence[Attachment] = (),
        unets: Sequence[Attachment] = (),
        refusal: Callable[[nn.Module], Reason | None] = lambda unet: None,
    ) -> None:
        self._networks, self._vae_parts, self._report = attachments, vaes, report
        self._attachments = (*vaes, *attachments)
        self._vaes = VaeMemory(lambda needed, in_one: self._guarded(lambda: self._make_room(needed, in_one)))
        self._moves = WeightMoves(report)
        self.whole = WholeUnet(unets, refusal, self._make_room, report)
        self._oom_count: int | None = None
        self._release_always = False
        self._aux_models: Mapping[str, Any] = {}

    def install(self, host: Installation) -> None:
        """Wrap the functions that move modules."""
        self._aux_models = host.found["aux_models"]
        # what calls it looks it up in the module that defines it
        host.wrap("move_module_to_cpu", self._move_to_cpu)
        # SD.Next moves a module to the GPU with this, and looks it up in the package
        host.wrap("dispatch_model", self._dispatch)
        host.wrap("move_aux_to_gpu", self._move_aux_to_gpu)
        host.add(self._vaes.release, self._moves.drop)

    def watch(self, vaes: Iterable[Any]) -> None:
        """Make room for these VAEs, which need more memory than their weights, and for no others. Before each job."""
        if not torch.cuda.is_available():
            return
        self._notice_out_of_memory()
        self._vaes.watch(vaes)
        self.sweep()

    def sweep(self) -> None:
        """Free what is kept in system memory of modules that have left the GPU in another way: models that are unloaded
        lose their values."""
        self._moves.sweep()

    def _move_to_cpu(self, original: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        parts, ours = self._accelerators_in(module, self._vae_parts), self._accelerators_in(module, self._networks)
        was_there = (parts or ours) and gpu_room.on_gpu(module)
        with self._moves.where_it_leaves(module):
            result = original(module, *args, **kwargs)
        if was_there and not gpu_room.on_gpu(module):
            for part in parts:
                self._guarded(part.give_memory_back)
            if ours:
                self._report.count("weights_away")
                self._guarded(lambda: self._make_room(math.inf if self._release_always else gpu_room.IDLE_RESERVE))
        return result

    def _dispatch(self, original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
        places: Any = args[0] if args else kwargs.get("device_map")
        whole = self.whole.places(model, places)
        if whole is not None:
            changed = ((whole, *args[1:]), kwargs) if args else (args, {**kwargs, "device_map": whole})
            try:
                return self._dispatch_to(whole, original, model, *changed[0], **changed[1])
            except torch.cuda.OutOfMemoryError:
                # after the handler, which keeps what had come
                pass
            self.whole.did_not_fit(model)
        return self._dispatch_to(places, original, model, *args, **kwargs)

    def _dispatch_to(self, places: Any, original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
        ours = self._accelerators_in(model) if isinstance(model, nn.Module) and isinstance(places, dict) else []
        if not ours and isinstance(model, nn.Module):
            self._guarded(lambda: self._make_room(gpu_room.load_bytes(model)))
        one_place = isinstance(places, dict) and len(set(places.values())) == 1
        goes = place_of(next(iter(places.values()))) if one_place else None
        move = functools.partial(original, model, *args, **kwargs)
        if not isinstance(model, nn.Module) or not any(a.accelerators() for a in self._attachments):
            return move()
        for accelerator in ours:
            # dispatch_model calls state_dict() to read the names
            accelerator.restores_for_saving = False
        for_plans = [functools.partial(fetch_weights, a, goes, self._report, "SD.Next") for a in ours]
        try:
            with self._staying(model, goes):
                return self._moves.to_gpu(model, goes, move, for_plans)
        finally:
            for accelerator in ours:
                accelerator.restores_for_saving = True

    def _staying(self, model: nn.Module, goes: torch.device | None) -> contextlib.AbstractContextManager[None]:
        """See `staying`."""
        networks, kept, early = self._accelerators_in(model, self._networks), list[Accelerator](), list[Accelerator]()
        # empty parameters have no memory, by which accelerate knows a tied one: it would make them one
        self._guarded(lambda: kept.extend([] if networks and is_tied(model) else networks))
        if goes is not None and goes.type == "cuda":
            self._guarded(lambda: early.extend(a for a in kept if self.whole.expected_aside(a, goes)))
        return staying(kept, goes, bool(early))

    def _move_aux_to_gpu(self, original: Callable[..., Any], name: str) -> Any:
        """Make room for an auxiliary model, such as one for captions, which may be larger than the UNet."""
        model = getattr(self._aux_models.get(name), "model", None)
        if isinstance(model, nn.Module):
            self._guarded(lambda: self._make_room(gpu_room.load_bytes(model) + gpu_room.IDLE_RESERVE))
        return original(name)

    def _make_room(self, needed: float, in_one: bool = False) -> bool:
        others = [each.give_memory_back for each in self._attachments]
        return gpu_room.give_way(needed, in_one, others, self._report, _WHY)

    def _notice_out_of_memory(self) -> None:
        """After SD.Next ran out of memory, free what plans hold, and stop keeping weights on the GPU that it has moved
        off."""
        oom_count = shortages.of_host(self._report, host_gpu.device())
        if self._oom_count is not None and oom_count > self._oom_count:
            # it moved a network in a way that is not followed here, or there is less memory than it counts on
            self._guarded(lambda: self._make_room(math.inf))
            if not self._release_always:
                self._release_always = True
                what = "from now on no weights stay on the GPU that it moves off"
                self._report.event("memory", f"SD.Next ran out of GPU memory: {what}")
        self._oom_count = oom_count

    def _accelerators_in(self, module: nn.Module, attachments: Sequence[Attachment] | None = None) -> list[Accelerator]:
        among = self._attachments if attachments is None else attachments
        return [a for attachment in among for a in attachment.within(module)]

    def _guarded(self, action: Callable[[], object]) -> None:
        guarded(self._report, "memory", action)
