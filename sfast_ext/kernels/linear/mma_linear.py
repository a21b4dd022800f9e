"""A linear layer by `mma_gemm` or cuBLAS, as measured (`mma_choice`)."""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.nn import functional as F

from sfast_ext.kernels.backend.registry import Kernel, register
from sfast_ext.kernels.linear import mma_choice, mma_gemm

_choice = mma_choice.MmaChoice("linear")


def reference(x: Tensor, weight: Tensor, bias: Tensor | None = None, half_sums: bool = False) -> Tensor:
    """x (..., K), weight (N, K), bias (N) -> (..., N). Computes in float32 (float64 where x is) and rounds once.

    half_sums: whether sums may be in half precision; here they are not.
    """
    compute = torch.promote_types(x.dtype, torch.float32)
    return F.linear(x.to(compute), weight.to(compute), None if bias is None else bias.to(compute)).to(x.dtype)


def launch(x: Tensor, weight: Tensor, bias: Tensor | None = None, half_sums: bool = False) -> Tensor:
    """`reference` by the kernel, where it takes the operands and is chosen, else by PyTorch."""
    if not mma_gemm.linear_readable(x, weight, bias):
        return F.linear(x, weight, bias)
    ways = functools.partial(F.linear, x, weight, bias), functools.partial(mma_gemm.linear, x, weight, bias)
    tiles = mma_gemm.tiles(x.numel() // x.shape[-1], weight, half_sums=half_sums)
    return _choice.run(x.device, mma_choice.key(x, weight, bias), *ways, tiles, half_sums)


KERNEL = register(Kernel("mma_linear", reference, launch, needs_triton=False, cuda_sources=(mma_gemm._SOURCE,)))
