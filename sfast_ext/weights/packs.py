"""Packed weights of a weight arena: several weights are the rows of one tensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from sfast_ext.weights.weight import Weight


def _joined(weights: Sequence[Weight]) -> torch.Tensor:
    return torch.cat([w.tensor for w in weights])


class Packs:
    """All packs, by the weights in them."""

    def __init__(self) -> None:
        self._packs: dict[tuple[int, ...], Weight] = {}

    def __len__(self) -> int:
        return len(self._packs)

    def make(
        self,
        weights: Sequence[Weight],
        move: Callable[[Weight, torch.Tensor], None],
        join: Callable[[Sequence[Weight]], torch.Tensor] = _joined,
    ) -> Weight | None:
        """The pack of these weights, or their rows of a larger pack; see `WeightArena.pack`.

        Args:
            move: makes a weight a view of the given rows.
            join: makes the tensor of the pack.
        """
        known = self._packs.get(_key(weights))
        if known is not None:
            return known
        if not _stackable(weights):
            return None
        within = self._rows_of_pack(weights)
        if within is not None:
            return within
        if any(w.plans for w in weights):
            return None
        for w in weights:
            if w.pack is not None and not any(part.plans for part in w.pack.parts):
                self.dissolve(w.pack)
        if any(w.pack is not None for w in weights):
            return None
        try:
            with torch.inference_mode(False):
                pack = _packed(weights, join(weights))
        except torch.cuda.OutOfMemoryError:
            return None  # there is no room for both copies: they stay apart
        start = 0
        for w in weights:
            rows = w.tensor.shape[0]
            move(w, pack.tensor[start : start + rows])
            w.pack = pack
            start += rows
        self._packs[_key(weights)] = pack
        return pack

    def all(self) -> list[Weight]:
        """All packs."""
        return list(self._packs.values())

    def dissolve(self, pack: Weight) -> None:
        """Drop a pack. Its parameters keep their memory, but may be packed again."""
        for part in pack.parts:
            part.pack = None
        # packs that are rows of it are dropped as well, unless a plan reads them
        gone = [p for p in self._packs.values() if p is pack or not {*p.parts}.isdisjoint(pack.parts)]
        self._packs = {
            k: p for k, p in self._packs.items() if p not in gone or (p is not pack and all(w.plans for w in p.parts))
        }

    def drop_unread(self) -> None:
        """Drop the packs that no plan reads completely."""
        self._keep(lambda pack: all(part.plans for part in pack.parts))

    def drop_left(self, there: Callable[[Weight], bool]) -> None:
        """Drop the packs that no plan reads, and of which no part is there any more."""
        self._keep(lambda pack: any(part.plans or there(part) for part in pack.parts))

    def clear(self) -> None:
        """Drop all packs, which no plan reads."""
        self._keep(lambda pack: False)

    def _keep(self, kept: Callable[[Weight], bool]) -> None:
        gone = [pack for pack in self._packs.values() if not kept(pack)]
        self._packs = {key: pack for key, pack in self._packs.items() if kept(pack)}
        for pack in gone:
            if not any(part.plans for part in pack.parts):
                # cycles of references would keep its memory until garbage is collected
                pack.let_go()
                for part in pack.parts:
                    part.pack = None if part.pack is pack else part.pack

    def _rows_of_pack(self, weights: Sequence[Weight]) -> Weight | None:
        """The rows of a larger pack in which `weights` are neighbours in this order, or None."""
        pack = weights[0].pack
        if pack is None or any(w.pack is not pack for w in weights):
            return None
        parts = list(pack.parts)
        first = parts.index(weights[0])
        if parts[first : first + len(weights)] != list(weights):
            return None
        start = sum(w.tensor.shape[0] for w in parts[:first])
        found = _packed(weights, pack.tensor[start : start + sum(w.tensor.shape[0] for w in weights)])
        self._packs[_key(weights)] = found
        return found


def _packed(weights: Sequence[Weight], tensor: torch.Tensor) -> Weight:
    """The weight of a tensor with the rows of `weights`."""
    return Weight("+".join(w.path for w in weights), tensor, parts=tuple(weights))


def _stackable(weights: Sequence[Weight]) -> bool:
    """Whether weights can be rows of one tensor."""
    first = weights[0].tensor
    alike = all(
        w.tensor.dtype == first.dtype and w.tensor.device == first.device and w.tensor.shape[1:] == first.shape[1:]
        for w in weights
    )
    return len(set(_key(weights))) == len(weights) and alike and all(w.slots and w.tensor.dim() for w in weights)


def _key(weights: Sequence[Weight]) -> tuple[int, ...]:
    return tuple(id(w) for w in weights)
