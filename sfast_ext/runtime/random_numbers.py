"""Random numbers of a forward that is run again: it draws the same."""

from __future__ import annotations

import torch


class RandomNumbers:
    """The states of torch's generators of the CPU and of one GPU, as they are before a forward."""

    def __init__(self, device: torch.device | None) -> None:
        self._states: list[tuple[torch.Generator, torch.Tensor]] = []
        generators = [torch.default_generator]
        if device is not None and device.type == "cuda":
            # none before CUDA is in use
            generators += torch.cuda.default_generators[device.index or 0 :][:1]
        for generator in generators:
            try:
                self._states.append((generator, generator.get_state()))
            except RuntimeError:
                # that of a GPU while a graph is captured
                continue

    def put_back(self) -> None:
        """What was drawn since is drawn again."""
        for generator, state in self._states:
            # another thread may draw
            if not torch.equal(generator.get_state(), state):
                generator.set_state(state)
