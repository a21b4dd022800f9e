"""The kernels of 8-bit integers and those around them, as if they could be launched on the device of a test; what runs
is their references."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from sfast_ext.kernels.backend.registry import Kernel
from sfast_ext.kernels.eight_bits import quantise_rows, quantise_weights
from sfast_ext.kernels.linear import linear_accumulate, linear_geglu
from sfast_ext.kernels.pointwise import add_layer_norm, geglu, layer_norm
from sfast_ext.passes.eight_bits import KERNELS

AROUND = (add_layer_norm.launch, layer_norm.launch, geglu.launch, linear_geglu.launch, linear_accumulate.launch)
_FACTOR, _STEP = 0x9E3779B97F4A7C15 - 2**64, 0xD1B54A32D192ED03 - 2**64


def available(patch: pytest.MonkeyPatch, *, by_triton: bool = False) -> None:
    """Until the patch is undone, plans may be made of them.

    Args:
        by_triton: only if Triton may be used.
    """
    supported = Kernel.supported

    def there(kernel: Kernel[..., Any], device: torch.device, *, triton: bool) -> bool:
        if kernel in (*KERNELS, *AROUND):
            return kernel.enabled(device) and (triton or not by_triton)
        return supported(kernel, device, triton=triton)

    patch.setattr(Kernel, "supported", there)
    patch.setattr(quantise_weights.launch, "function", quantised_in_place)


def quantised_in_place(
    weights: Sequence[Tensor],
    rows: Sequence[Tensor],
    scales: Sequence[Tensor],
    digests: Sequence[Tensor],
    groups: Sequence[int],
) -> list[Tensor]:
    """What `quantise_weights.launch` does, without a branch: a recording of these operations is repeated with other
    values."""
    for weight, q, scale, digest, group in zip(weights, rows, scales, digests, groups, strict=True):
        now = digest_of(weight)
        changed = now != digest
        values, steps = quantise_rows.reference(weight, group)
        q.copy_(torch.where(changed[:, None], values, q))
        scale.copy_(torch.where(changed, steps, scale))
        digest.copy_(now)
    return list(rows)


def digest_of(weight: Tensor) -> Tensor:
    """A number of 64 bits for each row of a weight (N, K) in half precision; never 0."""
    words = weight.contiguous().view(torch.int16).to(torch.int64)
    places = torch.arange(1, words.shape[-1] + 1, device=words.device, dtype=torch.int64) * _STEP
    mixed = (words + places) * _FACTOR
    found = ((mixed ^ (mixed >> 29)) * _FACTOR).sum(-1)
    return torch.where(found == 0, torch.ones_like(found), found)
