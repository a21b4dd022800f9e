"""The PyTorch operations that kernels of the UNet replace."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def group_norm(
    x: Tensor, groups: int, weight: Tensor, bias: Tensor, eps: float, shift: Tensor, silu: bool
) -> Tensor:
    return F.silu(F.group_norm(x + shift[:, :, None, None], groups, weight, bias, eps))


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    total = x + residual
    return total, layer_norm(total, weight, bias, eps)


def geglu(x: Tensor) -> Tensor:
    value, gate = x.chunk(2, -1)
    return value * F.gelu(gate)


def bias_add(x: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
    return x + bias[None, :, None, None] + residual


def add_group_norm(
    x: Tensor,
    bias: Tensor,
    residual: Tensor,
    scale: float,
    groups: int,
    weight: Tensor,
    norm_bias: Tensor,
    eps: float,
    silu: bool,
) -> tuple[Tensor, Tensor]:
    total = (x + bias[None, :, None, None] + residual) * scale
    return total, F.silu(F.group_norm(total, groups, weight, norm_bias, eps))


def conv_group_norm(
    x: Tensor,
    conv_weight: Tensor,
    bias: Tensor,
    residual: Tensor,
    groups: int,
    weight: Tensor,
    norm_bias: Tensor,
    eps: float,
    silu: bool,
) -> tuple[Tensor, Tensor]:
    total = F.conv2d(x, conv_weight, bias, padding=1) + residual
    return total, F.silu(F.group_norm(total, groups, weight, norm_bias, eps))


def cat_group_norm(
    a: Tensor,
    bias: Tensor,
    residual: Tensor,
    b: Tensor,
    groups: int,
    weight: Tensor,
    norm_bias: Tensor,
    eps: float,
    silu: bool,
) -> tuple[Tensor, Tensor]:
    joined = torch.cat([a + bias[None, :, None, None] + residual, b], 1)
    return joined, F.silu(F.group_norm(joined, groups, weight, norm_bias, eps))


def upsample(x: Tensor, size: tuple[int, int], steps: tuple[float, float]) -> Tensor:
    return F.interpolate(x, size=size, mode="nearest")


def upsample_conv2d(x: Tensor, weight: Tensor) -> Tensor:
    return F.conv2d(F.interpolate(x, scale_factor=2.0, mode="nearest"), weight, padding=1)


def timestep_embedding(t: Tensor, frequency: Tensor, sine_first: bool, out_dtype: torch.dtype) -> Tensor:
    angle = t.float() * frequency
    both = torch.cat([angle.sin(), angle.cos()], -1)
    half = frequency.shape[-1]
    return (both if sine_first else torch.cat([both[:, half:], both[:, :half]], -1)).to(out_dtype)


def linear_geglu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return geglu(F.linear(x, weight, bias))


def query_attention(x: Tensor, weight: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q = F.linear(x, weight).unflatten(-1, (k.shape[1], k.shape[3])).transpose(1, 2)
    return F.scaled_dot_product_attention(q, k, v)


def linear_add_norm(
    x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor, scale: Tensor, shift: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    return add_layer_norm(F.linear(x, weight, bias), residual, scale, shift, eps)


def linear_accumulate(x: Tensor, weight: Tensor, total: Tensor, start: Tensor) -> Tensor:
    total.copy_(start)
    return F.linear(x, weight) + total
