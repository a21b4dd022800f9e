"""A linear layer of 8-bit integers: scales, bias and a residual are applied to the sums of the product."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from sfast_ext.kernels.backend.registry import kernel


def reference(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    dtype: torch.dtype = torch.float16,
) -> Tensor:
    """x (..., K) and weight (N, K) in int8, x_scale (...,) and weight_scale (N,) in float32, bias (N,), residual
    (..., N) -> (..., N): x_scale * weight_scale * (x @ weight.T) + bias + residual, rounded once to dtype.

    Does not overwrite the residual; a kernel may.
    """
    y = scaled(x, x_scale, weight, weight_scale, bias)
    return (y if residual is None else y + residual.float()).to(dtype)


def scaled(x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None) -> Tensor:
    """x_scale * weight_scale * (x @ weight.T) + bias, in float32."""
    y = F.linear(x.float(), weight.float()) * x_scale[..., None] * weight_scale
    return y if bias is None else y + bias.float()


@kernel(reference)
def launch(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    dtype: torch.dtype = torch.float16,
) -> Tensor:
    """`reference`."""
    return reference(x, x_scale, weight, weight_scale, bias, residual, dtype)
