"""The kernels of 8-bit integers and those around them, as if they could be launched on the device of a test; what runs
is their references."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import pytest
import torch

from sfast_ext.hosts import system_memory
from sfast_ext.kernels.backend import health
from sfast_ext.kernels.backend.registry import Kernel
from sfast_ext.kernels.eight_bits import gain, gated_norm8, gelu8, modulated_norm8, quantise_weights, swiglu8
from sfast_ext.kernels.group_norm import add_group_norm, cat_group_norm, group_norm
from sfast_ext.kernels.linear import linear_accumulate, linear_geglu
from sfast_ext.kernels.pointwise import add_layer_norm, bias_add, geglu, layer_norm
from sfast_ext.passes import eight_bits as passes_eight_bits
from sfast_ext.passes.eight_bits import KERNELS
from sfast_ext.passes.eight_bits_conv_match import CONV_KERNELS
from sfast_ext.runtime import lean_calls, plan_builder, verify
from sfast_ext.weights import digest
from sfast_ext.weights import resident as weights_resident

AROUND = (
    add_layer_norm.launch, layer_norm.launch, geglu.launch, linear_geglu.launch, linear_accumulate.launch,
    group_norm.launch, add_group_norm.launch, cat_group_norm.launch, bias_add.launch, modulated_norm8.launch,
    gated_norm8.launch, swiglu8.launch, gelu8.launch,
)  # fmt: skip


def pay_everywhere(patch: pytest.MonkeyPatch) -> None:
    """Until the patch is undone, all products pay on every card."""
    patch.setattr(gain, "pays", lambda products, by_norm, device, written=False: [True] * len(products))


def available(patch: pytest.MonkeyPatch, *, by_triton: bool = False) -> None:
    """Until the patch is undone, plans may be made of them.

    Args:
        by_triton: only if Triton may be used.
    """
    supported = Kernel.supported

    def there(kernel: Kernel[..., Any], device: torch.device, *, triton: bool) -> bool:
        if kernel in (*KERNELS, *CONV_KERNELS, *AROUND):
            return kernel.enabled(device) and (triton or not by_triton)
        return supported(kernel, device, triton=triton)

    # what a test before this one disabled is not, and what this one disables is not later
    patch.setattr(health, "_disabled", {})
    patch.setattr(Kernel, "supported", there)
    patch.setattr(quantise_weights.launch, "function", quantise_weights.in_place)


def too_inaccurate(patch: pytest.MonkeyPatch, kept: Collection[str]) -> None:
    """From now on layers with one of these in their names, whatever it has then, are measured as not fit for 8 bits."""
    real = passes_eight_bits.measured

    def measured(*args: Any, **kwargs: Any) -> Any:
        return {
            name: error._replace(plain=0.9, rotated=0.9) if any(each in name for each in kept) else error
            for name, error in real(*args, **kwargs).items()
        }

    patch.setattr(passes_eight_bits, "measured", measured)


def resident(patch: pytest.MonkeyPatch, size: int) -> None:
    """Until the patch is undone, plans of a model of so many bytes have products in 8 bits on a pretended card, and its
    half-precision weights may stay in system memory."""
    available(patch)
    pay_everywhere(patch)
    patch.setattr(verify, "milliseconds", lambda run, device, times=1: float(run() is None) + 1)
    patch.setattr(plan_builder, "unsupported", lambda device, dtypes: None)
    patch.setattr(digest, "COLUMNS", 5)
    patch.setattr(system_memory, "available_bytes", lambda: 8 << 30)
    patch.setattr(weights_resident, "BATCH_BYTES", size // 30)


def without_memory(patch: pytest.MonkeyPatch, card: Any) -> None:
    """Until the patch is undone, weights are quantised on a pretended card without memory for it, as by the kernel."""
    real = quantise_weights.launch.function

    def launch(*operands: Any) -> Any:
        before = card.capacity, card.peak
        card.capacity = 1 << 40
        try:
            return real(*operands)
        finally:
            card.capacity, card.peak = before

    patch.setattr(quantise_weights.launch, "function", launch)


def lean_calls_of(patch: pytest.MonkeyPatch, away: Callable[[], int]) -> list[int]:
    """How many weights are in system memory in each call that leaves them there.

    Args:
        away: counts them.
    """
    calls: list[int] = []
    real = lean_calls.run

    def counted(*given: Any) -> Any:
        calls.append(away())
        return real(*given)

    patch.setattr(lean_calls, "run", counted)
    return calls
