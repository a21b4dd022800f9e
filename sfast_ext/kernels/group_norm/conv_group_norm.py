"""A 3x3 convolution, shift and residual, and the group norm of the sum, for Hopper.

The convolution's epilogue adds shift and residual and computes the statistics of its tiles in registers
(csrc/conv2d.cu), so that the norm reads the sum only once. Elsewhere convolution and norm are separate kernels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sfast_ext.kernels.backend import cuda_tier, triton_runtime
from sfast_ext.kernels.backend.registry import kernel, require
from sfast_ext.kernels.backend.triton_runtime import DTYPES, channels_inner, channels_outer, is_dry_run
from sfast_ext.kernels.conv import conv2d
from sfast_ext.kernels.group_norm import add_group_norm, group_norm, portable, two_pass
from sfast_ext.kernels.group_norm.two_pass import Norm, Parts, normalise


def reference(
    x: Tensor, conv_weight: Tensor, shift: Tensor | None, residual: Tensor | None, groups: int, weight: Tensor | None,
    bias: Tensor | None, eps: float, silu: bool = False, out_dtype: torch.dtype | None = None,
) -> tuple[Tensor | None, Tensor]:  # fmt: skip
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


def fallback(
    x: Tensor, conv_weight: Tensor, shift: Tensor | None, residual: Tensor | None, groups: int, weight: Tensor | None,
    bias: Tensor | None, eps: float, silu: bool = False, out_dtype: torch.dtype | None = None,
) -> tuple[Tensor | None, Tensor]:  # fmt: skip
    """`reference` as a convolution and a group norm kernel."""
    conv = conv2d.launch(x, conv_weight)
    if residual is None:
        return None, group_norm.launch(conv, groups, weight, bias, eps, shift, silu, out_dtype)
    return add_group_norm.launch(conv, shift, residual, 1.0, groups, weight, bias, eps, silu, out_dtype)


def accepts(
    x: Tensor,
    conv_weight: Tensor,
    shift: Tensor | None,
    residual: Tensor | None,
    groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> str | None:
    """Why the two kernels do not take the operands; None if they do, and the convolution is faster than cuDNN."""
    if x.dim() != 4 or conv_weight.dim() != 4 or dtype not in DTYPES or groups < 1:
        return "other dimensions, or another dtype of the result"
    unfit = conv2d.accepts_statistics(x, conv_weight, groups)
    if unfit is not None:
        return unfit
    images, _, height, width = x.shape
    columns = conv_weight.shape[0]
    others = [t for t in (shift, residual, weight, bias) if t is not None]
    if not all(t.dtype in DTYPES and t.device == x.device for t in others):
        return "operands of another dtype or device"
    if shift is not None:
        wanted = (images, columns) if residual is None else (columns,)
        if shift.dtype != x.dtype or shift.shape != wanted or shift.stride(-1) != 1:
            return "a shift of another dtype or shape, or that is not dense"
        if shift.data_ptr() % 4 or (shift.dim() == 2 and shift.stride(0) % 2):  # read in pairs
            return "a shift that is not in aligned pairs"
    if residual is not None:
        if residual.dtype != x.dtype or residual.shape != (images, columns, height, width) or residual.data_ptr() % 16:
            return "a residual of another dtype or shape, or that is not aligned"
        if not is_dry_run() and not residual.is_contiguous(memory_format=torch.channels_last):
            return "a residual that is not channels last"
    if triton_runtime.accepts(x, shift, residual, weight, bias) is None:
        fits = group_norm.fitting(height * width, groups, columns // groups)[0] == "parts"
    else:
        unfit = cuda_tier.accepts(portable.NORMALISE, x, shift, residual, weight, bias)
        fits = portable.pixels_of_part(_parts(x), images, columns, groups, x.dtype) is not None
    return unfit or (None if fits else "parts of which the norm does not read the statistics")


def _parts(x: Tensor) -> Parts:
    """How the convolution divides an image of which it computes the statistics."""
    return Parts(*conv2d.boxes_of_image(x), *x.shape[2:])


@kernel(
    reference,
    fallback=fallback,
    uses=(add_group_norm.launch, conv2d.launch, group_norm.launch),
    triton_functions=(two_pass.group_norm_combine_kernel, two_pass.group_norm_normalise_kernel),
    cuda_sources=(conv2d._SOURCE, portable.NORMALISE),
)
def launch(
    x: Tensor, conv_weight: Tensor, shift: Tensor | None, residual: Tensor | None, groups: int, weight: Tensor | None,
    bias: Tensor | None, eps: float, silu: bool = False, out_dtype: torch.dtype | None = None,
) -> tuple[Tensor | None, Tensor]:  # fmt: skip
    """`reference` as convolution with statistics and the second kernel of a group norm, in Triton or else in CUDA C++,
    on Hopper; else by `fallback`.

    x and conv_weight as of `conv2d.launch`; shift and residual in x's dtype, the residual channels last and aligned to
    16 bytes; weight and bias in float16, bfloat16 or float32. Groups of 10, 20, 40, 80 or 160 channels.
    """
    dtype = out_dtype or x.dtype
    require(accepts(x, conv_weight, shift, residual, groups, weight, bias, dtype))
    out_sum, partial = conv2d.with_statistics(x, conv_weight, groups, shift, residual)
    norm = Norm(weight, bias, eps, silu, dtype).contiguous()
    inner, parts = channels_inner(out_sum), _parts(x)
    if triton_runtime.accepts(x, shift, residual, weight, bias) is None:
        out = normalise(inner, None, norm, partial, parts)
    else:
        out = portable.normalised_by(partial, parts.box_height * parts.box_width, inner, norm)
    return None if residual is None else out_sum, channels_outer(out)
