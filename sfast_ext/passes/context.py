"""What all passes are given."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING

import torch

from sfast_ext import kernels

if TYPE_CHECKING:
    from sfast_ext.weights.arena import WeightArena


@dataclass
class PassContext:
    """What passes may use: the weight arena, Triton kernels; and how images and sums are to be."""

    arena: WeightArena
    device: torch.device
    triton: bool
    channels_last: bool = True
    faster_sums: bool = False
    """Whether sums may be in half precision."""
    most_bytes: int | None = None
    """What a kernel may hold while it runs, its operands and its result included; None where that does not matter."""

    def serves(self, *modules: ModuleType) -> bool:
        """Whether all of these kernels may be launched. Operations without a kernel stay as they were captured."""
        return all(kernels.serves(module, self.device, triton=self.triton) for module in modules)
