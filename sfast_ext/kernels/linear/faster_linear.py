"""A linear layer with sums in half precision, on GPUs whose tensor cores are faster so (`mma_gemm`)."""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.nn import functional as F

from sfast_ext.kernels.backend import choices
from sfast_ext.kernels.backend.registry import Kernel, register
from sfast_ext.kernels.backend.triton_runtime import is_dry_run
from sfast_ext.kernels.linear import mma_gemm

_choices = choices.Choices("linear, faster sums")


def reference(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x (..., K), weight (N, K), bias (N) -> (..., N). Computes in float32 (float64 where x is) and rounds once."""
    compute = torch.promote_types(x.dtype, torch.float32)
    return F.linear(x.to(compute), weight.to(compute), None if bias is None else bias.to(compute)).to(x.dtype)


def launch(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`reference` by the kernel, unless PyTorch was measured to be faster or the kernel does not take the operands."""
    if not mma_gemm.linear_readable(x, weight, bias):
        return F.linear(x, weight, bias)
    ours = functools.partial(mma_gemm.linear, x, weight, bias)
    if is_dry_run():
        return ours()  # compiled ahead
    key = f"{x.numel() // x.shape[-1]}x{weight.shape[0]}x{x.shape[-1]}{', bias' * (bias is not None)}"
    return _choices.run(x.device, key, functools.partial(F.linear, x, weight, bias), {"mma": ours}, expected="mma")


KERNEL = register(Kernel("faster_linear", reference, launch, needs_triton=False, cuda_sources=(mma_gemm._SOURCE,)))
