"""A linear layer of 8-bit integers with GEGLU."""

from __future__ import annotations

import torch
from torch import Tensor

from sfast_ext.kernels.backend.registry import kernel
from sfast_ext.kernels.eight_bits import linear8
from sfast_ext.kernels.pointwise import geglu


def reference(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    gate_first: bool = False,
    approximate: str = "none",
    dtype: torch.dtype = torch.float16,
) -> Tensor:
    """x (..., K) and weight (2N, K) in int8, scales as of `linear8.reference`, bias (2N,) -> (..., N): value *
    gelu(gate) of the halves of the product, rounded once to dtype.

    gate_first, approximate: see `geglu.reference`.
    """
    return geglu.reference(linear8.scaled(x, x_scale, weight, weight_scale, bias), gate_first, approximate).to(dtype)


@kernel(reference)
def launch(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    gate_first: bool = False,
    approximate: str = "none",
    dtype: torch.dtype = torch.float16,
) -> Tensor:
    """`reference`."""
    return reference(x, x_scale, weight, weight_scale, bias, gate_first, approximate, dtype)
