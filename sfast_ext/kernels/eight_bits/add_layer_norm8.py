"""Residual add and layer norm whose result is int8; the sum is a result too, for the next residual."""

from __future__ import annotations

import torch
from torch import Tensor

from sfast_ext.kernels.backend.registry import kernel
from sfast_ext.kernels.eight_bits import layer_norm8, quantise_rows
from sfast_ext.kernels.pointwise import add_layer_norm
from sfast_ext.kernels.pointwise.layer_norm import Operands


def reference(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    shift: Tensor | None = None,
    post_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(sum, q, scale): sum as of `add_layer_norm.reference`; q (..., C) int8 and scale (...) float32 of the layer norm
    of the rounded sum, as `quantise_rows.reference` has them."""
    compute = torch.promote_types(x.dtype, torch.float32)
    out_sum, y = add_layer_norm.reference(x, residual, weight, bias, eps, compute, shift, post_bias)
    return out_sum, *quantise_rows.reference(y)


@kernel(reference, portable=True, cuda_sources=(layer_norm8.SOURCE,))
def launch(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    shift: Tensor | None = None,
    post_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`reference` in one launch. x and residual have one shape; dtypes, layouts and sizes as of
    `layer_norm8.launch`."""
    out_sum, q, scale = layer_norm8.normalised(Operands(x, residual, shift, post_bias, weight, bias), eps)
    assert out_sum is not None
    return out_sum, q, scale
