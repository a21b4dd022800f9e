"""Modules that a host moves between the CPU and the GPU: the weights that plans read come and go with them."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from sfast_ext.accelerator import Accelerator
from sfast_ext.hosts import gpu_room, quick_to, system_memory
from sfast_ext.hosts.attachment import wrap
from sfast_ext.hosts.session import guarded
from sfast_ext.plans.graph_pool import pool_of
from sfast_ext.report import Report
from sfast_ext.weights.host_copies import HostCopies, Sources, move_to_gpu, sources_of
from sfast_ext.weights.module_walk import modules_of, parameters_in


class Moves:
    """Follows modules that the host moves by `to`, as AUTOMATIC1111 does with --medvram.

    Args:
        among: gives the accelerators of modules, which are given by their ids.
        make_room: frees memory until so many bytes are free.
        host: its name, for the report.
        rare_among: gives further accelerators, of what is called about once for each image: the memory of their plans
            is freed whenever the module leaves the GPU.
    """

    def __init__(
        self,
        among: Callable[[Container[int]], Iterable[Accelerator]],
        make_room: Callable[[float], object],
        report: Report,
        host: str,
        rare_among: Callable[[Container[int]], Iterable[Accelerator]] = lambda modules: (),
    ) -> None:
        self._among, self._make_room, self._report, self._host = among, make_room, report, host
        self._rare_among = rare_among
        self._modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._unwrap: list[Callable[[], None]] = []
        self.copies = WeightMoves(report)

    def watch(self, modules: Iterable[nn.Module | None]) -> None:
        """Follow these modules, and no others."""
        # the class is wrapped, as a copy of an object has all that lies on it
        wanted = weakref.WeakSet(m for m in modules if m is not None and type(m) is not nn.Module)
        if wanted == self._modules:
            return
        self.release()
        self._modules = wanted
        owners = {type(module) for module in wanted}
        # a class that inherits a wrapped method has it already
        bases = [owner for owner in owners if not any(_inherits(owner, other, "to") for other in owners)]
        self._unwrap = [_wrap_method(owner, "to", self._to) for owner in bases]

    def release(self) -> None:
        """Follow none."""
        self._modules = weakref.WeakSet()
        self.copies.drop()
        while self._unwrap:
            self._unwrap.pop()()

    def _to(self, original: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if module not in self._modules:
            return original(module, *args, **kwargs)
        modules = modules_of(module)
        inside = set(map(id, modules))
        accelerators, rare = list(self._among(inside)), list(self._rare_among(inside))
        device = _device_of(args, kwargs)
        place = place_of(device)
        move = functools.partial(quick_to.to, original, module, modules, args, kwargs)
        if place is not None and place.type == "cuda":
            all_of_them = (*accelerators, *rare)
            for_plans = [functools.partial(fetch_weights, a, place, self._report, self._host) for a in all_of_them]
            with staying(accelerators, place, early=True):
                return self.copies.to_gpu(module, place, move, for_plans, modules)
        was_there = gpu_room.on_gpu(modules)
        result = self.copies.to_cpu(module, move, modules) if str(device) == "cpu" else move()
        if was_there and not gpu_room.on_gpu(module):
            for each in rare:
                guarded(self._report, "memory", each.give_memory_back)
            if accelerators:
                self._report.count("weights_away")
                guarded(self._report, "memory", lambda: self._make_room(gpu_room.IDLE_RESERVE))
        return result


class WeightMoves:
    """Moves weights between system memory and the GPU in place of a host: see `staging` and `host_copies`. What cannot
    be moved so is left to the host."""

    def __init__(self, report: Report) -> None:
        self._report, self._copies = report, HostCopies()

    def to_gpu(
        self,
        module: nn.Module,
        place: torch.device | None,
        move: Callable[[], Any],
        before: Iterable[Callable[[], object]] = (),
        modules: Iterable[nn.Module] | None = None,
    ) -> Any:
        """Move a module to the GPU; returns what `move` does.

        Args:
            place: where all of it goes; None if its parts go to different devices.
            move: how the host moves it.
            before: called first, as they move the weights that plans read.
            modules: the module and what is in it, if that is known.
        """
        parameters = parameters_in(modules_of(module) if modules is None else modules)
        sources: Sources = []
        self._attempt(lambda: sources.extend(sources_of(parameters) if system_memory.has_room() else ()))
        for action in before:
            guarded(self._report, "memory", action)
        if place is not None:
            self._attempt(lambda: move_to_gpu(parameters, place))
        result = _with_room(place, self._report, move)
        self._attempt(lambda: self._copies.keep(module, sources))
        return result

    def to_cpu(self, module: nn.Module, move: Callable[[], Any], modules: Iterable[nn.Module] | None = None) -> Any:
        """Move a module to system memory; returns what `move` does, which is how the host moves it.

        Args:
            modules: the module and what is in it, if that is known.
        """
        self._attempt(lambda: self._put_back(module, modules))
        return move()

    @contextlib.contextmanager
    def where_it_leaves(self, module: nn.Module) -> Iterator[None]:
        """While the host decides whether it moves a module to system memory by `to`."""
        if module not in self._copies:
            yield
            return

        def to(original: Callable[..., Any], moved: nn.Module, *args: Any, **kwargs: Any) -> Any:
            move = functools.partial(original, moved, *args, **kwargs)
            leaves = moved is module and str(_device_of(args, kwargs)) == "cpu"
            return self.to_cpu(moved, move) if leaves else move()

        unwrap = _wrap_method(type(module), "to", to)
        try:
            yield
        finally:
            unwrap()

    def sweep(self) -> None:
        """Free what is not needed any more."""
        self._attempt(self._copies.sweep)

    def drop(self) -> None:
        """Free all copies."""
        self._copies.drop()

    def _attempt(self, action: Callable[[], object]) -> None:
        def unless_full() -> None:
            try:
                action()
            except torch.cuda.OutOfMemoryError:
                # counted apart from the host's own, which follows if the weights do not fit either
                self._report.count("out_of_memory")

        guarded(self._report, "memory", unless_full)

    def _put_back(self, module: nn.Module, modules: Iterable[nn.Module] | None) -> None:
        self._report.count("weights_put_back", self._copies.put_back(module, modules))


def _with_room(place: torch.device | None, report: Report, move: Callable[[], Any]) -> Any:
    """What `move` returns. If it runs out of memory while there are CUDA graphs and banks, they are freed, and it is
    called again: it would have that memory without the extension."""
    try:
        return move()
    except torch.cuda.OutOfMemoryError:
        if place is None or place.type != "cuda" or not pool_of(place).holds_memory:
            raise
    # after the handler: the exception keeps what it had allocated
    report.count("out_of_memory")
    pool_of(place).make_room(report)
    return move()


@contextlib.contextmanager
def staying(
    accelerators: Iterable[Accelerator], place: torch.device | None, early: bool = False
) -> Iterator[None]:
    """While a host moves modules to the GPU: weights of which plans read 8-bit integers stay in system memory.

    Args:
        place: where all of a module goes; None if its parts go to different devices, and for system memory.
        early: see `Accelerator.keeping_aside`.
    """
    with contextlib.ExitStack() as each:
        for accelerator in accelerators if place is not None and place.type == "cuda" else ():
            each.enter_context(accelerator.keeping_aside(place, early))
        yield


def fetch_weights(accelerator: Accelerator, place: torch.device | None, report: Report, host: str) -> None:
    """Move a module's weights to where plans read them, just before the host moves the module to the GPU: moved by the
    host alone, they would be there twice.

    Args:
        place: where all of the module goes; None if its parts go to different devices.
    """
    planned = {plan.device for each in (accelerator, *accelerator.parts) for plan in list(each.plans.values())}
    try:
        if place is not None and planned == {place}:
            accelerator.fetch_weights()
            return
    except Exception as exc:
        what = f"the weights could not be moved to where accelerated steps read them, {host} moves them itself"
        report.event("memory", f"{what}: {exc}")
    # in parts, to another device, or without room: the host needs the memory of the second copy
    accelerator.give_memory_back()


def place_of(device: Any) -> torch.device | None:
    """A device with its index, as plans have it; None if weights are moved from there when they are needed, and for
    what names no device."""
    if device is None or isinstance(device, (torch.dtype, torch.Tensor)) or str(device) in ("cpu", "disk", "meta"):
        return None
    found = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    return torch.device(found.type, found.index or 0)


def _device_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The device, or what stands in its place, among the arguments of `Module.to`."""
    return args[0] if args else kwargs.get("device")


def _inherits(owner: type, other: type, name: str) -> bool:
    """Whether a class has its method from that other class, or both from the same."""
    return owner is not other and issubclass(owner, other) and getattr(owner, name) is getattr(other, name)


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
