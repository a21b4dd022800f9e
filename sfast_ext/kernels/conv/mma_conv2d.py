"""A 3x3 convolution by `mma_gemm` or cuDNN, as measured (`mma_choice`)."""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.nn import functional as F

from sfast_ext.kernels.backend.registry import kernel, require
from sfast_ext.kernels.backend.triton_runtime import cdiv
from sfast_ext.kernels.linear import mma_choice, mma_gemm

_choice = mma_choice.MmaChoice("conv2d")


def reference(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, stride: int = 1, half_sums: bool = False
) -> Tensor:
    """x (N, C, H, W), weight (K, C, 3, 3), bias (K) -> (N, K, H / stride, W / stride), rounded up; padding 1.

    Computes in float32 (float64 if x is) and rounds once. half_sums: whether sums may be in half precision; here
    they are not.
    """
    compute = torch.promote_types(x.dtype, torch.float32)
    wide = None if bias is None else bias.to(compute)
    return F.conv2d(x.to(compute), weight.to(compute), wide, padding=1, stride=stride).to(x.dtype)


def fallback(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, stride: int = 1, half_sums: bool = False
) -> Tensor:
    """`reference` by PyTorch, on CUDA by cuDNN."""
    return F.conv2d(x, weight, bias, padding=1, stride=stride)


@kernel(reference, fallback=fallback, needs_triton=False, cuda_sources=(mma_gemm._SOURCE,))
def launch(x: Tensor, weight: Tensor, bias: Tensor | None = None, stride: int = 1, half_sums: bool = False) -> Tensor:
    """`reference` by `mma_gemm` or PyTorch, as chosen; by PyTorch for operands that `mma_gemm.accepts_conv2d` declines:
    it takes float16, and bfloat16 from 8.0 on; channels last, C a multiple of 32, K of 8."""
    require(mma_gemm.accepts_conv2d(x, weight, bias))
    torchs = functools.partial(fallback, x, weight, bias, stride)
    ours = functools.partial(mma_gemm.conv2d, x, weight, bias, stride)
    rows = x.shape[0] * cdiv(x.shape[2], stride) * cdiv(x.shape[3], stride)
    tiles = mma_gemm.tiles(rows, weight, half_sums=half_sums)
    kind = str(x.dtype).removeprefix("torch.")
    sizes = f"{'x'.join(map(str, x.shape))} to {weight.shape[0]}, stride {stride} {kind}"
    return _choice.run(x.device, f"{sizes}{', bias' * (bias is not None)}", torchs, ours, tiles, half_sums)
