"""A convolution's bias, residual and scale, and group norm; the sum is a result too, for the next residual."""

from __future__ import annotations

import torch
from torch import Tensor

from sfast_ext.kernels.backend.registry import Kernel, register
from sfast_ext.kernels.group_norm import fused_inputs, group_norm, portable
from sfast_ext.kernels.pointwise import bias_add


def reference(
    x: Tensor,
    conv_bias: Tensor | None,
    residual: Tensor | None,
    scale: float,
    groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    silu: bool = False,
    out_dtype: torch.dtype | None = None,
    patches: bool = False,
) -> tuple[Tensor, Tensor]:
    """(sum, y): sum = (x + conv_bias + residual) * scale in x's dtype; y its group norm, with weight and bias, then
    SiLU.

    x, residual (N, C, H, W); vectors (C,). y is computed from the rounded sum, and rounded once to out_dtype (default:
    x's). patches: see `group_norm.reference`.
    """
    out_sum = bias_add.reference(x, conv_bias, residual, scale)
    return out_sum, group_norm.reference(out_sum, groups, weight, bias, eps, None, silu, out_dtype, patches)


def launch(
    x: Tensor,
    conv_bias: Tensor | None,
    residual: Tensor | None,
    scale: float,
    groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    silu: bool = False,
    out_dtype: torch.dtype | None = None,
    patches: bool = False,
) -> tuple[Tensor, Tensor]:
    """`reference` as one or two kernels; where an image is too large for their tiles, as separate ones."""
    dtype = out_dtype or x.dtype
    done = fused_inputs.run(x, None, conv_bias, residual, scale, groups, weight, bias, eps, silu, dtype, patches)
    if done is not None:
        return done
    out_sum = bias_add.launch(x, conv_bias, residual, scale)
    return out_sum, group_norm.launch(out_sum, groups, weight, bias, eps, None, silu, out_dtype, patches)


KERNEL = register(
    Kernel(
        "add_group_norm",
        reference,
        launch,
        portable=True,
        uses=(bias_add.KERNEL, group_norm.KERNEL),
        cuda_sources=portable.SOURCES,
        triton_functions=fused_inputs.KERNELS,
    )
)
