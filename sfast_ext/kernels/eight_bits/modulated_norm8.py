"""A norm that is scaled and shifted by vectors of its sample, whose result is int8 with a scale for each row."""

from __future__ import annotations

import torch
from torch import Tensor

from sfast_ext.kernels.backend.registry import kernel
from sfast_ext.kernels.eight_bits import quantise_rows
from sfast_ext.kernels.pointwise import modulated_norm


def reference(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    rms: bool = True,
    plus_one: bool = False,
    group: int = 0,
) -> tuple[Tensor, Tensor]:
    """(q (..., C) int8, scale (...) float32) of `modulated_norm.reference`, as `quantise_rows.reference` has them.

    Computes in float32 (float64 if x is): the norm is not rounded in between.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return quantise_rows.reference(
        modulated_norm.reference(wide, weight, bias, eps, scale, shift, rms, plus_one), group
    )


@kernel(reference, portable=True, cuda_sources=(modulated_norm.SOURCE,))
def launch(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    rms: bool = True,
    plus_one: bool = False,
    group: int = 0,
) -> tuple[Tensor, Tensor]:
    """`reference` in one launch; dtypes, layouts and sizes as of `modulated_norm.launch`. With a rotation rows, weights
    and vectors begin at multiples of 16 bytes."""
    norm = 1 if rms else 2
    parts = modulated_norm.Parts(norm=norm, plus_one=plus_one and scale is not None, codes=True, group=group)
    operands = modulated_norm.Operands(x, weight=weight, bias=bias, scale=scale, shift=shift)
    _, q, scales = modulated_norm.modulated(operands, parts, eps=eps)
    assert q is not None and scales is not None
    return q, scales
