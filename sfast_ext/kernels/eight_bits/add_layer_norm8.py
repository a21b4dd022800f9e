"""Residual add and layer norm, whose rows are 8-bit integers with a scale each; the sum is a result too."""

from __future__ import annotations

import torch
from torch import Tensor

from sfast_ext.kernels.backend.registry import kernel
from sfast_ext.kernels.eight_bits import quantise_rows
from sfast_ext.kernels.pointwise import add_layer_norm


def reference(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    shift: Tensor | None = None,
    post_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(sum, q, scale): the sum as of `add_layer_norm.reference`; q and scale of its norm, which is not rounded
    before, as of `quantise_rows.reference`."""
    wide = torch.promote_types(x.dtype, torch.float32)
    total, y = add_layer_norm.reference(x, residual, weight, bias, eps, wide, shift, post_bias)
    return total, *quantise_rows.reference(y)


@kernel(reference)
def launch(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    shift: Tensor | None = None,
    post_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`reference`."""
    return reference(x, residual, weight, bias, eps, shift, post_bias)
