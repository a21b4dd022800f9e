"""Concatenation of a skip connection and group norm whose result is int8; the joined tensor is a result too."""

from __future__ import annotations

import torch
from torch import Tensor

from sfast_ext.kernels.backend.registry import Declined, kernel
from sfast_ext.kernels.backend.triton_runtime import channels_inner, channels_outer
from sfast_ext.kernels.eight_bits import group_norm8
from sfast_ext.kernels.group_norm.portable import Inputs
from sfast_ext.kernels.group_norm.two_pass import Norm
from sfast_ext.kernels.pointwise import bias_add


def reference(
    a: Tensor, conv_bias: Tensor | None, residual: Tensor | None, b: Tensor, groups: int, weight: Tensor | None,
    bias: Tensor | None, eps: float, silu: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(joined, q, scales and zeros): joined as of `cat_group_norm.reference`; the others of `group_norm8.reference` of
    it."""
    summed = bias_add.reference(a, conv_bias, residual)
    joined = torch.cat([summed, b.to(summed.dtype)], 1).contiguous(memory_format=torch.channels_last)
    return joined, *group_norm8.reference(joined, groups, weight, bias, eps, None, silu)


@kernel(reference, portable=True, cuda_sources=group_norm8.SOURCES)
def launch(
    a: Tensor, conv_bias: Tensor | None, residual: Tensor | None, b: Tensor, groups: int, weight: Tensor | None,
    bias: Tensor | None, eps: float, silu: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """`reference` in two launches. a, residual (N, A, H, W) and b (N, B, H, W) are made channels last, vectors
    contiguous; dtypes as of `group_norm8.launch`."""
    if a.dim() != 4 or b.dim() != 4 or (b.shape[0], *b.shape[2:]) != (a.shape[0], *a.shape[2:]):
        raise Declined("operands of other shapes")
    if (residual is not None and residual.shape != a.shape) or (
        conv_bias is not None and conv_bias.shape != a.shape[1:2]
    ):
        raise Declined("a bias or a residual of another shape")
    addend = None if conv_bias is None else conv_bias.contiguous()
    added = None if residual is None else channels_inner(residual)
    inputs = Inputs(channels_inner(a), addend, added, channels_inner(b), 1.0, fused=True)
    joined, q, scale = group_norm8.normalised(inputs, groups, Norm(weight, bias, eps, silu, a.dtype))
    assert joined is not None
    return channels_outer(joined), channels_outer(q), scale
