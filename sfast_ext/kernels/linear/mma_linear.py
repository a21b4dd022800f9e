"""A linear layer by `mma_gemm` or cuBLAS, as measured (`mma_choice`)."""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.nn import functional as F

from sfast_ext.kernels.backend.registry import kernel, require
from sfast_ext.kernels.linear import mma_choice, mma_gemm

_choice = mma_choice.MmaChoice("linear")


def reference(x: Tensor, weight: Tensor, bias: Tensor | None = None, half_sums: bool = False) -> Tensor:
    """x (..., K), weight (N, K), bias (N) -> (..., N). Computes in float32 (float64 if x is) and rounds once.

    half_sums: whether sums may be in half precision; here they are not.
    """
    compute = torch.promote_types(x.dtype, torch.float32)
    return F.linear(x.to(compute), weight.to(compute), None if bias is None else bias.to(compute)).to(x.dtype)


def fallback(x: Tensor, weight: Tensor, bias: Tensor | None = None, half_sums: bool = False) -> Tensor:
    """`reference` by PyTorch."""
    return F.linear(x, weight, bias)


@kernel(reference, fallback=fallback, needs_triton=False, cuda_sources=(mma_gemm._SOURCE,))
def launch(x: Tensor, weight: Tensor, bias: Tensor | None = None, half_sums: bool = False) -> Tensor:
    """`reference` by `mma_gemm` or PyTorch, as chosen; by PyTorch for operands that `mma_gemm.accepts_linear` declines:
    it takes float16, and bfloat16 from 8.0 on; K a multiple of 32, N of 8."""
    require(mma_gemm.accepts_linear(x, weight, bias))
    ways = functools.partial(F.linear, x, weight, bias), functools.partial(mma_gemm.linear, x, weight, bias)
    tiles = mma_gemm.tiles(x.numel() // x.shape[-1], weight, half_sums=half_sums)
    return _choice.run(x.device, mma_choice.key(x, weight, bias), *ways, tiles, half_sums)
