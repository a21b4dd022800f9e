"""A 3x3 convolution, shift and residual, and the group norm of the sum, for Hopper.

The convolution's epilogue adds shift and residual and computes the statistics of its tiles in registers
(csrc/conv2d.cu), so that the norm reads the sum only once. Elsewhere convolution and norm are separate kernels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sfast_ext.kernels.backend import cuda_tier, nvrtc
from sfast_ext.kernels.backend.registry import Kernel, register
from sfast_ext.kernels.backend.triton_runtime import DTYPES, channels_inner, channels_outer, is_dry_run, supported
from sfast_ext.kernels.conv import conv2d
from sfast_ext.kernels.group_norm import add_group_norm, group_norm, portable, two_pass
from sfast_ext.kernels.group_norm.two_pass import Parts, normalise


def reference(
    x: Tensor,
    conv_weight: Tensor,
    shift: Tensor | None,
    residual: Tensor | None,
    groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    silu: bool = False,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor | None, Tensor]:
    """(sum, y): sum = conv2d(x) + shift + residual in x's dtype; y its group norm, with weight and bias, then SiLU.

    x (N, C, H, W), conv_weight (K, C, 3, 3); shift (N, K), or (K,) with a residual (N, K, H, W); weight, bias (K,).
    Without a residual the returned sum is None. y is computed from the rounded sum, and rounded once to out_dtype
    (default: x's).
    """
    compute = torch.promote_types(x.dtype, torch.float32)
    out_sum = conv2d.reference(x.to(compute), conv_weight.to(compute))
    if shift is not None:
        out_sum = out_sum + shift.to(compute).reshape(-1, out_sum.shape[1], 1, 1)
    if residual is not None:
        out_sum = out_sum + residual.to(compute)
    out_sum = out_sum.to(x.dtype)
    y = group_norm.reference(out_sum, groups, weight, bias, eps, None, silu, out_dtype)
    return None if residual is None else out_sum, y


def launch(
    x: Tensor,
    conv_weight: Tensor,
    shift: Tensor | None,
    residual: Tensor | None,
    groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    silu: bool = False,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor | None, Tensor]:
    """`reference` as convolution with statistics and the second kernel of a group norm, in Triton or else in CUDA C++,
    where `applicable`; else as a convolution and a group norm kernel."""
    dtype = out_dtype or x.dtype
    if applicable(x, conv_weight, shift, residual, groups, weight, bias, dtype):
        try:
            return _fused(x, conv_weight, shift, residual, groups, weight, bias, eps, silu, dtype)
        except nvrtc.Unavailable:
            pass  # logged; `available` is False from now on
    conv = conv2d.launch(x, conv_weight)
    if residual is None:
        return None, group_norm.launch(conv, groups, weight, bias, eps, shift, silu, out_dtype)
    return add_group_norm.launch(conv, shift, residual, 1.0, groups, weight, bias, eps, silu, out_dtype)


def applicable(
    x: Tensor,
    conv_weight: Tensor,
    shift: Tensor | None,
    residual: Tensor | None,
    groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> bool:
    """Whether both kernels can read the operands, and the convolution is faster than cuDNN."""
    if x.dim() != 4 or conv_weight.dim() != 4 or dtype not in DTYPES or groups < 1:
        return False
    if not conv2d.supports_statistics(x, conv_weight, groups):
        return False
    images, _, height, width = x.shape
    columns = conv_weight.shape[0]
    others = [t for t in (shift, residual, weight, bias) if t is not None]
    if not all(t.dtype in DTYPES and t.device == x.device for t in others):
        return False
    if shift is not None:
        wanted = (images, columns) if residual is None else (columns,)
        if shift.dtype != x.dtype or shift.shape != wanted or shift.stride(-1) != 1:
            return False
        if shift.data_ptr() % 4 or (shift.dim() == 2 and shift.stride(0) % 2):  # read in pairs
            return False
    if residual is not None:
        if residual.dtype != x.dtype or residual.shape != (images, columns, height, width) or residual.data_ptr() % 16:
            return False
        if not is_dry_run() and not residual.is_contiguous(memory_format=torch.channels_last):
            return False
    if supported(x, shift, residual, weight, bias):
        return group_norm.fitting(height * width, groups, columns // groups)[0] == "parts"
    if not cuda_tier.supported(portable.NORMALISE, x, shift, residual, weight, bias):
        return False
    return portable.pixels_of_part(_parts(x), images, columns, groups, x.dtype) is not None


def _parts(x: Tensor) -> Parts:
    """How the convolution divides an image of which it computes the statistics."""
    return Parts(*conv2d.boxes_of_image(x), *x.shape[2:])


def _fused(
    x: Tensor,
    conv_weight: Tensor,
    shift: Tensor | None,
    residual: Tensor | None,
    groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    silu: bool,
    dtype: torch.dtype,
) -> tuple[Tensor | None, Tensor]:
    out_sum, partial = conv2d.with_statistics(x, conv_weight, groups, shift, residual)
    weight, bias = (v if v is None else v.contiguous() for v in (weight, bias))
    inner, parts = channels_inner(out_sum), _parts(x)
    if supported(x, shift, residual, weight, bias):
        out = normalise(inner, None, weight, bias, partial, parts, eps, silu, dtype)
    else:
        each = parts.box_height * parts.box_width
        out = portable.normalised_by(partial, each, inner, weight, bias, eps, silu, dtype)
    return None if residual is None else out_sum, channels_outer(out)


KERNEL = register(
    Kernel(
        "conv_group_norm",
        reference,
        launch,
        uses=(add_group_norm.KERNEL, conv2d.KERNEL, group_norm.KERNEL),
        triton_functions=(two_pass.group_norm_combine_kernel, two_pass.group_norm_normalise_kernel),
        cuda_sources=(conv2d._SOURCE, portable.NORMALISE),
    )
)
