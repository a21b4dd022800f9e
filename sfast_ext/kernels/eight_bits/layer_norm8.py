"""Layer norm whose rows are 8-bit integers with a scale each."""

from __future__ import annotations

import torch
from torch import Tensor

from sfast_ext.kernels.backend.registry import kernel
from sfast_ext.kernels.eight_bits import quantise_rows
from sfast_ext.kernels.pointwise import layer_norm


def reference(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """(q, scale): `quantise_rows.reference` of the layer norm of x (..., C), which is not rounded before."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return quantise_rows.reference(layer_norm.reference(x, weight, bias, eps, wide))


@kernel(reference)
def launch(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """`reference`."""
    return reference(x, weight, bias, eps)
