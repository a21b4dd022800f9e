"""A linear layer accumulated in place onto a sum, so that no add is launched: the GEMM of cuBLAS with beta = 1, or on
GeForce `mma_gemm`, as measured (`mma_choice`)."""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.nn import functional as F

from sfast_ext.kernels.backend.registry import Declined, kernel
from sfast_ext.kernels.backend.triton_runtime import HALF
from sfast_ext.kernels.linear import mma_choice, mma_gemm

_choice = mma_choice.MmaChoice("linear onto a sum")


def reference(x: Tensor, weight: Tensor, out_sum: Tensor, half_sums: bool = False) -> Tensor:
    """x (..., K), weight (N, K), out_sum (..., N) -> x @ weight.T + out_sum.

    Computes in float32 (float64 if x is) and rounds once, to x's dtype; cuBLAS may round the product too, as two
    operations do. Does not overwrite `out_sum`. half_sums: whether sums may be in half precision; here they are not.
    """
    compute = torch.promote_types(x.dtype, torch.float32)
    return (F.linear(x.to(compute), weight.to(compute)) + out_sum.to(compute)).to(x.dtype)


def _by_cublas(x: Tensor, weight: Tensor, residual: Tensor) -> Tensor:
    residual.view(-1, weight.shape[0]).addmm_(x.reshape(-1, weight.shape[1]), weight.t())
    return residual


@kernel(reference, writes=2, needs_triton=False, cuda_sources=(mma_gemm._SOURCE,))
def launch(x: Tensor, weight: Tensor, out_sum: Tensor, half_sums: bool = False) -> Tensor:
    """`reference`, written over `out_sum` (..., N), by `mma_gemm` or cuBLAS, as chosen: in float16 or bfloat16, out_sum
    contiguous. Other operands are declined, and out_sum is not overwritten."""
    if mma_gemm.accepts_linear(x, weight, None, out_sum) is None:
        ways = functools.partial(_by_cublas, x, weight), functools.partial(mma_gemm.linear, x, weight, None)
        tiles = mma_gemm.tiles(x.numel() // x.shape[-1], weight, half_sums=half_sums)
        return _choice.run(x.device, mma_choice.key(x, weight, None), *ways, tiles, half_sums, out_sum)
    if not x.is_cuda or x.dtype not in HALF or not x.dtype == weight.dtype == out_sum.dtype:
        raise Declined("no half precision, or several dtypes")
    if not out_sum.is_contiguous() or weight.dim() != 2 or not x.numel():
        raise Declined("a sum that is not contiguous, or other shapes")
    return _by_cublas(x, weight, out_sum)
