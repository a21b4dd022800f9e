"""A convolution's bias, residual and scale, and group norm whose result is int8; the sum is a result too."""

from __future__ import annotations

from torch import Tensor

from sfast_ext.kernels.backend.registry import Declined, kernel
from sfast_ext.kernels.backend.triton_runtime import channels_inner, channels_outer
from sfast_ext.kernels.eight_bits import group_norm8
from sfast_ext.kernels.group_norm.portable import Inputs
from sfast_ext.kernels.group_norm.two_pass import Norm
from sfast_ext.kernels.pointwise import bias_add


def reference(
    x: Tensor, conv_bias: Tensor | None, residual: Tensor | None, scale: float, groups: int, weight: Tensor | None,
    bias: Tensor | None, eps: float, silu: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(sum, q, scales and zeros): sum as of `add_group_norm.reference`; the others of `group_norm8.reference` of the
    rounded sum."""
    out_sum = bias_add.reference(x, conv_bias, residual, scale)
    return out_sum, *group_norm8.reference(out_sum, groups, weight, bias, eps, None, silu)


@kernel(reference, portable=True, cuda_sources=group_norm8.SOURCES)
def launch(
    x: Tensor, conv_bias: Tensor | None, residual: Tensor | None, scale: float, groups: int, weight: Tensor | None,
    bias: Tensor | None, eps: float, silu: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """`reference` in two launches. x and residual (N, C, ...) are made channels last, vectors (C,) contiguous; dtypes
    as of `group_norm8.launch`."""
    if x.dim() < 3 or (residual is not None and residual.shape != x.shape):
        raise Declined("other dimensions, or a residual of another shape")
    if conv_bias is not None and conv_bias.shape != x.shape[1:2]:
        raise Declined("a bias of another shape")
    addend = None if conv_bias is None else conv_bias.contiguous()
    added = None if residual is None else channels_inner(residual)
    inputs = Inputs(channels_inner(x), addend, added, None, scale, fused=True)
    total, q, q_scale = group_norm8.normalised(inputs, groups, Norm(weight, bias, eps, silu, x.dtype))
    assert total is not None
    return channels_outer(total), channels_outer(q), q_scale


