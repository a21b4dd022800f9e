"""Figures of cards, as published.

NVIDIA Turing GPU Architecture (whitepaper, 2018), NVIDIA Ampere GA102 GPU Architecture (whitepaper, 2021) and NVIDIA
Ada GPU Architecture (whitepaper, 2023) for the architectures; clocks and memory of NVIDIA's product pages.
"""

from __future__ import annotations

from typing import NamedTuple

FMA_PER_CLOCK = 256
"""Of a multiprocessor's tensor cores, for products of float16 with sums in float32; twice as many with sums in float16.

The whitepapers' 59.5 TFLOP/s for an RTX 3080 are 68 multiprocessors at 1.71 GHz, their 165.2 for an RTX 4090 are 128 at
2.52 GHz, their 53.8 for an RTX 2080 Ti are 68 at 1.545 GHz."""
INTEGERS_PER_CLOCK = 4 * FMA_PER_CLOCK
"""The same for products of 8-bit integers with sums in int32: the whitepapers' 238 TOP/s for an RTX 3080, 660.6 for an
RTX 4090 and 215.2 for an RTX 2080 Ti."""
CLOCKS = {"HMMA": 32, "IMMA": 16, "MUFU": 8, "LDSM": 16}
"""Clocks for which an instruction of a warp occupies its unit, if the four schedulers share it evenly.

m16n8k16 with sums in float32 at 64 FMA, m16n8k32 of 8-bit integers at 256, a special function at 4 threads, ldmatrix of
four matrices (512 bytes) at 32 bytes."""


class Card(NamedTuple):
    """A card: compute capability, multiprocessors, boost clock in GHz, bandwidth of its memory in GB/s."""

    capability: int
    multiprocessors: int
    clock: float
    bandwidth: float

    @property
    def tflops(self) -> float:
        """Of products of float16 with sums in float32, in TFLOP/s."""
        return self.multiprocessors * self.clock * FMA_PER_CLOCK * 2 / 1e3

    @property
    def tops(self) -> float:
        """Of products of 8-bit integers, in TOP/s."""
        return self.multiprocessors * self.clock * INTEGERS_PER_CLOCK * 2 / 1e3


CARDS = {
    "GeForce RTX 2080 Ti": Card(75, 68, 1.545, 616.0),
    "GeForce RTX 3060": Card(86, 28, 1.777, 360.0),
    "GeForce RTX 3090": Card(86, 82, 1.695, 936.2),
    "GeForce RTX 4070": Card(89, 46, 2.475, 504.2),
    "GeForce RTX 4090": Card(89, 128, 2.52, 1008.0),
}
