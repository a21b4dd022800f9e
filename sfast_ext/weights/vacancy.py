"""Live tensors whose memory was freed while the host has the weights on another device."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from sfast_ext import reasons
from sfast_ext.weights.original_layout import OriginalLayouts, Strides, memory_of
from sfast_ext.weights.weight import Weight, WeightsAway

# in elements; offsets in a block keep their alignment, for kernels that load 16 bytes at a time
_ALIGNED = 256


@dataclass
class _Member:
    weight: Weight
    offset: int
    strides: Strides
    original: Strides | None


@dataclass
class Vacancy:
    """A block of memory that can be freed, or is freed, and the layout of the weights in it."""

    elements: int
    dtype: torch.dtype
    device: torch.device
    members: list[_Member] = field(default_factory=list)

    def vacate(self, nothing: torch.Tensor) -> None:
        """Free the block: its tensors are expansions of `nothing`, see `vacate`."""
        for member in self.members:
            member.weight.tensor.data = nothing.expand(member.weight.tensor.shape)
            member.weight.bound, member.weight.pointer = None, nothing.data_ptr()

    def occupy(self, layouts: OriginalLayouts) -> None:
        """Allocate the block again. Its values are not copied yet. Call it outside of inference mode.

        Raises:
            WeightsAway: the GPU is out of memory.
        """
        try:
            block = torch.empty(self.elements, dtype=self.dtype, device=self.device)
        except torch.cuda.OutOfMemoryError as exc:
            raise WeightsAway(reasons.NO_ROOM_FOR_WEIGHTS()) from exc
        for member in self.members:
            tensor = member.weight.tensor
            tensor.data = block.as_strided(tensor.shape, member.strides, member.offset)
            member.weight.pointer = tensor.data_ptr()
            if member.original is not None:
                layouts.record_memory(tensor, member.original)

    def with_rows(self, rows: Weight) -> Vacancy:
        """The same block, in which a weight is the rows of others in it that are its parts."""
        first = next(member for member in self.members if member.weight is rows.parts[0])
        self.members.append(_Member(rows, first.offset, first.strides, first.strides))
        return self


def vacate(given: Sequence[Vacancy]) -> None:
    """Free blocks. Their tensors keep shape, dtype and device, as expansions of a single NaN for each dtype and
    device: a launch for each tensor would take as long as the rest."""
    with torch.inference_mode(False), torch.no_grad():
        # all that may fail comes first
        nothing = {
            (dtype, device): torch.full((), math.nan if dtype.is_floating_point else 0, dtype=dtype, device=device)
            for dtype, device in {(block.dtype, block.device) for block in given}
        }
        for block in given:
            block.vacate(nothing[block.dtype, block.device])


def vacant_bytes(given: Iterable[Vacancy]) -> int:
    """What the blocks are going to take. Each may be given several times."""
    return sum(block.elements * block.dtype.itemsize for block in {id(block): block for block in given}.values())


def vacancies(live: Iterable[Weight], known: Iterable[Weight], layouts: OriginalLayouts) -> tuple[list[Vacancy], bool]:
    """The blocks of live tensors that no parameter of the module uses, and whether parameters use others.

    Args:
        live: the weights that plans read.
        known: all other weights that may use the same blocks.
    """
    blocks: dict[int, dict[int, Weight]] = {memory_of(w.tensor): {} for w in live}
    for weight in (*live, *known):
        if (block := blocks.get(memory_of(weight.tensor))) is not None:
            block[id(weight)] = weight
    everything = [weight for block in blocks.values() for weight in block.values()]
    held = [container.get(name) for weight in everything for container, name in weight.slots]
    used = {memory_of(value) for value in held if isinstance(value, torch.Tensor)} & blocks.keys()
    used |= {memory for memory, block in blocks.items() if len({w.tensor.dtype for w in block.values()}) > 1}
    free = (list(block.values()) for memory, block in blocks.items() if memory not in used)
    return [_block(weights, layouts) for weights in free], bool(used)


def apart(weights: Iterable[Weight], layouts: OriginalLayouts) -> list[Vacancy]:
    """A block for each of these, whatever memory they have now."""
    return [_block([weight], layouts) for weight in weights]


def of_pack(pack: Weight, vacant: Mapping[int, Vacancy]) -> Vacancy:
    """The block of a pack whose parts have no memory.

    Args:
        vacant: their blocks, by the id of the part.
    """
    shape, first = pack.tensor.shape, 0
    strides = torch.empty(shape, device="meta").stride()
    found = Vacancy(shape.numel(), pack.tensor.dtype, pack.tensor.device, [_Member(pack, 0, strides, strides)])
    for part in pack.parts:
        was = next(member for member in vacant[id(part)].members if member.weight is part)
        original = was.strides if was.original is None else was.original
        found.members.append(_Member(part, first * strides[0], strides, original))
        first += part.tensor.shape[0]
    return found


def _block(weights: list[Weight], layouts: OriginalLayouts) -> Vacancy:
    first = weights[0].tensor
    begin = min(w.tensor.storage_offset() for w in weights) // _ALIGNED * _ALIGNED
    found = Vacancy(0, first.dtype, first.device)
    for weight in weights:
        tensor = weight.tensor
        offset = tensor.storage_offset() - begin
        reach = offset + 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride()))
        found.elements = max(found.elements, reach)
        found.members.append(_Member(weight, offset, tensor.stride(), layouts.strides_of(tensor)))
    return found
