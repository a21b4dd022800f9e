"""What a forward that fails has changed, and has to find as it was if it runs again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from sfast_ext.capture import counters
from sfast_ext.capture.arguments import Containers


class Before:
    """The containers among the arguments of a forward, and torch's random numbers of the CPU and of one GPU, as they
    are before it runs."""

    def __init__(self, args: Sequence[Any], kwargs: dict[str, Any], device: torch.device | None) -> None:
        self._containers = Containers(args, kwargs)
        self._numbers: list[tuple[torch.Generator, Any]] = []
        generators = [torch.default_generator]
        if device is not None and device.type == "cuda":
            # none before CUDA is in use
            generators += torch.cuda.default_generators[device.index or 0 :][:1]
        for generator in generators:
            try:
                self._numbers.append((generator, _state_of(generator)))
            except RuntimeError:
                # that of a GPU while a graph is captured
                continue

    def put_back(self) -> None:
        """Undo what was done to the containers. What was drawn since is drawn again."""
        self._containers.put_back()
        for generator, state in self._numbers:
            # another thread may draw
            if _state_of(generator) != state:
                counters.put_back(generator, state)


def _state_of(generator: torch.Generator) -> Any:
    read = counters.reader(generator)
    assert read is not None
    return read(generator)
