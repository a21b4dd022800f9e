"""Parameters in system memory that stand in on the GPU while a forward is recorded.

A recording asks weights where they are and how they lie, and never for values. So a parameter is given memory of the
GPU that all of them share, as large as the largest needs. It is real memory, as torch computes some operations on
weights alone while it records. What it computes so means nothing, and is in no graph: the recording refuses reads of
weights.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sfast_ext import reasons
from sfast_ext.weights.original_layout import live_tensor, reach, set_data
from sfast_ext.weights.tracked import TrackedWeights
from sfast_ext.weights.vacancy import apart, of_pack
from sfast_ext.weights.weight import Weight, WeightsInUse


class StandIns:
    """Within, parameters that were set aside are on the GPU, without their values. No other forward of the module may
    run. Afterwards they are what they were, and weights of the arena that were indexed meanwhile have no memory, as
    those have that were set aside.

    Args:
        values: the parameters in system memory. Others stay as they are.
    """

    def __init__(self, tracked: TrackedWeights, values: Sequence[torch.Tensor], device: torch.device) -> None:
        self._tracked, self._values, self._device = tracked, values, device
        self._taken: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __enter__(self) -> StandIns:
        try:
            with torch.inference_mode(False), torch.no_grad():
                sources = [(value, live_tensor(value)) for value in self._values]
                sizes = [reach(source) * source.element_size() for _, source in sources]
                memory = torch.zeros(max(sizes, default=0), dtype=torch.uint8, device=self._device)
                for (value, source), size in zip(sources, sizes):
                    there = memory[:size].view(source.dtype).as_strided(source.shape, source.stride())
                    self._taken[id(value)] = value, source
                    set_data(value, there)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        tracked, taken, self._taken = self._tracked, self._taken, {}
        with torch.inference_mode(False), torch.no_grad():
            for value, source in taken.values():
                set_data(value, source)
            with tracked.lock:
                # next to one that plans read, whose live tensor is another
                indexed = [w for w in tracked.weights.values() if id(w.bound) in taken and not w.plans]
                tracked.vacate(apart(indexed, tracked.layouts))
                tracked.reset_detector()


def pack(tracked: TrackedWeights, weights: Sequence[Weight]) -> Weight | None:
    """`WeightArena.pack` of weights of which some have no memory: their pack has none either. None if others have.

    Raises:
        WeightsInUse: another thread has moved them since they were set aside.
    """
    vacant = tracked.vacant
    if not all(weight.is_bare for weight in weights):
        return None
    if not all(id(weight) in vacant for weight in weights):
        raise WeightsInUse(reasons.WEIGHTS_IN_USE())
    rows = sum(weight.tensor.shape[0] for weight in weights)
    made = tracked.packs.make(
        weights, lambda weight, place: None, lambda some: some[0].tensor[:1].expand(rows, *some[0].tensor.shape[1:])
    )
    if made is not None and id(made) not in vacant:
        whole = made.parts[0].pack
        assert whole is not None
        vacancy = of_pack(made, vacant) if whole is made else vacant[id(whole)].with_rows(made)
        tracked.note_vacant([vacancy])
    return made
