"""A linear layer accumulated in place onto a sum: the GEMM of cuBLAS with beta = 1, so that no add is launched."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from sfast_ext.kernels.backend.registry import Kernel, register
from sfast_ext.kernels.backend.triton_runtime import HALF


def reference(x: Tensor, weight: Tensor, out_sum: Tensor) -> Tensor:
    """x (..., K), weight (N, K), out_sum (..., N) -> x @ weight.T + out_sum.

    Computes in float32 (float64 where x is) and rounds once, to x's dtype; cuBLAS may round the product too, as two
    operations do. Does not overwrite `out_sum`.
    """
    compute = torch.promote_types(x.dtype, torch.float32)
    return (F.linear(x.to(compute), weight.to(compute)) + out_sum.to(compute)).to(x.dtype)


def launch(x: Tensor, weight: Tensor, out_sum: Tensor) -> Tensor:
    """`reference`, written over `out_sum` where that is contiguous and cuBLAS computes it."""
    if (
        not x.is_cuda
        or x.dtype not in HALF
        or not x.dtype == weight.dtype == out_sum.dtype
        or not out_sum.is_contiguous()
        or weight.dim() != 2
        or not x.numel()
    ):
        return reference(x, weight, out_sum)
    out_sum.view(-1, weight.shape[0]).addmm_(x.reshape(-1, weight.shape[1]), weight.t())
    return out_sum


KERNEL = register(Kernel("linear_accumulate", reference, launch, writes=2, needs_triton=False))
