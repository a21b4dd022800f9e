"""A 3x3 convolution, what is added to its result, and the group norm of the sum, for Hopper.

The convolution adds what is to be added and takes the statistics of its tiles while they lie in registers
(csrc/conv2d.cu), so that the norm reads the sum once, to normalise it. Elsewhere the two kernels follow each other.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sfast_ext.kernels.backend import nvrtc
from sfast_ext.kernels.backend.triton_runtime import DTYPES, are_collected, channels_inner, channels_outer
from sfast_ext.kernels.conv import conv2d
from sfast_ext.kernels.group_norm import add_group_norm, group_norm
from sfast_ext.kernels.group_norm.two_pass import Parts, normalise

USES = (add_group_norm, conv2d, group_norm)


def reference(
    x: Tensor,
    conv_weight: Tensor,
    shift: Tensor | None,
    residual: Tensor | None,
    groups: int,
    weight: Tensor | None,
    term: Tensor | None,
    eps: float,
    silu: bool = False,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor | None, Tensor]:
    """(sum, y): sum = conv2d(x) + shift + residual in x's dtype, y its group norm, times weight, plus term, then SiLU.

    x (N, C, H, W), conv_weight (K, C, 3, 3); shift (N, K), or (K,) with a residual (N, K, H, W); without a residual the
    sum is not handed out. y comes from the rounded sum, and is rounded once to out_dtype (default: x's).
    """
    compute = torch.promote_types(x.dtype, torch.float32)
    total = conv2d.reference(x.to(compute), conv_weight.to(compute))
    if shift is not None:
        total = total + shift.to(compute).reshape(-1, total.shape[1], 1, 1)
    if residual is not None:
        total = total + residual.to(compute)
    total = total.to(x.dtype)
    y = group_norm.reference(total, groups, weight, term, eps, None, silu, out_dtype)
    return None if residual is None else total, y


def launch(
    x: Tensor,
    conv_weight: Tensor,
    shift: Tensor | None,
    residual: Tensor | None,
    groups: int,
    weight: Tensor | None,
    term: Tensor | None,
    eps: float,
    silu: bool = False,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor | None, Tensor]:
    """`reference` as the convolution and one Triton kernel, where both take such tensors; else as two kernels of norms
    after the convolution."""
    dtype = out_dtype or x.dtype
    if fits(x, conv_weight, shift, residual, groups, weight, term, dtype):
        try:
            return _fused(x, conv_weight, shift, residual, groups, weight, term, eps, silu, dtype)
        except nvrtc.Unavailable:
            pass  # the log has it; it is not asked again
    picture = conv2d.launch(x, conv_weight)
    if residual is None:
        return None, group_norm.launch(picture, groups, weight, term, eps, shift, silu, out_dtype)
    return add_group_norm.launch(picture, shift, residual, 1.0, groups, weight, term, eps, silu, out_dtype)


def fits(
    x: Tensor,
    conv_weight: Tensor,
    shift: Tensor | None,
    residual: Tensor | None,
    groups: int,
    weight: Tensor | None,
    term: Tensor | None,
    dtype: torch.dtype,
) -> bool:
    """Whether the kernels take the operands."""
    if x.dim() != 4 or conv_weight.dim() != 4 or dtype not in DTYPES or groups < 1:
        return False
    if not conv2d.sums_groups(x, conv_weight, groups):
        return False
    images, _, height, width = x.shape
    columns = conv_weight.shape[0]
    others = [t for t in (shift, residual, weight, term) if t is not None]
    if not all(t.dtype in DTYPES and t.device == x.device for t in others):
        return False
    if shift is not None:
        wanted = (images, columns) if residual is None else (columns,)
        if shift.dtype != x.dtype or shift.shape != wanted or shift.stride(-1) != 1:
            return False
        if shift.data_ptr() % 4 or (shift.dim() == 2 and shift.stride(0) % 2):  # read by twos
            return False
    if residual is not None:
        if residual.dtype != x.dtype or residual.shape != (images, columns, height, width) or residual.data_ptr() % 16:
            return False
        if not are_collected() and not residual.is_contiguous(memory_format=torch.channels_last):
            return False
    path, _ = group_norm.fitting(height * width, groups, columns // groups)
    return path == "parts"


def _fused(
    x: Tensor,
    conv_weight: Tensor,
    shift: Tensor | None,
    residual: Tensor | None,
    groups: int,
    weight: Tensor | None,
    term: Tensor | None,
    eps: float,
    silu: bool,
    dtype: torch.dtype,
) -> tuple[Tensor | None, Tensor]:
    total, partial, boxes = conv2d.with_statistics(x, conv_weight, groups, shift, residual)
    height, width = x.shape[2:]
    weight, term = (v if v is None else v.contiguous() for v in (weight, term))
    parts = Parts(*boxes, height, width)
    inner = channels_inner(total)
    out = normalise(inner, None, weight, term, partial, parts, eps, silu, dtype)
    return None if residual is None else total, channels_outer(out)
