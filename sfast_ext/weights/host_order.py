"""The two orders in which the memory of a channels-last weight holds its elements.

A convolution returns a channels-last result if its weight is channels-last. So the original forward must not see a
weight in the layout that plans read: its results, and what hooks get, would have other strides, and `view` would raise.
A second copy of all convolutions would take a third of the memory of a UNet's weights. Instead their elements are put
into the host's order, in the same memory, before the original forward runs, and back before the next plan runs. Nothing
is moved between two runs of the same kind.

Memory that others reference is not rewritten: the parameter then gets separate memory for that time.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import nn

from sfast_ext import reasons, torch_state
from sfast_ext.weights.external_refs import ALONE, uses
from sfast_ext.weights.gate import Gate
from sfast_ext.weights.original_layout import OriginalLayouts, Strides, is_channels_last, is_plain, memory_of, set_data
from sfast_ext.weights.weight import Weight, WeightsChanged, WeightsInUse, tensors_of

_WAITS, _WAIT_S = 10, 0.002
_MIN_CONVERTED = 3  # convolutions that show which layout the host gave to all

T = TypeVar("T")
Turn = Callable[[torch.device], contextlib.AbstractContextManager[Any]]
Strange = tuple[Weight, torch.Tensor, Strides]
"""A weight, its parameter, and the strides that the parameter should have."""


class HostOrder:
    """The weights of one arena that are in channels-last memory.

    Args:
        layouts: knows the host's strides.
        lock: that of the arena.
        turn: the lock under which plans on a device run.
    """

    def __init__(self, layouts: OriginalLayouts, lock: threading.RLock, turn: Turn | None = None) -> None:
        self._layouts = layouts
        self._lock = lock
        self._turn: Turn = turn or (lambda device: lock)
        self._laid: dict[int, tuple[Weight, list[str]]] = {}
        self._in_place: dict[int, Weight] = {}  # those whose memory is in the host's order now
        self._apart: dict[int, Weight] = {}  # those whose parameter has separate memory now
        # where a parameter is, its id, and its strides
        self._seen: list[tuple[dict[str, Any], str, int, Strides]] = []
        self.pinned = False
        """Whether memory stays as it is: a CUDA graph of the program reads it."""

    def turn(self, device: torch.device) -> contextlib.AbstractContextManager[Any]:
        """The lock under which plans on a device run."""
        return self._turn(device)

    @property
    def changed(self) -> bool:
        """Whether any weight is in the host's order, or in separate memory. Exact under the lock `turn`."""
        return bool(self._in_place or self._apart)

    def __len__(self) -> int:
        return len(self._laid)

    def __contains__(self, weight: Weight) -> bool:
        return id(weight) in self._laid

    def add(self, weight: Weight, paths: list[str]) -> None:
        """The arena moved this weight to channels-last memory."""
        self._seen = []
        self._laid[id(weight)] = weight, paths

    def keep(self, known: Iterable[Weight]) -> None:
        """Forget all weights but these."""
        self._seen = []
        ids = {id(weight) for weight in known}
        self._laid = {key: laid for key, laid in self._laid.items() if key in ids}
        self._in_place = {key: weight for key, weight in self._in_place.items() if key in ids}
        self._apart = {key: weight for key, weight in self._apart.items() if key in ids}

    def bound(self, weight: Weight) -> None:
        """The parameter of a weight is a view of the live tensor again, which has its values."""
        self._in_place.pop(id(weight), None)
        self._apart.pop(id(weight), None)

    def left(self, parameters: Container[int]) -> None:
        """These parameters, by id, have left the memory of live tensors."""
        self._in_place = {key: w for key, w in self._in_place.items() if id(w.bound) not in parameters}
        self._apart = {key: w for key, w in self._apart.items() if id(w.bound) not in parameters}

    def is_current(self, weight: Weight, value: torch.Tensor) -> bool:
        """Whether the module holds the bound tensor, on the memory of the weight in the host's order."""
        return id(weight) in self._in_place and weight.bound is value and _on_memory_of(weight, value)

    @contextlib.contextmanager
    def host(self, gate: Gate, own: Container[int] | None = None) -> Iterator[None]:
        """Within, parameters have the host's strides, for a forward that is no plan.

        Args:
            gate: is held meanwhile.
            own: dictionaries of modules, by id. Weights in others stay as they are.
        """
        with gate:
            if self._laid and not self.pinned and not _compiled() and not self._is_as_seen(own):
                if strange := unrecorded(self._strange, own):
                    with self._turn(strange[0][0].tensor.device), self._lock:
                        unrecorded(lambda: self._to_host(self._strange(own)))
                elif own is None:
                    self._see()
            yield

    def _is_as_seen(self, own: Container[int] | None) -> bool:
        """Whether parameters have the strides with which they were all as the host laid them. To ask for these anew
        takes a slow CPU as long as a layer."""
        seen = self._seen
        if own is not None or not seen:
            return False
        for container, name, known, strides in seen:
            now: Any = container.get(name)
            if id(now) != known or now.stride() != strides:
                return False
        return True

    def _see(self) -> None:
        """No parameter is strange: note them, unless one is not asked as long as it is elsewhere."""
        seen = []
        for weight, _ in list(self._laid.values()):
            container, name = weight.slots[0]
            now = container.get(name)
            if not isinstance(now, torch.Tensor) or not is_plain(now) or now.device != weight.tensor.device:
                return
            seen.append((container, name, id(now), now.stride()))
        self._seen = seen

    def plan(self, gate: Gate, own: Container[int] | None = None) -> bool:
        """Give weights the order that plans read, before a plan runs.

        Returns:
            Whether all have it. One whose parameter was replaced or moved in the meantime is left to
            `WeightArena.sync`.

        Raises:
            WeightsInUse: another thread runs the original forward, or a CUDA graph of the program reads the memory.
            WeightsChanged: others reference memory that would be rewritten.
        """
        device = self.differs(own)
        if device is None:
            return True
        if self.pinned:
            raise WeightsInUse(reasons.CAPTURED_GRAPH())
        with self._turn(device), gate.exclusive(), self._lock:
            return self._to_plans(own)

    def check_format(self, weight: Weight, now: torch.Tensor, root: nn.Module) -> None:
        """Raise `WeightsChanged` if the host gave the parameter of a weight another memory format: contiguous or
        channels-last. The results of the original forward have other strides then."""
        if weight.tensor.dim() < 4 and now.dim() < 4:
            # it has none, see `is_channels_last`
            return
        was, new = self._layouts.strides_of(weight.tensor), self._layouts.strides_of(now, [weight.path])
        before = is_channels_last(weight.tensor.shape, was or weight.tensor.stride())
        if before != is_channels_last(now.shape, new or now.stride()):
            self._follow_conversion(value for value, *_ in tensors_of(root).values())
            raise WeightsChanged(reasons.WEIGHT_FORMAT(weight.path))

    def in_place(self) -> set[int]:
        """The ids of the parameters on memory of plans that is in the host's order now."""
        return {id(weight.bound) for weight in self._in_place.values()}

    def differs(self, own: Container[int] | None = None) -> torch.device | None:
        """The device of weights that are not as plans read them. None if there are none.

        Args:
            own: dictionaries of modules, by id. Weights in others do not count.
        """
        return next((weight.tensor.device for weight in self._differing() if _within(weight, own)), None)

    def _strange(self, own: Container[int] | None = None) -> list[Strange]:
        """The weights whose parameters have other strides than those of the host."""
        found = []
        for weight, paths in list(self._laid.values()):
            container, name = weight.slots[0]
            now = container.get(name)
            if not isinstance(now, torch.Tensor) or now.device != weight.tensor.device or not _within(weight, own):
                continue
            as_left = id(weight) in self._in_place and weight.bound is now
            if as_left and now.stride() != weight.tensor.stride():
                continue
            original = self._layouts.strides_of(now, paths)
            if original is not None and original != now.stride():
                found.append((weight, now, original))
        return found

    def _to_host(self, strange: Sequence[Strange]) -> None:
        """Give parameters the host's strides, see `_strange`. No plan may be running."""
        with _rewriting([weight for weight, *_ in strange]):
            for weight, now, original in strange:
                mine = now is weight.bound and _on_memory_of(weight, now)
                # a tensor that was computed from a weight has its strides
                self._layouts.restore(now, original)
                if mine and _fills_memory(weight, original) and _alone(weight):
                    # nobody reads the memory while it is rewritten, as the parameter has other memory
                    there = weight.tensor.as_strided(now.shape, original)
                    set_data(now, there.copy_(now.detach()))
                    self._in_place[id(weight)] = weight
                elif mine:
                    self._apart[id(weight)] = weight

    def _to_plans(self, own: Container[int] | None = None) -> bool:
        """See `plan`. No original forward may be running."""
        changed = [weight for weight in self._differing() if _within(weight, own)]
        complete = True
        with _rewriting(changed):
            for weight in changed:
                now = weight.bound
                if now is None or any(container.get(name) is not now for container, name in weight.slots):
                    complete = False
                elif id(weight) in self._apart:
                    complete = self._rejoin(weight, now) and complete
                elif not _on_memory_of(weight, now):
                    complete = False
                else:
                    self._rewrite(weight, now)
                self.bound(weight)
        return complete

    def _rewrite(self, weight: Weight, now: torch.Tensor) -> None:
        live, original = weight.tensor, now.stride()
        set_data(now, torch.empty_like(live).copy_(now.detach()))
        if not _soon_alone(weight):
            set_data(now, live.as_strided(now.shape, original))
            raise WeightsChanged(reasons.WEIGHT_SHARED(weight.path))
        live.copy_(now.detach())
        set_data(now, live)
        self._layouts.record(now, original, self._laid[id(weight)][1])

    def _rejoin(self, weight: Weight, now: torch.Tensor) -> bool:
        """Make a parameter in separate memory a view of the live tensor. False if its values changed there."""
        live = weight.tensor
        alike = now.shape == live.shape and now.dtype == live.dtype and now.device == live.device
        if not alike or not torch.equal(now, live):
            return False
        original = now.stride()
        set_data(now, live)
        self._layouts.record(now, original, self._laid[id(weight)][1])
        return True

    def _differing(self) -> list[Weight]:
        return [*self._in_place.values(), *self._apart.values()]

    def _follow_conversion(self, tensors: Iterable[torch.Tensor]) -> None:
        """If the host converted all tensors of the module to channels-last, that is its choice for these weights too:
        for them the conversion changed nothing.
        """
        ours = {id(weight.bound) for weight, _ in self._laid.values()}
        others = [t for t in tensors if id(t) not in ours and is_plain(t) and t.dim() == 4 and t.shape[1] > 1]
        if len(others) >= _MIN_CONVERTED and all(is_channels_last(t.shape, t.stride()) for t in others):
            for weight, paths in self._laid.values():
                container, name = weight.slots[0]
                now = container.get(name)
                if isinstance(now, torch.Tensor) and is_channels_last(now.shape, now.stride()):
                    self._layouts.choose(now, paths)


class ModuleOrder:
    """The order of the weights of a module, or of a part of it.

    Args:
        gate: that of the model.
        own: the dictionaries of the part, by id. All by default.
    """

    def __init__(
        self, order: HostOrder, gate: Callable[[], Gate], own: Callable[[], Container[int] | None] = lambda: None
    ) -> None:
        self._order, self._gate, self._own = order, gate, own

    def pin(self) -> None:
        """The program captures a CUDA graph of the module, which will read the weights where and as they are now."""
        self._order.pinned = True

    @property
    def pinned(self) -> bool:
        """Whether weights stay where and as they are, see `pin`."""
        return self._order.pinned

    def host(self) -> contextlib.AbstractContextManager[None]:
        """See `HostOrder.host`."""
        return self._order.host(self._gate(), self._own())

    def plan(self) -> bool:
        """See `HostOrder.plan`."""
        return not self._order.changed or self._order.plan(self._gate(), self._own())

    def is_plans(self) -> bool:
        """Whether `plan` has nothing to do."""
        return not self._order.changed or self._order.differs(self._own()) is None

    def is_hosts(self) -> bool:
        """Whether all weights of the model have the host's layout in any case."""
        return not len(self._order)

    def of_part(self, own: Callable[[], Container[int]]) -> ModuleOrder:
        """That of a part."""
        return ModuleOrder(self._order, self._gate, own)


def _within(weight: Weight, own: Container[int] | None) -> bool:
    return own is None or any(id(container) in own for container, _ in weight.slots)


def _on_memory_of(weight: Weight, tensor: torch.Tensor) -> bool:
    live = weight.tensor
    if tensor.device != live.device or tensor.dtype != live.dtype or tensor.shape != live.shape:
        return False
    return tensor.data_ptr() == live.data_ptr() == weight.pointer and memory_of(tensor) == memory_of(live)


def _fills_memory(weight: Weight, original: Strides) -> bool:
    """Whether the memory of a weight holds its elements and nothing else, in either order."""
    whole = weight.tensor.untyped_storage().nbytes() == weight.tensor.nbytes
    return whole and 1 + sum((n - 1) * step for n, step in zip(weight.tensor.shape, original)) == weight.tensor.numel()


def _alone(weight: Weight) -> bool:
    """Whether the live tensor is the only tensor in its memory."""
    # torch before 2.8 cannot tell in builds for a CPU
    return ALONE > 0 and uses(weight.tensor) == ALONE


def _soon_alone(weight: Weight) -> bool:
    """Like `_alone`. Another thread may be copying the weight, for a moment."""
    for _ in range(_WAITS):
        if _alone(weight):
            return True
        time.sleep(_WAIT_S)
    return False


@contextlib.contextmanager
def _rewriting(weights: Iterable[Weight]) -> Iterator[None]:
    """Within, memory may be rewritten: no mode of the caller sees an operation, and no stream of a GPU reads weights in
    the wrong order."""
    devices = {weight.tensor.device for weight in weights if weight.tensor.is_cuda}
    with undisturbed(), torch.inference_mode(False), torch.no_grad():
        for device in devices:
            torch.cuda.synchronize(device)
        yield
        for device in devices:
            torch.cuda.synchronize(device)


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Within, the modes that the caller put around a call see and change nothing."""
    with torch._C.DisableTorchFunction(), torch._C._DisablePythonDispatcher(), torch._C._DisableTorchDispatch():
        yield


def unrecorded(function: Callable[..., T], *args: Any) -> T:
    """Call a function whose operations no trace records, and no transform of torch.func sees."""
    if not torch_state.traces() and not torch_state.transforms():
        return function(*args)
    # these states cannot be suspended, and another thread has none of them
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(function, *args).result()


def _compiled() -> bool:
    """Whether torch.compile or torch.export follows this code."""
    compiling = getattr(getattr(torch, "compiler", None), "is_compiling", None)
    return compiling is not None and compiling()
