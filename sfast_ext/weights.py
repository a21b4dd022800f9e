"""The weight arena: the one place where the weights that plans read live.

A plan reads a *live* tensor, whose address never changes while a plan is bound to it. Most live tensors are simply
the module's own parameters. Packed weights (Q, K, V; all prompt keys and values; all time projections) are single
tensors of which the module's parameters become views, so there is no second copy and an update in place reaches the
packed tensor by itself. `sync()` sees parameters that were replaced or moved, copies their values into the live
tensors and re-binds the parameters.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

Slot = tuple[dict, str]


class WeightsAway(Exception):
    """Weights are not where plans read them for now (offloaded); the original forward runs, plans are kept."""


class WeightsChanged(Exception):
    """Weights changed in a way that no copy can follow (shape, dtype, removed); plans must be built anew."""


@dataclass(eq=False)
class Weight:
    """A parameter, buffer or packed tensor that plans may read.

    `tensor` is the live tensor. `slots` are the dictionaries of modules that hold the parameter (several where it is
    tied); empty for a packed tensor.
    """

    path: str
    tensor: torch.Tensor
    slots: list[Slot] = field(default_factory=list)
    bound: torch.Tensor | None = None
    """The very object that was in the slots when the live tensor was last known to hold its values."""
    pointer: int = 0
    home: tuple[int, ...] = ()
    """Strides the module's parameter had before the arena touched it."""
    pack: Weight | None = None
    parts: tuple[Weight, ...] = ()
    placed: bool = False
    """Whether the arena changed where or how the parameter lies."""
    plans: int = 0
    """How many plans read it; its address must not change while there is one."""

    @property
    def owner(self) -> dict:
        """The dictionary of the module that holds it."""
        return self.slots[0][0]

    @property
    def name(self) -> str:
        """Its name in that module."""
        return self.slots[0][1]

    def is_current(self, value: torch.Tensor) -> bool:
        """Whether the module still holds the tensor that the live one was bound to, where and as it was."""
        if id(self.bound) != id(value):
            return False
        live = self.tensor
        return value.device == live.device and value.dtype == live.dtype and _same_place(value, live)


class WeightArena:
    """Tracks the weights of one module.

    Args:
        root: the module whose parameters, buffers and tensor attributes plans may read.
    """

    def __init__(self, root: nn.Module) -> None:
        self.root = root
        self._lock = threading.RLock()
        self._weights: dict[int, Weight] = {}
        self._packs: dict[tuple[int, ...], Weight] = {}
        self._live: list[Weight] = []
        self._watch: list[tuple[dict, str, torch.Tensor, int, tuple[int, ...], Weight]] = []
        self.copied = 0

    def index(self) -> None:
        """Learn the module's tensors by identity, before a capture. O(parameters)."""
        with self._lock:
            known: dict[int, dict[str, Weight]] = {id(slot[0]): {} for w in self._weights.values() for slot in w.slots}
            for w in self._weights.values():
                for container, name in w.slots:
                    known[id(container)][name] = w
            held: dict[int, tuple[torch.Tensor, str, list[Slot]]] = {}
            for prefix, module in self.root.named_modules():
                for container in (module._parameters, module._buffers, module.__dict__):
                    for name, value in container.items():
                        if isinstance(value, torch.Tensor):
                            path = f"{prefix}.{name}" if prefix else name
                            held.setdefault(id(value), (value, path, []))[2].append((container, name))
            fresh = {key: self._indexed(value, path, slots, known) for key, (value, path, slots) in held.items()}
            # what plans read stays tracked even where the module let go of it: sync() reports that
            for w in self._live:
                if w.bound is not None:
                    fresh.setdefault(id(w.bound), w)
            self._weights = fresh

    def _indexed(
        self, value: torch.Tensor, path: str, slots: list[Slot], known: dict[int, dict[str, Weight]]
    ) -> Weight:
        """The weight that these slots hold: one that is known where it still is that tensor, else a new one."""
        were = [w for container, name in slots if (w := known.get(id(container), {}).get(name)) is not None]
        for w in were:
            if w.plans or w.is_current(value):
                # what it was tied to may have changed since, but what a plan reads is watched until sync() says so
                here = {(id(container), name) for container, name in slots}
                w.slots = slots + [s for s in w.slots if w.plans and (id(s[0]), s[1]) not in here]
                return w
        for w in were:
            if w.pack is not None:
                self._dissolve(w.pack)
        new = _weight(path, value, slots)
        same = self._weights.get(id(value))
        was = same if same is not None and same.bound is value else next(iter(were), None)
        if was is not None and was.placed and value.shape == was.tensor.shape:
            # replaced, or held by others now, yet its strides may still be the ones the arena gave it
            new.placed = True
            if value.stride() == was.tensor.stride():
                new.home = was.home
        return new

    def locate(self, tensor: torch.Tensor) -> Weight | None:
        """The weight that this very tensor object is, or None. `index()` must have run since it was assigned."""
        weight = self._weights.get(id(tensor))
        return weight if weight is not None and weight.bound is tensor else None

    def pack(self, weights: Sequence[Weight]) -> Weight | None:
        """One tensor with the rows (dim 0) of all `weights`, which become views of it.

        Returns None, and changes nothing, where they do not fit together, or a plan already reads one elsewhere.
        """
        with self._lock:
            key = tuple(id(w) for w in weights)
            if key in self._packs:
                return self._packs[key]
            first = weights[0].tensor
            alike = all(
                w.tensor.dtype == first.dtype
                and w.tensor.device == first.device
                and w.tensor.shape[1:] == first.shape[1:]
                for w in weights
            )
            free = all(w.pack is None and not w.plans and w.slots and w.tensor.dim() for w in weights)
            if len(set(key)) != len(key) or not alike or not free:
                return None
            with torch.inference_mode(False):
                packed = torch.cat([w.tensor for w in weights]).contiguous()
            pack = Weight("+".join(w.path for w in weights), packed, parts=tuple(weights))
            start = 0
            for w in weights:
                rows = w.tensor.shape[0]
                self._place(w, packed[start : start + rows])
                w.pack = pack
                start += rows
            self._packs[key] = pack
            return pack

    def channels_last(self, weight: Weight) -> bool:
        """Lay a 4-D weight out as channels-last; the same logical values. False where a plan holds it otherwise."""
        with self._lock:
            if weight.tensor.dim() != 4 or not weight.slots:
                return False
            if weight.tensor.is_contiguous(memory_format=torch.channels_last):
                return True
            if weight.plans or weight.pack is not None:
                return False
            with torch.inference_mode(False):
                place = weight.tensor.contiguous(memory_format=torch.channels_last)
            self._place(weight, place)
            return True

    def bind(self, weights: Sequence[Weight]) -> None:
        """A plan reads these from now on: their addresses stay."""
        with self._lock:
            for weight in weights:
                for w in weight.parts or (weight,):
                    w.plans += 1
            self._refresh_live()
            # what no plan reads is not ours to keep alive (a host's backups among it)
            self._weights = {k: w for k, w in self._weights.items() if w.plans or w.placed}

    def unbind(self, weights: Sequence[Weight]) -> None:
        """The plan that read these is gone."""
        with self._lock:
            for weight in weights:
                for w in weight.parts or (weight,):
                    w.plans -= 1
            self._refresh_live()

    def sync(self) -> int:
        """Bring the live tensors up to date with the module's parameters; returns how many were copied.

        Raises:
            WeightsAway: a parameter is on another device, or on none.
            WeightsChanged: a parameter changed its shape or dtype, or is no plain tensor any more.
        """
        stale = []
        for container, name, bound, pointer, stride, weight in self._watch:
            now = container.get(name)
            if now is not bound or now.data_ptr() != pointer or now.stride() != stride:
                stale.append((weight, now))
        if not stale:
            return 0
        with self._lock:
            return self._adopt(stale)

    def release(self) -> None:
        """Give every parameter back with the strides it had, in memory of its own, with the values it has now."""
        with self._lock:
            touched = [w for w in {id(w): w for w in [*self._weights.values(), *self._live]}.values() if w.slots]
            for w in touched:
                container, name = w.slots[0]
                now = container.get(name)
                if not isinstance(now, torch.Tensor) or not w.placed:
                    continue
                ours = now.data_ptr() == w.tensor.data_ptr() and now.device == w.tensor.device
                as_placed = now.stride() == w.tensor.stride() and now.shape == w.tensor.shape
                if ours or as_placed:
                    # other strides on our memory are the host's choice
                    strides = w.home if as_placed else now.stride()
                    own = torch.empty_strided(now.shape, strides, dtype=now.dtype, device=now.device)
                    own.copy_(now.detach())
                    now.data = own
            self._weights, self._packs, self._live, self._watch = {}, {}, [], []

    def status(self) -> dict[str, int]:
        """Counts for the report."""
        with self._lock:
            return {
                "tracked": len(self._live),
                "packed_tensors": len(self._packs),
                "packed_parameters": sum(len(p.parts) for p in self._packs.values()),
                "copied": self.copied,
            }

    def _dissolve(self, pack: Weight) -> None:
        # its parameters stay where they are, but may be packed anew
        for part in pack.parts:
            part.pack = None
        self._packs = {k: p for k, p in self._packs.items() if p is not pack}

    def _refresh_live(self) -> None:
        packed = {id(p): p for pack in self._packs.values() for p in pack.parts}
        everything = {
            **{id(w): w for w in self._weights.values()},
            **{id(w): w for w in self._live},
            **packed,
        }
        self._live = [w for w in everything.values() if w.plans]
        self._rewatch()

    def _rewatch(self) -> None:
        self._watch = [
            (container, name, w.bound, w.pointer, w.tensor.stride(), w)
            for w in self._live
            if w.bound is not None
            for container, name in w.slots
        ]

    def _place(self, weight: Weight, place: torch.Tensor) -> None:
        # values are in `place` already, or about to be the same: callers build it from weight.tensor
        assert weight.bound is not None
        # the module's own tensor object stays, so that the host's references to it stay good
        weight.bound.data = place
        weight.tensor, weight.pointer, weight.placed = place, place.data_ptr(), True

    def _adopt(self, stale: list[tuple[Weight, torch.Tensor | None]]) -> int:
        arriving: dict[int, Weight] = {}
        for weight, now in stale:
            _fits(weight, now)
            if any(c.get(n) is not now for c, n in weight.slots):
                raise WeightsChanged(f"{weight.path} is no longer shared between modules")
            bound = self._weights.get(id(now))
            if bound is None or bound.bound is not now or not bound.plans:
                bound = weight
            other = arriving.setdefault(id(now), bound)
            if other is not weight:
                # each has a live tensor of its own, and one parameter cannot be a view of both
                raise WeightsChanged(f"{weight.path} is now the tensor of {other.path}")
        targets, sources = [], []
        for weight, now in stale:
            assert now is not None
            if not _same_place(now, weight.tensor):
                targets.append(weight.tensor)
                overlaps = now.data_ptr() == weight.tensor.data_ptr()
                sources.append(now.detach().clone() if overlaps else now.detach())
        with torch.inference_mode(False), torch.no_grad():
            if targets:
                torch._foreach_copy_(targets, sources)
        for weight, now in stale:
            assert now is not None
            if not _same_place(now, weight.tensor):
                if now.stride() != weight.tensor.stride():
                    # laid out anew by the host: that is what it gets back
                    weight.home, weight.placed = tuple(now.stride()), True
                now.data = weight.tensor
            weight.bound = now
            self._weights[id(weight.bound)] = weight
        self.copied += len(targets)
        self._rewatch()
        return len(targets)


def _weight(path: str, value: torch.Tensor, slots: list[Slot]) -> Weight:
    return Weight(path, value.detach(), slots, value, value.data_ptr(), tuple(value.stride()))


def _same_place(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.data_ptr() == b.data_ptr() and a.stride() == b.stride()


def _fits(weight: Weight, now: torch.Tensor | None) -> None:
    live = weight.tensor
    if not isinstance(now, torch.Tensor):
        raise WeightsChanged(f"{weight.path} is gone")
    if type(now) not in (torch.Tensor, nn.Parameter) or now.layout is not torch.strided:
        raise WeightsChanged(f"{weight.path} is now a {type(now).__name__}")
    if now.device != live.device:
        raise WeightsAway(f"the weights are on {now.device}, the plans on {live.device}")
    if now.shape != live.shape or now.dtype != live.dtype:
        raise WeightsChanged(
            f"{weight.path} changed from {live.dtype}{list(live.shape)} to {now.dtype}{list(now.shape)}"
        )
