"""What a forward that fails has changed, and has to find as it was if it runs again."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch

from sfast_ext.capture.arguments import Containers
from sfast_ext.weights.streamed import tensors


class Before:
    """The containers among the arguments of a forward, and torch's random numbers of the CPU and of one GPU, as they
    are before it runs.

    Args:
        device: of the weights; if it is no GPU, that of the arguments counts.
    """

    def __init__(self, args: Sequence[Any], kwargs: dict[str, Any], device: torch.device | None) -> None:
        self._containers = Containers(args, kwargs)
        self._numbers: list[tuple[torch.Generator, torch.Tensor]] = []
        if device is None or device.type != "cuda":
            device = next((x.device for x in tensors((tuple(args), kwargs)) if x.is_cuda), None)
        generators = [torch.default_generator]
        if device is not None:
            # none before CUDA is in use
            generators += torch.cuda.default_generators[device.index or 0 :][:1]
        for generator in generators:
            # that of a GPU raises while a graph is captured
            with contextlib.suppress(RuntimeError):
                self._numbers.append((generator, generator.get_state()))

    def put_back(self) -> None:
        """Undo what was done to the containers. What was drawn since is drawn again."""
        self._containers.put_back()
        for generator, state in self._numbers:
            with contextlib.suppress(RuntimeError):
                # another thread may draw
                if not torch.equal(generator.get_state(), state):
                    generator.set_state(state)
