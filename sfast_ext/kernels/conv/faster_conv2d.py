"""A 3x3 convolution with sums in half precision, on GPUs whose tensor cores are faster so (`mma_gemm`)."""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.nn import functional as F

from sfast_ext.kernels.backend import choices
from sfast_ext.kernels.backend.registry import Kernel, register
from sfast_ext.kernels.backend.triton_runtime import is_dry_run
from sfast_ext.kernels.linear import mma_gemm

_choices = choices.Choices("conv2d, faster sums")


def reference(x: Tensor, weight: Tensor, bias: Tensor | None = None, stride: int = 1) -> Tensor:
    """x (N, C, H, W), weight (K, C, 3, 3), bias (K) -> (N, K, H / stride, W / stride), rounded up; padding 1.

    Computes in float32 (float64 where x is) and rounds once.
    """
    compute = torch.promote_types(x.dtype, torch.float32)
    wide = None if bias is None else bias.to(compute)
    return F.conv2d(x.to(compute), weight.to(compute), wide, padding=1, stride=stride).to(x.dtype)


def launch(x: Tensor, weight: Tensor, bias: Tensor | None = None, stride: int = 1) -> Tensor:
    """`reference` by the kernel, unless PyTorch was measured to be faster or the kernel does not take the operands."""
    torchs = functools.partial(F.conv2d, x, weight, bias, padding=1, stride=stride)
    if not mma_gemm.conv2d_readable(x, weight, bias):
        return torchs()
    ours = functools.partial(mma_gemm.conv2d, x, weight, bias, stride)
    if is_dry_run():
        return ours()  # compiled ahead
    key = f"{'x'.join(map(str, x.shape))} to {weight.shape[0]}, stride {stride}{', bias' * (bias is not None)}"
    return _choices.run(x.device, key, torchs, {"mma": ours}, expected="mma")


KERNEL = register(Kernel("faster_conv2d", reference, launch, needs_triton=False, cuda_sources=(mma_gemm._SOURCE,)))
