"""Products and attention by our kernels for GeForce wherever these take the operands, measured or not."""

from __future__ import annotations

import contextlib
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch

from sfast_ext.kernels.backend.choices import Choices
from sfast_ext.tools.lib.ways import passing_for

MMA = "mma"
"""How the names of those begin that `Choices` choose among."""


@contextlib.contextmanager
def everywhere(capability: tuple[int, int]) -> Iterator[Counter[str]]:
    """Within, the GPU passes for one of this compute capability, and if several ways exist one of ours is taken,
    another for other sizes. Yields what was chosen how often, by operation and way."""
    chosen: Counter[str] = Counter()

    # in the place of a measurement
    def find(
        self: Any, device: torch.device, key: str, ways: Mapping[str, Any], expected: str, sure: bool, limits: Any
    ) -> str:
        ours = sorted(name for name in ways if name.startswith(MMA))
        name = ours[zlib.crc32(key.encode()) % len(ours)] if ours else expected
        self._chosen[device, key] = name
        chosen[f"{self._what}: {name}"] += 1
        return name

    with pytest.MonkeyPatch.context() as patch, passing_for(capability):
        patch.setattr(Choices, "_find", find)
        yield chosen
