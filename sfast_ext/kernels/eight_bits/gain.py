"""What products of 8-bit integers save on a card, in microseconds, by a model of the card.

A product takes its multiply-adds at a part of the tensor cores' rate, and 8 bits save what the two rates differ by.
They cost reading the weight in half precision, to know whether it changed, and a pass over the input, which is read in
half precision and written in 8 bits, unless the kernel of a norm writes it so that is launched in any case.

On an NVIDIA H200 (benchmarks/results: hopper8-h200.json, quantisers-h200.json) the model says for 2048x3840x1280 12.6
us where 15.1 were measured, for 2048x1280x1280 4.2 and 4.0, for 2048x5120x1280 with GEGLU 33 and 35; for a pass over
2048x1280 4.1 and 2.8 to 4.3, over 2048x5120 8.9 and 5.7 to 11.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from sfast_ext.kernels.backend import cuda_driver, nvrtc, triton_runtime
from sfast_ext.kernels.backend.cuda_driver import Unavailable
from sfast_ext.kernels.backend.triton_runtime import multiprocessors
from sfast_ext.kernels.linear import linear_layer_norm

_RATES = {
    (7, 5): (512, 1024),
    (8, 0): (1024, 2048),
    (8, 6): (512, 1024),
    (8, 7): (1024, 2048),
    (8, 9): (512, 1024),
    (9, 0): (2048, 4096),
    (12, 0): (512, 1024),
    (12, 1): (512, 1024),
}
"""By compute capability, multiply-adds of a multiprocessor and clock: of float16 with sums in float32, and of 8-bit
integers, as in NVIDIA's whitepapers. 10.0 to 11.0 are not here: their libraries have instructions for half precision
that are faster than `mma.sync` of 8-bit integers."""
_BUSY = 512
"""Multiply-adds of float16 for a multiprocessor and clock, above which an attention's instructions take longer than its
products: one with queries and keys in 8 bits has more of them. On an NVIDIA H200 as 8.0 it took 1.11 times as long."""
_GEFORCE = "geforce"
_SLOWER_SUMS = 2
"""A GeForce adds up products of float16 in float32 at half the rate of the same chip's cards for data centres."""
_WITHOUT_TENSOR_CORES = "gtx"
"""GeForce GTX 16: 7.5 as well, and without tensor cores."""
_REACHED = 0.75
"""Of the rate, by large products of either kind."""
_LAUNCH = 2.5
"""Microseconds of one more kernel in a CUDA graph."""
_OF_NORM = 6.0
"""Microseconds by which a group norm takes longer that writes 8 bits, on Hopper, where it otherwise has its statistics
from the convolution in front of it: 3 to 6 (benchmarks/results/hopper-conv8-h200.json)."""
_MARGIN = 1.1
"""By which what is saved must exceed the costs."""
_CLOCK, _BANDWIDTH = 1.5, 300.0
"""Of a card that does not say: GHz, GB/s."""


class Rates(NamedTuple):
    """Of a card.

    Attributes:
        half: multiply-adds of float16 with sums in float32, a microsecond.
        eight: multiply-adds of 8-bit integers.
        bandwidth: bytes of its memory.
    """

    half: float
    eight: float
    bandwidth: float


class Product(NamedTuple):
    """Of so many rows with a weight (columns, depth); of GEGLU all columns of the weight count."""

    rows: int
    columns: int
    depth: int
    fused: float = 0.0
    """Microseconds that it saves in half precision as one kernel with what follows, as it cannot be in 8 bits."""


def rates(device: torch.device) -> Rates | None:
    """Those of a card; None for one whose products of 8-bit integers are no faster than those in half precision."""
    per_clock = _RATES.get(triton_runtime.capability(device))
    if per_clock is None:
        return None
    name, clock, bandwidth = _published(device)
    if _WITHOUT_TENSOR_CORES in name:
        return None
    half, eight = (1e3 * clock * multiprocessors(device) * each for each in per_clock)
    return Rates(half / _SLOWER_SUMS if _GEFORCE in name else half, eight, 1e3 * bandwidth)


@functools.lru_cache(maxsize=None)
def _published(device: torch.device) -> tuple[str, float, float]:
    """Its name in lower case, boost clock in GHz and bandwidth in GB/s."""
    name = str(torch.cuda.get_device_properties(device).name).lower()
    try:
        driver = nvrtc.loaded_driver()
        clock, memory_clock, bits = (
            driver.cuDeviceGetAttribute(each, device.index or 0)
            for each in (
                cuda_driver.CU_DEVICE_ATTRIBUTE_CLOCK_RATE,
                cuda_driver.CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE,
                cuda_driver.CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH,
            )
        )
    except (Unavailable, AttributeError):
        clock = memory_clock = bits = 0
    # clocks are in kHz, and two bits are moved in each of a memory's
    return name, clock / 1e6 or _CLOCK, 2 * memory_clock * bits / 8 / 1e6 or _BANDWIDTH


def saved(product: Product, on: Rates) -> float:
    """What a product in 8 bits saves, less the reading of its weight; its input costs `input_cost`."""
    of_weight = product.columns * product.depth
    faster = product.rows * of_weight * (1 / on.half - 1 / on.eight) / _REACHED
    return faster - 2 * of_weight / on.bandwidth - product.fused


def convolution_pays(product: Product, device: torch.device) -> bool:
    """Whether a 3x3 convolution on Hopper is worth computing in 8 bits, with the norm that writes its input."""
    on = rates(device)
    return on is not None and saved(product, on) > _OF_NORM


def input_cost(rows: int, depth: int, by_norm: bool, device: torch.device, on: Rates) -> float:
    """What it takes to have the input of products in 8 bits.

    Args:
        by_norm: whether the kernel of a norm writes it. That costs nothing, unless the norm is otherwise one kernel
            with the product in front of it, as on Hopper.
    """
    if by_norm and not linear_layer_norm.launch.supported(device, triton=False):
        return 0.0
    return _LAUNCH + 3 * rows * depth / on.bandwidth


def attention_pays(heads: int, queries: int, keys: int, size: int, device: torch.device) -> bool:
    """Whether products of so many heads' queries and keys are worth computing in 8 bits. On a CPU they are."""
    if device.type != "cuda":
        return True
    on = rates(device)
    if on is None or _RATES[triton_runtime.capability(device)][0] > _BUSY:
        return False
    faster = heads * queries * keys * size * (1 / on.half - 1 / on.eight) / _REACHED
    return faster > _MARGIN * (_LAUNCH + 3 * heads * keys * size / on.bandwidth)


def pays(products: list[Product], by_norm: bool, device: torch.device, *, written: bool = False) -> list[bool]:
    """Of products of one input, which of them are worth computing in 8 bits. On a CPU all are.

    Args:
        by_norm: see `input_cost`.
        written: whether the kernel of a transformer's norm, or of an activation, writes the input in 8 bits. That costs
            nothing.
    """
    if device.type != "cuda":
        return [True] * len(products)
    on = rates(device)
    if on is None:
        return [False] * len(products)
    each = [saved(product, on) for product in products]
    cost = 0.0 if written else input_cost(products[0].rows, products[0].depth, by_norm, device, on)
    enough = sum(x for x in each if x > 0) > _MARGIN * cost
    return [x > 0 and enough for x in each]
