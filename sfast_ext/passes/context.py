"""What all passes are given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from sfast_ext.kernels.backend.registry import Kernel

if TYPE_CHECKING:
    from sfast_ext.weights.arena import WeightArena

    from .eight_bits_selection import Selection


@dataclass
class PassContext:
    """What passes may use: the weight arena, Triton kernels; and how images and sums are to be."""

    arena: WeightArena
    device: torch.device
    triton: bool
    channels_last: bool = True
    faster_sums: bool = False
    """Whether sums may be in half precision."""
    eight_bits: Selection | None = None
    """Which linear layers are computed with 8-bit integers; None: none are."""
    most_bytes: int | None = None
    """What a kernel may hold while it runs, its operands and its result included; None if memory does not matter."""

    def supported(self, *kernels: Kernel[..., Any]) -> bool:
        """Whether all of these kernels may be launched. Operations without a kernel stay as they were captured."""
        return all(kernel.supported(self.device, triton=self.triton) for kernel in kernels)
