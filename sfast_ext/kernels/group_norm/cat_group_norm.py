"""Concatenation of a skip connection and group norm; the joined tensor is a result too."""

from __future__ import annotations

import torch
from torch import Tensor

from sfast_ext.kernels.backend.registry import Declined, kernel
from sfast_ext.kernels.group_norm import fused_inputs, group_norm, portable
from sfast_ext.kernels.group_norm.two_pass import Norm
from sfast_ext.kernels.pointwise import bias_add


def reference(
    a: Tensor, conv_bias: Tensor | None, residual: Tensor | None, b: Tensor, groups: int, weight: Tensor | None,
    bias: Tensor | None, eps: float, silu: bool = False, out_dtype: torch.dtype | None = None, patches: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(joined, y): joined = a + conv_bias + residual and b along the channels; y its group norm, then SiLU.

    a, residual (N, A, H, W), conv_bias (A,), b (N, B, H, W); the norm's weight and bias (A + B,). y is computed from
    the rounded sum, and rounded once to out_dtype (default: a's). patches: see `group_norm.reference`.
    """
    summed = bias_add.reference(a, conv_bias, residual)
    joined = torch.cat([summed, b.to(summed.dtype)], 1).contiguous(memory_format=torch.channels_last)
    return joined, group_norm.reference(joined, groups, weight, bias, eps, None, silu, out_dtype, patches)


@kernel(
    reference,
    portable=True,
    uses=(bias_add.launch, group_norm.launch),
    cuda_sources=portable.SOURCES,
    triton_functions=fused_inputs.KERNELS,
)
def launch(
    a: Tensor, conv_bias: Tensor | None, residual: Tensor | None, b: Tensor, groups: int, weight: Tensor | None,
    bias: Tensor | None, eps: float, silu: bool = False, out_dtype: torch.dtype | None = None, patches: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`reference` in one or two launches; as separate kernels if an image is too large for their tiles.

    a, residual (N, A, H, W) and b (N, B, H, W), of one dtype, are made channels last, vectors contiguous; float16,
    bfloat16 or float32, in CUDA C++ one dtype for all operands.
    """
    norm = Norm(weight, bias, eps, silu, out_dtype or a.dtype)
    try:
        return fused_inputs.run(a, b, conv_bias, residual, 1.0, groups, norm, patches)
    except Declined as exc:
        launch.count(exc)
    summed = a if conv_bias is None and residual is None else bias_add.launch(a, conv_bias, residual)
    joined = torch.cat([summed, b.to(summed.dtype)], 1)
    return joined, group_norm.launch(joined, groups, weight, bias, eps, None, silu, out_dtype, patches)
