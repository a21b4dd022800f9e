"""A convolution's bias, residual and scale, and group norm; the sum is a result too, for the next residual."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sfast_ext.kernels.backend.registry import Declined, kernel
from sfast_ext.kernels.group_norm import fused_inputs, group_norm, portable
from sfast_ext.kernels.group_norm.two_pass import Norm
from sfast_ext.kernels.pointwise import bias_add


def reference(
    x: Tensor, conv_bias: Tensor | None, residual: Tensor | None, scale: float, groups: int, weight: Tensor | None,
    bias: Tensor | None, eps: float, silu: bool = False, out_dtype: torch.dtype | None = None, patches: bool = False,
    out: Sequence[Tensor | None] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(sum, y): sum = (x + conv_bias + residual) * scale in x's dtype; y its group norm, with weight and bias, then
    SiLU.

    x, residual (N, C, H, W); vectors (C,). y is computed from the rounded sum, and rounded once to out_dtype (default:
    x's). patches: see `group_norm.reference`. out: (None, memory that y may take); not overwritten here.
    """
    out_sum = bias_add.reference(x, conv_bias, residual, scale)
    return out_sum, group_norm.reference(out_sum, groups, weight, bias, eps, None, silu, out_dtype, patches)


@kernel(
    reference,
    portable=True,
    writes=11,
    uses=(bias_add.launch, group_norm.launch),
    cuda_sources=portable.SOURCES,
    triton_functions=fused_inputs.KERNELS,
)
def launch(
    x: Tensor, conv_bias: Tensor | None, residual: Tensor | None, scale: float, groups: int, weight: Tensor | None,
    bias: Tensor | None, eps: float, silu: bool = False, out_dtype: torch.dtype | None = None, patches: bool = False,
    out: Sequence[Tensor | None] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`reference` in one or two launches; as separate kernels if an image is too large for their tiles.

    x and residual (N, C, H, W), of one dtype, are made channels last, vectors (C,) contiguous; float16, bfloat16 or
    float32, in CUDA C++ one dtype for all operands. y is written to `out[1]` as by `group_norm.launch`; it may be x, of
    which nothing is left to read then.
    """
    room = None if out is None else out[1]
    norm = Norm(weight, bias, eps, silu, out_dtype or x.dtype)
    try:
        return fused_inputs.run(x, None, conv_bias, residual, scale, groups, norm, patches, room)
    except Declined as exc:
        launch.count(exc)
    out_sum = bias_add.launch(x, conv_bias, residual, scale)
    return out_sum, group_norm.launch(out_sum, groups, weight, bias, eps, None, silu, out_dtype, patches, room)
