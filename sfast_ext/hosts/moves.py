"""Modules that a host moves between the CPU and the GPU: the weights that plans read come and go with them."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from sfast_ext.accelerator import Accelerator
from sfast_ext.hosts import gpu_room
from sfast_ext.hosts.attachment import wrap
from sfast_ext.hosts.session import guarded
from sfast_ext.report import Report


class Moves:
    """Follows one module that the host moves by `to`, as AUTOMATIC1111 does with --medvram.

    Args:
        within: gives the accelerators of a module and of what is in it.
        make_room: frees memory until so many bytes are free.
        host: its name, for the report.
    """

    def __init__(
        self,
        within: Callable[[nn.Module], Iterable[Accelerator]],
        make_room: Callable[[float], object],
        report: Report,
        host: str,
    ) -> None:
        self._within, self._make_room, self._report, self._host = within, make_room, report, host
        self._module: Callable[[], nn.Module | None] = lambda: None
        self._unwrap: Callable[[], None] | None = None

    def watch(self, module: nn.Module | None) -> None:
        """Follow this module, and no other."""
        if module is self._module():
            return
        self.release()
        # wrapped is the class: what lies on an object goes along where that is copied
        if module is not None and type(module) is not nn.Module:
            self._module = weakref.ref(module)
            self._unwrap = _wrap_method(type(module), "to", self._to)

    def release(self) -> None:
        """Follow none."""
        self._module = lambda: None
        if self._unwrap is not None:
            self._unwrap()
            self._unwrap = None

    def _to(self, original: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        accelerators = list(self._within(module)) if module is self._module() else []
        if not accelerators:
            return original(module, *args, **kwargs)
        place = place_of(args[0] if args else kwargs.get("device"))
        was_there = gpu_room.on_gpu(module)
        if place is not None and place.type == "cuda":
            for accelerator in accelerators:
                fetch = functools.partial(fetch_weights, accelerator, place, self._report, self._host)
                guarded(self._report, "memory", fetch)
        result = original(module, *args, **kwargs)
        if was_there and not gpu_room.on_gpu(module):
            self._report.count("weights_away")
            guarded(self._report, "memory", lambda: self._make_room(gpu_room.IDLE_RESERVE))
        return result


def fetch_weights(accelerator: Accelerator, place: torch.device | None, report: Report, host: str) -> None:
    """Move a module's weights to where plans read them, just before the host moves the module to the GPU: moved by the
    host alone, they would be there twice.

    Args:
        place: where all of the module goes; None where its parts go to different devices.
    """
    planned = {plan.device for each in (accelerator, *accelerator.parts) for plan in list(each.plans.values())}
    try:
        if place is not None and planned == {place}:
            accelerator.fetch_weights()
            return
    except Exception as exc:
        what = f"the weights could not be moved to where plans read them, {host} moves them itself"
        report.event("memory", f"{what}: {exc}")
    # in parts, to another device, or without room: the host needs the memory of the second copy
    accelerator.give_memory_back()


def place_of(device: Any) -> torch.device | None:
    """A device with its index, as plans have it; None where weights are moved from there when they are needed, and for
    what names no device."""
    if device is None or isinstance(device, (torch.dtype, torch.Tensor)) or str(device) in ("cpu", "disk", "meta"):
        return None
    found = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    return torch.device(found.type, found.index or 0)


def _wrap_method(owner: type, name: str, around: Callable[..., Any]) -> Callable[[], None]:
    """`wrap` for a method that a class may have inherited: afterwards it inherits it again."""
    own = name in vars(owner)
    unwrap = wrap(owner, name, around)
    ours = vars(owner)[name]

    def undo() -> None:
        unwrap()
        if not own and vars(owner).get(name) is not ours:
            delattr(owner, name)

    return undo
